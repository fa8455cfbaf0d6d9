"""kernels/numerics.py against PyTorch's casts and hand-written tables, over whole code spaces.

Mutations seen to fail: round half up in f32_to_e4m3_bits (drop `(mag >> 20) & 1`); its bound 0x3C800000 -> 0x3C000000;
`mag < 8` -> `mag < 7` and 0x7F -> 0x7E in e4m3_bits_to_f32; ties up in f32_to_e2m1_code (drop `(mag >> 22) & 1`);
`mag < 2` -> `mag < 1` in e2m1_code_to_f32; byte 0 not special in ue8m0_to_f32; 0x7FFFFF -> 0x800000 and no minimum in
pow2_ceil_exponent; truncation and no NaN branch in f32_to_bf16; `reference.isfinite()` not compared in relative_error.
"""

import math

import pytest
import torch
import triton
import triton.language as tl

from kernels import numerics
from kernels.testing import poisoned_empty, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = tl.constexpr(16384)


@triton.jit
def _map_kernel(x_ptr, out_ptr, n, FUNCTION: tl.constexpr, BITCAST: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = FUNCTION(tl.load(x_ptr + i, mask=i < n, other=0))
    if BITCAST:
        y = y.to(tl.int16, bitcast=True)
    tl.store(out_ptr + i, y.to(out_ptr.dtype.element_ty), mask=i < n)


def apply(function, x, out_dtype, bitcast=False):
    x = x.contiguous().to(DEVICE)
    out = torch.full(x.shape, 77, dtype=out_dtype, device=DEVICE)
    _map_kernel[(triton.cdiv(x.numel(), BLOCK.value),)](x, out, x.numel(), FUNCTION=function, BITCAST=bitcast)
    return out.cpu()


def all_bf16():
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def patterns():
    """Every bf16 value, random fp32 bit patterns, normals, and the neighbours of every E4M3 and E2M1 rounding tie."""
    g = torch.Generator().manual_seed(0)
    random = (
        torch.randint(-(2**31), 2**31, (200_000,), generator=g, dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat([(codes[1:] + codes[:-1]) / 2, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])])
    near = [ties, torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(1e9))]
    near = torch.cat(near + [-t for t in near])
    return torch.cat([all_bf16(), random, torch.randn(200_000, generator=g) * 3, near])


def same_floats(a, b):
    """Equal bit for bit; any NaN equals any NaN."""
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


def test_e4m3_encode():
    x = patterns()
    out = apply(numerics.f32_to_e4m3_bits, x, torch.uint8)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(out[~x.isnan()], expected[~x.isnan()])
    assert ((out[x.isnan()] & 0x7F) == 0x7F).all()


def test_e4m3_decode_all_codes():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert same_floats(apply(numerics.e4m3_bits_to_f32, codes, torch.float32), codes.view(torch.float8_e4m3fn).float())


MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_e2m1_decode_all_codes():
    expected = torch.tensor(MAGNITUDES + [-m for m in MAGNITUDES])
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert same_floats(apply(numerics.e2m1_code_to_f32, codes, torch.float32), expected.repeat(16))


def test_e2m1_encode():
    """Nearest of the eight magnitudes, ties to the even code, by distances in float64."""
    x = patterns()
    x = x[~x.isnan()]
    out = apply(numerics.f32_to_e2m1_code, x, torch.int32)
    distance = (x.double().abs().clamp(max=6)[:, None] - torch.tensor(MAGNITUDES).double()).abs()
    best = distance.min(dim=1, keepdim=True).values
    odd = torch.arange(8) % 2
    expected = torch.where(distance == best, odd, 2).argmin(dim=1)  # the even one among equals
    expected = expected + 8 * torch.signbit(x)
    assert torch.equal(out.long(), expected)


def test_ue8m0_decode_all_codes():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = torch.tensor([math.ldexp(1.0, b - 127) for b in range(255)] + [math.nan])
    assert same_floats(apply(numerics.ue8m0_to_f32, codes, torch.float32), expected)


def test_pow2_ceil_exponent():
    x = patterns().abs()
    x = torch.cat([x, torch.tensor([1.0, 1.5, 3e-5, 0.0, 2.0**-149, float("inf")]), -patterns()[patterns().isnan()]])
    out = apply(numerics.pow2_ceil_exponent, x, torch.int32)
    mantissa, exponent = torch.frexp(x.double())  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    expected = (exponent - (mantissa == 0.5).int() + 127).clamp(min=1, max=255)
    expected = torch.where(x == 0, 0, expected)
    expected = torch.where(x.isfinite(), expected, 255)
    assert torch.equal(out, expected.int())


def test_bf16_round():
    x = patterns()
    out = apply(numerics.f32_to_bf16, x, torch.int16, bitcast=True).view(torch.bfloat16).float()
    assert same_floats(out, x.bfloat16().float())


def test_relative_error_sees_misplaced_specials():
    a = torch.tensor([1.0, 2.0, float("nan")])
    assert relative_error(a, a) == 0
    assert relative_error(torch.tensor([1.0, 2.0, 3.0]), a) == math.inf
    assert relative_error(a, torch.tensor([1.0, 2.0, 3.0])) == math.inf
    assert relative_error(a, torch.tensor([1.0, 2.0, float("inf")])) == math.inf
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 5.0])) == pytest.approx(math.sqrt(10) / 5)
    with pytest.raises(ValueError, match="shape"):
        relative_error(a, a[:2])


def test_poisoned_empty():
    with poisoned_empty():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(2, dtype=torch.bfloat16)).isnan().all()
        assert (torch.empty(3, dtype=torch.uint8) == 0xA5).all() and torch.ones(1).new_empty(2).isnan().all()
    assert torch.empty is not None and torch.empty(0).numel() == 0
