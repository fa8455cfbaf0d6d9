"""Runs lessons from top to bottom: `python notebooks/execute.py [03 07 ...] [--check]`.

Without `--check` the outputs are written into the notebooks, as they are committed. With it nothing is written, and a
lesson fails where a cell raises, or where a number it prints differs from the committed one. Durations and rates are
masked, and cells tagged `varies` (training, sampling: sums in another order) are compared without their numbers.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
TIMES = re.compile(r"\d[\d,.]*\s?(?:s|ms|us|µs|min|seconds|tokens/s|GB/s|GFLOP/s)\b")
NUMBERS = re.compile(r"-?\d[\d,.]*(?:e[+-]?\d+)?")
WIDGET = "application/vnd.jupyter.widget-view+json"
TEXTS = ("text/markdown", "text/plain")


def lessons() -> list[Path]:
    """Every notebook of the course, in order."""
    return sorted(HERE.glob("[0-9][0-9]_*.ipynb"))


def notebooks() -> list[Path]:
    """Every lesson, and the explorer."""
    return [*lessons(), HERE / "explorer.ipynb"]


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh run; raises where a cell does."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    where = {"metadata": {"path": str(HERE)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", coalesce_streams=True, resources=where).execute()
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            if "text/html" in output.get("data", {}):
                output.data.pop(WIDGET, None)  # lives as long as its kernel; the HTML stands in where there is none
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def printed(cell: nbformat.NotebookNode) -> str:
    """What a cell said in words, times masked; of a picture its alt text, of a widget the words beside it."""
    parts = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if output.output_type == "stream":
            parts.append(output.text)
        elif "image/svg+xml" in data:
            parts += re.findall(r"<desc[^>]*>(.*?)</desc>", str(data["image/svg+xml"]), re.DOTALL)
        elif WIDGET not in data:
            parts.append(next((data[kind] for kind in TEXTS if kind in data), ""))
    text = TIMES.sub("TIME", "\n".join(parts))
    if "varies" in cell.metadata.get("tags", ()):
        text = NUMBERS.sub("NUMBER", text)
    return re.sub(r"\s+", " ", re.sub(r"0x[0-9a-f]+", "ADDRESS", text)).strip()


def differences(old: nbformat.NotebookNode, new: nbformat.NotebookNode) -> list[str]:
    """Where the outputs of two runs differ, a line each."""
    found = []
    for i, (before, after) in enumerate(zip(old.cells, new.cells, strict=True)):
        if before.cell_type == "code" and printed(before) != printed(after):
            found.append(f"cell {i}: committed {printed(before)[:300]!r}, now {printed(after)[:300]!r}")
    return found


def definitions(notebook: nbformat.NotebookNode) -> list[str]:
    """`def` and `class` in cells: what belongs into a package, with a test."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        f"cell {i}: {node.name}"
        for i, cell in enumerate(notebook.cells)
        if cell.cell_type == "code"
        for node in ast.walk(ast.parse(cell.source))
        if isinstance(node, kinds)
    ]


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 where a lesson fails."""
    parser = argparse.ArgumentParser(prog="python notebooks/execute.py", description=__doc__.split("\n")[0])
    parser.add_argument("lessons", nargs="*", help="numbers of lessons, or explorer; all of them")
    parser.add_argument("--check", action="store_true", help="write nothing, compare with what is committed")
    chosen = parser.parse_args(arguments)
    known = [path.stem.partition("_")[0] for path in notebooks()]
    for name in chosen.lessons:
        if name not in known:
            print(f"error: lesson is {name!r}; accepted: {', '.join(known)}", file=sys.stderr)
            return 1
    failed = 0
    for path in notebooks():
        if chosen.lessons and path.stem.partition("_")[0] not in chosen.lessons:
            continue
        start = time.perf_counter()
        try:
            made = run(path)
            found = differences(nbformat.read(path, as_version=4), made) if chosen.check else []
        except Exception as error:  # a cell may raise anything
            found = [str(error)]
        failed += bool(found)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", *found, sep="\n  ", flush=True)
        if not found and not chosen.check:
            nbformat.write(made, path)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
