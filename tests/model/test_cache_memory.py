"""Caches of released size, allocated and asked what they take."""

import csv

import pytest
import torch

from flashsim.config import load_config
from flashsim.kv_cache import kv_bytes_per_token, kv_cache
from model import cache_memory
from model.cache_memory import CACHES, lengths_that_fit, line, main, measure

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["v2", "v3.2", "v4-flash", "v4-pro", "v4.1-flash"])
def test_released_caches_grow_by_the_formula(name):
    """To the byte on the host; V1 is left to the command, for its gigabytes."""
    config = load_config(name)
    taken = [measure(config, tokens, CPU)["requested_bytes"] for tokens in (512, 1024, 1536)]
    assert taken[1] - taken[0] == taken[2] - taken[1] == 512 * kv_bytes_per_token(config)
    assert taken[0] >= kv_cache(config, 512).total()  # rings have places for a rollback


def test_every_family_has_its_cache():
    assert {type(load_config(name)) for name in ("v1", "v2", "v3", "v3.2", "v4-pro", "v4.1-flash")} == set(CACHES)


def test_a_line_through_points():
    assert line([2, 4, 8], [13, 23, 43]) == (3.0, 5.0)
    assert line([2], [13]) == (13, 0)


def test_lengths_halve_until_they_fit(monkeypatch):
    config = load_config("v1")
    monkeypatch.setattr(cache_memory, "free_memory", lambda device: 389_120 * 5000)
    assert lengths_that_fit(config, 2**20, CPU) == [1024, 2048, 3072, 4096]


def test_command_goes_on_behind_its_rows(tmp_path, capsys, monkeypatch):
    command = [
        "--models",
        "v3.2,v4.1-flash",
        "--device",
        "cpu",
        "--longest",
        "2Ki",
        "--out",
        str(tmp_path / "rows.csv"),
    ]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "v3.2: formula 48,068.0000 bytes a token" in first and "(+0.000%)" in first
    monkeypatch.setattr(cache_memory, "measure", None)
    assert main(command) == 0
    assert capsys.readouterr().out == first
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert len(rows) == 8 and all(row["device"] == "CPU" and row["allocated_bytes"] == "" for row in rows)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--models", "v5"], "v5"),
        (["--longest", "1000"], "longest is 1000; accepted: a multiple of 512"),
        (["--longest", "long"], "long"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, arguments, text):
    assert main(["--device", "cpu", *arguments]) == 1
    err = capsys.readouterr().err
    assert text in err and err.startswith("error: ") and err.count("\n") == 1
