"""linear against its reference, which sums the blocks of 32 inputs one by one in float32.

Mutations seen to fail: at each test.
"""

import pytest
import torch

from kernels.linear import linear, quantise_activation
from kernels.reference.block_quant import block_dequant_reference, block_quant_reference
from kernels.reference.linear import linear_reference
from kernels.testing import poisoned_empty, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The order of float32 sums; 3e-7 is typical. A matrix unit cuts, rather than rounds, the sums of its 16 products.
FP32 = 2e-6 if DEVICE == "cpu" else 2e-5
BF16 = 4e-3  # one rounding of the output to bfloat16, 2^-9 each, 1.7e-3 is typical


def inputs(M, K, N, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-4, 5, (M, K // 32), generator=g).float())
    x = torch.randn(M, K, generator=g) * sizes.repeat_interleave(32, dim=1)
    codes = torch.randn(N, K, generator=g).mul(50).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.randint(110, 128, (N // 32, K // 32), generator=g).to(torch.uint8)
    return x.to(dtype).to(DEVICE), codes.to(DEVICE), scales.to(DEVICE)


# Seen to fail: scale row n // 32 -> n // 64; scales one step late; SPLIT parts summed without the last;
# K % BK tail unmasked.
@pytest.mark.parametrize("act_quant", [True, False])
@pytest.mark.parametrize(
    ("M", "K", "N"), [(1, 32, 32), (1, 1280, 96), (3, 96, 160), (16, 512, 64), (17, 160, 96), (70, 256, 32)]
)
def test_matches_reference(M, K, N, act_quant):
    args = inputs(M, K, N)
    with poisoned_empty():
        out = linear(*args, act_quant=act_quant)
    assert out.dtype == torch.float32
    assert relative_error(out, linear_reference(*args, act_quant=act_quant)) < FP32


# Seen to fail: the scales of the first group for all; a group's outputs written over those before.
@pytest.mark.parametrize("act_quant", [True, False])
@pytest.mark.parametrize(
    ("M", "K", "N", "groups"), [(1, 64, 32, 4), (1, 640, 96, 2), (3, 96, 64, 3), (40, 128, 160, 2)]
)
def test_groups(M, K, N, groups, act_quant):
    (x, _, _), (_, codes, scales) = inputs(M, groups * K, 32), inputs(1, K, groups * N, seed=1)
    with poisoned_empty():
        out = linear(x, codes, scales, act_quant, groups)
    expected = linear_reference(x, codes, scales, act_quant, groups)
    assert out.shape == (M, groups * N) and relative_error(out, expected) < FP32
    alone = linear(x[:, -K:], codes[-N:], scales[-N // 32 :], act_quant)
    assert relative_error(out[:, -N:], alone) < FP32


def test_groups_that_do_not_fit():
    x, codes, scales = inputs(2, 96, 96)
    for groups in (0, 2):
        with pytest.raises(ValueError, match=f"groups is {groups}"):
            linear(x, codes, scales, True, groups)


@pytest.mark.parametrize("act_quant", [True, False])
def test_strided_views(act_quant):
    """Seen to fail: x's row stride replaced by K."""
    x, codes, scales = inputs(5, 256, 128)
    args = x[1:4, 64:192], codes[32:96, 64:192], scales[1:3, 2:6]
    assert relative_error(linear(*args, act_quant=act_quant), linear_reference(*args, act_quant=act_quant)) < FP32


def test_activation_quantisation_is_the_fp8_format():
    """Bit for bit the format of block_quant. Seen to fail: LIMIT 448 -> 440; byte 254 in place of 255."""
    x, _, _ = inputs(9, 160, 32)
    x[2] = 0
    x[5, :2] = torch.tensor([448, 3 * 2.0**-9])  # under scale 1 a subnormal code, under scale 2 a tie
    x[5, 2:32] = 0
    x[3, 40] = float("nan")
    x[4, 5] = float("-inf")
    with poisoned_empty():
        out = quantise_activation(x).float()
    expected = block_dequant_reference(*block_quant_reference(x, "fp8"), "fp8", dtype=torch.float32)
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.nan_to_num(), expected.nan_to_num())


def test_nan_and_infinity_reach_the_output():
    """A bad activation spoils its row, a bad weight its column. Seen to fail: code 0x7F decoded as 480."""
    x, codes, scales = inputs(4, 64, 64)
    x[1, 3] = float("inf")
    codes[5, 40] = 0x7F
    scales[1, 1] = 255
    out = linear(x, codes, scales)
    bad = torch.zeros(4, 64, dtype=torch.bool, device=DEVICE)
    bad[1], bad[:, 5], bad[:, 32:] = True, True, True
    assert torch.equal(~out.isfinite(), bad)


def test_published_tile():
    """Eight bytes of a released tile under scale 2^-12, read off by unit activations (scale 1 each: no rounding).

    Seen to fail: bias 7 -> 8 in e4m3_bits_to_f32.
    """
    codes = torch.zeros(32, 32, dtype=torch.uint8)
    codes[0, :8] = torch.tensor([0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5], dtype=torch.uint8)
    scales = torch.full((1, 1), 0x73, dtype=torch.uint8)
    out = linear(torch.eye(32)[:8].to(DEVICE), codes.to(DEVICE), scales.to(DEVICE))
    expected = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    assert out[:, 0].tolist() == expected


def test_inputs_untouched_empty_and_errors():
    x, codes, scales = inputs(2, 64, 64)
    saved = [t.clone() for t in (x, codes, scales)]
    linear(x, codes, scales)
    assert all(torch.equal(a, b) for a, b in zip(saved, (x, codes, scales), strict=True))
    assert linear(x[:0], codes, scales).shape == (0, 64)
    with pytest.raises(ValueError, match="expected a multiple of 32"):
        linear(x[:, :40].contiguous(), codes, scales)
    with pytest.raises(ValueError, match="scales of codes have shape"):
        linear(x, codes, scales[:, :1])
    with pytest.raises(ValueError, match="codes has shape"):
        linear(x, codes[:, :32], scales)
    with pytest.raises(TypeError, match="uint8"):
        linear(x, codes.int(), scales)
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        linear(x.double(), codes, scales)
    with pytest.raises(ValueError, match="unit stride"):
        linear(inputs(2, 128, 64)[0][:, ::2], codes, scales)


@pytest.mark.gpu
@pytest.mark.parametrize("act_quant", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("M", "K", "N"), [(1, 1280, 32768), (16, 5120, 512), (33, 5120, 1280), (129, 1280, 4096), (1000, 5120, 2304)]
)
def test_released_sizes(M, K, N, dtype, act_quant):
    args = inputs(M, K, N, dtype)
    out = linear(*args, act_quant=act_quant)
    reference = linear_reference(args[0].float(), *args[1:], act_quant=act_quant)
    assert relative_error(out, reference) < (BF16 if dtype == torch.bfloat16 else FP32)
