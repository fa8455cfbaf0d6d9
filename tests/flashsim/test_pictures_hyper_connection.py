"""Sinkhorn's steps in plain numbers against the model's, and what the pictures say."""

import pytest

from flashsim.drawing import FigureError
from flashsim.pictures.hyper_connection import balance, balancing, single_pass

torch = pytest.importorskip("torch")
LOGITS = [[1.0, -2.0, 0.5, 0.0], [0.0, 3.0, 0.0, 1.0], [2.0, 2.0, -1.0, 0.0], [0.3, 0.1, 0.2, 4.0]]


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_steps_end_where_the_model_ends(iterations):
    from model.hyper_connection import sinkhorn

    made = torch.tensor(balance(LOGITS, iterations)[-1].matrix, dtype=torch.float64)
    wanted = sinkhorn(torch.tensor([LOGITS] * 5, dtype=torch.float64), iterations, 1e-6)[0]
    assert (made - wanted).abs().max() < 1e-12


def test_each_step_does_what_it_says():
    steps = balance(LOGITS, 20, eps=0.0)
    assert len(steps) == 40
    for step in steps:
        sums = step.column_sums() if "columns" in step.what else step.row_sums()
        assert sums == pytest.approx([1.0] * 4)
    errors = [step.error() for step in steps]
    assert errors[-1] < 0.01 < errors[1] and errors == sorted(errors, reverse=True)


def test_pictures():
    drawing = balancing(LOGITS)
    assert drawing.rows[-1]["step"] == 39 and len(drawing.rows) == 5 * 16
    assert drawing.svg() == balancing(LOGITS).svg()
    drawing = single_pass(["attention 0", "experts 0"])
    assert [row["pre of"] for row in drawing.rows] == ["(1, 0, ...)", "attention 0"]
    assert drawing.svg().startswith("<?xml")


def test_what_is_not_square_is_named():
    with pytest.raises(FigureError, match="logits is 1 x 2; accepted: a square matrix"):
        balance([[1, 2]])
    with pytest.raises(FigureError, match="iterations is 0"):
        balance(LOGITS, 0)
