"""The router against its twin: ties, far logits, a bias that chooses and does not weigh, what cannot be."""

import pytest
import torch

pytest.importorskip("triton")

from kernels.reference.router import router_reference
from kernels.router import router
from kernels.testing import poisoned_empty, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 1e-6


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def same(logits, bias, k, scale=1.5):
    with poisoned_empty():
        experts, weights = router(logits, bias, k, scale)
    expected, wanted = router_reference(logits, bias, k, scale)
    assert experts.dtype == torch.int64 and torch.equal(experts, expected)
    assert relative_error(weights, wanted) < FP32
    return experts, weights


# Mutations seen to fail here: weights with the bias in them, ties to the higher expert, the picked not in order, the
# scale left out, softplus as log(1 + exp(x)).
@pytest.mark.parametrize(
    ("tokens", "number", "k"), [(1, 1, 1), (3, 6, 2), (5, 33, 4), (2, 384, 6), (1, 384, 64), (4, 7, 7)]
)
@pytest.mark.parametrize("rows", [False, True])
def test_tokens(tokens, number, k, rows):
    bias = 0.3 * (draw(tokens, number, seed=1) if rows else draw(number, seed=1))
    _, weights = same(2 * draw(tokens, number), bias, k)
    assert (weights.sum(dim=1) - 1.5).abs().max() < 1e-5


def test_ties_go_to_the_lower_expert():
    logits = torch.zeros(2, 12, device=DEVICE)
    experts, _ = same(logits, torch.zeros(12, device=DEVICE), 5)
    assert experts.tolist() == [[0, 1, 2, 3, 4]] * 2
    bias = torch.zeros(12, device=DEVICE)
    bias[[3, 9]] = 1.0
    assert same(logits, bias, 3)[0].tolist() == [[0, 3, 9]] * 2


def test_far_logits_keep_their_digits():
    """At -30 softplus is e^-30, which 1 + e^x has lost; at 50 it is 50."""
    logits = torch.tensor([[-30.0, -29.0, -80.0, -28.5], [50.0, 21.0, 19.9, -5.0]], device=DEVICE)
    same(logits, torch.zeros(4, device=DEVICE), 2)


def test_a_negative_bias_below_every_other_is_still_a_choice():
    same(draw(3, 5), torch.full((5,), -1e30, device=DEVICE), 5)


def test_nan_leaves_a_valid_choice():
    logits = draw(2, 9)
    logits[0, 4] = float("nan")
    experts, _ = router(logits, torch.zeros(9, device=DEVICE), 3, 1.0)
    assert ((experts >= 0) & (experts < 9)).all() and (experts.diff(dim=1) > 0).all()


def test_no_tokens():
    experts, weights = router(draw(0, 8), draw(8), 2, 1.0)
    assert experts.shape == weights.shape == (0, 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x, b: (x.double(), b, 2, 1.0), "logits must be contiguous float32"),
        (lambda x, b: (x[:, ::2], b, 2, 1.0), "logits must be contiguous"),
        (lambda x, b: (x, b, 9, 1.0), "k 1 to 64 of them, got 8 and 9"),
        (lambda x, b: (x, b, 0, 1.0), "got 8 and 0"),
        (lambda x, b: (x, b[:4], 2, 1.0), r"bias must be float32 \[8\] or \[3, 8\]"),
        (lambda x, b: (x, b.repeat(2)[::2], 2, 1.0), "bias must be contiguous"),
    ],
)
def test_what_cannot_be(make, text):
    with pytest.raises((TypeError, ValueError), match=text):
        router(*make(draw(3, 8), draw(8)))
