"""`python -m model.inspect FOLDER`: a checkpoint's headers against its config, without reading a weight.

Prints tensors, parameters and bytes by part and by type, or what is wrong, and exits with 1. With a preset name, or
with the path of a config.json alone, it prints what a checkpoint of that config must have: 96,085 tensors and
510,286,023,000 bytes for `v4.1-flash`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashsim.config import load_config, preset_name
from flashsim.paths import data_dir
from flashsim.reading import ConfigError, read_json_object
from flashsim.units import number_of_bytes
from model.checkpoint import INDEX_FILE, Checkpoint, text_config
from model.safetensors_file import CheckpointError
from model.tensor_table import DTYPE_BYTES, Header, TensorSpec, scale_name, stored, tensors


@dataclass
class Inspection:
    """Sums over headers. `by_part` and `by_type` map to (tensors, parameters or elements, bytes)."""

    name: str
    layout: str
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    files: int = 0
    by_part: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    by_type: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        keys = ("tensors", "parameters", "bytes")
        return {
            "name": self.name,
            "layout": self.layout,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "files": self.files,
            "by_part": {part: dict(zip(keys, sums, strict=True)) for part, sums in self.by_part.items()},
            "by_type": {
                kind: dict(zip(("tensors", "elements", "bytes"), sums, strict=True))
                for kind, sums in self.by_type.items()
            },
            "notes": self.notes,
        }

    def __str__(self) -> str:
        where = f" in {self.files} file{'s' * (self.files != 1)}" if self.files else ", expected"
        lines = [
            f"{self.name}: {self.layout}{where}",
            f"{'':10}{'tensors':>10}{'parameters':>20}{'bytes':>20}",
            *(f"{part:10}{count:>10,}{size:>20,}{size_b:>20,}" for part, (count, size, size_b) in self.by_part.items()),
            f"{'total':10}{self.tensors:>10,}{self.parameters:>20,}{self.nbytes:>20,}",
            "",
            f"{'type':10}{'tensors':>10}{'elements':>20}{'bytes':>20}",
            *(f"{kind:10}{count:>10,}{size:>20,}{size_b:>20,}" for kind, (count, size, size_b) in self.by_type.items()),
            "",
            number_of_bytes(self.nbytes),
        ]
        return "\n".join(lines + self.notes)


def summarise(
    name: str, layout: str, table: Mapping[str, TensorSpec], headers: Mapping[str, Header], files: int = 0
) -> Inspection:
    """Sums of the headers of a checkpoint whose parameters are `table`."""
    result = Inspection(name, layout, files=files)
    parts: dict[str, Counter] = {}
    kinds: dict[str, Counter] = {}
    for parameter, spec in table.items():
        sums = parts.setdefault(spec.part, Counter(tensors=0, parameters=0, bytes=0))
        if parameter not in headers:
            continue
        sums["parameters"] += math.prod(spec.shape)
        for key in {parameter, scale_name(parameter)} if spec.quantised else {parameter}:
            if key in headers:
                sums["tensors"] += 1
                sums["bytes"] += headers[key].nbytes
    for header in headers.values():
        sums = kinds.setdefault(header.dtype, Counter())
        sums.update(tensors=1, elements=math.prod(header.shape), bytes=header.nbytes)
    result.by_part = {part: (s["tensors"], s["parameters"], s["bytes"]) for part, s in parts.items() if s["tensors"]}
    order = sorted(kinds, key=lambda kind: (-DTYPE_BYTES[kind], kind))
    result.by_type = {kind: tuple(kinds[kind][key] for key in ("tensors", "elements", "bytes")) for kind in order}
    result.tensors = len(headers)
    result.parameters = sum(parameters for _, parameters, _ in result.by_part.values())
    result.nbytes = sum(header.nbytes for header in headers.values())
    absent = [part for part, s in parts.items() if not s["tensors"]]
    result.notes += [f"The config implies a {part} part; the files have none." for part in absent]
    return result


def expected(source: str | os.PathLike, *, quantised: bool | None = None) -> Inspection:
    """What a checkpoint of a preset or of a `config.json` must have, drafter and vision included.

    Args:
        source: a preset name or the path of a config.json or its folder.
        quantised: packed weights or not; by default what the config's `quantization_config` says.

    Raises:
        ConfigError: naming the field.

    >>> report = expected("v4.1-flash")
    >>> report.tensors, report.nbytes, report.parameters
    (96085, 510286023000, 763205315794)
    """
    config = text_config(load_config(source))
    preset = preset_name(source) if isinstance(source, str) else None
    path = data_dir() / "configs" / f"{preset}.json" if preset else Path(source)
    root = read_json_object(path / "config.json" if path.is_dir() else path)
    quantised = "quantization_config" in root if quantised is None else quantised
    table = tensors(config, root.get("vision_config"))
    return summarise(
        config.name, "quantised" if quantised else "unquantised", table, stored(table, quantised=quantised)
    )


def inspect(folder: str | os.PathLike) -> Inspection:
    """A folder's headers, checked against its config and summed.

    Raises:
        CheckpointError, ConfigError: the first kind of problem, naming the tensors or the field.
    """
    checkpoint = Checkpoint(folder)
    layout = "quantised" if checkpoint.packed else "unquantised"
    report = summarise(checkpoint.folder.name, layout, checkpoint.table, checkpoint.headers, len(checkpoint.files))
    if checkpoint.index is not None:
        metadata = json.loads((checkpoint.folder / INDEX_FILE).read_bytes()).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if total is not None and total != report.nbytes:
            report.notes.append(f"The index states total_size {total!r}; the tensors have {report.nbytes:,} bytes.")
    return report


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status: 0 when everything fits, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m model.inspect", description="Checks headers against the config.")
    parser.add_argument("folder", help="a checkpoint folder; or a preset name or a config.json, for what it must have")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        source = options.folder
        alone = (preset_name(source) is not None and not Path(source).is_dir()) or Path(source).suffix == ".json"
        report = expected(source) if alone else inspect(source)
    except (CheckpointError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report.to_dict(), indent=1) if options.json else report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
