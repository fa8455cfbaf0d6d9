"""One model, many ways to run it: full, chunks, token by token, ragged batches, tails, replays. All in float64."""

import pytest
import torch

from flashsim.persistent import replay_rows
from flashsim.pictures.replay import replay_map
from model.replay import ReplayError, compare, keep, replay, row_differences
from model.transformer import InputError

SAME = 1e-12  # float64 with the cache rounding in float32; measured 1e-14


@pytest.fixture(scope="module")
def full(tiny, ids):
    return tiny(ids[:, :61])


@pytest.mark.parametrize("sizes", [[7, 1, 2, 13, 38], [2, 59], [1] * 61, [3] * 20 + [1], [60, 1]])
def test_chunks_equal_one_forward(tiny, ids, full, sizes):
    cache, low, parts = tiny.new_cache(2), 0, []
    for size in sizes:
        parts.append(tiny(ids[:, low : low + size], cache=cache))
        low += size
    assert (torch.cat(parts, dim=1) - full).abs().max() < SAME


@pytest.mark.parametrize("prompt", range(1, 36))
def test_prefill_then_decode_at_every_residue(tiny, ids, full, prompt):
    cache = tiny.new_cache(2)
    last = tiny.prefill(ids[:, :prompt], cache)
    assert (last - full[:, prompt - 1]).abs().max() < SAME
    for n in range(prompt, prompt + 3):
        assert (tiny(ids[:, n : n + 1], cache=cache)[:, 0] - full[:, n]).abs().max() < SAME


@pytest.mark.parametrize("lengths", [[20, 13], [5, 18], [1, 2]])
def test_ragged_batches_equal_each_alone(tiny, ids, full, lengths):
    for start in (
        lambda c: tiny(ids[:, :20], cache=c, lengths=lengths),
        lambda c: tiny.prefill(ids[:, :20], c, lengths=lengths, chunk=6),
    ):
        cache = tiny.new_cache(2)
        start(cache)
        more = torch.stack([ids[b, n : n + 9] for b, n in enumerate(lengths)])
        got = tiny(more, cache=cache, lengths=[2, 9])
        for b, (n, count) in enumerate(zip(lengths, [2, 9], strict=True)):
            assert (got[b, :count] - full[b, n : n + count]).abs().max() < SAME


def test_last_gives_the_last_real_row(tiny, ids, full):
    out = tiny(ids[:, :20], lengths=[20, 13], last=True)
    assert (out - torch.stack([full[0, 19], full[1, 12]])).abs().max() < SAME


@pytest.mark.parametrize("position", [0, 7, 30, 59])
def test_a_token_never_changes_what_comes_before(tiny, ids, full, position):
    changed = ids[:1, :61].clone()
    changed[0, position] = (changed[0, position] + 1) % 320
    out = tiny(changed)
    assert (out[:, :position] - full[:1, :position]).abs().max() < SAME if position else True
    assert (out[:, position:] - full[:1, position:]).abs().max() > 1e-3


def test_float32_stays_on_the_path(make_model, ids):
    model = make_model(dtype=torch.float32)
    whole = model(ids[:, :50])
    assert whole.dtype == torch.float32
    cache = model.new_cache(2)
    parts = [model(ids[:, n : n + 1], cache=cache) for n in range(50)]
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-5
    assert (model(ids[1:, :50]) - whole[1:]).abs().max() < 1e-5


# --- the causal encoder-decoder: architecture 13.2, 16.6 ------------------------------------------


@pytest.mark.parametrize("chunk", [None, 1, 5, 8, 33])
@pytest.mark.parametrize(
    ("tail", "exact"), [("exact", True), (22, True), (21, False), (8, False), (1, False), (None, True)]
)
def test_tails(tiny, ids, full, tail, exact, chunk):
    """W + (R - 1)(W - 1) = 8 + 2 * 7 = 22 rows are enough, 21 are not."""
    cache = tiny.new_cache(2)
    logits = tiny.prefill(ids[:, :60], cache, tail=tail, chunk=chunk)
    difference = (logits - full[:, 59]).abs().max()
    assert difference < SAME if exact else difference > 1e-4
    if exact:
        assert (tiny(ids[:, 60:61], cache=cache)[:, 0] - full[:, 60]).abs().max() < SAME


