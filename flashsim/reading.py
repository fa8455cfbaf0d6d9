"""Reads a JSON file that a stranger made: one clear sentence for whatever is wrong with it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 4 * 2**20
"""A `config.json` has a few kilobytes; anything above this is not one, and is not read."""


class ConfigError(ValueError):
    """A field of a config is missing, malformed, or contradicts another: names the field, its value, what is
    accepted.
    """

    def __init__(self, field: str, value: Any, accepted: str):
        shown = _one_line(str(value), 1000) if isinstance(value, Missing | Words) else shorten(value)
        super().__init__(f"{_one_line(field)} is {shown}; accepted: {_one_line(accepted, 1000)}")
        self.field, self.value, self.accepted = field, value, accepted


class Missing:
    """Stands for a value that is not there."""

    def __str__(self) -> str:
        return "missing"


class Words(str):
    """A value in words of our own, which a message shows as they are."""


def shorten(value: Any) -> str:
    """A value as one line of at most 80 characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an int of too many digits to print
        text = f"a {type(value).__name__}"
    return _one_line(text)


def _one_line(text: str, limit: int = 80) -> str:
    """The text without the line breaks and control characters that a stranger's file may have put into it."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def read_json_object(path: str | os.PathLike) -> dict[str, Any]:
    """The JSON object in a file, refusing what `json` lets through: duplicate keys, NaN, infinity, other types.

    Raises:
        ConfigError: no such file, not a regular file, empty, over `MAX_FILE_BYTES`, not UTF-8, not JSON, or not an
        object.
    """
    path, accepted = Path(path), "a config.json: one JSON object in a file of at most 4 MiB"
    try:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            raise ConfigError("config file", Words(f"{path} (a directory)"), accepted)
        if not stat.S_ISREG(info.st_mode):
            raise ConfigError("config file", Words(f"{path} (not a regular file)"), accepted)
        if info.st_size > MAX_FILE_BYTES:
            raise ConfigError("config file", Words(f"{path} ({info.st_size:,} bytes)"), accepted)
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("config file", Words(f"{path} ({reason})"), accepted) from None
    if not raw.strip():
        raise ConfigError("config file", Words(f"{path} (empty)"), accepted)
    try:
        data = json.loads(
            raw.decode("utf-8-sig"),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite_float,
        )
    except ConfigError:
        raise
    except UnicodeDecodeError:
        raise ConfigError("config file", Words(f"{path} (not UTF-8 text)"), accepted) from None
    except RecursionError:
        raise ConfigError("config file", Words(f"{path} (nested too deeply)"), accepted) from None
    except ValueError as error:
        reason = getattr(error, "msg", str(error))
        where = f", line {error.lineno}" if hasattr(error, "lineno") else ""
        raise ConfigError("config file", Words(f"{path} (not JSON: {reason}{where})"), accepted) from None
    if not isinstance(data, dict):
        raise ConfigError("config file", Words(f"{path} (a JSON {type(data).__name__})"), accepted)
    return data


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ConfigError(twice, Words("given twice in the file"), "each key once")
    return result


def _no_constant(text: str) -> Any:
    raise ConfigError("a number in the config file", text, "finite JSON numbers")


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ConfigError("a number in the config file", text, "finite JSON numbers")
    return value
