"""The whole shape of DeepSeek-V4.1 on one device: random weights in the released formats, decode steps timed.

    python -m model.fullsize --contexts 4Ki,128Ki,1M --batches 1,8,32 --out data/measured/fullsize.csv

The released weights take 510 GB; `--weights FOLDER` runs those that are there, over as many GPUs as torchrun starts, or
from the files (`--offload`). What a step costs does not depend on their values, so the shape can be run without them:
full width, every layer, every expert, the real schedule, records and hash. Two things are smaller, and every row says
so: with `--tie-experts` all layers read the routed experts of one, and Engram tables have `--engram-rows` rows, which
the real hash reaches modulo that number. A cache is filled with random records, so no prompt has to be run.

| column | what it is |
| --- | --- |
| `step_us` | median time of one decode step of the whole batch, p20 and p80 beside it |
| `method` | `graph`: one step captured in a CUDA graph and replayed; `events`, `clock`: launched each time |
| `counted_flops`, `formula_flops` | of one token: `model.flop_counter` over a real step, `flashsim.decode_flops` |
| `..._weighted_flops` | the same, BF16 1, FP8 1/2, FP4 1/4, as in Figure 2 of the V4.1 report |
| `read_bytes` | what a step must read: every weight that it uses and the cache, `step_floor` |
| `floor_us` | the larger of those bytes and those FLOPs at the rates of `kernels.bench` |

A captured step stays at its position: it is for timing, and generation does not use it. Rows are appended whole, and a
sweep that is run again goes on behind the rows that its file has. Source: V4.1 architecture 11, 14; `kernels/bench.py`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashsim.config import V41Config, load_config
from flashsim.flops import FlopsReport, decode_flops
from flashsim.formats import FP4, MXFP8
from flashsim.reading import ConfigError
from flashsim.traffic import decode_read
from flashsim.units import number_of_bytes, parse_context
from model.backend import make_backend, measured_rates
from model.cache import Cache
from model.flop_counter import FlopCounter
from model.loading import load, put_parameter, put_stored
from model.memory import require
from model.moe import MoE
from model.parallel import Ranks, hold, start
from model.quant import Codec
from model.random_weights import spread
from model.run_rows import append, device_of, rows_of, where
from model.step_profile import by, kernels_of
from model.stored_weights import ExpertStack, StoredEmbedding, StoredLinear, StoredWeight
from model.tensor_table import TensorSpec, packed, stored, tensors
from model.transformer import Transformer
from model.weight_formats import E2M1_VALUES

SHAPE = ("model", "layers", "experts", "tied", "weights", "engram_rows", "ranks", "backend", "dtype")
"""What a row says of the model that ran."""

FIELDS = (
    *(*SHAPE, "batch", "context"),
    *("step_us", "p20_us", "p80_us", "method", "counted_flops", "formula_flops"),
    *("counted_weighted_flops", "formula_weighted_flops", "read_bytes", "floor_us"),
    *("cache_bytes", "peak_bytes", "device", "torch", "triton", "commit", "date"),
)
SETTINGS = (*SHAPE, "batch", "context")
"""What makes a row the same measurement."""

PROFILE_FIELDS = (
    *(*SHAPE, "batch", "context", "part", "kernel", "us", "launches"),
    *("device", "torch", "triton", "commit", "date"),
)
KERNEL_NAME = 80
"""So many letters of a kernel's name are kept."""

ALONE = Ranks()
EXPERT = ".ffn.experts."
TABLE = ".engram.embed."


# --- weights ----------------------------------------------------------------------------------------------------------


def table_of(config: V41Config, engram_rows: int | None) -> dict[str, TensorSpec]:
    """Every parameter of the text model, Engram tables cut to so many rows."""
    table = {name: spec for name, spec in tensors(config).items() if spec.part == "text"}
    if engram_rows is not None:
        for name, spec in table.items():
            if TABLE in name:
                table[name] = spec._replace(shape=(min(engram_rows, spec.shape[0]), spec.shape[1]))
    return table


