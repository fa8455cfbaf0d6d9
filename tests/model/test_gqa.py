"""V1: grouped-query attention, its BF16 cache, and what the models of V1 to V3.2 have in common."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flashsim import decode_flops, decode_read, kv_cache, load_config
from flashsim.reading import ConfigError
from model.attention import gqa
from model.backend import BackendError
from model.cache import CacheError
from model.flop_counter import FlopCounter
from model.generate import generate
from model.prenorm_transformer import GQATransformer
from model.random_weights import randomise
from model.token_cache import TokenCache, TokenStep
from model.transformer import InputError

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "v1"
FIELDS = json.loads((GOLDEN / "config.json").read_text())
SAME = 1e-12  # float64; measured 3e-15

# heads, KV heads, head_dim: groups of 4, multi-head, multi-query, odd groups with a width that is not D / heads
SHAPES = [(8, 2, 8), (5, 5, 12), (6, 1, 10), (9, 3, 22)]


def fields(**changes):
    return FIELDS | {"num_hidden_layers": 2, "hidden_size": 48, "vocab_size": 61, "intermediate_size": 24} | changes


def shaped(heads, kv_heads, width, **changes):
    return fields(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width, **changes)


def build(config=None, dtype=torch.float64, **options):
    return randomise(GQATransformer(fields() if config is None else config, dtype=dtype, **options))


@pytest.fixture(scope="module")
def tiny():
    return build()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 61, (2, 80), generator=torch.Generator().manual_seed(3))


def golden_model(**options):
    model = GQATransformer(GOLDEN, **options)
    model.load_state_dict(load_file(GOLDEN / "model.safetensors"))
    return model, load_file(GOLDEN / "golden.safetensors")


@pytest.mark.parametrize("rounding", [True, False])
def test_golden_logits(rounding):
    """Measured 1.4e-5. BF16 records lose nothing of a float32 model: the remainder lies beside them."""
    model, golden = golden_model(cache_rounding=rounding)
    assert (model(golden["input_ids"]) - golden["logits"]).abs().max() < 1e-4


def test_golden_streams():
    """`hidden.i` enters layer i: finds the layer in which a bug sits."""
    model, golden = golden_model()
    seen = []
    hooks = [layer.register_forward_pre_hook(lambda m, args: seen.append(args[0])) for layer in model.model.layers]
    hooks.append(model.model.norm.register_forward_pre_hook(lambda m, args: seen.append(args[0])))
    model(golden["input_ids"])
    for hook in hooks:
        hook.remove()
    for i, h in enumerate(seen):
        assert (h - golden[f"hidden.{i}"]).abs().max() < 1e-4


@pytest.mark.parametrize("sizes", [[1] * 64, [7, 1, 2, 13, 41], [63, 1], [5] * 12 + [4]])
def test_golden_in_pieces(sizes):
    model, golden = golden_model()
    cache = model.new_cache(2)
    parts = [model(part, cache=cache) for part in golden["input_ids"].split(sizes, dim=1)]
    assert (torch.cat(parts, dim=1) - golden["logits"]).abs().max() < 1e-4


def test_mistakes_show_in_the_golden_logits(monkeypatch):
    """Round-robin groups, pairs of neighbours, no scale, unrotated keys: each is seen by the tests above."""
    model, golden = golden_model()
    attend, rotate = gqa.attend, gqa.rotate_halves

    def off(name, function):
        with monkeypatch.context() as patch:
            patch.setattr(gqa, name, function)
            return (model(golden["input_ids"]) - golden["logits"]).abs().max()

    def neighbours(x, turn):
        pairs = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(pairs, turn)

    def round_robin(q, k, v, *rest):
        order = torch.arange(8).view(4, 2).T.flatten()  # head a to KV head a mod 2
        return attend(q[:, :, order], k, v, *rest)[:, :, order.argsort()]

    assert off("attend", round_robin) > 1e-2
    assert off("rotate_halves", neighbours) > 1e-2
    assert off("attend", lambda q, k, v, visible, scale: attend(q, k, v, visible, 1.0)) > 1e-2
    assert off("rotate_halves", lambda x, turn: rotate(x, turn) if x.shape[2] == 8 else x) > 1e-2


def test_attention_against_a_loop():
    """Each head, query and key by itself."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, w, generator=generator) for n, h, w in ((3, 6, 5), (7, 2, 5), (7, 2, 4)))
    visible = torch.rand(2, 3, 7, generator=generator) < 0.6
    visible[..., 0] = True
    out = gqa.attend(q, k, v, visible, 0.3)
    for b in range(2):
        for i in range(3):
            for a in range(6):
                keys = visible[b, i].nonzero().flatten()
                weights = torch.softmax(torch.stack([0.3 * q[b, i, a] @ k[b, t, a // 3] for t in keys]), dim=0)
                expected = sum(w * v[b, t, a // 3] for w, t in zip(weights, keys, strict=True))
                assert (out[b, i, a] - expected).abs().max() < 1e-6


def test_few_scores_at_a_time_change_nothing(tiny, ids, monkeypatch):
    whole = tiny(ids)
    monkeypatch.setattr(gqa, "SCORES_AT_ONCE", 2000)
    assert (tiny(ids) - whole).abs().max() < SAME


# --- one model, many ways to run it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_equal_one_forward(shape, ids):
    model = build(shaped(*shape))
    full, cache = model(ids[:, :31]), model.new_cache(2)
    parts = [model(part, cache=cache) for part in ids[:, :31].split([4, 1, 1, 25], dim=1)]
    assert (torch.cat(parts, dim=1) - full).abs().max() < SAME


@pytest.mark.parametrize("lengths", [[20, 13], [1, 20], [20, 20]])
def test_ragged_batches_equal_each_alone(tiny, ids, lengths):
    cache = tiny.new_cache(2)
    last = tiny(ids[:, :20], cache=cache, lengths=lengths, last=True)
    assert cache.lengths == lengths
    assert cache.nbytes() == sum(kv_cache(tiny.config, n).total() for n in lengths)
    more = tiny(ids[:, 40:45], cache=cache, lengths=[2, 5])
    for b, (n, count) in enumerate(zip(lengths, [2, 5], strict=True)):
        alone = tiny(torch.cat([ids[b : b + 1, :n], ids[b : b + 1, 40 : 40 + count]], dim=1))[0]
        assert (last[b] - alone[n - 1]).abs().max() < SAME
        assert (more[b, :count] - alone[n:]).abs().max() < SAME


@pytest.mark.parametrize("position", [0, 11, 29])
def test_a_token_changes_nothing_before_it(tiny, ids, position):
    changed = ids[:1, :30].clone()
    changed[0, position] = (changed[0, position] + 1) % 61
    difference = (tiny(changed) - tiny(ids[:1, :30])).abs().amax(dim=-1)[0]
    assert (difference[:position] == 0).all()
    assert (difference[position:] > 1e-6).all()


def test_truncate_and_fork(tiny, ids):
    cache = tiny.new_cache(2)
    tiny(ids[:, :30], cache=cache)
    copy = cache.fork([1, 0, 1])
    cache.truncate([30, 7])
    assert (cache.lengths, copy.lengths) == ([30, 7], [30, 30, 30])
    got, copied = tiny(ids[:, 50:53], cache=cache), tiny(ids[[1, 0, 1], 50:53], cache=copy)
    for b, n in ((0, 30), (1, 7)):
        expected = tiny(torch.cat([ids[b : b + 1, :n], ids[b : b + 1, 50:53]], dim=1))[0, n:]
        assert (got[b] - expected).abs().max() < SAME
    assert (copied[1] - got[0]).abs().max() < SAME
    assert (copied[0] - copied[2]).abs().max() < SAME
    for wanted, text in ((34, "0 to its 33"), (-1, "0 to its"), ([1], "length has 1 numbers")):
        with pytest.raises(CacheError, match=text):
            cache.truncate(wanted)
    with pytest.raises(CacheError, match="sequences is"):
        cache.fork([2])


@pytest.mark.parametrize("chunk", [None, 1, 7, 40])
def test_prefill_gives_the_last_logits(tiny, ids, chunk):
    """As V4.1's, with every layer for every row; so `python -m model.generate` runs these models."""
    cache, seen = tiny.new_cache(2), []
    last = tiny.prefill(ids[:, :30], cache, tail=None, chunk=chunk, progress=lambda *pair: seen.append(pair))
    assert (last - tiny(ids[:, :30])[:, -1]).abs().max() < SAME
    assert cache.lengths == [30, 30]
    assert seen == ([(7, 30), (14, 30), (21, 30), (28, 30), (30, 30)] if chunk == 7 else seen)
    new = generate(tiny, ids[0, :9].tolist(), 3, chunk=chunk)
    expected = ids[:1, :9]
    for _ in range(3):
        expected = torch.cat([expected, tiny(expected)[:, -1:].argmax(-1)], dim=1)
    assert new == expected[0, 9:].tolist()


def test_prefill_of_ragged_prompts_and_what_it_refuses(tiny, ids):
    last = tiny.prefill(ids[:, :20], lengths=[20, 6])
    assert (last - torch.stack([tiny(ids[:1])[0, 19], tiny(ids[1:])[0, 5]])).abs().max() < SAME
    for options, text in (
        ({"tail": 8}, "tail is 8; accepted: 'exact' or None"),
        ({"chunk": 0}, "chunk is 0; accepted: a whole number from 1"),
        ({"chunk": 4, "lengths": [20, 6]}, "accepted: one of the two"),
    ):
        with pytest.raises(InputError, match=text):
            tiny.prefill(ids[:, :20], **options)
    with pytest.raises(CacheError, match="prefix of llama; accepted: caches of"):
        tiny.new_cache().prefix(3)


# --- bytes and FLOPs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_equal_the_prediction_for_every_length(shape, dtype):
    """Without a model: counts do not depend on values. One token after another."""
    config = load_config(shaped(*shape))
    cache = TokenCache(config, dtype=dtype)
    assert cache.nbytes() == 0
    vector = torch.zeros(1, 1, cache.codecs["main_kv"].width)
    for n in range(1, 301):
        step = TokenStep(config, [n - 1], [1], cache.device)
        cache.begin(step)
        for layer in config.layers():
            cache.write(layer, "main_kv", step, vector)
        cache.advance(step)
        predicted = kv_cache(config, n)
        assert cache.nbytes() == predicted.total()
        for key in ("component", "layer", "tier"):
            assert cache.nbytes(by=key) == predicted.by(key)


def test_bytes_of_the_release():
    config = load_config("v1")
    cache = TokenCache(config, 1, capacity=3, dtype=torch.bfloat16)
    cache.lengths = [3]
    assert cache.nbytes() == kv_cache(config, 3).total() == cache.reserved_nbytes() == 3 * 389_120
    assert {store.rows.shape for store in cache.stores.values()} == {(1, 3, 4096)}


def test_a_bfloat16_model_stores_its_records_and_nothing_else(ids):
    model = build(dtype=torch.bfloat16)
    cache = model.new_cache(2, capacity=24)
    logits = torch.cat([model(part, cache=cache) for part in ids[:, :24].split([11, 1, 12], dim=1)], dim=1)
    assert cache.nbytes() == cache.reserved_nbytes() == 2 * kv_cache(model.config, 24).total()
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()
    keys_then_values = cache.read(0, "main_kv", 24)
    assert torch.equal(keys_then_values, keys_then_values.bfloat16().float())


def test_records_are_bfloat16_keys_then_values(tiny, ids):
    """The bytes themselves, read without the codec."""
    cache = tiny.new_cache(1)
    tiny(ids[:1, :9], cache=cache)
    (_, _, _, records), *_ = cache.stored(0)
    numbers = records.clone().view(torch.bfloat16)
    layer, config = tiny.model.layers[0], tiny.config
    x = layer.input_layernorm(tiny.model.embed_tokens(ids[:1, :9]))
    values = layer.self_attn.v_proj(x)[0].bfloat16()
    assert torch.equal(numbers[:, config.num_key_value_heads * config.head_dim :], values)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 2, 40])
def test_decode_flops_equal_the_prediction(shape, n, ids):
    model = build(shaped(*shape, tie_word_embeddings=n == 2))
    cache = model.new_cache(1)
    if n > 1:
        model(ids[:1, : n - 1], cache=cache)
    with FlopCounter(model) as counter:
        model(ids[:1, n - 1 : n], cache=cache, last=True)
    rows = counter.compare(decode_flops(model.config, n))
    assert all(row.counted == row.predicted for row in rows)
    assert counter.flops == decode_flops(model.config, n).by("component")
    assert cache.nbytes() == decode_read(model.config, n).total()  # a decode step reads all there is


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_names_of_a_checkpoint(tiny):
    names = set(load_file(GOLDEN / "model.safetensors"))
    assert set(GQATransformer(GOLDEN, device="meta").state_dict()) == names
    tied = GQATransformer(fields(tie_word_embeddings=True), device="meta")
    assert set(tiny.state_dict()) - set(tied.state_dict()) == {"lm_head.weight"}
    assert not tiny(torch.zeros(1, 3, dtype=torch.int64)).is_inference()
    assert "backend='reference', dtype=float64, device=cpu, cache_rounding=True" in repr(tiny)


def test_tied_embeddings_are_the_head(ids):
    tied, free = build(fields(tie_word_embeddings=True)), build()
    free.load_state_dict(tied.state_dict() | {"lm_head.weight": tied.model.embed_tokens.weight})
    assert (tied(ids) - free(ids)).abs().max() < SAME


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attention_bias": True}, "attention_bias is True; accepted: false"),
        ({"mlp_bias": True}, "mlp_bias is True; accepted: false"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2'; accepted: llama"),
        ({"head_dim": 7}, "head_dim is 7; accepted: an even number"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "rope_scaling.rope_type is 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}}, "V1 has no RoPE"),
    ],
)
def test_configs_that_it_does_not_compute(changes, text):
    with pytest.raises(ConfigError, match=text):
        GQATransformer(fields(**changes))


def test_other_families_and_backends():
    with pytest.raises(ConfigError, match="model_type is 'deepseek_v3'; accepted: llama"):
        GQATransformer("v3", device="meta")
    with pytest.raises(BackendError, match="accepted: reference, as the kernels"):
        GQATransformer(fields(), "triton")


def test_bad_calls(tiny, ids):
    for bad, text in (
        (torch.tensor([[0, 61]]), "token id 61; accepted: 0 to 60"),
        (torch.zeros(1, 0, dtype=torch.int64), "at least one sequence of one token"),
        (torch.zeros(1, 4), "whole numbers"),
        (torch.zeros(1, 4097, dtype=torch.int64), "4097 tokens in a sequence; accepted: max_position_embeddings, 4096"),
    ):
        with pytest.raises(InputError, match=text):
            tiny(bad)
    with pytest.raises(InputError, match="lengths are"):
        tiny(ids[:, :5], lengths=[5, 6])
    with pytest.raises(InputError, match="form is 'naive'; accepted: None"):
        tiny(ids[:, :5], form="naive")
    with pytest.raises(InputError, match="ids have 2 sequences; accepted: 1"):
        tiny(ids[:, :5], cache=tiny.new_cache(1))
    with pytest.raises(CacheError, match="made for another model"):
        tiny(ids[:1, :5], cache=build(cache_rounding=False).new_cache(1))
    with pytest.raises(CacheError, match="batch_size is 0"):
        tiny.new_cache(0)
    with pytest.raises(CacheError, match="by is 'size'"):
        tiny.new_cache(1).nbytes(by="size")
