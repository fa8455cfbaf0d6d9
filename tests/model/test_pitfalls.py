"""Easy mistakes of V4.1 implementations (architecture 15.2, 15.3), each with the test that catches it.

| mistake | test |
| --- | --- |
| 1 first channels rotated, or halves paired | test_mechanisms: rotation_turns_adjacent_pairs_of_the_last_channels |
| 2 output not turned back, or by key positions | here: the_output_is_turned_back_by_the_query |
| 3 theta 10,000 for window keys of compressed layers | here: window_keys_rotate_by_the_table_of_their_layer |
| 4 YaRN temperature; ramp over channels | here: turns_have_no_temperature; test_mechanisms: yarn_frequencies.. |
| 5 entry at its last token; seen too early or too late | here: entries_stand_at.., an_entry_is_seen_.. |
| 6 index key of the rotated or rounded latent | here: index_keys_come_from_the_plain_latent |
| 7, 8 sink scaled or with a value; two softmaxes | test_mechanisms: attention_is_one_softmax_with_an_unscaled_sink |
| 9 selections not cut with the rows | test_paths: tails; here: a_tail_cuts_selections_too |
| 10 bias in weights; 1.5 missing; p_e after w2 | test_mechanisms: the_bias_chooses.., routing_weight_stands_before.. |
| 11 reciprocal for division, or the reverse | test_quant: reciprocal_and_not_division, against_the_rules.. |
| 12 FP4 ties rounded up | test_quant: e2m1_ties_go_to_the_even_code |
| 13 hash in floating point; negative modulo | test_mechanisms: rows_of_the_release, products_stay_below.. |
| 14 look-back lost at a chunk; pad slot 2 | test_paths: chunks_equal_one_forward; test_mechanisms: blocked_places.. |
| 15 -0 in FP4; 1e-20 in float16 | here: negative_zero_stays_zero; test_loading: types_that_do_not_compute |
| 16 stages of the drafter taken for its block | test_transformer: names_and_shapes.. (three stages) |
| 17 image tokens keep bias on delimiters | test_paths: images_reach_the_router |
| 18 head in bfloat16 | here: the_head_is_float32 |
| 19 scales inverted | test_weight_formats: published_bytes_of_the_release |
| 20 ties in selection | test_mechanisms: top_k_breaks_ties..; test_paths: chunks_equal_one_forward |
| query norm of V4 | here: queries_have_no_norm |
| overlapping groups, position bias of V4 | here: a_group_is_itself_wherever_it_stands |
| `pre` of the same site; `hc_head` | here: a_site_collapses_with_the_coefficients_before_it |
| Engram after the coefficients | here: coefficients_see_the_memory |
| shared experts without clamp | here: shared_experts_are_clamped |
"""

import pytest
import torch
from torch.nn import functional as F

from flashsim.formats import MXFP4
from model.indexer import index_scores
from model.quant import pack, unpack_record
from model.rope import frequencies, rotate, turns
from model.step import Step

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plain(make_model):
    """The tiny model without cache rounding: what is kept can be compared with what was computed."""
    return make_model(cache_rounding=False)


