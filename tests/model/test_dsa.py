"""V3.2: the lightning indexer, attention over what it picks, and the 656 + 132 bytes that a token and layer take."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flashsim import decode_flops, decode_read, kv_cache, load_config
from flashsim.reading import ConfigError
from model import lightning_indexer
from model.attention import dsa
from model.flop_counter import FlopCounter
from model.hadamard import hadamard
from model.lightning_indexer import LayerNorm, LightningIndexer
from model.prenorm_transformer import DSATransformer, MLATransformer
from model.random_weights import randomise
from model.record_codec import RecordCodec
from model.token_cache import TokenCache

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "v32"
FIELDS = json.loads((GOLDEN / "config.json").read_text())
SAME = 1e-11  # float64; measured 2e-14

CONFIGS = {
    "golden": {},
    "one token, one head": {"kv_lora_rank": 3, "index_topk": 1, "index_n_heads": 1, "num_attention_heads": 1},
    "more than there is": {"index_topk": 500},
    "two scales a latent": {"kv_lora_rank": 256, "index_head_dim": 128, "index_topk": 7},
    "all of the key rotated": {"index_head_dim": 16, "qk_nope_head_dim": 5, "v_head_dim": 9, "index_topk": 9},
    "halves": {"rope_interleave": False, "first_k_dense_replace": 0, "tie_word_embeddings": True},
}


def fields(name="golden", **changes):
    return FIELDS | {"num_hidden_layers": 3, "vocab_size": 61} | CONFIGS[name] | changes


def build(name="golden", dtype=torch.float64, cache_rounding=True, **changes):
    return randomise(DSATransformer(fields(name, **changes), dtype=dtype, cache_rounding=cache_rounding))


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 61, (2, 80), generator=torch.Generator().manual_seed(11))


@pytest.fixture(scope="module")
def tiny():
    return build()


def golden_model(**options):
    model = DSATransformer(GOLDEN, **options)
    model.load_state_dict(load_file(GOLDEN / "model.safetensors"))
    return model, load_file(GOLDEN / "golden.safetensors"), load_file(GOLDEN / "golden_q.safetensors")["logits"]


@pytest.mark.parametrize("form", ["naive", "absorbed"])
def test_golden_logits(form):
    """Measured 8e-6 without rounding and 7e-6 with it; between the two lies 2.6."""
    for rounding in (False, True):
        model, golden, rounded = golden_model(cache_rounding=rounding)
        expected = rounded if rounding else golden["logits"]
        assert (model(golden["input_ids"], form=form) - expected).abs().max() < 1e-4
    assert (rounded - golden["logits"]).abs().max() > 1


@pytest.mark.parametrize("rounding", [True, False])
@pytest.mark.parametrize("sizes", [[1] * 72, [7, 1, 2, 13, 49], [12, 1, 59], [5] * 14 + [2]])
def test_golden_in_pieces(sizes, rounding):
    model, golden, rounded = golden_model(cache_rounding=rounding)
    cache = model.new_cache(2)
    parts = [model(part, cache=cache) for part in golden["input_ids"].split(sizes, dim=1)]
    assert (torch.cat(parts, dim=1) - (rounded if rounding else golden["logits"])).abs().max() < 1e-4


def test_mistakes_show_in_the_golden_logits(monkeypatch):
    """Mistakes 1, 3, 7 and 20 of the reference's list and what is near them: rounded logits move by 1e-2 and more."""
    model, golden, rounded = golden_model()

    def off(target, name, function):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, function)
            return (model(golden["input_ids"]) - rounded).abs().max()

    halves, width = lightning_indexer.rotate_halves, FIELDS["qk_rope_head_dim"]
    turn = LightningIndexer.turn
    neighbours = lambda x, rotation: halves(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), rotation)  # noqa: E731
    assert off(lightning_indexer, "rotate_halves", neighbours) > 1e-2
    at_the_end = lambda self, x, rotation: turn(self, x.roll(width, -1), rotation).roll(-width, -1)  # noqa: E731
    assert off(LightningIndexer, "turn", at_the_end) > 1e-2
    assert off(LightningIndexer, "turn", lambda self, x, rotation: x) > 1e-2

    norm = LayerNorm.forward
    assert off(LayerNorm, "forward", lambda self, x: norm(self, x) - self.bias) > 1e-2
    rms = lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight + self.bias  # noqa: E731
    assert off(LayerNorm, "forward", rms) > 1e-2
    assert off(lightning_indexer, "hadamard", lambda x: x) > 1e-2  # other codes, so another selection

    picked = dsa.picked
    assert off(dsa, "picked", lambda selected, n: picked(selected, n).roll(1, -1)) > 1e-2
    best = lightning_indexer.top_k
    blind = lambda scores, k: best(scores.where(scores > -torch.inf, 1e3), k)  # noqa: E731  sees what is to come
    assert off(lightning_indexer, "top_k", blind) > 1e-2
    assert off(lightning_indexer, "top_k", lambda scores, k: best(-scores.where(scores > -torch.inf, 1e3), k)) > 1e-2

    pack = RecordCodec.pack

    def rotary_too(self, x):  # rounds the RoPE key to FP8 as well
        if self.width == 48:
            part = x[..., 32:].float()
            scale = 2.0 ** (part.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448).log2().ceil()
            x = torch.cat((x[..., :32], ((part / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)), dim=-1)
        return pack(self, x)

    assert off(RecordCodec, "pack", rotary_too) > 1e-2


# --- the indexer by itself --------------------------------------------------------------------------------------------


def test_scores_and_selection_against_a_loop(ids):
    """Definition 4.1 term by term, without rounding; ties and future tokens included."""
    model = build(cache_rounding=False, index_topk=4)
    cache, seen = model.new_cache(1), []
    indexer = model.model.layers[1].self_attn.indexer
    hook = indexer.register_forward_hook(lambda module, args, out: seen.append((args[0], args[1], out)))
    model(ids[:1, :14], cache=cache)
    hook.remove()
    ((x, qr, selected),) = seen
    frequency = 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16)
    ramp = ((torch.arange(8) - 2) / (6 - 2)).clamp(0, 1)  # floor and ceiling of 2.62 and 5.63
    frequency = frequency / 40 * ramp + frequency * (1 - ramp)

    def turned(v, position):
        angle = (position * frequency).double()
        a, b = v[:8], v[8:16]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), v[16:]))

    keys, number = [], 24
    for t in range(14):
        k = indexer.wk.weight @ x[0, t]
        k = (k - k.mean()) / (k.var(correction=0) + 1e-6).sqrt() * indexer.k_norm.weight + indexer.k_norm.bias
        keys.append(turned(k, t))
    for i in range(14):
        query = (indexer.wq_b.weight @ qr[0, i]).view(number, 32)
        weight = indexer.weights_proj.weight @ x[0, i] * number**-0.5
        scores = [
            sum((turned(query[a], i) @ keys[t]).relu() * weight[a] * 32**-0.5 for a in range(number)).item()
            for t in range(i + 1)
        ]
        best = sorted(sorted(range(i + 1), key=lambda t: (-scores[t], t))[:4])
        assert [t for t in selected[0, i].tolist() if t >= 0] == best
        assert selected.shape == (1, 14, 4)


