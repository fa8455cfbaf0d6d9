"""Routing in plain numbers against the model's, experts of a batch by counting, and what the pictures say."""

import itertools
from fractions import Fraction

import pytest

from flashsim.drawing import FigureError
from flashsim.pictures.moe import experts_touched, loads, route, router

torch = pytest.importorskip("torch")


def test_routing_is_that_of_the_model():
    import model.moe

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 16, generator=generator, dtype=torch.float64)
    bias = torch.randn(16, generator=generator, dtype=torch.float64) * 0.3
    experts, weights = model.moe.route(logits, bias, 4, 1.5)
    scores = torch.nn.functional.softplus(logits).sqrt()
    for token in range(20):
        chosen = route(scores[token], bias, 4, 1.5)
        assert list(chosen.experts) == experts[token].tolist()
        assert chosen.weights == pytest.approx(weights[token].tolist(), abs=1e-12)


def test_ties_go_to_the_lower_expert_and_the_bias_does_not_weigh():
    assert route([1, 1, 1], [0, 0, 0], 2).experts == (0, 1)
    assert route([1, 3, 1], [9, 0, 0], 2).weights == (0.25, 0.75)


@pytest.mark.parametrize(("experts", "k", "tokens"), [(4, 2, 2), (5, 1, 3), (3, 3, 2)])
def test_experts_of_a_batch_counted_out(experts, k, tokens):
    picks = list(itertools.combinations(range(experts), k))
    batches = list(itertools.product(picks, repeat=tokens))
    mean = Fraction(sum(len(set().union(*batch)) for batch in batches), len(batches))
    assert experts_touched(experts, k, tokens) == mean


def test_pictures():
    drawing = router([0.9, 0.5, 0.8], [-0.3, 0.2, 0.1], 2)
    assert "Chosen of 3 experts: 1, 2. By score alone it would be 0, 2." in drawing.alt
    assert [row["chosen"] for row in drawing.rows] == [False, True, True]
    drawing = loads([9, 1, 2], [4, 4, 4], ("before", "after"), title="Loads")
    assert "Before: from 1 to 9 tokens an expert; after: from 4 to 4" in drawing.alt
    assert drawing.svg().startswith("<?xml")


def test_what_does_not_fit_is_named():
    with pytest.raises(FigureError, match="bias is 1 numbers; accepted: one for each of 2 scores"):
        route([1, 2], [0], 1)
    with pytest.raises(FigureError, match="k is 3; accepted: a whole number from 1 to 2"):
        route([1, 2], [0, 0], 3)
    with pytest.raises(FigureError, match="5 of 4 experts"):
        experts_touched(4, 5, 1)
