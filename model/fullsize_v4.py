"""V4-Flash at its released shape beside V4.1's: counted FLOPs of a decode step, and the time of its kernels.

    python -m model.fullsize_v4 --contexts 4Ki,64Ki,128Ki,1Mi --out data/measured/fullsize.csv --profile profile.csv

Rows are those of `model.fullsize`, so that both models stand in one file. V4 runs in PyTorch (`reference`), with plain
bfloat16 weights, random, of which all layers share the routed experts of the first. It is launched op by op and asks
the device which experts were picked, so `step_us` is the host's time; what compares with V4.1 is the profile of both
under `reference`, part by part, for the parts that read the cache: `attention` and `indexer`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashsim.config import V4Config, load_config
from flashsim.flops import decode_flops
from flashsim.kv_cache import kv_cache
from flashsim.reading import ConfigError
from flashsim.units import parse_context
from model.flop_counter import FlopCounter
from model.fullsize import FIELDS, PROFILE_FIELDS, SETTINGS, compared, flops_of, profile_rows, times_us
from model.memory import require
from model.random_weights import spread
from model.run_rows import append, device_of, rows_of, where
from model.v4_cache import V4Cache
from model.v4_moe import V4MoE
from model.v4_transformer import V4Transformer

ROWS_AT_ONCE = 2**16
"""So many records are drawn and packed at a time."""


def build(config: V4Config, dtype: torch.dtype, device: torch.device, seed: int = 0) -> V4Transformer:
    """The model with random plain weights, the routed experts of its first layer in every layer.

    Raises:
        MemoryError: they do not fit.
    """
    model = V4Transformer(config, "reference", dtype, "meta")
    layers = [module for module in model.modules() if isinstance(module, V4MoE)]
    for layer in layers:
        layer.experts = layers[0].experts
    needed = sum(p.nbytes for p in model.parameters())
    require(f"{config.name} with its weights", needed, device)
    generator = torch.Generator(device).manual_seed(seed)
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if name == "tid2eid":  # distinct experts of a token: k in a row
                first = torch.arange(len(values), device=device).unsqueeze(1)
                values = (first + torch.arange(values.shape[1], device=device)) % config.n_routed_experts
            else:
                mean, deviation = spread(f"{path}.{name}".lstrip("."), parameter.shape[-1])
                values.normal_(mean, deviation, generator=generator)
            setattr(module, name, nn.Parameter(values, requires_grad=False))
    return model.eval()


def filled_cache(model: V4Transformer, batch: int, context: int, room: int = 1, seed: int = 0) -> V4Cache:
    """A cache of `batch` sequences with `context` tokens each, all of random records, and room for more.

    Raises:
        MemoryError: it does not fit.
    """
    cache = model.new_cache(batch, capacity=context + room)
    generator = torch.Generator(model.device).manual_seed(seed)
    for store in cache.stores.values():
        _random_records(store.rows.flatten(0, 1), store.codec, generator)
    for (_, component), ring in cache.rings.items():
        if component == "window_kv":
            _random_records(ring.rows.flatten(0, 1), cache.window_codec, generator)
        else:
            ring.rows.normal_(generator=generator)
        ring.end = [context] * batch
    cache.lengths = [context] * batch
    return cache


def _random_records(rows: Tensor, codec, generator: torch.Generator) -> None:
    for low in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[low : low + ROWS_AT_ONCE]
        values = torch.randn(len(part), codec.width, device=rows.device, generator=generator)
        part.copy_(codec.pack(values.to(codec.dtype)))


class DecodeStep:
    """One decode step of a batch, always at the same position: `step()` gives logits [B, vocab]."""

    def __init__(self, model: V4Transformer, cache: V4Cache, ids: Tensor):
        self.model, self.cache, self.ids = model, cache, ids
        self._lengths = list(cache.lengths)
        self._ends = [(r, list(r.first), list(r.end), list(r.lost)) for r in cache.rings.values()]

    def __call__(self) -> Tensor:
        self.cache.lengths = list(self._lengths)
        for ring, *sides in self._ends:
            ring.first, ring.end, ring.lost = (list(side) for side in sides)
        return self.model(self.ids, cache=self.cache, last=True)


def decode_step(model: V4Transformer, batch: int, context: int) -> DecodeStep:
    """A step whose new token is the last of `context` visible ones."""
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
    return DecodeStep(model, filled_cache(model, batch, context - 1), ids)


def measure(step: DecodeStep, context: int, seconds: float) -> dict[str, Any]:
    """A decode step of sequences that see `context` tokens each."""
    model, batch, device = step.model, len(step.ids), step.model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with FlopCounter(model) as counter:
        logits = step()
    if batch == 1:
        compared(counter, decode_flops(model.config, context))
    if not torch.isfinite(logits).all():
        raise ArithmeticError("a step of random weights gave logits that are not finite")
    samples, method = times_us(step, device, seconds, capture=False)
    p20, median, p80 = (statistics.quantiles(samples, n=10)[i] for i in (1, 4, 7))
    return {
        "batch": batch,
        "context": context,
        "step_us": f"{median:.1f}",
        "p20_us": f"{p20:.1f}",
        "p80_us": f"{p80:.1f}",
        "method": method,
        **flops_of(counter, decode_flops(model.config, context), batch),
        "cache_bytes": kv_cache(model.config, context).total() * batch,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else "",
    }


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m model.fullsize_v4", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="v4-flash", help="a V4 preset or config.json (v4-flash)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    parser.add_argument("--contexts", default="4Ki", help="tokens visible to the step: 4Ki,128Ki,1M (4Ki)")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each measurement (0.5)")
    parser.add_argument("--profile", type=Path, help="CSV file for the time of every kernel in a step, on a GPU")
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
    begun, device = time.perf_counter(), device_of(chosen.device)
    contexts = [parse_context(text) for text in chosen.contexts.split(",")]
    if chosen.profile and device.type != "cuda":
        raise ValueError("profile needs a GPU; accepted: --device cuda")
    config = load_config(chosen.model)
    if not isinstance(config, V4Config):
        raise ConfigError("model_type", config.model_type, ", ".join(V4Config.model_types))
    model = build(config, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    print(f"{config.name}: made in {time.perf_counter() - begun:.0f} s", flush=True)
    here, shape = where(device), shape_of(model)
    rows = rows_of(chosen.out, FIELDS, here["device"]) if chosen.out else []
    known = {tuple(row[key] for key in SETTINGS) for row in rows}
    profiled = rows_of(chosen.profile, PROFILE_FIELDS, here["device"]) if chosen.profile else []
    profiled = {int(row["context"]) for row in profiled if row["model"] == config.name}
    for context in contexts:
        row = shape | {"batch": 1, "context": context}
        if tuple(str(row[key]) for key in SETTINGS) in known and (not chosen.profile or context in profiled):
            continue
        step = decode_step(model, 1, context)
        if chosen.profile and context not in profiled:
            kernels = profile_rows(model, step, 1, context)
            append(chosen.profile, PROFILE_FIELDS, *(shape | kernel | here for kernel in kernels))
        if tuple(str(row[key]) for key in SETTINGS) in known:
            continue
        row |= measure(step, context, chosen.seconds) | here
        if chosen.out:
            append(chosen.out, FIELDS, row)
        flops = f"{row['counted_flops']:,} FLOPs a token counted, {row['formula_flops']:,} by the formula"
        print(f"context {context:,}: {row['step_us']} us ({row['method']}), {flops}", flush=True)
    return 0


def shape_of(model: V4Transformer) -> dict[str, Any]:
    """What a row says of the model."""
    config = model.config
    return {
        "model": config.name,
        "layers": config.num_hidden_layers,
        "experts": config.n_routed_experts,
        "tied": True,
        "weights": "random",
        "engram_rows": 0,
        "ranks": 1,
        "backend": model.backend.name,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


if __name__ == "__main__":
    sys.exit(main())
