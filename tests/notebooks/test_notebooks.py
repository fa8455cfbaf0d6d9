"""Every lesson runs from top to bottom, says what it said when it was committed, and defines nothing."""

import importlib.util
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("execute", ROOT / "notebooks" / "execute.py")
execute = importlib.util.module_from_spec(spec)
spec.loader.exec_module(execute)
LESSONS = execute.notebooks()
SECONDS = 120


@pytest.mark.parametrize("path", LESSONS, ids=[path.stem for path in LESSONS])
def test_a_lesson_runs_and_prints_what_it_printed(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    committed = nbformat.read(path, as_version=4)
    assert not execute.definitions(committed)
    assert not execute.differences(committed, execute.run(path))


@pytest.mark.parametrize("path", LESSONS, ids=[path.stem for path in LESSONS])
def test_a_lesson_is_committed_executed_and_small(path):
    committed = nbformat.read(path, as_version=4)
    cells = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "restart and run all, then save"
    assert path.stat().st_size < 600_000
    for cell in committed.cells:
        assert cell.cell_type != "markdown" or "](data:" not in cell.source, "no pictures inside Markdown cells"
        for output in cell.get("outputs", ()):
            assert output.output_type != "error"


def test_the_list_of_lessons_is_true():
    """Every lesson has a row in the README with its own question and minutes, in order, and no row leads nowhere."""
    readme = (ROOT / "notebooks" / "README.md").read_text()
    found = re.findall(r"^\| \[(\d\d) [^]]*\]\((.*?)\) \| (.*?) \| (\d+) \|$", readme, re.MULTILINE)
    expected = []
    for path in execute.lessons():
        first = nbformat.read(path, as_version=4).cells[0].source
        question = re.search(r"\n\*\*(.*?)\*\*\n", first, re.DOTALL)[1].replace("\n", " ")
        minutes = sum(map(int, re.findall(r"\d+", re.search(r"\*Time:\*(.*)", first)[1])))
        expected.append((path.name[:2], path.name, question, str(minutes)))
    assert found == expected


@pytest.mark.parametrize("name", ["3", "99", "tour"])
def test_a_lesson_that_is_not_there(name, capsys):
    """It ran nothing, and said that all was well."""
    assert execute.main([name, "--check"]) == 1
    assert capsys.readouterr().err.startswith(f"error: lesson is {name!r}; accepted: 00, 01, 02")


def test_a_changed_number_is_seen():
    """The comparison fails where a number differs, and lets a time pass."""
    cell = nbformat.v4.new_code_cell("print(890)")
    other = nbformat.v4.new_code_cell("print(890)")
    cell.outputs = [nbformat.v4.new_output("stream", text="890 bytes in 1.5 s\n")]
    other.outputs = [nbformat.v4.new_output("stream", text="890 bytes in 2.5 s\n")]
    one, two = (nbformat.v4.new_notebook(cells=[c]) for c in (cell, other))
    assert not execute.differences(one, two)
    other.outputs[0].text = "891 bytes in 2.5 s\n"
    assert execute.differences(one, two)


def test_the_explorer_is_committed_as_what_stands_in_without_a_kernel():
    explorer = nbformat.read(ROOT / "notebooks" / "explorer.ipynb", as_version=4)
    (output,) = next(cell for cell in explorer.cells if cell.cell_type == "code").outputs
    assert set(output.data) == {"text/html", "text/plain"}
    assert "<img " in output.data["text/html"] and "stored by a token\t890\tbytes" in output.data["text/plain"]
