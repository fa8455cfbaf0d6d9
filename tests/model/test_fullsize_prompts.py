"""Prompts of the full-size run, at small size: prefill in three ways, a kept prefix in three."""

import csv

import pytest

from model.fullsize_prompts import main

COMMAND = ["--model", "tiny", "--device", "cpu", "--backend", "reference", "--engram-rows", "64", "--tie-experts"]


def test_half_the_layers_and_a_kept_prefix_save_work(tmp_path, capsys):
    out = tmp_path / "rows.csv"
    command = [*COMMAND, "--contexts", "200,300", "--new", "16", "--chunk", "128", "--repeats", "1", "--out", str(out)]
    assert main(command) == 0 and main(command) == 0
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 12  # the second run had nothing left to do
    flops = {(row["kind"], row["mode"]): int(row["counted_flops"]) for row in rows if row["tokens"] == "300"}
    assert flops["prefill", "bounded"] < flops["prefill", "exact"] < flops["prefill", "full"]
    assert flops["replay", "bounded"] < flops["replay", "exact"] < flops["replay", "cold"]
    assert flops["replay", "cold"] == flops["prefill", "exact"]
    assert {row["kept"] for row in rows if row["kind"] == "replay"} == {"184", "284"}
    assert all(float(row["seconds"]) > 0 and row["tied"] == "True" for row in rows)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--new", "0"], "new is 0; accepted: a whole number from 1"),
        (["--chunk", "0"], "chunk is 0"),
        (["--engram-rows", "0"], "engram_rows is 0"),
        (["--contexts", "some"], "some"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, arguments, text):
    assert main([*COMMAND, *arguments]) == 1
    err = capsys.readouterr().err
    assert text in err and err.startswith("error: ") and err.count("\n") == 1
