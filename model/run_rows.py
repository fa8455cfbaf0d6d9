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
        found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def device_of(name: str) -> torch.device:
    """The device that a command line names, a GPU or the CPU.

    Raises:
        ValueError: it is neither, or there is no GPU.
    """
    kind = name.partition(":")[0]
    try:
        device = torch.device(name)
    except RuntimeError:
        kind = ""
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"device is {name!r}; accepted: cuda, cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name}, and PyTorch finds no GPU; accepted: --device cpu, for small models")
    return device


def rows_of(path: Path, fields: Sequence[str], device: str) -> list[dict[str, str]]:
    """The rows that a file has for this device; none where there is no file, or an empty one.

    Raises:
        ValueError: the file has other columns, half a row, or cannot be read.
    """
    try:
        text = path.read_bytes().decode() if path.exists() else ""
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); accepted: a CSV file, or a new one") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8; accepted: a file of this command, or a new one") from None
    if not text:
        return []
    file = csv.DictReader(io.StringIO(text, newline=""))
    if tuple(file.fieldnames or ()) != tuple(fields):
        raise ValueError(f"{path} has other columns; accepted: a file of this command, or a new one")
    if not text.endswith("\n"):
        raise ValueError(f"{path} ends within line {len(text.splitlines())}; accepted: whole rows, so remove that line")
    found = []
    for row in file:
        if None in row or None in row.values():
            raise ValueError(f"{path} has other cells than columns in line {file.line_num}; accepted: whole rows")
        found.append(row)
    return [row for row in found if row["device"] == device]


def append(path: Path, fields: Sequence[str], *rows: Mapping[str, Any]) -> None:
    """Whole rows at the end of the file, in one write; the file is made where there is none.

    Raises:
        ValueError: it cannot be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="") as file:
            if not file.tell():
                writer.writeheader()
            writer.writerows(rows)
            file.write(text.getvalue())
    except OSError as error:
        accepted = "a CSV file in a folder that can be written to"
        raise ValueError(f"{path} cannot be written ({error.strerror}); accepted: {accepted}") from None