@pytest.fixture
def x():
    """[1, 12, 128] inputs of a layer."""
    return torch.randn(1, 12, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def caught(module, model, *args, **options):
    """(inputs, output) of each call of a module while the model runs."""
    calls = []
    hook = module.register_forward_hook(lambda _, inputs, output: calls.append((inputs, output)))
    try:
        model(*args, **options)
    finally:
        hook.remove()
    return calls


def attend(model, layer, x, start=0):
    """The attention of one layer over rows x at positions start, start + 1, ..., with no entries selected."""
    cache = model.new_cache(1)
    step = Step(model.config, [start], [x.shape[1]], CPU)
    step.selected = torch.zeros(1, x.shape[1], 0, dtype=torch.int64)
    return model.layers[layer].attn(x, step, cache)


@pytest.mark.parametrize("layer", [0, 5])  # window-only, and one of the compressed table
def test_the_output_is_turned_back_by_the_query(plain, x, layer):
    """Values carry rotation; once the output is turned back, distances alone count, so a shift changes nothing."""
    assert (attend(plain, layer, x, 100) - attend(plain, layer, x)).abs().max() < 1e-5  # float32 angles


@pytest.mark.parametrize("layer", [0, 2, 5])
def test_window_keys_rotate_by_the_table_of_their_layer(plain, x, layer):
    attention, cache = plain.layers[layer].attn, plain.new_cache(1)
    records = attention.remember(x, Step(plain.config, [40], [12], CPU), cache)
    latent = attention.kv_norm(attention.wkv(x))
    right, wrong = (turns(torch.arange(40, 52), frequencies(plain.config, table)) for table in (layer >= 2, layer < 2))
    keys = cache.window_codec.unpack(records)
    assert (keys - rotate(latent, right)).abs().max() < 1e-12
    assert (keys - rotate(latent, wrong)).abs().max() > 0.1


def test_turns_have_no_temperature(tiny):
    far = torch.tensor([0, 1, 4095, 10**6])
    for table in (True, False):
        torch.testing.assert_close(turns(far, frequencies(tiny.config, table)).abs(), torch.ones(4, 8))


@pytest.mark.parametrize(("layer", "ratio"), [(2, 2), (4, 1)])
def test_entries_stand_at_their_first_token(plain, ids, layer, ratio):
    cache, compressor = plain.new_cache(1), plain.layers[layer].attn.compressor
    ((_, latent),) = caught(compressor.norm, plain, ids[:1, :13], cache=cache)
    position = torch.arange(13 // ratio) * ratio
    entries = cache.main_codec.unpack(cache.sources[layer].entries[:, : 13 // ratio])
    assert (entries - rotate(latent, turns(position, frequencies(plain.config, True)))).abs().max() < 1e-12


@pytest.mark.parametrize(("layer", "ratio"), [(2, 2), (4, 1)])
def test_index_keys_come_from_the_plain_latent(make_model, ids, layer, ratio):
    """Neither rotated nor rounded: with cache rounding on, the key is still that of the latent before it."""
    model = make_model()
    cache, attention = model.new_cache(1), model.layers[layer].attn
    ((_, latent),) = caught(attention.compressor.norm, model, ids[:1, :13], cache=cache)
    indexer, turn = attention.indexer, turns(torch.arange(13 // ratio) * ratio, frequencies(model.config, True))
    expected = cache.key_codec.pack(rotate(indexer.k_norm(indexer.wk(latent)), turn))
    assert torch.equal(cache.sources[layer].keys[:, : 13 // ratio], expected)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_an_entry_is_seen_from_its_last_token_on(plain, ratio):
    codec = plain.new_cache(1).key_codec
    generator = torch.Generator().manual_seed(1)
    queries, keys = (codec.pack(torch.randn(*n, 64, generator=generator).double()) for n in ((1, 9, 4), (1, 8)))
    positions = torch.arange(9).unsqueeze(0)
    scores = index_scores(queries, torch.ones(1, 9, 4).double(), keys, positions, ratio, codec)
    for p in range(9):
        assert torch.isfinite(scores[0, p]).tolist() == [t * ratio + ratio - 1 <= p for t in range(8)]


def test_a_tail_cuts_selections_too(tiny, ids):
    """A reuse layer below the boundary's selection reads the rows that were kept, not the first ones."""
    calls = caught(tiny.layers[4].attn.indexer, tiny.prefill, ids[:1, :60], tail=8)
    whole = caught(tiny.layers[4].attn.indexer, tiny, ids[:1, :60])
    assert torch.equal(calls[0][1], whole[0][1][:, -8:])


def test_negative_zero_stays_zero():
    values = torch.full((1, 32), -1e-30)
    values[0, 0] = 6.0
    back = unpack_record(pack(values, MXFP4), MXFP4, 32, torch.float32)
    assert back[0, 0] == 6 and not back[0, 1:].any() and torch.isfinite(back).all()


def test_the_head_is_float32(make_model, ids):
    model = make_model(dtype=torch.bfloat16)
    (((inputs,), _),) = caught(model.head, model, ids[:1, :5])
    logits = model(ids[:1, :5])
    assert logits.dtype == torch.float32
    exact = F.linear(inputs.float(), model.head.weight.float())
    assert (logits - exact).abs().max() < 1e-4 < (exact.bfloat16().float() - exact).abs().max()


def test_queries_have_no_norm(plain, x):
    """Queries of twice the length sharpen attention; a norm on them would undo it."""
    weight = plain.layers[0].attn.wq_b.weight
    before = attend(plain, 0, x)
    weight.data.mul_(2)
    after = attend(plain, 0, x)
    weight.data.div_(2)
    assert (after - before).abs().max() > 1e-2


def test_a_group_is_itself_wherever_it_stands(plain, x):
    """Latents of exchanged groups are exchanged latents: no position bias, and nothing of the neighbours."""

    def latents(rows):
        cache, compressor = plain.new_cache(1, capacity=12), plain.layers[2].attn.compressor
        made, _ = compressor(rows, Step(plain.config, [0], [12], CPU), cache, cache.sources[2])
        return made.unflatten(1, (3, 2))

    swapped = latents(x.unflatten(1, (3, 4)).flip(1).flatten(1, 2))
    assert (swapped - latents(x).flip(1)).abs().max() < 1e-12


def test_a_site_collapses_with_the_coefficients_before_it(make_model, ids):
    """`pre` of an attention site serves the experts of its layer, theirs the next layer, the last one the head."""
    model, line = make_model(), ids[:1, :9]
    first, second, last = model.layers[2], model.layers[3], model.layers[-1]

    def inputs():
        sites = (first.attn_norm, first.ffn_norm, second.attn_norm, model.norm)
        return [caught(site, model, line)[0][0][0] for site in sites]

    before = inputs()
    ((embedding, _),) = caught(model.layers[0].attn_norm, model, line)
    assert torch.equal(embedding[0], model.embed(line))  # the first site collapses with (1, 0, 0, 0)
    for layer, site, changed in (
        (first, "attn", [False, True, True, True]),
        (first, "ffn", [False, False, True, True]),
        (last, "ffn", [False, False, False, True]),
    ):
        base = getattr(layer, f"hc_{site}_base")
        base.data[:4] += 1.0  # the four numbers of `pre`
        assert [bool((a - b).abs().max() > 1e-6) for a, b in zip(inputs(), before, strict=True)] == changed
        base.data[:4] -= 1.0


def test_coefficients_see_the_memory(make_model, ids):
    """The attention coefficients of a layer with Engram are those of the streams after it."""
    model = make_model()
    layer, seen = model.layers[1], []
    mix = layer.mix
    layer.mix = lambda site, h: seen.append(h) or mix(site, h)
    ((_, memory),) = caught(layer.engram, model, ids[:1, :9])
    assert torch.equal(seen[0], memory)


def test_shared_experts_are_clamped(tiny):
    """silu(10) * 10 is the most that an inner channel gives, however large the input."""
    shared = tiny.layers[0].ffn.shared_experts
    x = torch.randn(1, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    inner = caught(shared.w2, shared, x * 1e6)[0][0][0]
    assert inner.abs().max() <= 100 and (inner.abs() > 99).any()
