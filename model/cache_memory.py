"""Figure 1(b) measured: caches of released size are allocated, and the device is asked what they take.

    python -m model.cache_memory --out data/measured/cache_memory.csv

Each cache is made at four lengths up to 2^20 tokens, as far as memory goes, and three accounts are read: what its
tensors asked for, what PyTorch's allocator gave (large tensors in whole pages of 2 MiB, small ones in 512 bytes), and
how much less the driver has free. A line through the four lengths has a slope, bytes a token, to stand beside
`flashsim.kv_bytes_per_token`, and a fixed part: windows, rings and open groups, which do not grow. The lengths are
whole groups of every compression ratio, so asking has the slope of the formula exactly; giving differs by whole pages.

On a CPU there is one account, the bytes of the tensors' storages.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from flashsim.config import Config, DSAConfig, GQAConfig, MLAConfig, V4Config, V41Config, load_config
from flashsim.kv_cache import kv_bytes_per_token, kv_cache
from flashsim.reading import ConfigError
from flashsim.units import parse_context
from model.cache import Cache
from model.memory import free_memory
from model.run_rows import append, device_of, rows_of, where
from model.token_cache import TokenCache
from model.v4_cache import V4Cache

CACHES: Mapping[type[Config], type] = {
    GQAConfig: TokenCache,
    MLAConfig: TokenCache,
    DSAConfig: TokenCache,
    V4Config: V4Cache,
    V41Config: Cache,
}
MODELS = "v1,v3.2,v4-flash,v4.1-flash"
"""Those of Figure 1(b)."""

FIELDS = (
    *("model", "tokens", "predicted_bytes", "requested_bytes", "allocated_bytes", "driver_bytes"),
    *("device", "torch", "triton", "commit", "date"),
)
SETTINGS = ("model", "tokens")
ACCOUNTS = FIELDS[3:6]


def measure(config: Config, tokens: int, device: torch.device) -> dict[str, Any]:
    """The accounts of a cache of one sequence with room for so many tokens; None where a device keeps none."""
    before = _accounts(device)
    cache = CACHES[type(config)](config, capacity=tokens, dtype=torch.bfloat16, device=device)
    after = _accounts(device)
    taken = [b - a for a, b in zip(before, after, strict=True)] if before else [cache.reserved_nbytes(), "", ""]
    return {
        "model": config.name,
        "tokens": tokens,
        "predicted_bytes": kv_cache(config, tokens).total(),
        **dict(zip(ACCOUNTS, taken, strict=True)),
        **where(device),
    }


def _accounts(device: torch.device) -> list[int] | None:
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    statistics = torch.cuda.memory_stats(device)
    keys = ("requested_bytes.all.current", "allocated_bytes.all.current")
    return [*(statistics.get(key, 0) for key in keys), total - free]


def line(tokens: Sequence[int], taken: Sequence[int]) -> tuple[float, float]:
    """(fixed, slope) of the straight line that lies closest to the points.

    >>> line([1, 2, 3, 4], [12, 14, 16, 18])
    (10.0, 2.0)
    """
    mean_n, mean_b = Fraction(sum(tokens), len(tokens)), Fraction(sum(taken), len(taken))
    spread = sum((n - mean_n) ** 2 for n in tokens)
    slope = sum((n - mean_n) * (b - mean_b) for n, b in zip(tokens, taken, strict=True)) / spread if spread else 0
    return float(mean_b - slope * mean_n), float(slope)


def lengths_that_fit(config: Config, longest: int, device: torch.device) -> list[int]:
    """Four lengths in equal steps up to `longest`, halved until the cache takes nine tenths of free memory at most."""
    free = free_memory(device)
    while free is not None and kv_cache(config, longest).total() > 0.9 * free and longest > 512:
        longest = max(longest // 1024, 1) * 512
    return [longest * quarter // 4 for quarter in (1, 2, 3, 4)]


def summary(rows: Sequence[Mapping[str, Any]], configs: Sequence[Config]) -> list[str]:
    """For each model slope and fixed part of every account, beside the formula."""
    lines = []
    for config in configs:
        name, mine = config.name, [row for row in rows if row["model"] == config.name]
        tokens = [int(row["tokens"]) for row in mine]
        predicted = float(kv_bytes_per_token(config))
        lines.append(f"{name}: formula {predicted:,.4f} bytes a token; up to {max(tokens):,} tokens")
        for account in ACCOUNTS:
            if any(row[account] == "" for row in mine):
                continue
            fixed, slope = line(tokens, [int(row[account]) for row in mine])
            lines.append(f"  {account:16} {slope:14,.4f} a token ({slope / predicted - 1:+.3%}), fixed {fixed:14,.0f}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 and one line where something cannot be."""
    parser = argparse.ArgumentParser(prog="python -m model.cache_memory", description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=MODELS, help=f"presets or config.json files ({MODELS})")
    parser.add_argument("--longest", default="1Mi", help="tokens of the longest cache, as far as memory goes (1Mi)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    parser.add_argument("--out", type=Path, help="CSV file that rows are appended to; without it they are only printed")
    chosen = parser.parse_args(arguments)
    try:
        device, longest = device_of(chosen.device), parse_context(chosen.longest)
        if longest % 512:
            raise ValueError(f"longest is {longest}; accepted: a multiple of 512, four whole groups of 128")
        configs = [load_config(name) for name in chosen.models.split(",")]
        known = rows_of(chosen.out, FIELDS, where(device)["device"]) if chosen.out else []
        have = {tuple(row[key] for key in SETTINGS) for row in known}
        rows = []
        for config in configs:
            for tokens in lengths_that_fit(config, longest, device):
                if (config.name, str(tokens)) in have:
                    rows += [row for row in known if (row["model"], row["tokens"]) == (config.name, str(tokens))]
                    continue
                row = measure(config, tokens, device)
                if chosen.out:
                    append(chosen.out, FIELDS, row)
                rows.append(row)
    except (ConfigError, MemoryError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(summary(rows, configs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