def weight_bytes(config: V41Config, *, tie_experts: bool, engram_rows: int | None, ranks: Ranks = ALONE) -> int:
    """Bytes of all weights of a rank as they will lie in memory, an exact integer."""
    first = min((name.split(EXPERT)[0] for name in tensors(config) if EXPERT in name), default="")
    headers = stored(table_of(config, engram_rows))
    own = [name for name in headers if not tie_experts or EXPERT not in name or name.split(EXPERT)[0] == first]
    routed = sum(headers[name].nbytes for name in own if EXPERT in name)
    return sum(headers[name].nbytes for name in own) - routed + routed // ranks.number


class CutEmbedding(StoredEmbedding):
    """An Engram table with fewer rows than its hash reaches."""

    def forward(self, ids: Tensor) -> Tensor:
        """[...] ids, taken modulo the rows there are, to [..., width]."""
        return super().forward(ids % self.stored.shape[0])


def random_planes(spec: TensorSpec, generator: torch.Generator, deviation: float) -> tuple[Tensor, Tensor]:
    """Codes and scales of a packed weight [rows, width] of about this standard deviation, uint8, without NaN."""
    weight, scale = (torch.empty(h.shape, dtype=torch.uint8, device=generator.device) for h in packed(spec))
    fill_codes(weight, generator, e4m3=spec.kind != "fp4")
    scale.fill_(127 + round(math.log2(deviation / code_deviation(spec.kind))))
    return weight, scale


@lru_cache
def code_deviation(kind: str) -> float:
    """The standard deviation of the codes that `fill_codes` draws."""
    if kind == "fp4":
        return (sum(value**2 for value in E2M1_VALUES) / len(E2M1_VALUES)) ** 0.5
    codes = torch.arange(256).to(torch.uint8) & NO_NAN
    return codes.view(torch.float8_e4m3fn).float().square().mean().sqrt().item()


NO_NAN = 0xBF
"""E4M3 codes without the upper half of the exponents, where the NaN is."""


def fill_codes(codes: Tensor, generator: torch.Generator, *, e4m3: bool) -> None:
    """Random codes of E2M1, two a byte, or of E4M3."""
    codes.random_(0, 256, generator=generator)
    if e4m3:
        codes &= NO_NAN


def build(
    config: V41Config,
    backend: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tie_experts: bool = True,
    engram_rows: int | None = 2**20,
    seed: int = 0,
    ranks: Ranks = ALONE,
) -> Transformer:
    """The model with random packed weights, made where they will lie.

    Raises:
        MemoryError: they do not fit; says what would.
    """
    mine = ranks.experts(config.n_routed_experts)
    needed = weight_bytes(config, tie_experts=tie_experts, engram_rows=engram_rows, ranks=ranks)
    least = number_of_bytes(weight_bytes(config, tie_experts=True, engram_rows=2**16, ranks=ranks))
    hint = f"; with --tie-experts and --engram-rows 65536 it needs {least}"
    require(f"{config.name} with its weights", needed, device, hint)
    generator = torch.Generator(device).manual_seed(seed)
    model = Transformer(config, backend, dtype, "meta")
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    _fill_experts(model, torch.Generator(device).manual_seed(seed + 1 + ranks.rank), tie_experts, mine)
    for name, spec in table_of(config, engram_rows).items():
        mean, deviation = spread(name, spec.shape[-1])
        if EXPERT in name:
            continue
        if not spec.quantised:
            values = torch.empty(spec.shape, dtype=parameters[name].dtype, device=device)
            put_parameter(model, name, values.normal_(mean, deviation, generator=generator))
            continue
        weight = StoredWeight(name, spec.shape, spec.kind, dtype, *random_planes(spec, generator, deviation))
        if TABLE in name:
            parent = name.rpartition(".embed.")[0]
            modules[parent].embed = CutEmbedding(weight, device, model.backend)
        else:
            put_stored(model, modules, weight, device, True)
    if config.engram_layer_ids:
        model.set_token_map([i % config.engram_compressed_vocab_size for i in range(config.vocab_size)])
    return model.eval()


