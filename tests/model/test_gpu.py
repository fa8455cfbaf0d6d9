"""The model on a GPU: golden logits, decode, the two backends against each other, bytes, and waits.

Arithmetic in float32 is float32 there, not float64 as on a CPU, and a matrix unit cuts its sums: relative errors of
some 4e-6. Beside a step of 2^-3 between E4M3 codes, one cached value in 25,000 takes the other code, and all later rows
of its sequence differ by 1e-3 to 1e-1. A token caches some 500 values in these models, and rounds some 6,000 with
activation rounding. So float64 is compared in full; float32 by its first rows, by the share of sequences that agree,
and by the size of what is left; and the ops one by one, where nothing cascades.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import model
from flashsim.config import load_config
from flashsim.flops import decode_flops
from flashsim.formats import FP4, MXFP4, MXFP8, Record
from flashsim.kv_cache import kv_cache
from model.backend import make_backend
from model.engram import History, hash_tables
from model.flop_counter import FlopCounter
from model.hyper_connection import Mix
from model.layers import Linear, RMSNorm
from model.moe import Expert, MoE
from model.quant import Codec
from model.rope import frequencies
from model.stored_weights import ExpertStack, StoredLinear, StoredWeight

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
BACKENDS = ("reference", "triton")
ROUNDED = {"packed": True, "activation_rounding": True}
SMALL = {"c32": 1e-4, "a32": 1e-4, "aq": 1e-3}  # what the golden page allows
GOLDENS = [("c32", {}), ("a32", {}), ("aq", {}), ("aq", {"packed": True})]


def load(name, **options):
    source = GOLDEN / name if (GOLDEN / name).exists() else name
    return model.load(source, device="cuda", **options)


def golden(name):
    tensors = load_file(GOLDEN / name / "golden.safetensors")
    return tensors["input_ids"], tensors["logits"]


def random_ids(batch, length, seed=0):
    return torch.randint(0, 160, (batch, length), generator=torch.Generator().manual_seed(seed))


def relative(out, expected):
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


def agreeing(out, expected, tolerance=1e-4):
    """Share of sequences [B, S, ...] whose rows all agree."""
    difference = (out.double() - expected.double()).abs().flatten(1).amax(1)
    print("largest difference of each sequence:", " ".join(f"{d:.0e}" for d in difference.tolist()))
    return (difference < tolerance).double().mean().item()


# --- the whole model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), GOLDENS)
def test_golden_logits_in_float64(name, options):
    ids, logits = golden(name)
    out = load(name, dtype=torch.float64, **options)(ids).cpu()
    assert (out - logits).abs().max() < SMALL[name]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "options"), GOLDENS)
def test_golden_logits_in_float32(name, options, backend):
    """Every row may follow a code that fell to the other side, but not in the first rows of all sequences."""
    ids, logits = golden(name)
    lm = load(name, backend=backend, **options)
    out = lm(ids).cpu()
    assert out.dtype == torch.float32 and torch.isfinite(out).all()
    by_row = (out - logits).abs().amax(-1)
    print("first row beyond 1e-4:", [next((i for i, d in enumerate(r) if d > 1e-4), None) for r in by_row.tolist()])
    assert by_row[:, :4].amax(1).min() < SMALL[name]
    assert relative(out, logits) < 0.2


@pytest.mark.parametrize(
    ("name", "options"), [("aq", {}), ("aq", {"packed": True}), ("aq", ROUNDED), ("tiny", {}), ("c32", {})]
)
def test_triton_equals_reference(name, options):
    """16 sequences, prefill past the window and three steps of decode, each backend with its own cache."""
    ids = random_ids(16, 23)
    logits = []
    for backend in BACKENDS:
        lm = load(name, backend=backend, **options)
        cache = lm.new_cache(16)
        parts = [lm(ids[:, :20], cache=cache)] + [lm(ids[:, i : i + 1], cache=cache) for i in range(20, 23)]
        logits.append(torch.cat(parts, dim=1))
    agreeing(logits[1], logits[0])
    first = 1 if options == ROUNDED else 2  # rows of a sequence that no other code should reach in most sequences
    assert agreeing(logits[1][:, :first], logits[0][:, :first]) >= 0.5
    assert relative(logits[1], logits[0]) < (0.5 if options == ROUNDED else 0.2)


@pytest.mark.parametrize("name", ["a32", "tiny"])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", torch.float64), ("reference", torch.float32), ("triton", torch.float32)]
)
def test_decode_is_forward(name, backend, dtype):
    lm, ids = load(name, backend=backend, dtype=dtype), random_ids(8, 30)
    whole, cache = lm(ids), lm.new_cache(8)
    parts = [
        lm(ids[:, low:high], cache=cache) for low, high in ((0, 17), (17, 24), *((i, i + 1) for i in range(24, 30)))
    ]
    share = agreeing(torch.cat(parts, dim=1), whole, 1e-6 if dtype == torch.float64 else 1e-4)
    assert share == 1.0 if dtype == torch.float64 else share >= 0.2


@pytest.mark.parametrize("backend", BACKENDS)
def test_cache_bytes(backend):
    lm = load("tiny", backend=backend, dtype=torch.bfloat16)
    cache = lm.new_cache(1)
    for n, count in ((1, 1), (8, 7), (9, 1), (40, 31), (41, 1)):
        lm(random_ids(1, count, seed=n), cache=cache)
        stored = {key: value for key, value in kv_cache(lm.config, n).by("component").items() if value}
        held = {key: value for key, value in cache.nbytes(by="component").items() if value}
        assert held == stored, f"after {n} tokens"


@pytest.mark.parametrize(("name", "options"), [("tiny", {}), ("aq", ROUNDED)])
def test_counted_flops(name, options):
    """The kernels count what they are given, the widened products included; see test_flop_counter.py."""
    for backend in BACKENDS:
        lm = load(name, backend=backend, dtype=torch.bfloat16, **options)
        cache, ids = lm.new_cache(1), random_ids(1, 34)
        lm(ids[:, :33], cache=cache)
        with FlopCounter(lm) as counter:
            lm(ids[:, 33:], cache=cache, last=True)
        counter.compare(decode_flops(lm.config, 34))  # an error names a component that differs without a reason


@pytest.mark.parametrize("options", [{}, ROUNDED], ids=["expanded", "packed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_runs(backend, options):
    """Random weights are chaotic in bfloat16: finite, of the right size, and near enough to be the same model."""
    ids, logits = golden("aq")
    lm = load("aq", backend=backend, dtype=torch.bfloat16, **options)
    out = lm(ids[:, :24]).cpu()
    assert out.dtype == torch.float32 and torch.isfinite(out).all()
    error = relative(out, logits[:, :24])
    print(f"relative difference {error:.2f}")
    assert error < (1.2 if options else 0.7)


def test_prefill_replay_and_ragged_batches():
    lm = load("a32", dtype=torch.float64)
    ids = random_ids(2, 60)
    whole = lm(ids)
    torch.testing.assert_close(lm.prefill(ids, chunk=17), whole[:, -1], rtol=0, atol=1e-6)
    ragged = lm(ids, lengths=[33, 60])
    torch.testing.assert_close(ragged[0, :33], whole[0, :33], rtol=0, atol=1e-6)


# --- op by op, in bfloat16 --------------------------------------------------------------------------------------------


def draw(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def records(width, form):
    return Codec(Record(((width, form),)), rounding=True, dtype=torch.bfloat16)


def both(op, *arguments, **options):
    return [getattr(make_backend(name), op)(*arguments, **options) for name in BACKENDS]


@pytest.mark.parametrize(("form", "width"), [(MXFP8, 512), (FP4, 512), (MXFP4, 128)])
def test_pack(form, width):
    codec = records(width, form)
    reference, triton = both("pack", draw(3, 70, width), codec)
    assert torch.equal(reference, triton)


@pytest.mark.parametrize("ratio", [1, 2])
def test_compress(ratio):
    codec = records(512, FP4)
    value = draw(2, 9, ratio, 512, seed=1, dtype=torch.bfloat16 if ratio == 1 else torch.float32)
    gate = None if ratio == 1 else draw(2, 9, ratio, 512, seed=2, dtype=torch.float32)
    norm = RMSNorm(512, 1e-20, dtype=torch.bfloat16, device="cuda")
    norm.weight.data.copy_(1 + 0.1 * draw(512, seed=3))
    groups = SimpleNamespace(starts=[0, 1000], first=torch.tensor([0, 1000], device="cuda"))
    frequency = frequencies(load_config("v4.1-flash"), True, torch.device("cuda"))
    made = both("compress", value, gate, norm, frequency, groups, torch.bfloat16, codec)
    latents, packed = zip(*made, strict=True)
    assert relative(latents[1], latents[0]) < 4e-3
    values = [codec.unpack(r) for r in packed]
    print(f"{(packed[0] != packed[1]).double().mean().item():.4f} of the bytes differ")
    assert relative(values[1], values[0]) < 2e-2  # a latent rounded to the next bfloat16 may take the next code


@pytest.mark.parametrize("candidates", [False, True])
def test_index_scores_and_selection(candidates):
    codec = records(128, MXFP4)
    backend = make_backend("reference")
    queries, keys = backend.pack(draw(2, 5, 64, 128), codec), backend.pack(draw(2, 300, 128, seed=1), codec)
    weights = (draw(2, 5, 64, seed=2) * 0.01).contiguous()
    positions = torch.tensor([[100, 101, 299, -1, 40], [598, 599, 0, 1, 2]], device="cuda")
    chosen, blocks = {}, None
    if candidates:
        blocks = torch.tensor([0, 5, 2, -1, 37], device="cuda").expand(2, 5, 5).contiguous()
        chosen = {"candidates": blocks, "block_size": 8}
    reference, triton = both("index_scores", queries, weights, keys, positions, 2, codec, **chosen)
    assert torch.equal(reference.isinf(), triton.isinf())
    seen = ~reference.isinf()
    assert relative(triton[seen], reference[seen]) < 1e-3
    for k in (16, 512):
        one, other = both("top_k", reference, k)
        assert torch.equal(one, other)
    maxima = reference.unflatten(-1, (-1, 4)).amax(-1)
    newest = torch.full(maxima.shape[:-1], 3, device="cuda")
    one, other = both("top_blocks", maxima, 6, newest)
    assert torch.equal(one, other)


@pytest.mark.parametrize(("width", "heads"), [(512, 64), (64, 8), (32, 4)])  # 32 is padded for the kernel
def test_sparse_attention(width, heads):
    window_codec = records(width, MXFP8)
    main_codec = records(width, FP4)
    backend = make_backend("reference")
    window, entries = backend.pack(draw(200, width), window_codec), backend.pack(draw(90, width, seed=1), main_codec)
    generator = torch.Generator().manual_seed(3)
    slots = torch.randint(-1, 200, (7, 128), generator=generator).cuda()
    indices = torch.randint(-1, 90, (7, 70), generator=generator).cuda()
    sink = draw(heads, seed=4, dtype=torch.float32)
    for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float32, 2e-5)):
        q = draw(7, heads, width, seed=5, dtype=dtype)
        for rest in ((entries, indices), (None, None)):
            reference, triton = both("sparse_attention", q, window, slots, *rest, sink, window_codec, main_codec)
            assert triton.shape == reference.shape and triton.dtype == dtype
            assert relative(triton, reference) < tolerance


def test_hyper_connections():
    streams, hidden = 4, 1024
    h, y = draw(2, 9, streams, hidden), draw(2, 9, hidden, seed=1)
    fn = draw(24, streams * hidden, seed=2, dtype=torch.float32) * (streams * hidden) ** -0.5
    scale, base = draw(3, seed=3, dtype=torch.float32), draw(24, seed=4, dtype=torch.float32)
    options = {"norm_eps": 1e-20, "iterations": 20, "eps": 1e-6}
    reference, triton = both("coefficients", h, fn, scale, base, **options)
    for one, other in zip(reference, triton, strict=True):
        assert relative(other, one) < 1e-3
    mix = Mix(*(part.contiguous() for part in reference))
    for op, arguments in (("collapse", (h, mix.pre)), ("expand", (h, y, mix))):
        one, other = both(op, *arguments)
        assert relative(other, one) < 4e-3


def test_engram():
    config = load_config("tiny")
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(0, 160, (3, 14), generator=generator).cuda()
    blocked = (torch.rand(3, 14, generator=generator) < 0.2).cuda()
    history = History(ids, blocked, 7, 4)
    for table in hash_tables(config).values():
        reference, triton = both("rows", history, table.to(torch.device("cuda")))
        assert torch.equal(reference, triton)
    h, kv = draw(2, 5, 4, 512), draw(2, 5, 5 * 512, seed=1)
    q_weight, k_weight = draw(4, 512, seed=2), draw(4, 512, seed=3)
    images = (torch.arange(10) % 3 == 0).view(2, 5).cuda()
    for mask in (None, images):
        one, other = both("remember", h, kv, q_weight, k_weight, mask, 1e-20)
        assert relative(other, one) < 4e-3
    table = packed_weight(500, 256, "table")
    one, other = both("gather", table, torch.randint(0, 500, (2, 5, 24), generator=generator).cuda())
    assert torch.equal(one, other)


def packed_weight(rows, width, kind, seed=0, place=None):
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * width**-0.5
    return StoredWeight.pack("made", values.cuda(), kind, torch.bfloat16, place=place)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("groups", [1, 4])
def test_packed_linear(tokens, groups):
    weight, x = packed_weight(groups * 96, 512, "fp8"), draw(1, tokens, groups * 512, seed=1)
    for rounding in (False, True):
        reference, triton = both("packed_linear", x, weight, groups, rounding)
        assert relative(triton, reference) < 4e-3
    reference, triton = both("packed_linear", x.float(), weight, groups, True)
    assert relative(triton, reference) < 5e-5


def packed_experts(backend, hidden=512, inner=256, experts=12, picks=4):
    """A layer of packed experts on the GPU, as loading makes one."""
    config = load_config("tiny").to_dict() | {
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "n_routed_experts": experts,
        "num_experts_per_tok": picks,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
    }
    layer = MoE(load_config(config), make_backend(backend), dtype=torch.bfloat16, device="cuda")
    layer.stack = ExpertStack(experts, hidden, inner, activation_rounding=True, device="cuda")
    everyone: list[tuple[Expert, str]] = [(expert, "fp4") for expert in layer.experts]
    for e, (expert, kind) in enumerate([*everyone, (layer.shared_experts, "fp8")]):
        for i, matrix in enumerate(ExpertStack.MATRICES):
            place = layer.stack.place(e, matrix) if kind == "fp4" else None
            weight = packed_weight(*getattr(expert, matrix).weight.shape, kind, 10 * e + i, place)
            setattr(expert, matrix, StoredLinear(weight, layer.backend, activation_rounding=True))
    layer.gate.weight.data.copy_(draw(experts, hidden, seed=7) * hidden**-0.5)
    for bias in (layer.gate.bias, layer.gate.bias_vl):
        bias.data.copy_(draw(experts, seed=8, dtype=torch.float32) * 0.1)
    return layer


@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_packed_experts(tokens):
    x = draw(1, tokens, 512, seed=9)
    reference, triton = (packed_experts(name)(x) for name in BACKENDS)
    assert relative(triton, reference) < 2e-2  # an inner value rounded to the next bfloat16 may take the next FP8 code


def test_widened_products():
    """bfloat16 operands, float32 sums: as exact as converting both first, and the result is float32."""
    linear, x = Linear(1024, 300, widened=True, dtype=torch.bfloat16, device="cuda"), draw(2, 3, 1024)
    linear.weight.data.copy_(draw(300, 1024, seed=1))
    out, exact = linear(x), x.double() @ linear.weight.double().T
    assert out.dtype == torch.float32 and out.shape == (2, 3, 300)
    assert relative(out, exact) < 1e-5


# --- waits and graphs -------------------------------------------------------------------------------------------------


def test_packed_ops_do_not_wait_for_the_gpu():
    """Experts, linears, lookups: no result is read on the host. Shown to fail by an `.item()` in any of them."""
    layer, x = packed_experts("triton"), draw(1, 1, 512)
    weight, table = packed_weight(96, 512, "fp8"), packed_weight(500, 256, "table")
    ids = torch.zeros(1, 1, 24, dtype=torch.int64, device="cuda")
    history = History(ids[..., 0, :4].contiguous(), ids[..., 0, :4] > 0, 7, 4)
    hashing = next(iter(hash_tables(load_config("tiny")).values())).to(torch.device("cuda"))
    backend = make_backend("triton")

    def step():
        backend.gather(table, ids)
        backend.rows(history, hashing)
        return layer(x), backend.packed_linear(x, weight, 1, True)

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_packed_experts_in_a_cuda_graph():
    layer, x = packed_experts("triton"), draw(1, 1, 512)
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    x.copy_(draw(1, 1, 512, seed=77))
    graph.replay()
    assert torch.equal(out, layer(x))
