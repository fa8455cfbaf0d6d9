"""Heads that share keys and values are neighbours, as in the model."""

import pytest

from flashsim.drawing import FigureError
from flashsim.pictures.attention import heads, shared_by


def test_neighbours_share():
    assert shared_by(64, 8)[35] == 35 // 8 and shared_by(4, 4) == [0, 1, 2, 3] and shared_by(4, 1) == [0] * 4
    with pytest.raises(FigureError, match="divisor of query_heads, 8"):
        shared_by(8, 3)


def test_the_model_shares_alike():
    """A value that only one KV head has comes out of the heads that read it, and of no other."""
    torch = pytest.importorskip("torch")
    from model.attention.gqa import attend

    value = torch.zeros(1, 1, 2, 1)
    value[:, :, 1] = 1.0
    out = attend(torch.ones(1, 1, 8, 4), torch.ones(1, 1, 2, 4), value, torch.ones(1, 1, 1, dtype=torch.bool), 1.0)
    assert out.flatten().tolist() == [float(kv == 1) for kv in shared_by(8, 2)]


def test_a_picture_has_words_and_rows():
    drawn = heads({"grouped-query": 2, "latent": 1}, 4)
    assert "grouped-query: KV heads 2, query heads that read each 2" in drawn.alt
    assert [row["reads_kv_head"] for row in drawn.rows] == [0, 0, 1, 1, 0, 0, 0, 0]
    assert drawn.svg() == drawn.svg()