def _fill_experts(model: Transformer, generator: torch.Generator, tie: bool, mine: range) -> None:
    """A stack of the experts `mine` for every layer, or one for all."""
    config, stack, experts = model.config, None, None
    for path, layer in model.named_modules():
        if not isinstance(layer, MoE):
            continue
        if stack is None or not tie:
            sizes = len(mine), config.hidden_size, config.moe_intermediate_size
            stack = ExpertStack(*sizes, activation_rounding=True, device=generator.device)
            for matrix in ExpertStack.MATRICES:
                codes, scales = getattr(stack, matrix)
                spec = TensorSpec((codes.shape[1], 2 * codes.shape[2]), "fp4")
                for expert in range(len(mine)):
                    codes[expert], scales[expert] = random_planes(spec, generator, spec.shape[1] ** -0.5)
            experts = _views(stack, f"{path}.experts", layer, model)
        layer.stack, layer.experts = stack, experts
        if len(mine) < config.n_routed_experts:
            hold(layer, list(experts), mine)


def _views(stack: ExpertStack, path: str, layer: MoE, model: Transformer) -> torch.nn.ModuleList:
    """The experts as layers, for a backend that has no kernel for all of them at once."""
    if model.backend.expert_runner(_Stacked(stack)) != "PyTorch":
        return torch.nn.ModuleList()
    experts = layer.experts[: len(stack.w1[0])]
    for i, expert in enumerate(experts):
        for matrix in ExpertStack.MATRICES:
            name, shape = f"{path}.{i}.{matrix}.weight", tuple(getattr(expert, matrix).weight.shape)
            weight = StoredWeight(name, shape, "fp4", model.dtype, *stack.place(i, matrix))
            setattr(expert, matrix, StoredLinear(weight, model.backend, activation_rounding=True))
    return experts


class _Stacked:
    """Stands for a layer that has this stack, where a backend is asked who runs it."""

    def __init__(self, stack: ExpertStack):
        self.stack = stack


# --- a cache as long as one likes -------------------------------------------------------------------------------------


def random_records(rows: Tensor, codec: Codec, generator: torch.Generator) -> None:
    """Fill packed records [..., bytes] with valid ones: no NaN, scales around 2^-6."""
    scales = codec.form.scales(codec.width)
    fill_codes(rows, generator, e4m3=codec.form is MXFP8)
    low, high = (0x20, 0x30) if codec.form is FP4 else (119, 123)
    rows[..., -scales:].random_(low, high, generator=generator)


def filled_cache(model: Transformer, batch: int, context: int, room: int = 1, seed: int = 0) -> Cache:
    """A cache of `batch` sequences with `context` tokens each, all of random records, and room for more.

    Raises:
        MemoryError: it does not fit.
    """
    cache = model.new_cache(batch, capacity=context + room)
    generator = torch.Generator(model.device).manual_seed(seed)
    cache.tokens.random_(0, model.config.vocab_size, generator=generator)
    cache.lengths = [context] * batch
    for ring in cache.windows.values():
        random_records(ring.rows, cache.window_codec, generator)
    for source in cache.sources.values():
        random_records(source.entries, cache.main_codec, generator)
        random_records(source.keys, cache.key_codec, generator)
        if source.pending is not None:
            source.pending.rows.normal_(generator=generator)
    for ring in cache._rings():
        ring.end = [context] * batch
    return cache


# --- one step ---------------------------------------------------------------------------------------------------------


class DecodeStep:
    """One decode step of a batch, always at the same position: `step()` gives logits [B, vocab].

    Index tables and what else the host makes are made by the first call; from then on a step asks nothing of the host
    that depends on the device, so that it can be captured.
    """

    def __init__(self, model: Transformer, cache: Cache, ids: Tensor):
        self.model, self.cache = model, cache
        self._ends = [(ring, list(ring.first), list(ring.end), list(ring.lost)) for ring in cache._rings()]
        _, self.step, self.ids = model._begin(ids, cache, None, None)

    def __call__(self) -> Tensor:
        self.cache.lengths = list(self.step.start)
        for ring, *sides in self._ends:
            ring.first, ring.end, ring.lost = (list(side) for side in sides)
        self.step.selected = self.step.candidates = None
        with torch.inference_mode():
            return self.model._logits(*self.model._run(self.ids, self.step, self.cache, None, self.step.start), True)


