"""V4's shape beside V4.1's: shared experts, filled caches, a step that stays in place, rows of the same file."""

import csv

import pytest
import torch

from flashsim.config import load_config
from flashsim.kv_cache import kv_cache
from model.fullsize import FIELDS
from model.fullsize_v4 import DecodeStep, build, filled_cache, main

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small():
    return build(load_config("ladder-v4-flash"), torch.float32, CPU)


def test_layers_share_the_routed_experts_alone(small):
    first, second = (layer.ffn for layer in list(small.layers)[:2])
    assert first.experts is second.experts
    assert first.shared_experts is not second.shared_experts
    assert all(torch.isfinite(p).all() for p in small.parameters())


@pytest.mark.parametrize("context", [1, 9, 300])
def test_a_filled_cache_has_the_bytes_of_the_formula(small, context):
    cache = filled_cache(small, 2, context)
    for b in range(2):
        assert cache.nbytes(by="component", sequence=b) == kv_cache(small.config, context).by("component")
    assert torch.isfinite(small(torch.zeros(2, 1, dtype=torch.int64), cache=cache)).all()


def test_a_step_that_stays_in_place_is_an_ordinary_step(small):
    """Called three times it gives what decode gives once. Mutation: rings that are not put back."""
    ids = torch.randint(0, 160, (2, 60), generator=torch.Generator().manual_seed(1))
    caches = [small.new_cache(2, capacity=64) for _ in range(2)]
    for cache in caches:
        small(ids[:, :59], cache=cache)
    expected = small(ids[:, 59:], cache=caches[0], last=True)
    step = DecodeStep(small, caches[1], ids[:, 59:])
    for _ in range(3):
        assert torch.equal(step(), expected)


def test_rows_and_a_sweep_that_goes_on(tmp_path, capsys):
    out = tmp_path / "rows.csv"
    command = ["--model", "ladder-v4-flash", "--device", "cpu", "--seconds", "0", "--out", str(out)]
    assert main([*command, "--contexts", "40"]) == 0
    assert main([*command, "--contexts", "40,300"]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["context"] for row in rows] == ["40", "300"] and tuple(rows[0]) == FIELDS
    config = load_config("ladder-v4-flash")
    assert [int(row["cache_bytes"]) for row in rows] == [kv_cache(config, n).total() for n in (40, 300)]
    assert all(int(row["counted_flops"]) > int(float(row["formula_flops"])) for row in rows)  # mixing is counted too


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "v4.1-flash", "--device", "cpu"], "model_type is 'deepseek_v41'"),
        (["--device", "cpu", "--profile", "rows.csv"], "profile needs a GPU"),
        (["--device", "cpu", "--contexts", "0"], "context is"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, text, capsys):
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and text in error and error.count("\n") == 1
