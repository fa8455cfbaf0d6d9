"""The benchmark cases agree with their references at the small size, so that a row can be trusted when it is timed."""

import csv

import pytest
import torch

pytest.importorskip("triton")

import kernels.bench_cases  # noqa: F401
from kernels.bench import COPY_BYTES_PER_S, FIELDS, REGISTRY, Case, _write, check, floor_us

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("make, small", [entry[1::2] for entry in REGISTRY], ids=[entry[0] for entry in REGISTRY])
def test_small_size(make, small):
    check(make, small, DEVICE)


def test_a_wrong_kernel_gets_no_row():
    def make(n, device):
        x = torch.ones(n, device=device)
        return Case(
            run=lambda x: x + 1e-3, reference=lambda x: x, inputs=(x,), bytes_moved=8 * n, flops=0, dtype="fp32"
        )

    with pytest.raises(AssertionError, match=r"relative error 0\.001"):
        check(make, {"n": 8}, DEVICE)


def test_floor_is_the_larger_bound():
    assert floor_us(COPY_BYTES_PER_S, 0) == pytest.approx(1e6)
    assert floor_us(COPY_BYTES_PER_S, 2 * 684e12) == pytest.approx(2e6)


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "measured" / "kernels.csv"
    for median in (1, 2):
        _write(path, dict.fromkeys(FIELDS, "x") | {"median_us": median})
    assert [row["median_us"] for row in csv.DictReader(path.open())] == ["1", "2"]
