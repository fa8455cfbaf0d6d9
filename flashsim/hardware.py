"""Accelerators from `data/hardware.toml`: memory, bandwidth and peak rates, each with its source.

    >>> device("h200-sxm").memory_bytes
    141000000000

Rates are the makers' own, dense; `measured` holds what was measured, where it was.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from flashsim.paths import data_dir
from flashsim.reading import ConfigError, Missing


@dataclass(frozen=True)
class Rates:
    """Bytes a second of the memory and FLOP/s by precision (`bf16`, `fp8`, `fp4`), and where they are from."""

    hbm_bytes_per_s: int
    peak_flops_per_s: Mapping[str, float]
    source: str


@dataclass(frozen=True)
class Device:
    """One accelerator: its key in the file, its name, memory in bytes, rates as stated and, perhaps, as measured."""

    key: str
    name: str
    memory_bytes: int
    rates: Rates
    measured: Rates | None = field(default=None)


@lru_cache
def devices() -> Mapping[str, Device]:
    """Every device of `data/hardware.toml` by its key.

    Raises:
        ConfigError: a field is missing or is no positive number.
    """
    path = data_dir() / "hardware.toml"
    with path.open("rb") as file:
        tables = tomllib.load(file)
    return MappingProxyType({key: _device(key, table) for key, table in tables.items()})


def device(key: str | Device) -> Device:
    """The device of this key.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(key, Device):
        return key
    known = devices()
    if not isinstance(key, str) or key not in known:
        raise ConfigError("device", key, ", ".join(known))
    return known[key]


def _device(key: str, table: Mapping[str, Any]) -> Device:
    measured = table.get("measured")
    return Device(
        key,
        _get(table, f"{key}.name", str),
        _positive(table, f"{key}.memory_bytes"),
        _rates(table, key),
        _rates(measured, f"{key}.measured") if measured is not None else None,
    )


def _rates(table: Mapping[str, Any], key: str) -> Rates:
    peaks = _get(table, f"{key}.peak_flops_per_s", dict)
    for name in peaks:
        if name not in ("bf16", "fp8", "fp4"):
            raise ConfigError(f"{key}.peak_flops_per_s", name, "bf16, fp8, fp4")
        _positive(peaks, f"{key}.peak_flops_per_s.{name}")
    return Rates(
        _positive(table, f"{key}.hbm_bytes_per_s"), MappingProxyType(dict(peaks)), _get(table, f"{key}.source", str)
    )


def _get(table: Mapping[str, Any], path: str, kind: type) -> Any:
    value = table.get(path.rpartition(".")[2], Missing())
    if not isinstance(value, kind):
        raise ConfigError(path, value, f"a {kind.__name__} in data/hardware.toml")
    return value


def _positive(table: Mapping[str, Any], path: str) -> Any:
    value = table.get(path.rpartition(".")[2], Missing())
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(path, value, "a number above 0")
    return value
