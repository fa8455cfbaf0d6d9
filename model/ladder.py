"""`python -m model.ladder`: the same text through every generation at one small scale, its cache counted.

    python -m model.ladder [--prompt TEXT] [--context N] [--json] [--figure PATH]

Each model runs N - 1 tokens of the text and one decode step; what its cache then holds is counted in its tensors, what
the step reads of it where records are unpacked, and matrix products where PyTorch dispatches them. Predictions are
those of `flashsim` for the same config and, below, for the released model, which nothing here could run. Weights are
random: bytes and FLOPs do not depend on them.

| column | measured | predicted |
| --- | --- | --- |
| stored, bytes a token | what a period more of tokens adds to entries and index keys, a token | `kv_bytes_per_token` |
| window, bytes | the sliding windows of all layers, constant once they are full | `kv_cache` |
| read, bytes a step | records that the step unpacks | `decode_read` |
| decode, FLOPs a token | matrix products of the step | `decode_flops` |

Where a measured number is not the predicted one, the component and the reason stand below the table.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashsim.config import LADDER_PRESETS, Config, load_config
from flashsim.drawing import INK, LOOKS, MUTED, Drawing, FigureError, log_axis, new_figure, styled
from flashsim.flops import decode_flops
from flashsim.kv_cache import kv_bytes_per_token, kv_cache
from flashsim.schedule import layer_plan
from flashsim.traffic import decode_read
from flashsim.units import ContextError, number, parse_context, plain
from model.flop_counter import Comparison, FlopCounter
from model.loading import load
from model.read_counter import ReadCounter
from model.tokenizer import TokenizerError, encode

CONTEXT, RELEASED_CONTEXT = 512, 10**6
PROMPT = "How many bytes of cache does one more token cost? Count them. "
CHANGES = {
    "deepseek-llm-67b": "a key and a value of every KV head",
    "v2": "one latent for all heads",
    "v3": "the same, other experts",
    "v3.2": "the latent in FP8; an indexer picks tokens",
    "v4-flash": "one entry for 4 or 128 tokens, a window",
    "v4-pro": "the same, fewer window-only layers",
    "v4.1-flash": "entries in FP4, shared by layers",
}
"""What each released model does to the cache, by the preset of `flashsim`."""


class LadderError(ValueError):
    """A context or a figure path that the ladder cannot serve."""


@dataclass(frozen=True)
class Costs:
    """Of one model at `context` tokens: exact numbers. Weights of FLOPs belong to predictions alone."""

    context: int
    stored_bytes_per_token: int | Fraction
    window_bytes: int
    read_bytes_per_step: int
    decode_flops: int | Fraction
    weighted_decode_flops: int | Fraction | None = None


@dataclass(frozen=True)
class Rung:
    """One generation: small and measured, small and predicted, released and predicted.

    `flops_differences` and `read_differences` have every component that is not as predicted, with the reason.
    """

    generation: str
    change: str
    small: str
    released: str
    measured: Costs
    predicted: Costs
    predicted_released: Costs
    flops_differences: dict[str, Comparison] = field(default_factory=dict)
    read_differences: dict[str, Comparison] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        fields = asdict(self)
        for costs in ("measured", "predicted", "predicted_released"):
            fields[costs] = {k: v if v is None else plain(v) for k, v in fields[costs].items()}
        for kind in ("flops_differences", "read_differences"):
            rows = getattr(self, kind).values()
            fields[kind] = {row.component: row._replace(predicted=plain(row.predicted))._asdict() for row in rows}
        return fields


def predict(config: Config, context: int) -> Costs:
    """What `flashsim` says of a config with `context` tokens visible."""
    flops = decode_flops(config, context)
    stored, windows = kv_bytes_per_token(config), kv_cache(config, context).tier_bytes("window")
    read = decode_read(config, context).total()
    return Costs(context, stored, windows, read, flops.total(), flops.weighted_total())


def measure(lm: nn.Module, ids: Sequence[int], context: int) -> tuple[Costs, FlopCounter, ReadCounter]:
    """What a model stores with `context` tokens, and reads and computes in the decode step of the last one.

    ids: at least `context` tokens and a period of the compression ratios more.
    """
    more = period(lm.config)
    ids = torch.tensor([ids[: context + more]])
    cache = lm.new_cache(capacity=ids.shape[1])
    if context > 1:
        lm(ids[:, : context - 1], cache=cache, last=True)
    with FlopCounter(lm) as products, ReadCounter(cache) as reads:
        lm(ids[:, context - 1 : context], cache=cache, last=True)
    before = cache.nbytes(by="tier")
    lm(ids[:, context:], cache=cache, last=True)
    grown = Fraction(cache.nbytes(by="tier")["global"] - before["global"], more)
    read, flops = sum(reads.nbytes.values()), sum(products.flops.values())
    return Costs(context, _whole(grown), before.get("window", 0), read, flops), products, reads


def period(config: Config) -> int:
    """Tokens after which every compressor is where it was."""
    return math.lcm(*(max(plan.compress_ratio, 1) for plan in layer_plan(config)))


def climb(
    prompt: str = PROMPT, context: int = CONTEXT, released_context: int = RELEASED_CONTEXT, *, progress=None
) -> list[Rung]:
    """Every generation at the small scale, in order of release.

    Args:
        prompt: repeated until there are enough tokens, one for each byte.
        context: tokens visible in the decode step.
        released_context: the same for the released models, which are predicted alone.
        progress: called with the name of each generation before it runs.

    Raises:
        LadderError: a context that one of the models does not take, or an empty prompt.
    """
    configs = [load_config(name) for name in LADDER_PRESETS]
    most = min(config.max_position_embeddings - period(config) for config in configs)
    if not 1 <= context <= most:
        raise LadderError(f"context is {context}; accepted: 1 to {most} tokens")
    if not prompt:
        raise LadderError("prompt is empty; accepted: a text of at least one byte")
    rungs = []
    for config, (released, change) in zip(configs, CHANGES.items(), strict=True):
        if progress is not None:
            progress(LOOKS[released].label)
        lm = load(config)
        ids = encode(lm.tokenizer, prompt)
        ids = (ids * (most // len(ids) + 1))[: context + period(config)]
        measured, products, reads = measure(lm, ids, context)
        rows = products.compare(decode_flops(config, context)), reads.compare(decode_read(config, context))
        rungs.append(
            Rung(
                LOOKS[released].label,
                change,
                config.name,
                released,
                measured,
                predict(config, context),
                predict(load_config(released), released_context),
                *({row.component: row for row in each if row.reason} for each in rows),
            )
        )
    return rungs


def _whole(value: Fraction) -> int | Fraction:
    return value.numerator if value.denominator == 1 else value


# --- the table --------------------------------------------------------------------------------------------------------


def table(rungs: Sequence[Rung]) -> str:
    """Both halves as text: the small models with measured beside predicted, then the released ones."""
    config, small, large = load_config(rungs[0].small), rungs[0].measured.context, rungs[0].predicted_released.context
    both = ("measured", "predicted")
    groups = (
        ("", ("generation", "what is cached")),
        ("stored, bytes a token", both),
        ("window, bytes", both),
        ("read, bytes a step", both),
        ("decode, FLOPs a token", both),
    )
    rows = [
        (
            *(rung.generation, rung.change),
            *(number(costs.stored_bytes_per_token) for costs in (rung.measured, rung.predicted)),
            *(number(costs.window_bytes) for costs in (rung.measured, rung.predicted)),
            *(number(costs.read_bytes_per_step) for costs in (rung.measured, rung.predicted)),
            *(number(costs.decode_flops) for costs in (rung.measured, rung.predicted)),
        )
        for rung in rungs
    ]
    title = f"{config.num_hidden_layers} layers and {config.num_attention_heads} heads each, random weights"
    lines = [f"Small models, run here: {title}, {small:,} tokens visible", "", *_columns(groups, rows), ""]
    lines += [*_differences(rungs), ""]

    groups = (
        ("", ("generation", "model")),
        ("stored, bytes a token", ("predicted",)),
        ("window, bytes", ("predicted",)),
        ("read, bytes a step", ("predicted",)),
        ("decode, GFLOPs a token", ("predicted", "weighted")),
    )
    rows = [
        (
            *(rung.generation, rung.released),
            *(number(n) for n in (costs.stored_bytes_per_token, costs.window_bytes, costs.read_bytes_per_step)),
            *(f"{float(flops) / 1e9:,.1f}" for flops in (costs.decode_flops, costs.weighted_decode_flops)),
        )
        for rung in rungs
        for costs in [rung.predicted_released]
    ]
    return "\n".join([*lines, f"Released models, {large:,} tokens visible", "", *_columns(groups, rows), "", NOTES])


NOTES = """Stored: main KV and indexer keys, which grow with the context; Figure 1(b) of the V4.1 report shows four of
the released numbers. Window: of one sequence, whatever its length. Read: what one decode step loads of the cache.
Weighted: BF16 products count 1, FP8 1/2, FP4 1/4, as in Figure 2 of the report. V1 to V3.2 were made for fewer tokens
than a million: theirs is an extrapolation."""


def _differences(rungs: Sequence[Rung]) -> list[str]:
    """Where measured is not predicted: the component, how much more in which generation, and why."""
    lines = []
    for words, kind in (("bytes read", "read_differences"), ("FLOPs", "flops_differences")):
        found: dict[tuple[str, str], list[str]] = {}
        for rung in rungs:
            for row in getattr(rung, kind).values():
                more = f"{rung.generation} {number(row.counted - row.predicted)}"
                found.setdefault((row.component, row.reason), []).append(more)
        for (component, reason), more in found.items():
            lines += [f"{words} measured beyond the prediction, {component}: {', '.join(more)}", f"    {reason}"]
    return lines


def _columns(groups: Sequence[tuple[str, Sequence[str]]], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines under two lines of titles. The first group is words, to the left; the others numbers."""
    cells = [[subtitle for _, subtitles in groups for subtitle in subtitles], *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    top, first = [], 0
    for title, subtitles in groups:
        last = first + len(subtitles)
        there = sum(widths[first:last]) + 2 * (len(subtitles) - 1)
        widths[first] += max(len(title) - there, 0)
        top.append(title.rjust(max(there, len(title))))
        first = last
    words = len(groups[0][1])
    align = [str.ljust] * words + [str.rjust] * (len(widths) - words)
    lines = ["  ".join(f(c, w) for f, c, w in zip(align, row, widths, strict=True)) for row in cells]
    return [line.rstrip() for line in ("  ".join(top), *lines)]


# --- the figure -------------------------------------------------------------------------------------------------------


@styled
def figure(rungs: Sequence[Rung]) -> Drawing:
    """Bytes and FLOPs a token in four panels: small models, measured and predicted; released models, predicted."""
    small, large = rungs[0].measured.context, rungs[0].predicted_released.context
    first, last = rungs[0].measured, rungs[-1].measured
    start, end = (number(costs.stored_bytes_per_token) for costs in (first, last))
    title = f"The ladder at a small scale: {start} bytes a token become {end}, counted in running models"
    note = "Bar: measured. White diamond: predicted by the formulas. Hatched bar: predicted, too large to run here."
    drawn, axes = new_figure(10.5, 6.4, title, note, nrows=2, ncols=2, sharey=True)
    stored, flops = "stored_bytes_per_token", "decode_flops"
    panels = (
        (stored, ("measured", "small: stored, bytes a token", 1)),
        (stored, ("predicted_released", "released: stored, bytes a token", 1)),
        (flops, ("measured", f"small: decode, MFLOPs a token, {small:,} tokens visible", 10**6)),
        (flops, ("predicted_released", f"released: decode, GFLOPs a token, {large:,} tokens visible", 10**9)),
    )
    rows: list[dict[str, Any]] = []
    for rung in rungs:
        row: dict[str, Any] = {"generation": rung.generation, "small_preset": rung.small, "released": rung.released}
        for name in ("measured", "predicted", "predicted_released"):
            costs = getattr(rung, name)
            row[f"{name}_stored_bytes_per_token"] = costs.stored_bytes_per_token
            row[f"{name}_decode_flops"] = costs.decode_flops
        rows.append(row)
    for (key, (name, words, unit)), ax in zip(panels, axes.flat, strict=True):
        values = [float(row[f"{name}_{key}"]) / unit for row in rows]
        low, high = 10 ** math.floor(math.log10(min(values)) - 0.2), max(values) * 6
        for y, (rung, row, value) in enumerate(zip(rungs, rows, values, strict=True)):
            colour, runs = LOOKS[rung.released].colour, name == "measured"
            face = {"color": colour} if runs else {"color": "white", "hatch": "////"}
            ax.barh(y, value - low, left=low, height=0.6, edgecolor=INK if runs else colour, **face)
            if runs:
                predicted = float(row[f"predicted_{key}"]) / unit
                ax.plot(predicted, y, "D", color="white", markeredgecolor=INK, markersize=6, zorder=4)
            ax.text(value * 1.25, y, number(row[f"{name}_{key}"]) if unit == 1 else f"{value:,.1f}", va="center")
        powers = range(round(math.log10(low)), math.ceil(math.log10(max(values))) + 1)
        log_axis(ax.xaxis, [10**k for k in powers])
        ax.set(xlim=(low, high), ylim=(len(rungs) - 0.4, -0.6))
        ax.set_yticks(range(len(rungs)), [rung.generation for rung in rungs])
        ax.tick_params(axis="y", length=0)
        ax.set_title(words, color=MUTED)
    alt = "Four bar charts, logarithmic axes, one bar for each generation."
    for rung, row in zip(rungs, rows, strict=True):
        alt += (
            f" {rung.generation}: small model {number(row['measured_stored_bytes_per_token'])} bytes a token measured,"
        )
        alt += f" {number(row['predicted_stored_bytes_per_token'])} predicted,"
        alt += f" {number(row['measured_decode_flops'])} decode FLOPs measured,"
        alt += f" {number(row['predicted_decode_flops'])} predicted;"
        alt += f" released {number(row['predicted_released_stored_bytes_per_token'])} bytes a token,"
        alt += f" {float(row['predicted_released_decode_flops']) / 1e9:,.1f} GFLOPs at {large:,} tokens."
    return Drawing("ladder-measured", title, drawn, alt, rows)


def write_figure(rungs: Sequence[Rung], path: str | Path) -> Path:
    """The figure as the SVG or PNG file of that name.

    Raises:
        LadderError: another kind of file, or a place that cannot be written to.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise LadderError(f"figure is {str(path)!r}; accepted: a path that ends in .svg or .png")
    drawing = figure(rungs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawing.svg().encode() if path.suffix == ".svg" else drawing.png())
    except OSError as error:
        raise LadderError(f"figure is {str(path)!r}, which cannot be written ({error.strerror})") from None
    return path


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m model.ladder",
        description="Runs every generation at one small scale: bytes stored and FLOPs, measured beside predicted.",
    )
    parser.add_argument("--prompt", default=PROMPT, help="text, repeated until there are enough tokens")
    parser.add_argument("--context", metavar="N", default=CONTEXT, help=f"tokens visible, {CONTEXT} by default; 2Ki")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--figure", metavar="PATH", help="draw the figure too, to an .svg or .png file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # small matrices
    try:
        if options.figure is not None and Path(options.figure).suffix not in (".svg", ".png"):
            raise LadderError(f"figure is {options.figure!r}; accepted: a path that ends in .svg or .png")
        rungs = climb(options.prompt, parse_context(options.context), progress=_progress)
        if options.figure is not None:
            write_figure(rungs, options.figure)
    except (LadderError, FigureError, ContextError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps([rung.to_dict() for rung in rungs], indent=1) if options.json else table(rungs))
    return 0


def _progress(generation: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{generation} ...", end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
