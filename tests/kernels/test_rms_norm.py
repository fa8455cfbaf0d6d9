"""RMS norm against its twin: ragged widths, strided rows, a row of zeros, what cannot be."""

import pytest
import torch

pytest.importorskip("triton")

from kernels.reference.rms_norm import rms_norm_reference
from kernels.rms_norm import rms_norm
from kernels.testing import poisoned_empty, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 5e-7  # the order of a sum over the width; 1e-7 seen
BF16 = 3e-3  # a value beside the middle of two bfloat16 numbers may take the other


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


# Mutations seen to fail here: the mean over WIDTH in place of D, eps left out, the weight of the row below.
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 32), (5, 33), (2, 500), (4, 512), (1, 1280), (2, 5120)])
@pytest.mark.parametrize("eps", [1e-20, 0.5])
def test_rows(rows, width, eps):
    x, weight = draw(rows, width), 1 + 0.1 * draw(width, seed=1)
    with poisoned_empty():
        out = rms_norm(x, weight, eps)
    assert relative_error(out, rms_norm_reference(x, weight, eps)) < FP32


def test_strided_rows_and_bfloat16_weights():
    x, weight = draw(6, 96)[:, 16:80], draw(64, seed=1, dtype=torch.bfloat16)
    assert relative_error(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6)) < FP32


@pytest.mark.parametrize("width", [512, 5120])
def test_bfloat16_rows(width):
    x, weight = draw(7, width, dtype=torch.bfloat16), draw(width, seed=1, dtype=torch.bfloat16)
    out, expected = rms_norm(x, weight, 1e-20), rms_norm_reference(x, weight, 1e-20)
    assert out.dtype == torch.bfloat16 and relative_error(out, expected) < BF16


def test_zeros_stay_zeros_and_no_rows_are_none():
    x = torch.zeros(2, 40, device=DEVICE)
    assert torch.equal(rms_norm(x, torch.ones(40, device=DEVICE), 1e-20), x)
    assert rms_norm(x[:0], torch.ones(40, device=DEVICE), 1e-20).shape == (0, 40)


@pytest.mark.parametrize(
    ("x", "weight", "text"),
    [
        (torch.zeros(2, 8).double(), torch.ones(8), "x must be float32 or bfloat16"),
        (torch.zeros(8, 2).T, torch.ones(8), "unit last stride"),
        (torch.zeros(2, 8), torch.ones(7), r"weight must be float32 or bfloat16 \[8\]"),
        (torch.zeros(2, 8), torch.ones(16)[::2], "weight must be contiguous"),
        (torch.zeros(1, 16385), torch.ones(16385), "1 to 16384"),
    ],
)
def test_what_cannot_be(x, weight, text):
    with pytest.raises((TypeError, ValueError), match=text):
        rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-20)
