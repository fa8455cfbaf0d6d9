"""Finds `data/` in a checkout or in an installed wheel."""

from __future__ import annotations

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
