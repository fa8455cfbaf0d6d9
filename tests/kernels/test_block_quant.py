"""block_quant and block_dequant against their references: every byte equal.

Mutations seen to fail: see the comment at each test.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.block_quant import FORMATS, block_dequant, block_quant
from kernels.reference.block_quant import block_dequant_reference, block_quant_reference
from kernels.testing import poisoned_empty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRID = {  # every representable magnitude of an element
    "fp8": torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double(),
    "mxfp4": torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64),
}
GRID["fp4"] = GRID["mxfp4"]


def rows_of(rows, width, dtype=torch.float32, seed=0):
    """Normal rows of very different size, so that scales spread over the whole range."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g) * torch.exp2(
        torch.randint(-20, 12, (rows, width // 16), generator=g)
    ).float().repeat_interleave(16, dim=1)
    return x.to(dtype).to(DEVICE)


def check(x, format, out=None):
    with poisoned_empty():
        codes, scales = block_quant(x, format, out=out)
        values = block_dequant(codes, scales, format, dtype=torch.float32)
    codes_ref, scales_ref = block_quant_reference(x, format)
    assert torch.equal(scales, scales_ref)
    assert torch.equal(codes, codes_ref)
    values_ref = block_dequant_reference(codes_ref, scales_ref, format, dtype=torch.float32)
    assert torch.equal(values.view(torch.int32)[~values.isnan()], values_ref.view(torch.int32)[~values_ref.isnan()])
    assert torch.equal(values.isnan(), values_ref.isnan())
    return codes, scales, values


# Seen to fail: low and high nibble exchanged; `block // PER_ROW` by PER_ROW + 1; LIMIT 448 -> 447; sign bit left out;
# codes_stride used for the scales.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (3, 96), (7, 512), (130, 64), (1, 8192)])
def test_bytes_equal_reference(rows, width, format, dtype):
    check(rows_of(rows, width, dtype), format)


def test_fp4_width_of_one_block():
    check(rows_of(5, 16), "fp4")


@pytest.mark.parametrize("format", FORMATS)
def test_worked_group(format):
    """The worked group of the format definition (bf16 inputs)."""
    x = torch.zeros(1, 32, dtype=torch.bfloat16, device=DEVICE)
    x[0, :4] = torch.tensor([0.30078125, -1.703125, 2.25, 0.01171875])
    expected = {
        "fp8": [0.3125, -1.75, 2.25, 0.01171875],
        "fp4": [0.375, -1.5, 2.25, 0.0],
        "mxfp4": [0.25, -1.5, 2.0, 0.0],
    }[format]
    _, scales, values = check(x, format)
    assert values[0, :4].tolist() == expected and (values[0, 4:] == 0).all()
    assert scales[0, 0].item() == {"fp8": 127 - 7, "mxfp4": 127 - 1, "fp4": 0x2C}[format]  # 0x2C is 0.375


@pytest.mark.parametrize(("format", "byte"), [("fp8", 127 - 22), ("mxfp4", 1), ("fp4", 1)])
def test_zero_block(format, byte):
    """Seen to fail: without the floor of A."""
    _, scales, values = check(torch.zeros(2, 64, device=DEVICE), format)
    assert (scales == byte).all() and (values == 0).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_nan_and_infinity_poison_their_block_only(format, bad, dtype):
    """Seen to fail: scale bytes without `finite`; codes without `keep`; a float maximum in place of the integer one."""
    x = rows_of(3, 64, dtype)
    x[1, 37] = bad
    _, _, values = check(x, format)
    block = FORMATS[format]
    first = 37 // block * block
    assert values[1, first : first + block].isnan().all() and values.isnan().sum() == block


@pytest.mark.parametrize("format", FORMATS)
def test_scale_edges(format):
    """Maxima at, one ulp below and one ulp above limit * 2^k, over all exponents; signed zeros and subnormals.

    Seen to fail: 0x7FFFFF -> 0x800000 in pow2_ceil_exponent. A true division by 448 or 6 passes: with float32 maxima it
    never crosses a power of two that the rounded reciprocal does not.
    """
    limit = 448.0 if format == "fp8" else 6.0
    top = limit * torch.exp2(torch.arange(-149.0, 120.0, dtype=torch.float64))
    top = torch.cat([top, top[:, None].mul(torch.tensor([0.75, 0.9, 1.1, 1.5])).flatten()]).float()
    top = torch.cat([top, torch.nextafter(top, torch.tensor(0.0)), torch.nextafter(top, torch.tensor(1e38))])
    fractions = torch.tensor([1.0, -0.0, 0.0, -1 / 3, 0.5, 1e-3, -1e-30, 2 / 3] * 4)
    check((top[:, None] * fractions).to(DEVICE), format)


def test_fp4_scale_saturates():
    """A block above 448 * 6 saturates at +-2688 (seen to fail: E4M3 scale clamped to 0x7D)."""
    x = torch.full((1, 16), 1e5, device=DEVICE)
    x[0, 1] = -1e30
    _, scales, values = check(x, "fp4")
    assert scales.item() == 0x7E and values[0, 0] == 2688 and values[0, 1] == -2688


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_exact_ties_go_to_the_even_code(format, dtype):
    """Blocks whose first element fixes the scale and whose others sit on midpoints, or one bf16 step beside them.

    Seen to fail: ties up in f32_to_e2m1_code.
    """
    grid, block = GRID[format].float(), FORMATS[format]
    ties = (grid[1:] + grid[:-1]) / 2
    if format == "fp4":
        scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # every scale
    else:
        scales = torch.exp2(torch.arange(-9.0, 9.0))
    near = torch.cat([ties, ties * (1 + 2.0**-7), ties * (1 - 2.0**-7)])
    near = torch.nn.functional.pad(near, (0, -len(near) % (block - 1))).reshape(-1, block - 1)
    lead = torch.full((len(near), 1), grid[-1].item())
    unit = torch.cat([lead, near], dim=1).reshape(1, -1, block)
    x = (unit * scales[:, None, None]).reshape(-1, block)
    x = torch.nn.functional.pad(x, (0, 32 - block))
    check(torch.cat([x, -x]).to(dtype).to(DEVICE), format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_bf16_value_with_every_fp4_scale_mantissa(dtype):
    """All positive bf16 values of 24 binades under the 8 mantissas of an E4M3 scale: the short encoding is exact.

    Seen to fail (bf16): without the 64 added to each line of the short encoding.
    """
    v = torch.arange(0x3C00, 0x4400, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()  # 2^-7 .. 2^9
    rows = []
    for mantissa in range(8):
        lead = 6 * (1 + mantissa / 8) * 2.0 ** torch.floor(torch.log2(v / 6) + 1)  # above v, and exact in bf16
        block = torch.zeros(len(v), 16)
        block[:, 0], block[:, 1], block[:, 2] = lead, v, -v
        rows.append(block)
    check(torch.cat(rows).to(dtype).reshape(-1, 4096).to(DEVICE), "fp4")


@pytest.mark.parametrize("format", FORMATS)
def test_one_record_tensor_and_strided_input(format):
    """Codes and scales as two slices of a record; x as a slice of a wider matrix; bytes beside them untouched.

    Seen to fail: x_stride replaced by the width.
    """
    x = rows_of(9, 256)[:, 64:192]
    code_bytes, scale_bytes = 128 // (1 if format == "fp8" else 2), 128 // FORMATS[format]
    record = torch.full((9, code_bytes + scale_bytes + 3), 0x5A, dtype=torch.uint8, device=DEVICE)
    before = x.clone()
    check(x, format, out=(record[:, :code_bytes], record[:, code_bytes : code_bytes + scale_bytes]))
    assert (record[:, code_bytes + scale_bytes :] == 0x5A).all() and torch.equal(x, before)


@settings(max_examples=30, deadline=None)
@given(
    format=st.sampled_from(sorted(FORMATS)),
    seed=st.integers(0, 2**31),
    exponents=st.lists(st.integers(-30, 30), min_size=1, max_size=4),
    bf16=st.booleans(),
)
def test_nearest_and_idempotent(format, seed, exponents, bf16):
    """unpack(pack(x)) is the nearest value of the block's grid, and packing it again changes no value.

    One exception belongs to the format: a subnormal E4M3 scale is rounded by up to a half, not a sixteenth, of its
    size. The largest value may then become 4 s, which asks for a smaller scale when it is packed again.

    Seen to fail: truncation in place of rounding in either encoder.
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(len(exponents), 64, generator=g) * torch.exp2(torch.tensor(exponents).float())[:, None]
    x = x.bfloat16() if bf16 else x
    codes, scales = block_quant(x.to(DEVICE), format)
    values = block_dequant(codes, scales, format, dtype=torch.float32)
    again = block_dequant(*block_quant(values, format), format, dtype=torch.float32)
    normal = (scales >= 8 if format == "fp4" else scales >= 0).repeat_interleave(FORMATS[format], dim=1)
    assert torch.equal(again[normal], values[normal])

    one = torch.full_like(codes, 0x38 if format == "fp8" else 0x22)  # every element 1.0
    scale = block_dequant(one, scales, format, dtype=torch.float32).cpu().double()
    error = (values.cpu().double() - x.double()).abs()
    grid = torch.cat([GRID[format], -GRID[format]])
    best = (grid * scale[..., None] - x.double()[..., None]).abs().amin(dim=-1)
    # v / s is rounded to float32 before it is rounded to the grid: 2^-24 of its size
    assert (error <= best + x.double().abs() * 2.0**-23).all()


@pytest.mark.parametrize("format", FORMATS)
def test_dequant_all_codes_and_scales(format):
    """Every code byte under every scale byte. Seen to fail: byte 0 or 255 not special in ue8m0_to_f32."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(256, 1).to(DEVICE)
    blocks = 256 * (1 if format == "fp8" else 2) // FORMATS[format]
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None].repeat(1, blocks).to(DEVICE)
    with poisoned_empty():
        values = block_dequant(codes, scales, format, dtype=torch.float32)
    expected = block_dequant_reference(codes, scales, format, dtype=torch.float32)
    same = (values.view(torch.int32) == expected.view(torch.int32)) | (values.isnan() & expected.isnan())
    assert same.all()


def test_empty_and_errors():
    codes, scales = block_quant(torch.empty(0, 64, device=DEVICE), "fp4")
    assert codes.shape == (0, 32) and scales.shape == (0, 4)
    assert block_dequant(codes, scales, "fp4").shape == (0, 64)
    x = torch.zeros(2, 64, device=DEVICE)
    with pytest.raises(ValueError, match="format must be one of"):
        block_quant(x, "int8")
    with pytest.raises(ValueError, match="not a multiple"):
        block_quant(x[:, :24].contiguous(), "fp4")
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        block_quant(x.double(), "fp4")
    with pytest.raises(ValueError, match="unit stride"):
        block_quant(x[:, ::2], "fp4")
    with pytest.raises(ValueError, match="out scales must be uint8"):
        block_quant(x, "fp4", out=(torch.empty(2, 32, dtype=torch.uint8, device=DEVICE),) * 2)
    codes, scales = block_quant(x, "fp8")
    with pytest.raises(ValueError, match="scales must have shape"):
        block_dequant(codes, scales[:, :1], "fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("width", [16 * 33 * 2, 512, 5120, 8192])
def test_released_sizes(format, width, dtype):
    x = rows_of(2049, width, dtype)
    codes, scales, values = check(x, format)
    exact = block_dequant(codes, scales, format, dtype=torch.bfloat16)
    assert torch.equal(exact.float(), values)  # nothing is lost in bf16