def times_us(
    step: Callable[[], Tensor], device: torch.device, seconds: float = 1.0, number: int = 0, capture: bool = True
) -> tuple[list[float], str]:
    """Times of single steps in microseconds, and how they were taken; a `number` of them where ranks must agree.

    `capture`: as a CUDA graph where that can be.
    """
    for _ in range(3):
        step()
    if device.type != "cuda":
        return list(_clock(step, seconds, number)), "clock"
    torch.cuda.synchronize()
    call, method = (_captured(step), "graph") if capture else (None, "")
    if call is None:
        call, method = step, "events"
    samples, until = [], time.perf_counter() + (0 if number else seconds)
    while len(samples) < (number or 10) or time.perf_counter() < until:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(1e3 * start.elapsed_time(end))
    return samples, method


def _captured(step: Callable[[], Tensor]) -> Callable[[], None] | None:
    """The step as a CUDA graph; None, and a line that says why, where it cannot be one."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"no graph ({str(error).splitlines()[0][:100]}), timed by events", file=sys.stderr)
        return None
    return graph.replay


def _clock(step: Callable[[], Tensor], seconds: float, number: int) -> Iterator[float]:
    taken, until = 0, time.perf_counter() + (0 if number else seconds)
    while taken < (number or 3) or time.perf_counter() < until:
        start = time.perf_counter()
        step()
        yield 1e6 * (time.perf_counter() - start)
        taken += 1


def step_floor(config: V41Config, batch: int, context: int) -> tuple[int, float]:
    """(bytes that a step of the batch must read, microseconds that these and the FLOPs take at the measured rates).

    Weights: every matrix once, of routed experts as many as `batch` tokens of a uniform router are expected to pick.
    """
    copied, products = measured_rates()
    picked = config.num_experts_per_tok / config.n_routed_experts
    used = 1 - (1 - picked) ** batch
    weights = 0.0
    for name, header in stored(table_of(config, None)).items():
        if EXPERT in name:
            weights += used * header.nbytes
        elif TABLE not in name and name != "embed.weight":
            weights += header.nbytes
    read = round(weights) + batch * decode_read(config, context).total()
    flops = batch * decode_flops(config, context).total()
    return read, 1e6 * max(read / copied, flops / products["bf16"])


def compared(counter: FlopCounter, formula: FlopsReport) -> None:
    """Says on stderr where counted and predicted FLOPs differ for a reason that is not known; the row has both."""
    try:
        counter.compare(formula)
    except ValueError as error:
        print(f"warning: {error}", file=sys.stderr, flush=True)


def flops_of(counter: FlopCounter, formula: FlopsReport, batch: int) -> dict[str, Any]:
    """Counted FLOPs of one token beside those of the formula, plain and weighted by the precision of the formula."""
    plain, weighted = formula.by("component"), formula.weighted_by("component")
    weights = {name: Fraction(weighted[name]) / plain[name] for name in plain if plain[name]}
    counted = sum(flops * weights.get(name, 1) for name, flops in counter.flops.items())
    return {
        "counted_flops": sum(counter.flops.values()) // batch,
        "formula_flops": formula.total(),
        "counted_weighted_flops": round(counted / batch),
        "formula_weighted_flops": round(formula.weighted_total()),
    }


def measure(model: Transformer, batch: int, context: int, seconds: float, ranks: Ranks = ALONE) -> dict[str, Any]:
    """A decode step of `batch` sequences that see `context` tokens each, the new one among them."""
    device, config = model.device, model.config
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    cache = filled_cache(model, batch, context - 1)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    step = DecodeStep(model, cache, ids)
    with FlopCounter(model) as counter:
        logits = step()
    if batch == 1 and ranks.number == 1:
        compared(counter, decode_flops(config, context))
    if not torch.isfinite(logits).all():
        raise ArithmeticError("a step of random weights gave logits that are not finite")
    samples, method = times_us(step, device, seconds, 0 if ranks.number == 1 else 30)
    p20, median, p80 = (statistics.quantiles(samples, n=10)[i] for i in (1, 4, 7))
    read, floor = step_floor(config, batch, context)
    return {
        "batch": batch,
        "context": context,
        "step_us": f"{median:.1f}",
        "p20_us": f"{p20:.1f}",
        "p80_us": f"{p80:.1f}",
        "method": method,
        **flops_of(counter, decode_flops(config, context), batch),
        "read_bytes": read,
        "floor_us": f"{floor:.1f}" if device.type == "cuda" else "",
        "cache_bytes": cache.nbytes(),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else "",
    }


def profile_rows(
    model: torch.nn.Module, step: Callable[[], Tensor], batch: int, context: int, steps: int = 3
) -> list[dict[str, Any]]:
    """What a step spends in every part of the model and in every kernel there, the longest part first."""
    kernels = kernels_of(model, step, steps)
    rows = []
    for part in by("part", kernels):
        for name, (us, launches) in by("name", (k for k in kernels if k.part == part), steps).items():
            row = {"batch": batch, "context": context, "part": part, "kernel": name[:KERNEL_NAME]}
            rows.append(row | {"us": f"{us:.2f}", "launches": f"{launches:.1f}"})
    return rows


# --- a model as the command line asks for it --------------------------------------------------------------------------


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which model is built."""
    parser.add_argument("--model", default="v4.1-flash", help="a V4.1 preset or config.json (v4.1-flash)")
    parser.add_argument("--weights", type=Path, help="a checkpoint folder, whose weights and config run instead")
    parser.add_argument("--offload", action="store_true", help="with --weights: leave matrices in the files")
    parser.add_argument("--experts", type=int, help="routed experts, fewer than the model has")
    parser.add_argument("--tie-experts", action="store_true", help="all layers read the routed experts of the first")
    parser.add_argument("--engram-rows", type=int, default=2**20, help="rows of an Engram table (1,048,576)")
    parser.add_argument("--backend", default="triton", help="triton or reference (triton)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")


