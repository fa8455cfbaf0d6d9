"""Pictures of attention say what the model does."""

import pytest

from flashsim.drawing import FigureError
from flashsim.pictures.attention import heads, reach, seen_from, shared_by


def test_neighbours_share():
    assert shared_by(64, 8)[35] == 35 // 8 and shared_by(4, 4) == [0, 1, 2, 3] and shared_by(4, 1) == [0] * 4
    with pytest.raises(FigureError, match="divisor of query_heads, 8"):
        shared_by(8, 3)


@pytest.mark.parametrize("ratio", [1, 2, 4, 7])
def test_entries_are_seen_as_the_model_sees_them(ratio):
    torch = pytest.importorskip("torch")
    from flashsim.config import load_config
    from model.attention.hca import visible_entries
    from model.step import Step

    step = Step(load_config("ladder-v4-flash"), [0], [30], torch.device("cpu"))
    for position, row in enumerate(visible_entries(step, ratio)[0].tolist()):
        assert seen_from(position, 5, ratio).entries == [j for j in row if j >= 0]
        assert seen_from(position, 5, ratio).window == list(range(position + 1))[-5:]


def test_overlapping_entries_have_two_groups():
    tokens = seen_from(15, 4, 4, overlap=True).tokens
    assert tokens[0] == [0, 1, 2, 3] and tokens[3] == list(range(8, 16))
    assert seen_from(15, 4, 4).tokens[3] == list(range(12, 16))


def test_pictures_have_words_and_rows():
    drawn = heads({"grouped-query": 2, "latent": 1}, 4)
    assert "2 KV heads, each read by 2 query heads" in drawn.alt and len(drawn.rows) == 8
    drawn = reach(13, 6, 4, selected=[0, 2], overlap=True)
    assert [row["number"] for row in drawn.rows if row["kind"] == "entry" and row["read"]] == [0, 2]
    assert "tokens 8 to 13" in drawn.alt and drawn.svg() == drawn.svg()
    assert reach(2, 8, 4).rows == [{"kind": "token", "number": t, "read": True} for t in range(3)]
    with pytest.raises(FigureError, match="selected is"):
        reach(13, 6, 4, selected=[3])
    with pytest.raises(FigureError, match="ratio is 0"):
        seen_from(13, 6, 0)
