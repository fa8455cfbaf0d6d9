"""Prompts at full size: what half a model saves in prefill, and what a kept prefix saves before the first token.

    python -m model.fullsize_prompts --contexts 8Ki,32Ki,128Ki --tie-experts --out data/measured/fullsize_prompts.csv

| kind | mode | what runs |
| --- | --- | --- |
| `prefill` | `bounded` | encoder half for every row, decoder half for the last `sliding_window` |
| `prefill` | `exact` | the same with as many rows of the decoder half as exact logits take |
| `prefill` | `full` | every layer for every row |
| `replay` | `cold`, `exact`, `bounded` | a prompt of which all but the last `--new` tokens are kept (`model.replay`) |

`seconds` is the time to the first token's logits, the shortest of `--repeats` runs after one that is counted. The model
is that of `model.fullsize`: the released shape with random weights. Stored prefixes are random records.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from flashsim.persistent import REPLAY_MODES
from flashsim.reading import ConfigError
from flashsim.units import parse_context
from model.flop_counter import FlopCounter
from model.fullsize import SHAPE, add_shape_options, build_from, filled_cache, shape_of
from model.run_rows import append, rows_of, where
from model.transformer import Transformer

FIELDS = (
    *(*SHAPE, "kind", "mode", "tokens", "kept", "chunk"),
    *("seconds", "counted_flops", "peak_bytes", "device", "torch", "triton", "commit", "date"),
)
SETTINGS = (*SHAPE, "kind", "mode", "tokens", "kept", "chunk")


def runs(model: Transformer, tokens: int, new: int, chunk: int) -> Iterator[tuple[str, str, int, Callable[[], Any]]]:
    """(kind, mode, tokens that had been kept, what to run) for a prompt of so many tokens."""
    ids = torch.arange(tokens, device=model.device).remainder(model.config.vocab_size).unsqueeze(0)
    tails = {"bounded": model.config.sliding_window, "exact": "exact", "full": None}
    for mode, tail in tails.items():
        yield "prefill", mode, 0, lambda tail=tail: model.prefill(ids, tail=tail, chunk=chunk)
    if tokens > new:
        before = filled_cache(model, 1, tokens - new, room=0)
        before.tokens[:, : tokens - new] = ids[:, : tokens - new]
        stored = before.prefix(tokens - new)
        del before
        for mode in REPLAY_MODES:
            yield "replay", mode, tokens - new, lambda mode=mode: model.replay(ids, stored, mode, chunk=chunk)


def measure(model: Transformer, run: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Seconds, counted FLOPs and peak bytes of a run."""
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with FlopCounter(model) as counter:
        run()
    best = float("inf")
    for _ in range(repeats):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return {
        "seconds": f"{best:.6f}",
        "counted_flops": sum(counter.flops.values()),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else "",
    }


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m model.fullsize_prompts", description=__doc__.split("\n")[0])
    add_shape_options(parser)
    parser.add_argument("--contexts", default="8Ki", help="tokens of a prompt: 8Ki,32Ki,128Ki (8Ki)")
    parser.add_argument("--new", type=int, default=256, help="tokens of a prompt behind its kept prefix (256)")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens that run at a time (4,096)")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs (2)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="start nothing after so many seconds")
    parser.add_argument("--out", type=Path, help="CSV file that rows are appended to; without it they are only printed")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 and one line where something cannot be."""
    try:
        return _sweep(options(arguments))
    except (ArithmeticError, ConfigError, MemoryError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _sweep(chosen: argparse.Namespace) -> int:
    start = time.perf_counter()
    contexts = [parse_context(text) for text in chosen.contexts.split(",")]
    for field in ("new", "chunk", "repeats"):
        if getattr(chosen, field) < 1:
            raise ValueError(f"{field} is {getattr(chosen, field)}; accepted: a whole number from 1")
    model, ranks = build_from(chosen)
    if ranks.number > 1:
        raise ValueError(f"ranks is {ranks.number}; accepted: 1, for prompts")
    device = where(model.device)
    known = rows_of(chosen.out, FIELDS, device["device"]) if chosen.out else []
    known = {tuple(row[key] for key in SETTINGS) for row in known}
    for tokens in contexts:
        for kind, mode, kept, run in runs(model, tokens, chosen.new, chosen.chunk):
            row = shape_of(model, ranks, chosen)
            row |= {"kind": kind, "mode": mode, "tokens": tokens, "kept": kept, "chunk": chosen.chunk}
            if tuple(str(row[key]) for key in SETTINGS) in known:
                continue
            if time.perf_counter() - start > chosen.limit:
                print(f"limit of {chosen.limit:.0f} s: run again to go on with {kind} {mode} of {tokens:,} tokens")
                return 0
            row |= measure(model, run, chosen.repeats) | device
            if chosen.out:
                append(chosen.out, FIELDS, row)
            text = f"{kind} {mode}, {tokens:,} tokens, {kept:,} kept: {float(row['seconds']):.3f} s"
            print(f"{text}, {row['counted_flops'] / 1e12:.3f} TFLOPs counted", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
