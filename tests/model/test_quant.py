"""Block formats: the worked examples of the architecture page, every bfloat16 against a slow reading of the rules."""

import math

import pytest
import torch

from flashsim.formats import FP4, MXFP4, MXFP8
from model.quant import Codec, encode_e2m1, pack, power_of_two, unpack_record

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def rounded(x, form):
    return unpack_record(pack(x, form), form, x.shape[-1], torch.float32)


def test_e2m1_ties_go_to_the_even_code():
    # seen red with torch.bucketize(right=True): all ties up
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert [GRID[c] for c in encode_e2m1(ties)] == [0, 1, 1, 2, 2, 4, 4]
    assert [GRID[c - 8] for c in encode_e2m1(-ties)] == [0, 1, 1, 2, 2, 4, 4]
    assert encode_e2m1(torch.tensor([-0.0, 0.0, 100.0])).tolist() == [8, 0, 7]


def test_power_of_two():
    values = torch.tensor([1.0, 1.5, 3e-5, 2.0**-126, 2.0 + 2.0**-22, math.inf, math.nan])
    assert power_of_two(values).tolist() == [1.0, 2.0, 2.0**-15, 2.0**-126, 4.0, math.inf, math.inf]


WORKED = [0.30078125, -1.703125, 2.25, 0.01171875]


@pytest.mark.parametrize(
    ("form", "width", "scale", "expected"),
    [
        (MXFP8, 32, 127 - 7, [0.3125, -1.75, 2.25, 0.01171875]),
        (FP4, 16, int(torch.tensor(0.375).to(torch.float8_e4m3fn).view(torch.uint8)), [0.375, -1.5, 2.25, 0.0]),
        (MXFP4, 32, 127 - 1, [0.25, -1.5, 2.0, 0.0]),
    ],
)
def test_worked_group(form, width, scale, expected):
    x = torch.tensor(WORKED + [0.0] * (width - len(WORKED)))
    record = pack(x, form)
    assert record.dtype == torch.uint8
    assert record.shape == (form.nbytes(width),)
    assert record[-1] == scale
    assert rounded(x, form)[: len(WORKED)].tolist() == expected


@pytest.mark.parametrize(("form", "scale"), [(MXFP8, 127 - 22), (FP4, 1), (MXFP4, 1)])
def test_zero_group(form, scale):
    """fp8 2^-22, fp4 the smallest E4M3, mxfp4 2^-126: finite scales, zeros out."""
    record = pack(torch.zeros(form.block_size), form)
    assert record[-1] == scale
    assert not unpack_record(record, form, form.block_size, torch.float32).any()


@pytest.mark.parametrize("form", [MXFP8, FP4, MXFP4])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_becomes_finite(form, bad):
    x = torch.ones(2 * form.block_size)
    x[3] = bad
    out = rounded(x, form)
    assert not torch.isfinite(out[: form.block_size]).any()
    assert torch.isfinite(out[form.block_size :]).all()


def slow(v, amax, form):
    """One value of a group, by the rules as they are written down."""
    f32 = lambda x: float(torch.tensor(x, dtype=torch.float32))  # noqa: E731
    if form is FP4:
        wanted = f32(max(amax, 6 * 2.0**-9) / 6)
        scale = float(torch.tensor(min(wanted, 448.0)).to(torch.float8_e4m3fn).float())
    else:
        top, floor = (448.0, f32(1e-4)) if form is MXFP8 else (6.0, 6 * 2.0**-126)
        y = f32(max(amax, floor) * f32(1 / top))
        scale = 2.0 ** math.ceil(math.log2(y))
        scale = scale if scale >= y else 2 * scale
        scale = scale / 2 if scale / 2 >= y else scale
    y = abs(f32(v / scale))
    if form is MXFP8:
        code = float(torch.tensor(min(y, 448.0)).to(torch.float8_e4m3fn).float())
    else:
        y = min(y, 6.0)
        code = min(GRID, key=lambda g: (abs(g - y), GRID.index(g) % 2))
    return math.copysign(code * scale, v)


@pytest.mark.parametrize("form", [MXFP8, FP4, MXFP4])
def test_against_the_rules_for_bfloat16_values(form):
    generator = torch.Generator().manual_seed(3)
    size = form.block_size
    x = torch.randn(40, size, generator=generator) * torch.exp2(torch.randint(-12, 6, (40, 1), generator=generator))
    x[:8] = (torch.arange(8 * size).view(8, size) - 4 * size) / 8  # many exact ties
    x = x.bfloat16().float()
    out = rounded(x, form)
    for row, got in zip(x, out, strict=True):
        amax = float(row.abs().max())
        assert got.tolist() == [slow(float(v), amax, form) for v in row]


@pytest.mark.parametrize("form", [MXFP8, FP4, MXFP4])
def test_packing_again_changes_nothing(form):
    x = torch.randn(64, 4 * form.block_size, generator=torch.Generator().manual_seed(5))
    once = rounded(x, form)
    assert torch.equal(rounded(once, form), once)


def test_reciprocal_and_not_division():
    """448 * 2^k * (1 + 2^-23): the fp32 reciprocal and a division can fall on different sides of a power of two."""
    amax = torch.tensor([448.0 * 2.0**k for k in range(-9, 9)]).unsqueeze(-1) * torch.ones(32)
    assert pack(amax, MXFP8)[:, -1].tolist() == [127 + k for k in range(-9, 9)]


def test_codec_without_rounding_keeps_every_bit():
    from flashsim.formats import Record

    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    codec = Codec(Record(((32, MXFP8),)), rounding=False, dtype=torch.float64)
    assert codec.pack(x).shape == (3, codec.nbytes)
    assert torch.equal(codec.unpack(codec.pack(x)), x)
