"""Finds `data/` in a checkout or in an installed wheel, and writes results: all of them or none."""

from __future__ import annotations

import contextlib
import os
import shutil
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


class OutputError(ValueError):
    """A folder for results that cannot be made or written to."""


def write_files(out: str | os.PathLike[str], contents: Mapping[str, bytes]) -> list[Path]:
    """Writes all of the named files into the folder `out`, which is made where needed, or none of them.

    Everything goes into a temporary folder inside `out` first and is moved into place, file by file, at the end.
    After an error, `out` is as it was found.

    Raises:
        OutputError: `out` cannot be made or written to, or holds a folder by the name of a file.
    """
    made: list[Path] = []
    staging = None
    try:
        if not os.fspath(out):
            raise ValueError("an empty path")
        folder = Path(out)
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
        for name, content in contents.items():
            if (folder / name).is_dir():
                raise ValueError(f"with a folder {name} in it")
            (staging / name).write_bytes(content)
        moved: list[str] = []
        try:
            for name in contents:
                if (folder / name).exists():
                    os.replace(folder / name, staging / f"{name}.before")
                moved.append(name)
                os.replace(staging / name, folder / name)
        except OSError:
            for name in moved:  # put back what was there
                (folder / name).unlink(missing_ok=True)
                if (staging / f"{name}.before").exists():
                    os.replace(staging / f"{name}.before", folder / name)
            raise
        made = []
        return [folder / name for name in contents]
    except (OSError, TypeError, ValueError) as error:
        shown, reason = str(out) or "''", getattr(error, "strerror", None) or error
        shown = shown if shown.isprintable() and len(shown) < 200 else f"{shown[:60]!r}"
        raise OutputError(f"out is {shown} ({reason}); accepted: a folder that can be made or written to") from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        for path in made:
            with contextlib.suppress(OSError, ValueError):
                path.rmdir()
