"""The rotation in place against its twin: shared turns, odd numbers of pairs, back and forth, what cannot be."""

import pytest
import torch

pytest.importorskip("triton")

from kernels.reference.rope import rope_reference
from kernels.rope import rope_
from kernels.testing import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 3e-7


def inputs(vectors, width, pairs, share, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(vectors, width, generator=g).to(DEVICE, dtype)
    angle = 100 * torch.rand(vectors // share, pairs, generator=g)
    return x, torch.polar(torch.ones_like(angle), angle).to(DEVICE)


# Mutations seen to fail here: the turn of the row itself instead of its group, the first channels instead of the last,
# the sign of the sine, pairs taken from two halves.
@pytest.mark.parametrize(
    ("vectors", "width", "pairs", "share"),
    [(1, 2, 1, 1), (5, 32, 8, 1), (24, 64, 16, 8), (40, 36, 7, 4), (16, 512, 32, 16)],
)
@pytest.mark.parametrize("back", [False, True])
def test_vectors(vectors, width, pairs, share, back):
    x, turns = inputs(vectors, width, pairs, share)
    expected, before = rope_reference(x, turns, back), x.clone()
    out = rope_(x, turns, back)
    assert out is x and relative_error(out, expected) < FP32
    assert torch.equal(out[:, : width - 2 * pairs], before[:, : width - 2 * pairs])


def test_back_undoes_and_lengths_stay():
    x, turns = inputs(12, 64, 16, 4)
    before = x.clone()
    rope_(x, turns)
    assert relative_error(x.norm(dim=1), before.norm(dim=1)) < FP32
    assert relative_error(rope_(x, turns, back=True), before) < 2 * FP32


def test_bfloat16_is_rounded_once():
    x, turns = inputs(32, 128, 32, 8, dtype=torch.bfloat16)
    expected = rope_reference(x, turns)
    assert relative_error(rope_(x, turns), expected) < 1e-3  # a product beside a middle may fall to the other side


def test_nothing_to_turn():
    x, turns = inputs(4, 8, 2, 2)
    before = x.clone()
    assert torch.equal(rope_(x, turns[:, :0].contiguous()), before)
    assert rope_(x[:0], turns).shape == (0, 8)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x, t: (x.double(), t), "x must be contiguous float32 or bfloat16"),
        (lambda x, t: (x[:, 1:], t), "x must be contiguous"),
        (lambda x, t: (x, t.conj()), "turns must be contiguous complex64"),
        (lambda x, t: (x, t.real.contiguous()), "turns must be contiguous complex64"),
        (lambda x, t: (x[:3].contiguous(), t), "do not fit"),
        (lambda x, t: (x[:, :2].contiguous(), t), "do not fit"),
    ],
)
def test_what_cannot_be(make, text):
    with pytest.raises((TypeError, ValueError), match=text):
        rope_(*make(*inputs(4, 8, 2, 2)))