def build_from(chosen: argparse.Namespace) -> tuple[Transformer, Ranks]:
    """The model of these options, on this rank; says what it takes.

    Raises:
        ValueError, ConfigError, BackendError, MemoryError: it cannot be here.
    """
    begun, device = time.perf_counter(), device_of(chosen.device)
    config = load_config(chosen.weights or chosen.model)
    if not isinstance(config, V41Config):
        raise ConfigError("model_type", config.model_type, ", ".join(V41Config.model_types))
    if chosen.weights and (chosen.experts is not None or chosen.tie_experts):
        raise ValueError("weights has experts of its own; accepted: --weights without --experts and --tie-experts")
    if chosen.offload and not chosen.weights:
        raise ValueError("offload is for files; accepted: with --weights FOLDER")
    if chosen.experts is not None:
        config = load_config(config.to_dict() | {"n_routed_experts": chosen.experts})
    if chosen.engram_rows < 1:
        raise ValueError(f"engram_rows is {chosen.engram_rows}; accepted: a whole number from 1")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    make_backend(chosen.backend).check(config, dtype, device, True)
    ranks, device = start(device)
    if chosen.weights:
        options = {"packed": not chosen.offload, "offload": chosen.offload, "activation_rounding": True}
        mine = ranks.experts(config.n_routed_experts) if ranks.number > 1 else None
        model = load(chosen.weights, chosen.backend, dtype, device, experts=mine, **options)
        if ranks.rank == 0:
            print(f"{config.name}: read from {chosen.weights} in {time.perf_counter() - begun:.0f} s", flush=True)
        return model, ranks
    settings = {"tie_experts": chosen.tie_experts, "engram_rows": chosen.engram_rows, "ranks": ranks}
    model = build(config, chosen.backend, dtype, device, **settings)
    if ranks.rank == 0:
        weights, seconds = number_of_bytes(weight_bytes(config, **settings)), time.perf_counter() - begun
        print(f"{config.name}: {weights} of weights a rank made in {seconds:.0f} s", flush=True)
    return model, ranks