def test_ties_go_to_the_earlier_token(ids):
    """With heads that weigh nothing all scores are zero: the first tokens are picked, in prefill and in decode."""
    model = build(index_topk=3)
    for layer in model.model.layers:
        layer.self_attn.indexer.weights_proj.weight.zero_()
    seen = []
    hook = model.model.layers[0].self_attn.indexer.register_forward_hook(lambda m, args, out: seen.append(out))
    cache = model.new_cache(1)
    model(ids[:1, :6], cache=cache)
    model(ids[:1, 6:7], cache=cache)
    hook.remove()
    assert seen[0][0].tolist() == [[0, -1, -1], [0, 1, -1], *[[0, 1, 2]] * 4]
    assert seen[1][0].tolist() == [[0, 1, 2]]


def test_layer_norm_is_a_true_one():
    norm = LayerNorm(3)
    norm.weight.copy_(torch.tensor([1.0, 2.0, 1.0]))
    norm.bias.copy_(torch.tensor([0.5, 0.0, 0.0]))
    out = norm(torch.tensor([1.0, 2.0, 6.0]))
    deviation = (14 / 3) ** 0.5
    assert out.tolist() == pytest.approx([0.5 - 2 / deviation, -2 / deviation, 3 / deviation], abs=1e-6)


def test_hadamard():
    """Orthogonal, symmetric, natural order."""
    assert hadamard(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [5, -1, -2, 0]
    x = torch.randn(5, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert (hadamard(hadamard(x)) - x).abs().max() < 1e-12
    assert (hadamard(x) @ hadamard(x).T - x @ x.T).abs().max() < 1e-12
    with pytest.raises(ValueError, match="a Hadamard rotation of 24 channels"):
        hadamard(torch.zeros(24))


# --- many ways to run it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_forms_and_pieces_equal_one_forward(name, rounding, ids):
    model = build(name, cache_rounding=rounding)
    full, cache = model(ids[:, :30], form="naive"), model.new_cache(2)
    assert (model(ids[:, :30], form="absorbed") - full).abs().max() < SAME
    parts = [model(part, cache=cache) for part in ids[:, :30].split([6, 1, 1, 22], dim=1)]
    assert (torch.cat(parts, dim=1) - full).abs().max() < SAME


@pytest.mark.parametrize("lengths", [[5, 18], [18, 1]])
def test_ragged_batches_equal_each_alone(tiny, ids, lengths):
    cache = tiny.new_cache(2)
    first = tiny(ids[:, :18], cache=cache, lengths=lengths)
    copy = cache.fork([1, 0])
    got, other = tiny(ids[:, 40:41], cache=cache), tiny(ids[[1, 0], 40:43], cache=copy)
    for b, n in enumerate(lengths):
        alone = tiny(torch.cat([ids[b : b + 1, :n], ids[b : b + 1, 40:43]], dim=1))[0]
        assert (first[b, :n] - alone[:n]).abs().max() < SAME
        assert (got[b, 0] - alone[n]).abs().max() < SAME
        assert (other[1 - b] - alone[n:]).abs().max() < SAME
    assert torch.isfinite(first).all()  # padding rows too
    cache.truncate(1)
    assert cache.nbytes() == 2 * kv_cache(tiny.config, 1).total()
    again = tiny(ids[:, 1:9], cache=cache)
    assert (again - tiny(ids[:, :9])[:, 1:]).abs().max() < SAME


@pytest.mark.parametrize("position", [0, 11, 29])
def test_a_token_changes_nothing_before_it(tiny, ids, position):
    changed = ids[:1, :30].clone()
    changed[0, position] = (changed[0, position] + 1) % 61
    difference = (tiny(changed) - tiny(ids[:1, :30])).abs().amax(dim=-1)[0]
    assert (difference[:position] < SAME).all()
    assert (difference[position] > 1e-6).all()


def test_few_numbers_at_a_time_change_nothing(tiny, ids, monkeypatch):
    whole = tiny(ids)
    monkeypatch.setattr(lightning_indexer, "SCORES_AT_ONCE", 30_000)
    monkeypatch.setattr(dsa, "NUMBERS_AT_ONCE", 10_000)
    for form in ("naive", "absorbed"):
        assert (tiny(ids, form=form) - whole).abs().max() < SAME


def test_with_room_for_every_token_it_is_v3(ids):
    """Same weights, no rounding, `index_topk` at least the context; and not with less."""
    sparse = build(cache_rounding=False, index_topk=30)
    kept = ("indexer.", "index_")
    v3 = {key: value for key, value in fields().items() if not key.startswith(kept)} | {"model_type": "deepseek_v3"}
    dense = MLATransformer(v3, dtype=torch.float64)
    dense.load_state_dict({name: value for name, value in sparse.state_dict().items() if ".indexer." not in name})
    assert (sparse(ids[:, :30]) - dense(ids[:, :30])).abs().max() < SAME
    less = build(cache_rounding=False, index_topk=29)(ids[:, :30])
    assert (less - dense(ids[:, :30]))[:, :29].abs().max() < SAME
    assert (less - dense(ids[:, :30]))[:, 29].abs().max() > 1e-6


# --- bytes and FLOPs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_equal_the_prediction_for_every_length(name):
    config = load_config(fields(name))
    cache = TokenCache(config, capacity=300)
    assert cache.nbytes() == 0
    for n in range(1, 301):
        cache.lengths = [n]
        predicted = kv_cache(config, n)
        assert cache.nbytes() == predicted.total()
        for key in ("component", "layer", "tier"):
            assert cache.nbytes(by=key) == predicted.by(key)


def test_bytes_of_the_release():
    cache = TokenCache(load_config("v3.2"), 1, capacity=5, dtype=torch.bfloat16)
    cache.lengths = [5]
    assert cache.nbytes() == cache.reserved_nbytes() == 5 * 48_068
    assert {name: codec.nbytes for name, codec in cache.codecs.items()} == {"main_kv": 656, "index_key": 132}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_model_that_decodes(dtype, ids):
    model = build(dtype=dtype)
    cache = model.new_cache(2, capacity=20)
    for n in range(1, 21):
        assert torch.isfinite(model(ids[:, n - 1 : n], cache=cache)).all()
        assert cache.nbytes(by="component", sequence=1) == kv_cache(model.config, n).by("component")
    assert (cache.reserved_nbytes() == cache.nbytes()) == (dtype == torch.bfloat16)


def test_records_byte_by_byte():
    """656: codes, four float32 scales, RoPE key in BF16. 132: codes, one scale. Vector 9.2 of the reference."""
    config = load_config("v3.2")
    cache = TokenCache(config, dtype=torch.bfloat16)
    values = torch.tensor([0.30078125, -1.703125, 2.25, 0.01171875])
    latent = torch.zeros(576)
    latent[:4], latent[128:132], latent[512:516] = values, 4 * values, values
    record = cache.codecs["main_kv"].pack(latent)
    assert record.shape == (656,)
    assert record[512:528].clone().view(torch.float32).tolist() == [2**-7, 2**-5, P2_OF_ZERO, P2_OF_ZERO]
    codes = record[:512].view(torch.float8_e4m3fn).float()
    assert (codes[:4] / 2**7).tolist() == [0.3125, -1.75, 2.25, 0.01171875]
    assert record[528:].clone().view(torch.bfloat16)[:4].tolist() == values.tolist()  # the RoPE key is not rounded
    assert cache.codecs["main_kv"].unpack(record)[:4].tolist() == [0.3125, -1.75, 2.25, 0.01171875]
    key = cache.codecs["index_key"].pack(latent[:128])
    assert key[128:].clone().view(torch.float32).tolist() == [2**-7]
    assert cache.codecs["index_key"].unpack(key)[:4].tolist() == [0.3125, -1.75, 2.25, 0.01171875]


P2_OF_ZERO = 2.0**-22  # the smallest power of two that is at least 1e-4 / 448


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("n", [1, 9, 33])
def test_decode_flops_equal_the_prediction(name, n, ids):
    model = build(name)
    cache = model.new_cache(1)
    if n > 1:
        model(ids[:1, : n - 1], cache=cache)
    with FlopCounter(model) as counter:
        model(ids[:1, n - 1 : n], cache=cache, last=True)
    predicted = decode_flops(model.config, n)
    counter.compare(predicted)
    assert counter.flops == {component: flops for component, flops in predicted.by("component").items() if flops}


def test_a_decode_step_reads_what_is_predicted(ids, monkeypatch):
    """Bytes that the step unpacks: every index key, the records of the picked tokens, nothing else."""
    model = build(dtype=torch.bfloat16)
    cache, read = model.new_cache(1, capacity=40), []
    model(ids[:1, :32], cache=cache)
    unpack = RecordCodec.unpack

    def counting(self, rows):
        read.append(rows.numel() if rows.ndim != 4 or rows.shape[2] != 24 else 0)  # not the query's own heads
        return unpack(self, rows)

    monkeypatch.setattr(RecordCodec, "unpack", counting)
    model(ids[:1, 32:33], cache=cache)
    assert sum(read) == decode_read(model.config, 33).total()


# --- names and what it refuses ----------------------------------------------------------------------------------------


def test_names_of_a_checkpoint():
    assert set(DSATransformer(GOLDEN, device="meta").state_dict()) == set(load_file(GOLDEN / "model.safetensors"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"index_head_dim": 8}, "index_head_dim is 8; accepted: a width of at least qk_rope_head_dim, 16"),
        ({"index_head_dim": 48}, "index_head_dim is 48; accepted: a power of two"),
        ({"kv_lora_rank": 192}, "kv_lora_rank is 192; accepted: what its records can hold"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; accepted: noaux_tc"),
    ],
)
def test_configs_that_it_does_not_compute(changes, text):
    with pytest.raises(ConfigError, match=text):
        DSATransformer(fields(**changes))


def test_any_width_without_rounding(ids):
    model = build(cache_rounding=False, kv_lora_rank=192, index_head_dim=48)
    cache = model.new_cache(2)
    parts = [model(part, cache=cache) for part in ids[:, :20].split([19, 1], dim=1)]
    assert (torch.cat(parts, dim=1) - model(ids[:, :20])).abs().max() < SAME