@pytest.mark.parametrize("back", range(9))
def test_an_exact_tail_can_be_taken_back(tiny, ids, full, back):
    """`rollback` more rows than the last logits need: without them the windows of deep layers are quietly wrong."""
    before = tiny.new_cache(2)
    tiny.prefill(ids[:, :40], before)
    caches = [tiny.new_cache(2), replay(tiny, ids[:1, :60], before.fork([0]).prefix(40), "exact").cache]
    tiny.prefill(ids[:, :60], caches[0])
    for cache in caches:
        cache.truncate(60 - back)
        for n in range(60 - back, 61):
            step = tiny(ids[: cache.batch_size, n : n + 1], cache=cache)[:, 0]
            assert (step - full[: cache.batch_size, n]).abs().max() < SAME


def test_chunking_does_not_change_a_bounded_tail(tiny, ids):
    whole = tiny.prefill(ids[:, :60], tail=8)
    assert (tiny.prefill(ids[:, :60], tail=8, chunk=7) - whole).abs().max() < SAME


def test_windows_that_begin_at_different_positions(tiny, ids):
    """After a bounded tail one ring holds 6 rows and the other 8; each sequence sees its own alone."""
    cache = tiny.new_cache(2)
    tiny.prefill(ids[:, :20], cache, tail=8)
    cache.truncate([18, 20])
    alone = [cache.fork([b]) for b in (0, 1)]
    together = tiny(ids[:, 30:33], cache=cache)
    for b in (0, 1):
        assert (tiny(ids[b : b + 1, 30:33], cache=alone[b]) - together[b]).abs().max() < SAME


@pytest.mark.parametrize(("lengths", "rows"), [([20, 13], 8), ([3, 20], 8)])
def test_bounded_tails_of_ragged_prompts(tiny, ids, lengths, rows):
    together = tiny.prefill(ids[:, :20], tail=rows, lengths=lengths, chunk=6)
    for b, n in enumerate(lengths):
        assert (tiny.prefill(ids[b : b + 1, :n], tail=rows) - together[b]).abs().max() < SAME


def test_images_reach_the_router(tiny, ids):
    seen = []
    hook = tiny.layers[5].ffn.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    images = torch.zeros(1, 12, dtype=torch.bool)
    images[0, 3:6] = True
    tiny(ids[:1, :12], images=images)
    tiny.prefill(ids[:1, :12], tail=8, images=images)
    hook.remove()
    assert torch.equal(seen[0], images)
    assert torch.equal(seen[1], images[:, 4:])


def test_rows_of_the_release():
    from model.transformer import Transformer

    assert Transformer("v4.1-flash", device="meta", dtype=torch.bfloat16).tail_rows() == 2414


def test_prefill_runs_decoder_layers_for_the_tail_alone(tiny, ids):
    """Rows that each layer's experts see: all below the boundary, the tail from it on."""
    rows = []
    hooks = [layer.ffn.register_forward_hook(lambda m, a, o: rows.append(a[0].shape[1])) for layer in tiny.layers]
    tiny.prefill(ids[:1, :60], tail=8)
    for hook in hooks:
        hook.remove()
    assert rows == [60] * 4 + [8] * 4


def test_progress(tiny, ids):
    seen = []
    tiny.prefill(ids[:1, :20], chunk=8, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(8, 20), (16, 20), (20, 20)]


# --- replay: architecture 13.1 --------------------------------------------------------------------


@pytest.mark.parametrize(("prefix", "prompt"), [(100, 160), (101, 160), (150, 151), (120, 120), (5, 60), (199, 260)])
@pytest.mark.parametrize("chunk", [None, 17])
def test_replays(tiny, ids, prefix, prompt, chunk):
    cold, exact, bounded = compare(tiny, ids[:1, :prompt], prefix, chunk=chunk)
    assert [r.mode for r in (cold, exact, bounded)] == ["cold", "exact", "bounded"]
    assert cold.difference == 0
    assert cold.encoder_rows == prefix
    assert exact.difference < SAME
    assert bounded.difference > 1e-4
    assert bounded.encoder_rows <= exact.encoder_rows <= prefix
    if prefix > 8:
        assert 8 <= bounded.encoder_rows <= 9  # one window, from the start of a group
    assert bounded.decoder_rows == 8
    assert "logits differ by" in str(bounded)


@pytest.mark.parametrize(("prefix", "prompt"), [(40, 60), (101, 160), (120, 120)])
@pytest.mark.parametrize("mode", ["cold", "exact", "bounded"])
def test_the_map_of_a_replay_is_true(tiny, ids, mode, prefix, prompt):
    """Rows that the map calls exact are those of a full forward in every layer; the first cut row is not."""
    stored = keep(tiny, ids[:1], prefix)
    errors = row_differences(tiny, ids[:1, :prompt], stored, mode)
    behind = replay_map(tiny.config, replay_rows(tiny.config, prompt, prefix, mode, rollback=stored.rollback))
    for error, layer in zip(errors, behind, strict=True):
        for span in layer.spans:
            part = error[span.low : span.high]
            if span.state == "not run":
                assert part.isnan().all()
            elif span.state == "exact":
                assert part.max() < SAME
            elif span.state == "cut":
                assert part[0] > 1e-6
            assert span.state == "not run" or not part.isnan().any()


