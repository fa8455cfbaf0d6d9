"""Pages of the book that are made and not written: the lessons with their outputs, and the report claim by claim.

They go into `book/_generated`, which is not kept. A page whose text has not changed is left alone, so a second build
has nothing to do.
"""

from __future__ import annotations

import os
import re
from html import unescape
from itertools import groupby
from pathlib import Path

import nbformat

from flashsim.claims import VERDICTS, Claim, check_claims, residual_text, value_text

HERE = Path(__file__).resolve().parent
NOTEBOOKS = HERE.parent / "notebooks"
TARGET = HERE / "_generated"
TITLE = re.compile(r"^# (?=\d\d\.)", re.MULTILINE)
PICTURE = re.compile(r"<desc[^>]*>(.*?)</desc>", re.DOTALL)
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")  # a link of a lesson to a file of the repository


def chapters() -> dict[str, Path]:
    """Number to page of every chapter, `02` to `chapters/02_one_latent.md`."""
    return {path.name[:2]: path for path in sorted((HERE / "chapters").glob("[0-9][0-9]_*.md"))}


def lessons() -> dict[str, Path]:
    """Number to notebook of every lesson."""
    return {path.name[:2]: path for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))}


def waiting() -> list[str]:
    """Chapters whose lesson is not written yet, as patterns that Sphinx leaves out."""
    there = lessons()
    return [f"chapters/{path.name}" for number, path in chapters().items() if number not in there]


def lesson_page(path: Path) -> str:
    """A lesson as its page shows it: as committed, pictures with their words, links out of the book as plain words."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = TITLE.sub("# Lesson ", OUTSIDE.sub(r"\1", cell.source))
            continue
        drawn = [
            str(output.data["image/svg+xml"]) for output in cell.outputs if "image/svg+xml" in output.get("data", {})
        ]
        words = [unescape(text) for svg in drawn for text in PICTURE.findall(svg)]
        if words:
            cell.metadata["mystnb"] = {"image": {"alt": " ".join(" ".join(words).split())}}
    return nbformat.writes(notebook)


def claims_page() -> str:
    """Every published number beside the one computed here, a table for each generation, and what was left out."""
    claims = check_claims()
    counts = [f"{sum(c.verdict == verdict for c in claims)} {verdict}" for verdict in VERDICTS]
    nothing = [c for c in claims if c.computed is None]
    lines = [
        "# The report, claim by claim",
        "",
        f"{len(claims)} numbers were published about these models. Each was computed again, by the formulas of the "
        f"library from the released configs, when this page was built: {', '.join(counts)}. "
        "`flashsim verify` prints the same, and fails where a verdict becomes worse.",
        "",
        "*Exact* is equal. *Within stated rounding* is equal at the precision that the source states. *Approximate* is "
        "within 10 %. *Not reproducible* is further away, or nothing computes it: a price, a score, a policy.",
        "",
    ]
    computed = sorted((c for c in claims if c.computed is not None), key=lambda c: c.generation)
    for generation, group in groupby(computed, key=lambda c: c.generation):
        lines += [f"## {'All generations' if generation == 'all' else generation}", ""]
        lines += ["| claim | published | computed | residual | verdict |", "| --- | ---: | ---: | ---: | --- |"]
        lines += [_row(claim) for claim in group] + [""]
    lines += ["## Nothing to compute", "", "| claim | published | why |", "| --- | ---: | --- |"]
    lines += [f"| {_name(c)} | {_cell(f'{value_text(c.published)} {c.unit}')} | {_cell(c.how)} |" for c in nothing]
    return "\n".join([*lines, ""])


def _row(claim: Claim) -> str:
    published = f"{value_text(claim.published)} {claim.unit}"
    cells = (published, value_text(claim.computed), residual_text(claim), claim.verdict)
    about = f"{_name(claim)}<br><small>{_cell(claim.how)}. {_cell(claim.source)}</small>"
    return f"| {about} | " + " | ".join(map(_cell, cells)) + " |"


def _name(claim: Claim) -> str:
    return f"`{claim.id}`"


def _cell(text: str) -> str:
    """Text that stays itself in a cell of a Markdown table."""
    return re.sub(r"([|*_<>`$\[\]])", r"\\\1", str(text))


def write(target: Path = TARGET) -> None:
    """Writes the pages, and removes those that no longer belong."""
    pages = {f"lessons/{path.name}": lesson_page(path) for path in lessons().values()}
    pages["claims.md"] = claims_page()
    for name, text in pages.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            partial = path.with_name(f"{path.name}.{os.getpid()}")  # two builds may run at once
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
    for path in [*target.rglob("*.md"), *target.rglob("*.ipynb")]:
        if path.relative_to(target).as_posix() not in pages:
            path.unlink()
