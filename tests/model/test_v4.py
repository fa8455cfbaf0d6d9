"""V4 whole: two goldens, paths that agree, bytes and FLOPs as predicted, and the mistakes that are easily made."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import model
from flashsim.config import load_config
from flashsim.flops import decode_flops
from flashsim.kv_cache import kv_cache
from flashsim.params import parameters
from flashsim.reading import ConfigError
from model import hyper_connection, v4_compressor, v4_moe, v4_transformer
from model.attention import csa, hca, window
from model.backend import BackendError
from model.cache import CacheError
from model.flop_counter import REASONS, FlopCounter
from model.random_weights import randomise
from model.record_codec import FP8_UE8M0_64, RecordCodec, pack_fp8, unpack_fp8
from model.step import Step
from model.transformer import InputError
from model.v4_cache import V4Cache
from model.v4_transformer import V4Transformer

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "v4"
SMALL = load_config(GOLDEN)
VARIANTS = {
    "golden": {},
    "flash": {"compress_ratios": (0, 0, 4, 128, 4), "num_hash_layers": 3},
    "pro": {"compress_ratios": (128, 128, 4, 128, 4), "o_groups": 4, "index_topk": 9, "num_hash_layers": 0},
    "odd": {
        "compress_rate_csa": 3,
        "compress_ratios": (3, 5, 3, 0, 7),
        "sliding_window": 7,
        "index_topk": 50,
        "hc_mult": 3,
        "index_n_heads": 2,
        "index_head_dim": 64,
        "head_dim": 144,
        "num_attention_heads": 3,
        "o_groups": 3,
        "n_shared_experts": 0,
        "swiglu_limit": None,
    },
    "least": {
        "compress_ratios": (4, 2, 1, 4, 0),
        "sliding_window": 1,
        "index_topk": 1,
        "hc_mult": 1,
        "index_n_heads": 1,
        "num_attention_heads": 1,
        "o_groups": 1,
        "n_shared_experts": 2,
        "num_experts_per_tok": 1,
        "num_hash_layers": 5,
    },
    "wide windows": {"compress_ratios": (0, 4, 6, 0, 0), "sliding_window": 400, "tie_word_embeddings": True},
}


def variant(name):
    return replace(SMALL, **VARIANTS[name])


def random_v4(config, **options):
    return randomise(V4Transformer(config, dtype=torch.float64, **options))


def golden(cache_rounding):
    loaded = model.load(GOLDEN, cache_rounding=cache_rounding)
    file = load_file(GOLDEN / "golden.safetensors")
    logits = load_file(GOLDEN / "golden_q.safetensors")["logits"] if cache_rounding else file["logits"]
    return loaded, file, logits


@pytest.fixture(scope="module")
def ids():
    """[2, 330] token ids."""
    return torch.randint(0, 160, (2, 330), generator=torch.Generator().manual_seed(3))


# --- goldens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_rounding", [False, True])
def test_logits(cache_rounding):
    lm, file, logits = golden(cache_rounding)
    assert (lm(file["input_ids"]) - logits).abs().max() < 1e-4  # measured 1.3e-6 and 1.1e-6


def test_residual_streams_at_the_layers():
    """`hidden.i` enters layer i, the last one leaves the last: finds the layer in which a bug sits."""
    lm, file, _ = golden(False)
    seen = []
    for layer in lm.layers:
        layer.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    lm(file["input_ids"])
    states = [before for before, _ in seen] + [seen[-1][1]]
    for i, h in enumerate(states):
        assert (h - file[f"hidden.{i}"]).abs().max() < 1e-4


@pytest.mark.parametrize("cache_rounding", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 15, 16, 17])
def test_chunks_stay_on_the_path(size, cache_rounding):
    lm, file, logits = golden(cache_rounding)
    ids, cache = file["input_ids"], lm.new_cache()
    parts = [lm(ids[:, low : low + size], cache=cache) for low in range(0, ids.shape[1], size)]
    assert (torch.cat(parts, dim=1) - logits).abs().max() < 1e-4


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["golden", "odd", "least"])
def test_prefill_then_decode_at_every_residue(name, ids):
    """A prompt of every length up to two groups, then a token, against one full forward."""
    lm = random_v4(variant(name))
    whole = lm(ids[:1, :34])
    for n in range(1, 33):
        cache = lm.new_cache()
        assert (lm(ids[:1, :n], cache=cache) - whole[:, :n]).abs().max() < 1e-12
        assert (lm(ids[:1, n : n + 1], cache=cache) - whole[:, n : n + 1]).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["pro"])
def test_token_by_token_over_long_groups(name, ids):
    lm = random_v4(variant(name))
    whole, cache = lm(ids[:1, :140]), lm.new_cache()
    parts = [lm(ids[:1, i : i + 1], cache=cache) for i in range(140)]
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["golden", "odd"])
def test_ragged_batches(name, ids):
    """Sequences of different lengths, before and in a call, are as each by itself."""
    lm = random_v4(variant(name))
    cache = lm.new_cache(2)
    first = lm(ids[:, :21], cache=cache, lengths=[21, 6])
    second = lm(ids[:, 30:39], cache=cache, lengths=[2, 9], last=True)
    assert cache.lengths == [23, 15]
    for b, (n, more) in enumerate(((21, 2), (6, 9))):
        alone = lm(torch.cat((ids[b : b + 1, :n], ids[b : b + 1, 30 : 30 + more]), dim=1))
        assert (first[b, :n] - alone[0, :n]).abs().max() < 1e-12
        assert (second[b] - alone[0, -1]).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["golden", "odd"])
def test_nothing_sees_the_future(name, ids):
    """9.5 and mistake 20: changing token j changes no logits before j, across group boundaries too."""
    lm = random_v4(variant(name))
    whole = lm(ids[:1, :40])
    for j in (1, 3, 4, 15, 16, 17, 31, 32, 38):
        other = ids[:1, :40].clone()
        other[0, j] = (other[0, j] + 1) % 160
        changed = (lm(other) - whole).abs().amax(dim=-1)[0]
        assert changed[:j].max() < 1e-12 and changed[j] > 1e-6


@pytest.mark.parametrize("keep", range(20, 29))
def test_taken_back_is_as_if_it_had_never_been(keep, ids):
    lm = random_v4(variant("golden"))
    cache = lm.new_cache()
    lm(ids[:1, :28], cache=cache)
    cache.truncate(keep)
    assert cache.nbytes(by="component") == kv_cache(lm.config, keep).by("component")
    expected = lm(torch.cat((ids[:1, :keep], ids[1:, :9]), dim=1))[:, keep:]
    assert (lm(ids[1:, :9], cache=cache) - expected).abs().max() < 1e-12


def test_forks_go_their_own_way(ids):
    lm = random_v4(variant("golden"))
    cache = lm.new_cache(2)
    lm(ids[:, :23], cache=cache)
    copy = cache.fork([1, 1, 0])
    own = torch.cat((ids[[1, 1, 0], :23], ids[[0, 1, 1], 50:60]), dim=1)
    assert (lm(own[:, 23:], cache=copy) - lm(own)[:, 23:]).abs().max() < 1e-12
    assert copy.lengths == [33] * 3 and cache.lengths == [23, 23]
    expected = lm(ids[:, :25])[:, 23:]
    assert (lm(ids[:, 23:25], cache=cache) - expected).abs().max() < 1e-12


def test_what_a_cache_refuses(ids):
    lm = random_v4(variant("golden"))
    cache = lm.new_cache()
    lm(ids[:1, :60], cache=cache)
    for wanted, text in ((40, "at most rollback, 8"), (61, "0 to its 60 tokens"), (-1, "0 to its 60")):
        with pytest.raises(CacheError, match=text):
            cache.truncate(wanted)
    cache.truncate(52)
    with pytest.raises(CacheError, match="at most rollback"):  # what the ring lost stays lost
        cache.truncate(51)
    cache.truncate(0)
    assert cache.nbytes() == 0
    assert (lm(ids[:1, :20], cache=cache) - lm(ids[:1, :20])).abs().max() < 1e-12
    with pytest.raises(CacheError, match="made for another model"):
        random_v4(SMALL, cache_rounding=False)(ids[:1, :2], cache=cache)
    with pytest.raises(InputError, match="token id 160; accepted: 0 to 159"):
        lm(torch.tensor([[160]]))


# --- bytes and FLOPs --------------------------------------------------------------------------------------------------


def filled(config, tokens, **options):
    """A cache that went through the motions of so many tokens, without a model: counts do not depend on values."""
    cache, step = V4Cache(config, **options), Step(config, [0], [tokens], torch.device("cpu"))
    cache.begin(step)
    for ring in cache.rings.values():
        ring.write(step, torch.zeros(1, tokens, *ring.rows.shape[2:], dtype=ring.rows.dtype))
    cache.advance(step)
    return cache


@pytest.mark.parametrize("name", VARIANTS)
def test_bytes_equal_the_prediction_for_every_length(name):
    config = variant(name)
    assert V4Cache(config).nbytes() == 0
    for n in range(1, 301):
        cache, predicted = filled(config, n), kv_cache(config, n)
        assert cache.nbytes() == predicted.total()
        for key in ("component", "layer", "tier"):
            assert cache.nbytes(by=key) == predicted.by(key), (n, key)


@pytest.mark.parametrize("name", ["v4-flash", "v4-pro"])
def test_bytes_of_the_release(name):
    config = load_config(name)
    for n in (1, 3, 4, 127, 128, 257):
        assert filled(config, n, dtype=torch.bfloat16).nbytes(by="component") == kv_cache(config, n).by("component")


@pytest.mark.parametrize("name", ["golden", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_model_that_decodes(name, dtype, ids):
    lm = randomise(V4Transformer(variant(name), dtype=dtype))
    cache = lm.new_cache(2)
    for n in range(1, 38):
        lm(ids[:, n - 1 : n], cache=cache)
        assert cache.nbytes(by="component", sequence=1) == kv_cache(lm.config, n).by("component")
    assert cache.nbytes() == 2 * kv_cache(lm.config, 37).total()
    assert cache.reserved_nbytes() > cache.nbytes()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 3, 4, 17, 129])
def test_flops_of_a_decode_step(name, tokens, ids):
    lm = random_v4(variant(name))
    cache = lm.new_cache()
    if tokens > 1:
        lm(ids[:1, : tokens - 1], cache=cache)
    with FlopCounter(lm) as counter:
        lm(ids[:1, tokens - 1 : tokens], cache=cache, last=True)
    rows = counter.compare(decode_flops(lm.config, tokens))
    assert {row.component for row in rows if row.reason} <= {"hyper_connection_mixing"} <= REASONS.keys()
    assert {row.component for row in rows} >= {"router", "lm_head", "attention_window"}


@pytest.mark.parametrize("name", ["v4-flash", "v4-pro", *VARIANTS])
def test_parameters(name):
    config = variant(name) if name in VARIANTS else replace(load_config(name), n_routed_experts=7)
    lm = V4Transformer(config, device="meta", dtype=torch.bfloat16, cache_rounding=False)
    counts = sum(p.numel() for name, p in lm.named_parameters() if not name.endswith("tid2eid"))
    assert counts == parameters(config).total()


# --- rules ------------------------------------------------------------------------------------------------------------


def test_hash_layers_route_by_token_id():
    lm = random_v4(variant("golden"))
    gate = lm.layers[0].ffn.gate
    x = torch.randn(2, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    experts, weights = gate(x, torch.tensor([7, 7]))
    assert experts.tolist() == [sorted(gate.tid2eid[7].tolist())] * 2
    s = torch.nn.functional.softplus(x @ gate.weight.T).sqrt().gather(1, experts)
    assert torch.allclose(weights, s / s.sum(dim=1, keepdim=True) * 1.5) and not torch.equal(weights[0], weights[1])
    assert not hasattr(gate, "bias") and not hasattr(lm.layers[2].ffn.gate, "tid2eid")


def test_sinkhorn_vector():
    """9.4; the streams mix over the first index, so that M^T h leaves the site (mistake 18)."""
    logits = torch.tensor([[0.0, 1, 2, 3], [1, 0, 0, 0], [0, 0, 2, 0], [0.5, 0, 0, 1]], dtype=torch.float64)
    expected = torch.tensor(
        [
            [0.048632, 0.205718, 0.206771, 0.538878],
            [0.503235, 0.288099, 0.106529, 0.102135],
            [0.135875, 0.211447, 0.577716, 0.074961],
            [0.312257, 0.294734, 0.108983, 0.284025],
        ],
        dtype=torch.float64,
    )
    m = hyper_connection.sinkhorn(logits, 20, 1e-6)
    assert (m - expected).abs().max() < 1e-6
    h = torch.eye(4, dtype=torch.float64)
    mix = hyper_connection.Mix(torch.zeros(4), torch.zeros(4), m)
    assert torch.equal(hyper_connection.expand(h, torch.zeros(4), mix), m.T)


YARN = """1 .687656022 .472870805 .325172456 .223606798 .153764561 .105737126 .0727107717 .05 .0343828011 .0236435402
.0162586228 .0111803399 .00768822805 .00528685632 .00363553858 .002265625 .00139680129 8.49689727e-4 5.08081963e-4
2.96977778e-4 1.68179989e-4 9.0867843e-5 4.54442323e-5 1.953125e-5 5.37231267e-6 3.69430316e-6 2.54040981e-6
1.74692811e-6 1.20128563e-6 8.260713e-7 5.68052904e-7"""


def test_frequencies():
    """9.1; window-only layers have neither YaRN nor the large theta (mistake 8)."""
    config = load_config("v4-flash")
    expected = torch.tensor([float(number) for number in YARN.split()])
    assert torch.allclose(v4_compressor.frequencies(config, True), expected, rtol=2e-6)
    plain = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    assert torch.allclose(v4_compressor.frequencies(config, False).double(), plain, rtol=1e-6)


def always(compressed):
    given = Step.turn
    return lambda step, _: given(step, compressed)


def turned_by(function):
    given = window.rotate
    return lambda x, turn: function(given, x, turn)


def swapped_halves(value, gate, first, overlap, given=v4_compressor.pool):
    swap = lambda x: torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1) if overlap else x  # noqa: E731
    return given(swap(value), swap(gate), first, overlap)


def two_softmaxes(value, gate, first, overlap, given=v4_compressor.pool):
    if not overlap:
        return given(value, gate, first, overlap)
    m, w = value.shape[2] // 2, value.shape[3] // 2
    parts = ((value[:, :, :m, :w], gate[:, :, :m, :w]), (value[:, :, m:, w:], gate[:, :, m:, w:]))
    return sum((torch.softmax(g, dim=2) * v).sum(dim=2) for v, g in parts) / 2


def late(turns):
    return lambda position, frequency: turns(position + 3, frequency)


def rounded_rotary(codec, x, given=RecordCodec.pack):
    if codec.width == 80:
        tail = unpack_fp8(*pack_fp8(x[..., 64:].float(), FP8_UE8M0_64), FP8_UE8M0_64)
        x = torch.cat((x[..., :64], tail.to(x.dtype)), dim=-1)
    return given(codec, x)


def first_channels(x, turn):
    n = 2 * turn.shape[-1]
    return torch.cat((window.rotate(x[..., :n], turn), x[..., n:]), dim=-1)


def halves(x, turn):
    n = 2 * turn.shape[-1]
    pairs = x[..., -n:].unflatten(-1, (2, -1)).mT.flatten(-2)
    return torch.cat((x[..., :-n], window.rotate(pairs, turn).unflatten(-1, (-1, 2)).mT.flatten(-2)), dim=-1)


def leaky_route(logits, bias, k, scale):
    s = torch.nn.functional.softplus(logits).sqrt() + bias
    picked, experts = s.sort(dim=-1, descending=True, stable=True)
    picked, order = picked[:, :k], experts[:, :k].sort(dim=-1)
    return order.values, picked.gather(-1, order.indices) / picked.sum(dim=-1, keepdim=True) * scale


def one_late(scores):
    return lambda q, w, k, positions, *rest: scores(q, w, k, positions - 1, *rest)


MISTAKES = {
    # earlier generations, section 7: number -> (where, name, what is put there, golden with rounding or without)
    "2 half RoPE in the indexer": (csa, "rotate", halves, False),
    "2 first channels in the indexer": (csa, "rotate", first_channels, False),
    "1.5 no Hadamard on queries and keys": (csa, "hadamard", lambda x: x, True),
    "7 rotary channels rounded to FP8": (RecordCodec, "pack", rounded_rotary, True),
    "8 YaRN and large theta in window layers": (Step, "turn", always(True), False),
    "8 small theta in compressed layers": (Step, "turn", always(False), False),
    "9 halves of the CSA compressor swapped": (v4_compressor, "pool", swapped_halves, False),
    "11 softmax over 4 slots twice": (v4_compressor, "pool", two_softmaxes, False),
    "12 position of the last token of a group": (v4_compressor, "turns", late(v4_compressor.turns), False),
    "13 visible one token late, CSA": (csa, "index_scores", one_late(csa.index_scores), False),
    "16 output not turned back": (
        window,
        "rotate",
        turned_by(lambda rotate, x, turn: x if turn.is_conj() else rotate(x, turn)),
        False,
    ),
    "17 query heads not normed": (window.F, "rms_norm", None, False),
    "18 mixing transposed": (
        v4_transformer,
        "expand",
        lambda h, y, mix: hyper_connection.expand(h, y, mix._replace(comb=mix.comb.mT)),
        False,
    ),
    "19 router bias in the weights": (v4_moe, "route", leaky_route, False),
    "5.6 no eps on the head's mixing": (v4_transformer.V4Transformer, "_head_mix", None, False),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_golden_sees_the_mistake(mistake, monkeypatch):
    place, name, wrong, rounding = MISTAKES[mistake]
    if name == "rms_norm":
        given = window.F.rms_norm
        wrong = lambda x, shape, weight, eps: x if weight is None else given(x, shape, weight, eps)  # noqa: E731
    if name == "_head_mix":
        head_mix = V4Transformer._head_mix
        wrong = lambda lm, h: head_mix(lm, h) - lm.config.hc_eps  # noqa: E731
    lm, file, logits = golden(rounding)
    monkeypatch.setattr(place, name, wrong)
    assert (lm(file["input_ids"]) - logits).abs().max() > 1e-4


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 15}, {"sliding_window": 17}, {"hc_sinkhorn_iters": 5}, {"swiglu_limit": None}]
)
def test_the_golden_sees_the_field(changes):
    """Mistake 14, and fields that are easily parsed and then forgotten."""
    file = load_file(GOLDEN / "golden.safetensors")
    lm = V4Transformer(replace(SMALL, **changes), cache_rounding=False)
    lm.load_state_dict(load_file(GOLDEN / "model.safetensors"))
    assert (lm(file["input_ids"]) - file["logits"]).abs().max() > 1e-4


def test_the_golden_sees_moved_parameters():
    """Mistakes 10 and 15: a bias row one token off, scaled sinks; no visible entry too late in HCA (13)."""
    lm, file, logits = golden(False)

    def worst():
        return (lm(file["input_ids"]) - logits).abs().max()

    ape, sink = lm.layers[2].attn.compressor.ape, lm.layers[3].attn.attn_sink
    for parameter, moved in ((ape, ape.roll(1, dims=0)), (sink, sink * 80**-0.5)):
        kept = parameter.clone()
        parameter.copy_(moved)
        assert worst() > 1e-3
        parameter.copy_(kept)
    assert worst() < 1e-4
    given = hca.visible_entries
    try:
        hca.visible_entries = lambda step, ratio: given(step, ratio).where(
            given(step, ratio) < (step.positions // ratio).unsqueeze(-1), -1
        )
        assert worst() > 1e-3
    finally:
        hca.visible_entries = given


# --- configs ----------------------------------------------------------------------------------------------------------


def test_what_a_config_may_not_say():
    for changes, text in (
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"index_head_dim": 8}, "index_head_dim is 8; accepted: a width of at least qk_rope_head_dim, 16"),
        ({"index_head_dim": 24}, "index_head_dim is 24; accepted: a power of two, for the Hadamard"),
        ({"head_dim": 100}, "head_dim is 100; accepted: what its records can hold"),
    ):
        with pytest.raises(ConfigError, match=text):
            V4Transformer(replace(SMALL, **changes))
    V4Transformer(replace(SMALL, index_head_dim=24), cache_rounding=False)
    with pytest.raises(BackendError, match="backend is 'triton'; accepted: reference"):
        V4Transformer(SMALL, backend="triton")
    with pytest.raises(ConfigError, match="model_type is 'deepseek_v3'"):
        V4Transformer("v3")


def test_bfloat16_runs_and_stays_near():
    lm = model.load(GOLDEN, dtype=torch.bfloat16)
    file = load_file(GOLDEN / "golden.safetensors")
    logits = lm(file["input_ids"][:, :24])
    assert logits.dtype == torch.float32 and logits.isfinite().all()
    assert (logits - file["logits"][:, :24]).norm() / file["logits"][:, :24].norm() < 0.5
