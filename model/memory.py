"""What fits: the free memory of a device, asked before anything large is made."""

from __future__ import annotations

from pathlib import Path

import torch

from flashsim.units import number_of_bytes


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be had on a device, or None where that cannot be known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


MODEST = 2**26
"""So few bytes are taken without asking, where asking would cost more than it tells: at every step, in every cache."""


def require(what: str, needed: int, device: torch.device | str, hint: str = "") -> None:
    """Nothing where `needed` bytes are free, or where that cannot be known.

    Raises:
        MemoryError: fewer are free; says how many, and the hint.
    """
    free = free_memory(torch.device(device))
    if free is not None and needed > free:
        raise MemoryError(f"{what} needs {number_of_bytes(needed)}, {device} has {number_of_bytes(free)} free{hint}")
