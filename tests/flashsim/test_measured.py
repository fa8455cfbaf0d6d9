"""Figures of measured rows: what is drawn is what the rows say. The rows of these tests are made up."""

import pytest

from flashsim import measured
from flashsim.config import load_config
from flashsim.drawing import FigureError
from flashsim.flops import decode_flops
from flashsim.kv_cache import kv_cache

pytest.importorskip("matplotlib")
WHERE = {"device": "Made-up GPU", "torch": "0", "triton": "0", "commit": "abc", "date": "2026-01-01"}
COUNTED = {"counted_weighted_flops": "1000", "formula_weighted_flops": "1000"}


def cache_rows():
    for model, extra in (("v1", 0), ("v4.1-flash", 4096)):
        for n in (2**18, 2**19, 2**20):
            size = int(kv_cache(load_config(model), n).total())
            accounts = {"requested_bytes": size + extra, "allocated_bytes": size + 2 * extra, "driver_bytes": size}
            yield WHERE | {"model": model, "tokens": str(n)} | {key: str(value) for key, value in accounts.items()}


def step_rows():
    for batch in (1, 8):
        for n in (4096, 2**20):
            row = {"model": "v4.1-flash", "backend": "triton", "batch": str(batch), "context": str(n)}
            yield WHERE | COUNTED | row | {"step_us": str(5000.0 * batch), "floor_us": "2500.0"}


def test_a_line_through_the_accounts_has_the_slope_of_the_formula():
    drawing = measured.cache_memory(list(cache_rows()))
    v1, v41 = drawing.rows
    assert v1["requested_bytes_per_token"] == v1["formula_bytes_per_token"] == 389120
    assert v41["requested_bytes_per_token"] == 890 and v41["published_bytes_per_token"] == 890
    assert v41["requested_fixed_bytes"] == 2703360 + 4096
    assert "Made-up GPU" in measured.provenance(cache_rows()) and "measured: tensors 389,120" in drawing.alt


def test_counted_points_are_the_rows():
    drawing = measured.counted_flops(list(step_rows()))
    assert [(r["context_tokens"], r["counted_weighted_flops"]) for r in drawing.rows] == [(4096, 1000), (2**20, 1000)]


def test_times_stand_beside_their_floors():
    rows = measured.step_time(list(step_rows())).rows
    assert [(r["batch"], r["step_ms"], r["ratio"]) for r in rows] == [(1, 5, 2), (1, 5, 2), (8, 40, 16), (8, 40, 16)]


def test_parts_are_summed_over_their_kernels():
    row = WHERE | {"model": "v4.1-flash", "backend": "triton", "batch": "1", "context": "4096"}
    rows = [row | {"part": p, "kernel": k, "us": u} for p, k, u in (("experts", "a", "3000"), ("experts", "b", "500"))]
    rows += [row | {"part": "attention", "kernel": "c", "us": "1000"}, row | {"backend": "reference", "us": "9"}]
    drawing = measured.step_parts(rows)
    assert {r["part"]: r["ms"] for r in drawing.rows} == {"experts": 3.5, "attention": 1.0}
    assert "4.50 ms, most of it experts (3.50)" in drawing.alt


def test_prompts():
    rows = [
        WHERE | {"kind": kind, "mode": mode, "tokens": str(n), "seconds": str(n / 1000), "counted_flops": str(n)}
        for kind, mode in (("prefill", "full"), ("prefill", "bounded"), ("replay", "cold"))
        for n in (8192, 32768)
    ]
    drawing = measured.prompts(rows)
    assert len(drawing.rows) == 6 and "replay cold: 8.192 s at 8,192 tokens" in drawing.alt


def test_rows_that_are_not_there():
    with pytest.raises(FigureError, match=r"rows is 'nothing'; accepted: .*kernels"):
        measured.measured("nothing")


COMMITTED = [
    name
    for name in ("cache_memory", "fullsize", "fullsize_prompts")
    if (measured.data_dir() / "measured" / f"{name}.csv").is_file()
]


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_rows_are_whole(name):
    """Every cell that says where a row is from is filled, and no measurement stands there twice."""
    rows = measured.measured(name)
    keys = [
        k for k in ("model", "backend", "kind", "mode", "tokens", "kept", "batch", "context", "device") if k in rows[0]
    ]
    seen = [tuple(row[key] for key in keys) for row in rows]
    assert len(set(seen)) == len(seen)
    for row in rows:
        assert None not in row and all(row[key] for key in ("model", "device", "torch", "commit", "date"))


@pytest.mark.skipif("cache_memory" not in COMMITTED, reason="no rows yet")
def test_committed_accounts_have_the_slope_of_the_formula():
    for row in measured.cache_memory().rows:
        formula = row["formula_bytes_per_token"]
        assert row["requested_bytes_per_token"] == formula, row["model"]
        assert abs(row["driver_bytes_per_token"] / formula - 1) < 0.02, "whole pages"


@pytest.mark.skipif("fullsize" not in COMMITTED, reason="no rows yet")
def test_committed_steps_counted_what_the_formula_says():
    for row in measured.measured("fullsize"):
        config, n = load_config(row["model"]), int(row["context"])
        assert int(row["formula_flops"]) == decode_flops(config, n).total()
        counted, formula = int(row["counted_weighted_flops"]), int(row["formula_weighted_flops"])
        assert 0 <= counted / formula - 1 < 0.002, "mixing of the streams is counted too"


def test_a_figure_without_rows_says_so(monkeypatch, tmp_path):
    (tmp_path / "measured").mkdir()
    monkeypatch.setattr(measured, "data_dir", lambda: tmp_path)
    assert measured.figure("prompts") == "prompts: no rows have been measured yet (data/measured/fullsize_prompts.csv)"
    assert measured.draw(tmp_path / "out") == []
    with pytest.raises(FigureError, match="figure is 'speed'; accepted: figure-1b-measured"):
        measured.figure("speed")
