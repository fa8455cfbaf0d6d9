"""`python -m model.convert IN OUT --to quantised|bfloat16|float32`: a checkpoint in another layout.

Drafter and vision tensors go along where IN has them. Going to `quantised` and back changes values once; after that
both directions keep every value. Memory holds one piece of one tensor at a time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from flashsim.reading import ConfigError
from flashsim.units import number_of_bytes
from model.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint
from model.safetensors_file import CheckpointError
from model.saving import LAYOUTS, SHARD_BYTES, write_checkpoint

MAX_EXTRA_BYTES = 64 * 2**20
_EXTRAS = (".json", ".jinja", ".txt", ".md", ".model")
_FLOATS = {"float32": "F32", "bfloat16": "BF16", "released": None}


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    layout: str,
    *,
    floats: str = "released",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[str, int], None] | None = None,
) -> Path:
    """Writes the checkpoint `source` to the new folder `target`.

    Args:
        layout: `quantised`, `bfloat16` or `float32`.
        floats: with `quantised`, the type of the tensors that carry no scales: `released`, `float32` or `bfloat16`.
        shard_bytes: the most a file takes, unless one tensor takes more.
        progress: called with each tensor's name and stored bytes.

    Raises:
        CheckpointError, ConfigError: naming what is wrong with the source, or a target that is there already.
    """
    if floats not in _FLOATS:
        raise CheckpointError(f"floats is {floats!r}; accepted: {', '.join(_FLOATS)}")
    if floats != "released" and layout != "quantised":
        raise CheckpointError(f"floats is {floats!r} with layout {layout!r}; accepted with quantised alone")
    checkpoint = Checkpoint(source)
    table = {name: spec for name, spec in checkpoint.table.items() if spec.part in checkpoint.parts}
    extras = {
        path.name: checkpoint.inside(path.name).read_bytes()
        for path in sorted(checkpoint.folder.iterdir())
        if path.suffix in _EXTRAS
        and path.name not in (CONFIG_FILE, INDEX_FILE)
        and path.is_file()
        and path.stat().st_size <= MAX_EXTRA_BYTES
    }

    def rows(name: str, start: int, stop: int) -> torch.Tensor:
        return checkpoint.weight(name, torch.float32, start, stop)

    return write_checkpoint(
        target,
        table,
        rows,
        layout,
        config_json=checkpoint.root,
        shard_bytes=shard_bytes,
        floats=_FLOATS[floats],
        extra_files=extras,
        progress=progress,
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m model.convert", description="A checkpoint in another layout.")
    parser.add_argument("source", metavar="IN", help="a checkpoint folder")
    parser.add_argument("target", metavar="OUT", help="the new folder")
    parser.add_argument("--to", required=True, choices=LAYOUTS, dest="layout")
    parser.add_argument("--floats", default="released", choices=list(_FLOATS), help="type of tensors without scales")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, metavar="N")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    options = parser.parse_args(arguments)
    written, started = [0, 0], time.monotonic()

    def progress(name: str, nbytes: int) -> None:
        written[0] += 1
        written[1] += nbytes
        if not options.quiet and sys.stderr.isatty():
            print(f"\r{written[0]:,} tensors, {written[1]:,} bytes: {name:60.60}", end="", file=sys.stderr)

    try:
        folder = convert(
            options.source,
            options.target,
            options.layout,
            floats=options.floats,
            shard_bytes=options.shard_bytes,
            progress=progress,
        )
    except (CheckpointError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    print(f"{folder}: {written[0]:,} tensors, {number_of_bytes(written[1])}, {options.layout}, {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
