"""Files of measurements: whole rows, or one sentence."""

import subprocess

import pytest
import torch

from flashsim.config import load_config
from model import cache_memory, fullsize, fullsize_prompts, fullsize_v4
from model.run_rows import append, rows_of, where

FIELDS = ("model", "tokens", "device")
ROW = {"model": "v1", "tokens": 512, "device": "CPU"}


@pytest.fixture
def path(tmp_path):
    append(tmp_path / "rows.csv", FIELDS, ROW, ROW | {"device": "other"})
    return tmp_path / "rows.csv"


def test_rows_of_a_device(path):
    assert rows_of(path, FIELDS, "CPU") == [{"model": "v1", "tokens": "512", "device": "CPU"}]
    append(path, FIELDS, ROW)
    assert path.read_text() == "model,tokens,device\nv1,512,CPU\nv1,512,other\nv1,512,CPU\n"


def test_an_empty_file_gets_its_header(tmp_path):
    path = tmp_path / "rows.csv"
    path.touch()
    assert rows_of(path, FIELDS, "CPU") == []
    append(path, FIELDS, ROW)
    assert path.read_text() == "model,tokens,device\nv1,512,CPU\n"


# A run that was killed while it wrote: a row appended behind half a row would spoil both.
@pytest.mark.parametrize("cut", [1, 3, 7, 12])
def test_half_a_row_is_named(path, cut):
    path.write_text(path.read_text()[:-cut])
    with pytest.raises(ValueError, match=r"rows\.csv ends within line 3; accepted: whole rows, so remove that line"):
        rows_of(path, FIELDS, "CPU")


@pytest.mark.parametrize("line", ["v1,512", "v1,512,CPU,4"])
def test_a_row_of_other_cells_is_named(path, line):
    path.write_text(f"model,tokens,device\nv1,512,CPU\n{line}\nv1,512,CPU\n")
    with pytest.raises(ValueError, match=r"rows\.csv has other cells than columns in line 3"):
        rows_of(path, FIELDS, "CPU")


def test_what_is_no_text_is_named(path):
    path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(ValueError, match=r"rows\.csv is no text in UTF-8; accepted: a file of this command"):
        rows_of(path, FIELDS, "CPU")


@pytest.mark.parametrize("place", ["", "rows.csv/below.csv"])
def test_a_place_that_cannot_be_written(path, place):
    with pytest.raises(ValueError, match=r"cannot be written .*accepted: a CSV file in a folder that can be"):
        append(path.parent / place, FIELDS, ROW)


@pytest.mark.parametrize(
    ("module", "command"),
    [
        (cache_memory, ["--device", "cpu", "--models", "tiny", "--longest", "512"]),
        (
            fullsize,
            ["--device", "cpu", "--backend", "reference", "--model", "tiny", "--contexts", "8", "--seconds", "0"],
        ),
        (fullsize_prompts, ["--device", "cpu", "--backend", "reference", "--model", "tiny", "--contexts", "8"]),
        (fullsize_v4, ["--device", "cpu", "--model", "ladder-v4-flash", "--contexts", "8", "--seconds", "0"]),
    ],
)
def test_commands_say_it_in_one_line(tmp_path, capsys, module, command):
    assert module.main([*command, "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} cannot be read (Is a directory)")


# Run from another repository, its commit would stand in the row.
def test_the_commit_is_that_of_this_code(tmp_path, monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    here = where(torch.device("cpu"))["commit"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    commit = ["git", "-C", str(tmp_path), *identity, "commit", "-q", "--allow-empty", "-m", "other"]
    subprocess.run(commit, check=True)
    monkeypatch.chdir(tmp_path)
    assert where(torch.device("cpu"))["commit"] == here


@pytest.mark.parametrize("module", [cache_memory, fullsize, fullsize_prompts, fullsize_v4])
@pytest.mark.parametrize("device", ["meta", "nowhere"])
def test_devices_are_cuda_and_cpu(capsys, module, device):
    """On `meta` nothing is allocated: what it `measured` would be the prediction."""
    assert module.main(["--device", device]) == 1
    assert capsys.readouterr().err == f"error: device is {device!r}; accepted: cuda, cpu\n"


def test_lengths_stay_whole_groups(monkeypatch):
    config = load_config("v4-flash")
    monkeypatch.setattr(cache_memory, "free_memory", lambda device: 10**7)
    lengths = cache_memory.lengths_that_fit(config, 3 * 512, torch.device("cpu"))
    assert all(length % 128 == 0 for length in lengths)
