"""Finds `data/` in a checkout or in an installed wheel, and writes results: all of them or none."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_dir() -> Path:
    """The folder of configs and published figures: `flashsim/_data` in a wheel, `data` in a checkout.

    Raises:
        FileNotFoundError: neither is there, so the installation is broken.
    """
    for folder in (_PACKAGE / "_data", _PACKAGE.parent / "data"):
        if (folder / "configs").is_dir():
            return folder
    raise FileNotFoundError(f"no data folder beside {_PACKAGE}: reinstall flashsim")


def write_files(out: str | os.PathLike, contents: Mapping[str, str | bytes]) -> list[Path]:
    """Writes all of the named files into the folder `out`, which is made if need be, or none of them.

    Everything is written into a temporary folder inside `out` first and then moved, so a reader never sees half a file.

    Raises:
        OutputError: `out` cannot be a folder, or cannot be written into.
    """
    out = Path(out)
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=out) as folder:
            for name, content in contents.items():
                data = content.encode() if isinstance(content, str) else content
                (Path(folder) / name).write_bytes(data)
            return [Path(os.replace(Path(folder) / name, out / name) or out / name) for name in contents]
    except OSError as error:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise OutputError(
            f"out is {str(out)!r} ({error.strerror}); accepted: a folder that can be written into"
        ) from None


class OutputError(ValueError):
    """A folder for results that cannot be made or written into."""
