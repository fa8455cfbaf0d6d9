"""Rows of measurements: whole rows appended to a CSV file, each with device, versions, commit and date."""

from __future__ import annotations

import csv
import datetime
import io
import os
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def where(device: torch.device) -> dict[str, str]:
    """Device, versions, commit and date. The commit is $COMMIT, for a copy without history, or git's."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "triton": triton,
        "commit": os.environ.get("COMMIT") or _git(),
        "date": datetime.date.today().isoformat(),
    }


def _git() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def rows_of(path: Path, fields: Sequence[str], device: str) -> list[dict[str, str]]:
    """The rows that a file has for this device; none where there is no file.

    Raises:
        ValueError: the file has other columns.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != tuple(fields):
            raise ValueError(f"{path} has other columns; accepted: a file of this command, or a new one")
        return [row for row in rows if row["device"] == device]


def append(path: Path, fields: Sequence[str], *rows: Mapping[str, Any]) -> None:
    """Whole rows at the end of the file, in one write; the file is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    if not path.exists():
        writer.writeheader()
    writer.writerows(rows)
    with path.open("a", newline="") as file:
        file.write(text.getvalue())
