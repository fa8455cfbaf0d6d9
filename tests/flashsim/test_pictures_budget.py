"""Pictures of budgets: their parts add up to a GPU, their rows are the search, and empty ones are refused."""

from xml.etree import ElementTree

import pytest

from flashsim.budget import Constraints, Fleet, capacity, search
from flashsim.drawing import FigureError

pytest.importorskip("matplotlib")
from flashsim.pictures.budget import budget_front, gpu_memory, parts

MIX = {"4Ki": 9, "128Ki": 1}


@pytest.mark.parametrize("model", ["v1", "v4-flash", "v4.1-flash"])
@pytest.mark.parametrize("tensor_parallel", [4, 8])
@pytest.mark.parametrize("kept_free", [0, 0.1, 0.55])
def test_parts_of_a_gpu_add_up_to_its_memory(model, tensor_parallel, kept_free):
    fit = capacity(model, Fleet("h200-sxm", 8, tensor_parallel, kept_free=kept_free), MIX)
    made = parts(fit)
    assert sum(made.values()) == 141_000_000_000 and all(size >= 0 for size in made.values())
    assert made["global cache"] + made["windows"] == sum(fit.tier_bytes.values())


def test_weights_larger_than_the_memory():
    fit = capacity("v3", Fleet("rtx-4090"), "4Ki")
    made = parts(fit)
    assert made["weights"] > 24_000_000_000 and sum(made.values()) == made["weights"]
    assert "weights do not fit" in gpu_memory({"one": fit}, "Too small").alt


def test_memory_is_drawn_with_its_numbers():
    fits = {f"{tp} GPUs": capacity("v4.1-flash", Fleet("h200-sxm", 8, tp), "128Ki") for tp in (4, 8)}
    fits["nothing fits"] = capacity("v1", Fleet("rtx-4090", weights_bytes=0), "1M")
    drawing = gpu_memory(fits, "Memory")
    assert [row["sequences"] for row in drawing.rows] == [876, 750, 0]
    assert "876 sequences" in drawing.alt and "not one sequence fits" in drawing.alt
    ElementTree.fromstring(drawing.svg())


def test_the_front_is_drawn_with_every_point():
    found = search(
        890, Constraints(encoder_ratio=(1, 2), decoder_ratio=(1, 2)), objectives=("stored_bytes", "kept_numbers")
    )
    drawing = budget_front(found, "Front")
    assert len(drawing.rows) == len(found.points)
    assert sum(row["front"] for row in drawing.rows) == len(found.front) > 1
    assert f"{len(found.points)} of {found.tried} configs" in drawing.alt and "itself stores 890 bytes" in drawing.alt
    ElementTree.fromstring(drawing.svg())
    assert "itself" not in budget_front(search(400), "Without the release").alt


def test_nothing_to_draw():
    with pytest.raises(FigureError, match="at least one capacity"):
        gpu_memory({}, "Nothing")
    with pytest.raises(FigureError, match="at least one config within its budget"):
        budget_front(search(1), "Nothing")