def shape_of(model: Transformer, ranks: Ranks, chosen: argparse.Namespace) -> dict[str, Any]:
    """What a row says of the model."""
    config = model.config
    return {
        "model": config.name,
        "layers": config.num_hidden_layers,
        "experts": config.n_routed_experts,
        "tied": chosen.tie_experts,
        "weights": "offloaded" if chosen.offload else "folder" if chosen.weights else "random",
        "engram_rows": max(config.engram_num_embeddings, default=0) if chosen.weights else chosen.engram_rows,
        "ranks": ranks.number,
        "backend": model.backend.name,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


# --- a sweep ----------------------------------------------------------------------------------------------------------


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m model.fullsize", description=__doc__.split("\n")[0])
    add_shape_options(parser)
    parser.add_argument("--contexts", default="4Ki", help="tokens visible to the step: 4Ki,128Ki,1M (4Ki)")
    parser.add_argument("--batches", default="1", help="sequences a step: 1,8,32 (1)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement (1)")
    parser.add_argument("--limit", type=float, default=math.inf, help="start no measurement after so many seconds")
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
    begun = time.perf_counter()
    contexts = [parse_context(text) for text in chosen.contexts.split(",")]
    batches = [int(text) if text.isdecimal() else 0 for text in chosen.batches.split(",")]
    if min(batches) < 1:
        raise ValueError(f"batches is {chosen.batches}; accepted: whole numbers from 1, with commas")
    if chosen.profile and device_of(chosen.device).type != "cuda":
        raise ValueError("profile needs a GPU; accepted: --device cuda")
    model, ranks = build_from(chosen)
    device, first = where(model.device), ranks.rank == 0
    known = rows_of(chosen.out, FIELDS, device["device"]) if chosen.out and first else []
    known = ranks.agree({tuple(row[key] for key in SETTINGS) for row in known})
    rows = rows_of(chosen.profile, PROFILE_FIELDS, device["device"]) if chosen.profile else []
    shape = {key: str(value) for key, value in shape_of(model, ranks, chosen).items()}
    profiled = {(int(row["batch"]), int(row["context"])) for row in rows if shape.items() <= row.items()}
    for batch in batches:
        for context in contexts:
            row = shape_of(model, ranks, chosen) | {"batch": batch, "context": context}
            if tuple(str(row[key]) for key in SETTINGS) in known:
                continue
            if ranks.agree(time.perf_counter() - begun > chosen.limit):
                if first:
                    print(f"limit of {chosen.limit:.0f} s: run again to go on with batch {batch}, context {context:,}")
                return 0
            if chosen.profile and (batch, context) not in profiled:
                _profile(model, batch, context, shape_of(model, ranks, chosen), chosen.profile)
            row |= measure(model, batch, context, chosen.seconds, ranks) | device
            if not first:
                continue
            if chosen.out:
                append(chosen.out, FIELDS, row)
            ratio = f"{float(row['step_us']) / float(row['floor_us']):.2f}x of the floor, " if row["floor_us"] else ""
            flops = f"{row['counted_flops']:,} FLOPs a token counted, {row['formula_flops']:,} by the formula"
            print(
                f"batch {batch}, context {context:,}: {row['step_us']} us ({row['method']}), {ratio}{flops}", flush=True
            )
    return 0


def _profile(model: Transformer, batch: int, context: int, shape: dict[str, Any], out: Path) -> None:
    """Print the parts of a step, and append the rows of its kernels."""
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
    rows = profile_rows(model, DecodeStep(model, filled_cache(model, batch, context - 1), ids), batch, context)
    parts: dict[str, float] = {}
    for row in rows:
        parts[row["part"]] = parts.get(row["part"], 0.0) + float(row["us"])
    append(out, PROFILE_FIELDS, *(shape | row | where(model.device) for row in rows))
    print(f"batch {batch}, context {context:,}: {sum(parts.values()):.0f} us in kernels")
    for part, us in parts.items():
        print(f"  {us:9.1f} us  {part}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
