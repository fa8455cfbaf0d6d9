"""moe against its reference, which runs one expert after the other with dequantised float32 weights.

Mutations seen to fail: at each test.
"""

import pytest
import torch
import triton
import triton.language as tl

from kernels.moe import fp4_operands, moe
from kernels.reference.block_quant import block_dequant_reference
from kernels.reference.moe import moe_reference
from kernels.testing import poisoned_empty, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sums in another order: 5e-7 is typical. An inner activation next to a rounding tie may land on the other E4M3 code,
# which moves one of its I terms by 6 %; on a matrix unit, whose sums are coarser, and in bfloat16 this does happen.
FP32 = 3e-6 if DEVICE == "cpu" else 3e-3
BF16 = 5e-3


def inputs(T, E, k, D, I, dtype=torch.float32, seed=0, shared=True):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=g).to(dtype)
    scores = torch.rand(T, E, generator=g)
    p, ids = scores.topk(k, dim=1)  # in the order of the score: experts are not ascending
    p = 1.5 * p / p.sum(dim=1, keepdim=True)

    def fp4(*shape):
        codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=g).to(torch.uint8)
        scales = torch.randint(120, 124, (*shape[:-1], shape[-1] // 32), generator=g).to(torch.uint8)
        return codes.to(DEVICE), scales.to(DEVICE)

    def fp8(rows, columns):
        codes = torch.randn(rows, columns, generator=g).to(torch.float8_e4m3fn).view(torch.uint8)
        return codes.to(DEVICE), torch.full((rows // 32, columns // 32), 124, dtype=torch.uint8, device=DEVICE)

    weights = fp4(E, I, D), fp4(E, I, D), fp4(E, D, I)
    shared = (fp8(I, D), fp8(I, D), fp8(D, I)) if shared else None
    return x.to(DEVICE), ids.to(torch.int32).to(DEVICE), p.to(DEVICE), *weights, shared


def check(args, tolerance=FP32, **options):
    with poisoned_empty():
        out = moe(*args, **options)
    assert relative_error(out, moe_reference(*args, **options)) < tolerance
    return out


# Seen to fail: p left out; w3 read for w1; channels of h modulo 4 exchanged; a tile's end
# ignored; slots without `+ e`; position not advanced between steps of PAIRS; scales one step late; shared left out.
@pytest.mark.parametrize(
    ("T", "E", "k", "D", "I"),
    [
        (1, 2, 1, 32, 32),
        (1, 8, 6, 128, 64),
        (5, 4, 2, 96, 160),
        (16, 3, 3, 64, 96),
        (17, 5, 2, 64, 32),
        (70, 3, 2, 96, 64),
        (2, 3, 2, 288, 160),
    ],
)
def test_matches_reference(T, E, k, D, I):
    check(inputs(T, E, k, D, I))


def test_without_shared_expert():
    check(inputs(20, 4, 2, 64, 64, shared=False))


@pytest.mark.parametrize("T", [4, 40])
def test_all_tokens_to_one_expert_and_picks_switched_off(T):
    """Empty experts, a crowded one, ids of -1 (seen to fail: -1 counted among the experts below)."""
    x, ids, p, *rest = inputs(T, 6, 3, 64, 32)
    ids[:] = torch.tensor([4, 1, -1], dtype=torch.int32)
    ids[T // 2 :, 1] = -1
    ids[-1] = -1
    check((x, ids, p, *rest))


def test_clamp_is_one_sided_for_the_gate():
    """Large inputs reach both clamps.

    Seen to fail: no clamp; the gate clamped from below too; up clamped from above only.
    """
    x, *rest = inputs(6, 3, 2, 64, 64)
    check((x * 40, *rest), limit=10.0)
    check((x * 40, *rest), limit=1.5)


def test_sum_is_in_ascending_expert_order():
    """Three picks whose sum in float32 depends on the order: 2^24 + 1 + 1 against 1 + 1 + 2^24.

    Seen to fail: rank counted by `>`.
    """
    x, _, _, w1, w3, w2, _ = inputs(1, 3, 3, 32, 32)
    for weight in (w1, w3, w2):
        weight[0].zero_(), weight[1].fill_(127)
    x.zero_()
    x[0, 0] = 1
    w1[0][:, 0, 0], w3[0][:, 0, 0], w2[0][:, 0, 0] = 4, 2, 2  # gate 2, up 1, then times 1
    w1[1].fill_(129)  # gate 8: silu(8) = 8 up to 0.03 %, one E4M3 code
    for big in range(3):
        w2[1].fill_(127 - 3)
        w2[1][big] = 127 + 24 - 3
        ids = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=DEVICE)
        p = torch.ones(1, 3, device=DEVICE)
        out = check((x, ids, p, w1, w3, w2), tolerance=1e-30)
        assert out[0, 0].item() == (2.0**24 + (2 if big == 2 else 0))


@pytest.mark.parametrize("which", [0, 1])
def test_nan_weight_survives_the_clamp(which):
    """A NaN in the gate or in the up projection alone. Seen to fail: either clamp by minimum and maximum."""
    x, ids, p, *weights, shared = inputs(6, 3, 2, 64, 32)
    weights[which][1][1, 5, 0] = 255  # one row of expert 1
    out = check((x, ids, p, *weights, shared))
    assert torch.equal(out.isnan().all(dim=1), (ids == 1).any(dim=1)) and out.isnan().any() and out.isfinite().any()


@pytest.mark.parametrize("T", [3, 20])
def test_nan_and_infinity_stay_with_their_token(T):
    """Seen to fail: activation blocks that hold NaN or infinity given an ordinary scale."""
    x, *rest = inputs(T, 4, 2, 64, 32)
    x[1, 7] = float("nan")
    x[2, 9] = float("inf")
    out = check((x, *rest))
    assert not out[1:3].isfinite().any() and out[0].isfinite().all() and out[3:].isfinite().all()


def test_more_pairs_than_one_sorting_step():
    """1,080 pairs with few channels: two steps of the counting sort."""
    check(inputs(360, 3, 3, 32, 32, shared=False))


def test_inputs_untouched_empty_and_errors():
    x, ids, p, w1, w3, w2, shared = inputs(2, 4, 2, 64, 32)
    saved = [t.clone() for t in (x, ids, p, *w1, *w3, *w2)]
    moe(x, ids, p, w1, w3, w2, shared)
    assert all(torch.equal(a, b) for a, b in zip(saved, (x, ids, p, *w1, *w3, *w2), strict=True))
    assert moe(x[:0], ids[:0], p[:0], w1, w3, w2, shared).shape == (0, 64)
    with pytest.raises(TypeError, match="int32 and float32"):
        moe(x, ids.long(), p, w1, w3, w2)
    with pytest.raises(ValueError, match="contiguous \\[2, picks\\]"):
        moe(x, ids[:1], p[:1], w1, w3, w2)
    with pytest.raises(ValueError, match="w2 codes must be contiguous uint8"):
        moe(x, ids, p, w1, w3, w1)
    with pytest.raises(ValueError, match="shared w2 has shape"):
        moe(x, ids, p, w1, w3, w2, (shared[0], shared[1], shared[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("T", [1, 7, 16, 17, 64, 300, 2048])
def test_released_widths(T, dtype):
    """Widths of the released model; 32 experts keep the float32 reference small. Covers every tile configuration."""
    check(inputs(T, 32, 6, 5120, 2304, dtype), FP32 if dtype == torch.float32 else BF16)


@triton.jit
def _decode_kernel(words_ptr, scales_ptr, out_ptr):
    row = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None]
    q = tl.load(words_ptr + row * 32 + tl.arange(0, 32)[None, :])
    scales = tl.load(scales_ptr + row * 4 + tl.arange(0, 4)[None, :])
    values = fp4_operands(q, scales, tl.bfloat16)
    at = out_ptr + row * 128 + 4 * tl.arange(0, 32)[None, :]
    for j in tl.static_range(4):
        tl.store(at + j, values[j].to(tl.float32) * 4294967296.0)


@pytest.mark.gpu
def test_decoding_in_registers_is_exact():
    """All 65,536 words of four codes, rows under scales 2^-100 .. 2^33, then NaN: the values of the mxfp4 format.

    The inline assembly runs on a GPU only. Its integer part was checked on all words against the table of codes.
    """
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).reshape(2048, 32).to(DEVICE)
    scales = (27 + torch.arange(2048 * 4) % 134).to(torch.uint8).reshape(2048, 4).to(DEVICE)
    scales[7], scales[9] = 255, 161
    out = torch.full((2048, 128), 77.0, device=DEVICE)
    _decode_kernel[(128,)](words, scales, out)
    expected = block_dequant_reference(words.view(torch.uint8), scales, "mxfp4", dtype=torch.float32)
    expected[9] = float("nan")  # 2^34 does not fit: NaN rather than a wrong number
    same = (out.view(torch.int32) == expected.view(torch.int32)) | (out.isnan() & expected.isnan())
    assert same.all()