def test_an_exact_replay_can_be_continued(tiny, ids):
    cold, exact, bounded = compare(tiny, ids[:1, :200], 137)
    nexts = [tiny(ids[:1, 200:210], cache=r.cache) for r in (cold, exact, bounded)]
    assert (nexts[1] - nexts[0]).abs().max() < SAME
    assert (nexts[2] - nexts[0]).abs().max() > 1e-4
    assert exact.cache.nbytes(by="component") == cold.cache.nbytes(by="component")


def test_stored_entries_are_read_and_not_written(tiny, ids):
    before = tiny.new_cache(1)
    tiny.prefill(ids[:1, :100], before)
    stored = before.prefix(100)
    kept = {layer: source.entries[:, : 100 // source.ratio].clone() for layer, source in stored.sources.items()}
    result = replay(tiny, ids[:1, :130], stored, "bounded")
    for layer, entries in kept.items():
        assert torch.equal(result.cache.sources[layer].entries[:, : entries.shape[1]], entries)


def test_replay_errors(tiny, ids):
    cache = tiny.new_cache(1)
    tiny.prefill(ids[:1, :40], cache)
    stored = cache.prefix(40)
    with pytest.raises(ReplayError, match="mode is 'warm'"):
        replay(tiny, ids[:1, :60], stored, "warm")
    with pytest.raises(ReplayError, match="differs from the stored tokens at position 3"):
        other = ids[:1, :60].clone()
        other[0, 3] = (other[0, 3] + 1) % 320
        replay(tiny, other, stored)
    with pytest.raises(ReplayError, match="stored prefix has 40 tokens; accepted: at most the prompt's 30"):
        replay(tiny, ids[:1, :30], stored)


# --- images ---------------------------------------------------------------------------------------


def test_image_spans_change_routing_and_close_engram(tiny, ids, full):
    images = torch.zeros(2, 61, dtype=torch.bool)
    images[0, 10:20] = True
    out = tiny(ids[:, :61], images=images)
    assert (out[0, :10] - full[0, :10]).abs().max() < SAME
    assert (out[0, 10:] - full[0, 10:]).abs().max() > 1e-3
    assert (out[1] - full[1]).abs().max() < SAME
    cache = tiny.new_cache(2)
    parts = [tiny(ids[:, a:b], cache=cache, images=images[:, a:b]) for a, b in ((0, 12), (12, 13), (13, 61))]
    assert (torch.cat(parts, 1) - out).abs().max() < SAME
    assert (tiny.prefill(ids[:, :61], images=images, chunk=9) - out[:, -1]).abs().max() < SAME


# --- what bad input gets --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (torch.tensor([[0, 320]]), "token id 320; accepted: 0 to 319"),
        (torch.tensor([[-1, 3]]), "token id -1"),
        (torch.zeros(1, 0, dtype=torch.int64), "at least one sequence of one token"),
        (torch.zeros(0, 4, dtype=torch.int64), "at least one sequence"),
        (torch.zeros(1, 4), "whole numbers \\[batch, sequence\\]"),
        (torch.zeros(4, dtype=torch.int64), "whole numbers \\[batch, sequence\\]"),
        (torch.zeros(1, 4097, dtype=torch.int64), "4097 tokens in a sequence; accepted: max_position_embeddings, 4096"),
    ],
)
def test_bad_ids(tiny, bad, text):
    with pytest.raises(InputError, match=text):
        tiny(bad)
    with pytest.raises(InputError, match=text):
        tiny.prefill(bad)


@pytest.mark.parametrize("options", [{"tail": 0}, {"tail": "all"}, {"chunk": 0}, {"tail": True}, {"chunk": "exact"}])
def test_bad_prefill_options(tiny, ids, options):
    with pytest.raises(InputError, match=f"{next(iter(options))} is "):
        tiny.prefill(ids[:, :4], **options)


def test_bad_lengths(tiny, ids):
    for lengths in ([5, 0], [5], [5, 6]):
        with pytest.raises(InputError, match="lengths are"):
            tiny(ids[:, :5], lengths=lengths)
