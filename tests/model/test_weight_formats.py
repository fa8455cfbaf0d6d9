"""Packed weights: code by code, group by group, and packing what was unpacked changes nothing."""

from pathlib import Path

import pytest
import torch

from model.weight_formats import (
    E2M1_VALUES,
    WeightValueError,
    _power_of_two_exponent,
    decode_scales,
    pack,
    unpack,
)

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
KINDS = ("fp8", "fp4", "table")


def slow_value(weight, scale, kind, row, column):
    """One value, from the bits alone."""
    if kind == "fp4":
        byte = int(weight[row, column // 2])
        code = byte >> 4 if column % 2 else byte & 15
        sign, size = code >> 3, E2M1_VALUES[code & 7]
    else:
        code = int(weight[row, column])
        sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    factor = 2.0 ** (int(scale[row // 32 if kind == "fp8" else row, column // 32]) - 127)
    return (-size if sign else size) * factor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 2), (32, 32), (33, 34), (70, 96), (2, 160)])
def test_unpack_against_the_bits(kind, shape):
    generator = torch.Generator().manual_seed(shape[0] * 100 + shape[1])
    rows, width = shape
    weight = torch.randint(0, 256, (rows, width // 2 if kind == "fp4" else width), generator=generator).to(torch.uint8)
    if kind != "fp4":
        weight[(weight & 127) == 127] = 3  # no NaN codes
    scale_rows = -(-rows // 32) if kind == "fp8" else rows
    scale = torch.randint(100, 140, (scale_rows, -(-width // 32)), generator=generator).to(torch.uint8)
    values = unpack(weight, scale, kind)
    assert values.dtype == torch.float32 and values.shape == shape
    for row in range(rows):
        for column in range(width):
            assert float(values[row, column]) == slow_value(weight, scale, kind, row, column)


def test_published_bytes_of_the_release():
    """V4.1 architecture, 16.3: first bytes of layers.0.attn.wkv.weight with scale byte 0x73."""
    weight = torch.tensor([[0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5]], dtype=torch.uint8)
    values = unpack(weight, torch.tensor([[0x73]], dtype=torch.uint8), "fp8")
    assert values[0].tolist() == [
        -0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(32, 32), (40, 70), (1, 64), (96, 2)])
def test_packing_again_changes_no_value(kind, shape):
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(shape, generator=generator) * torch.logspace(-20, 10, shape[1])
    once = unpack(*pack(values, kind), kind)
    assert torch.equal(unpack(*pack(once, kind), kind), once)
    assert not torch.equal(once, values)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_error_is_at_most_half_a_step(kind):
    generator = torch.Generator().manual_seed(8)
    values = torch.randn(64, 64, generator=generator)
    weight, scale = pack(values, kind)
    factors = decode_scales(scale).repeat_interleave(32, 1)
    factors = factors.repeat_interleave(32, 0) if kind == "fp8" else factors
    step = torch.full_like(values, 0.5) if kind == "fp4" else torch.zeros_like(values)
    scaled = (values / factors).abs()
    if kind == "fp4":
        step = torch.where(scaled > 4, 2.0, torch.where(scaled > 2, 1.0, 0.5))
    else:
        step = torch.exp2(torch.floor(torch.log2(scaled.clamp(min=2.0**-6))) - 3)
    assert ((unpack(weight, scale, kind) / factors - values / factors).abs() <= step / 2).all()
    largest = 6.0 if kind == "fp4" else 448.0
    tops = scaled.view(2, 32, 2, 32).amax((1, 3)) if kind == "fp8" else scaled.view(64, 2, 32).amax(2)
    assert ((tops <= largest) & (tops > largest / 2)).all()  # no larger scale than needed


def test_fp4_ties_go_to_the_even_code():
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -5.0, -6.0]])
    weight, scale = pack(ties, "fp4")
    assert scale.tolist() == [[127]]
    codes = [int(weight[0, i // 2]) >> (4 * (i % 2)) & 15 for i in range(12)]
    assert codes == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 14, 15]


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_zeros(kind):
    weight, scale = pack(torch.zeros(32, 64), kind)
    assert (scale < 255).all() and not weight.any()
    assert not unpack(weight, scale, kind).any()


@pytest.mark.parametrize("kind", KINDS)
def test_scales_at_and_just_above_the_largest_code(kind):
    largest = 6.0 if kind == "fp4" else 448.0
    for value, byte in ((largest, 127), (largest * 2, 128), (largest * 1.01, 128), (largest / 2**20, 107)):
        scale = pack(torch.full((1, 2), value), kind)[1]
        assert scale.flatten().tolist() == [byte]


def test_power_of_two_exponent():
    """P2 of V4.1 architecture, 16.4."""
    x = torch.tensor([1.0, 1.5, 3e-5, 2.0, 2.0000002, 0.0, 1e-45])
    assert _power_of_two_exponent(x).tolist() == [0, 1, -15, 1, 2, -126, -126]


def test_all_scale_bytes():
    values = decode_scales(torch.arange(255, dtype=torch.uint8))
    assert values.double().tolist() == [2.0 ** (b - 127) for b in range(255)]
    with pytest.raises(WeightValueError, match=r"scale at \[1, 0\] is NaN"):
        decode_scales(torch.tensor([[1, 2], [255, 3]], dtype=torch.uint8))


def test_no_finite_number_from_nan_or_overflow():
    scale = torch.full((1, 1), 127, dtype=torch.uint8)
    for code in (0x7F, 0xFF):
        weight = torch.tensor([[1, code]], dtype=torch.uint8)
        for kind in ("fp8", "table"):
            with pytest.raises(WeightValueError, match=r"value at \[0, 1\] is not finite"):
                unpack(weight, scale, kind)
    with pytest.raises(WeightValueError, match="not finite"):
        unpack(torch.tensor([[0x7E]], dtype=torch.uint8), torch.tensor([[254]], dtype=torch.uint8), "fp8")
    for bad in (float("nan"), float("inf"), float("-inf")):
        for kind in KINDS:
            with pytest.raises(WeightValueError, match=r"value at \[0, 1\] is not finite"):
                pack(torch.tensor([[1.0, bad]]), kind)


def test_other_dtypes_round_once():
    generator = torch.Generator().manual_seed(9)
    weight, scale = pack(torch.randn(40, 40, generator=generator), "fp8")
    out = torch.empty(40, 40, dtype=torch.bfloat16)
    assert unpack(weight, scale, "fp8", out) is out
    assert torch.equal(out, unpack(weight, scale, "fp8").to(torch.bfloat16))


def test_packing_the_float_checkpoint_gives_the_quantised_one_byte_for_byte():
    from safetensors.torch import load_file

    from flashsim import load_config
    from model.tensor_table import scale_name, tensors

    floats = load_file(GOLDEN / "a32" / "model.safetensors")
    packed = {}
    for shard in sorted((GOLDEN / "aq").glob("*.safetensors")):
        packed |= load_file(shard)
    for name, spec in tensors(load_config(GOLDEN / "aq")).items():
        if spec.quantised:
            weight, scale = pack(floats[name], spec.kind)
            assert torch.equal(weight, packed[name].view(torch.uint8)), name
            assert torch.equal(scale, packed[scale_name(name)].view(torch.uint8)), name
