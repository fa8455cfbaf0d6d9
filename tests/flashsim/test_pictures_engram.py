"""The hash of Engram in plain integers against the published rows, and what its pictures say."""

import pytest

from flashsim.drawing import FigureError
from flashsim.pictures.engram import hash_steps, lookups, met_before

torch = pytest.importorskip("torch")


def test_the_rows_of_the_release():
    """V4.1 architecture 16.2: the first and the last row of compressed ids 10, 20, 30, 40 in layer 1."""
    from flashsim import load_config
    from model.engram import hash_rows, hash_tables

    gram, table = [10, 20, 30, 40], hash_tables(load_config("v4.1-flash"))[1]
    steps = hash_steps(gram, *(t.tolist() for t in table))
    rows = [step.result for step in steps if "gram" in step.what]
    assert rows == hash_rows(torch.tensor(gram), table).tolist()
    assert (rows[0], rows[-1], len(rows)) == (10_250_667, 381_142_068, 24)


def test_rows_met_before():
    grams, rows = [[1, 9, 9], [2, 1, 9], [1, 2, 1], [1, 9, 8]], [[5, 7], [6, 8], [5, 8], [5, 7]]
    met = met_before(grams, rows, 1)
    assert met == [["new", "new"], ["new", "new"], ["collision", "collision"], ["again", "collision"]]
    drawing = lookups(list("abac"), grams, rows, 1, title="Rows")
    assert "1 were looked up before by the same n-gram, 3 by another one" in drawing.alt
    assert drawing.rows[3] == {"position": 1, "token": "b", "column": "3-gram, head 0", "row": 8, "state": "new"}
    assert drawing.svg() == lookups(list("abac"), grams, rows, 1, title="Rows").svg()


def test_what_does_not_fit_is_named():
    with pytest.raises(FigureError, match="3 ids, 2 multipliers"):
        hash_steps([1, 2, 3], [5, 7], [[11]], [[0]])
    with pytest.raises(FigureError, match="tokens is 1; accepted: one for each of the 2 positions"):
        lookups(["a"], [[1, 2], [2, 3]], [[1], [2]], 1, title="Rows")
