"""Figures of what was measured: rows of `data/measured/*.csv` beside the formulas and the published numbers.

| figure | rows | shows |
| --- | --- | --- |
| `figure-1b-measured` | cache_memory.csv | slope of the device's own accounts over four lengths, beside Figure 1(b) |
| `figure-2-measured` | fullsize.csv | FLOPs counted on real steps, beside the computed curve and the chart readings |
| `step-time` | fullsize.csv | time of a decode step and the floor under it, batch 1 to 32 |
| `step-parts` | fullsize_profile.csv | which part of the model takes the time |
| `prompts` | fullsize_prompts.csv | prefill of half a model and of all of it; replay of a kept prefix |

Nothing is drawn that has no row. Each figure says device, commit and date of its rows. The wheel has none: this needs
a checkout.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from flashsim.claims import published_figures
from flashsim.config import load_config
from flashsim.drawing import (
    INK,
    LESS,
    LOOKS,
    MORE,
    PALE,
    Drawing,
    FigureError,
    log_axis,
    new_figure,
    style,
    styled,
)
from flashsim.flops import decode_flops
from flashsim.kv_cache import kv_bytes_per_token
from flashsim.paths import data_dir, write_files
from flashsim.pictures import COLOURS, HATCHES, MARKERS
from flashsim.units import number, tokens

GIGA, MILLI = 10**9, 10**3
Row = Mapping[str, str]


def measured(name: str) -> list[dict[str, str]]:
    """The rows of `data/measured/NAME.csv`.

    Raises:
        FigureError: there is no such file.
    """
    folder = data_dir() / "measured"
    path = folder / f"{name}.csv"
    if not path.is_file():
        there = sorted(p.stem for p in folder.glob("*.csv")) if folder.is_dir() else []
        raise FigureError("rows", repr(name), ", ".join(there) or "a checkout, as the wheel has no measured rows")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fit(x: Sequence[int], y: Sequence[int]) -> tuple[Fraction, Fraction]:
    """(fixed, slope) of the straight line of least squares, exact.

    >>> fit([1, 2, 3], [12, 14, 16])
    (Fraction(10, 1), Fraction(2, 1))
    """
    mean_x, mean_y = Fraction(sum(x), len(x)), Fraction(sum(y), len(y))
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    return mean_y - slope * mean_x, slope


def provenance(rows: Iterable[Row]) -> str:
    """Device, versions, commits and dates of rows, in one line."""
    rows = list(rows)
    parts = [sorted({row[key] for row in rows if row[key]}) for key in ("device", "torch", "triton", "commit", "date")]
    device, torch, triton, commit, date = (", ".join(part) for part in parts)
    return f"{device}, torch {torch}, Triton {triton}, commit {commit}, {date}"


def _look(model: str):
    return LOOKS["deepseek-llm-67b" if model == "v1" else model]


@styled
def cache_memory(rows: Sequence[Row] | None = None) -> Drawing:
    """Figure 1(b) measured: bytes a token by the accounts of a device, beside the formula and the published number."""
    rows = measured("cache_memory") if rows is None else rows
    table = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        x, label = [int(row["tokens"]) for row in mine], _look(model).label
        record = {"model": model, "generation": label, "lengths": len(x), "longest_tokens": max(x)}
        for account in ("requested", "allocated", "driver"):
            if all(row[f"{account}_bytes"] for row in mine):
                fixed, slope = fit(x, [int(row[f"{account}_bytes"]) for row in mine])
                record |= {f"{account}_bytes_per_token": slope, f"{account}_fixed_bytes": fixed}
        stated = published_figures().get(f"kv_bytes_per_token.{label}")
        record["formula_bytes_per_token"] = kv_bytes_per_token(load_config(model))
        record["published_bytes_per_token"] = stated and Fraction(str(stated["value"]))
        table.append(record)
    title = "Figure 1(b) measured: what one more token takes on the device"
    figure, ax = new_figure(9, 1.5 + 0.9 * len(table), title, provenance(rows))
    left, series = (
        100,
        (("published", PALE, ""), ("formula", LESS, "//"), ("requested", MORE, ""), ("driver", "#E69F00", "..")),
    )
    names = {"requested": "measured: tensors", "driver": "measured: driver"}
    for i, (name, colour, hatch) in enumerate(series):
        values = [float(record.get(f"{name}_bytes_per_token") or left) for record in table]
        places = [y + 0.2 * (i - 1.5) for y in range(len(table))]
        label = names.get(name, name)
        ax.barh(
            places, [v - left for v in values], 0.18, left=left, color=colour, hatch=hatch, edgecolor=INK, label=label
        )
        for place, value in zip(places, values, strict=True):
            text = number(round(Fraction(value), 2)) if value > left else "no row"
            ax.annotate(f" {text}", (value, place), va="center", fontsize=8)
    log_axis(ax.xaxis, [10**k for k in range(2, 7)])
    ax.set(xlim=(left, 4 * 10**6), xlabel="bytes a token (logarithmic axis)")
    ax.set_yticks(range(len(table)), [record["generation"] for record in table])
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="lower right")
    alt = "Bar chart, logarithmic axis: bytes that one more token takes, slope of a line through four lengths."
    for record in table:
        alt += f" {record['generation']}: " + ", ".join(
            f"{names.get(name, name)} {number(round(Fraction(record[f'{name}_bytes_per_token']), 2))}"
            for name, _, _ in series
            if record.get(f"{name}_bytes_per_token")
        )
        alt += "."
    return Drawing("figure-1b-measured", title, figure, alt, table)


def _steps(rows: Sequence[Row] | None, model: str, backend: str | None = None) -> list[Row]:
    rows = measured("fullsize") if rows is None else rows
    found = [row for row in rows if row["model"] == model and backend in (None, row["backend"])]
    return sorted(found, key=lambda row: (int(row["batch"]), int(row["context"])))


@styled
def counted_flops(rows: Sequence[Row] | None = None) -> Drawing:
    """Figure 2 measured: weighted FLOPs counted on real decode steps at released size, on the computed curves."""
    rows = measured("fullsize") if rows is None else rows
    title = "Figure 2 measured: FLOPs counted on real decode steps"
    pair = [name for name in ("v4.1-flash", "v4-flash") if _steps(rows, name)]
    figure, ax = new_figure(
        8, 4.8, title, f"Lines: formula. Filled: counted. Circles: chart readings.\n{provenance(rows)}"
    )
    table, alt = [], "Line chart: weighted GFLOPs a token against the context."
    grid = [2**k for k in range(12, 21)]
    for name in pair:
        look, config = _look(name), load_config(name)
        curve = decode_flops(config, grid).weighted_total()
        ax.plot(grid, [float(v / GIGA) for v in curve], color=look.colour, label=f"{look.label}, formula")
        points = {int(r["context"]): r for r in _steps(rows, name) if r["batch"] == "1"}
        counted = {n: int(r["counted_weighted_flops"]) for n, r in points.items()}
        ax.plot(
            list(counted),
            [v / GIGA for v in counted.values()],
            look.marker,
            color=look.colour,
            label=f"{look.label}, counted",
        )
        for n, value in counted.items():
            formula = int(points[n]["formula_weighted_flops"])
            table.append(
                {"model": name, "context_tokens": n, "counted_weighted_flops": value, "formula_weighted_flops": formula}
            )
            alt += f" {look.label} at {n:,} tokens: counted {value / GIGA:.2f}, formula {formula / GIGA:.2f}."
        for word, n in (("4K", grid[0]), ("1M", grid[-1])):
            entry = published_figures().get(f"decode_weighted_gflops.{look.label}.{word}")
            if entry:
                ax.plot(n, float(entry["value"]), "o", markersize=13, markerfacecolor="none", color=INK, clip_on=False)
    log_axis(ax.xaxis, [4**k for k in range(6, 11)], tokens)
    ax.set(ylim=(0, 70), xlabel="context, tokens", ylabel="GFLOPs a token, weighted")
    ax.grid(True, axis="y")
    ax.legend(loc="upper left")
    return Drawing("figure-2-measured", title, figure, alt, table)


@styled
def step_time(rows: Sequence[Row] | None = None, model: str = "v4.1-flash", backend: str = "triton") -> Drawing:
    """Time of a decode step against the context, for each batch, and the floor: bytes over bandwidth."""
    rows = _steps(rows, model, backend)
    batches = sorted({int(row["batch"]) for row in rows})
    title = f"{_look(model).label}: time of a decode step at full size"
    note = f"Solid: measured, a captured graph. Dashed: floor, the bytes at the measured bandwidth.\n{provenance(rows)}"
    figure, ax = new_figure(8, 4.8, title, note)
    table, alt = [], "Line chart: milliseconds of a decode step against the context."
    for i, batch in enumerate(batches):
        mine = [row for row in rows if int(row["batch"]) == batch]
        x = [int(row["context"]) for row in mine]
        times, floors = ([float(row[key]) / MILLI for row in mine] for key in ("step_us", "floor_us"))
        look = {"color": COLOURS[i % 8], "marker": MARKERS[i % 8]}
        ax.plot(x, times, "-", label=f"batch {batch}", **look)
        ax.plot(x, floors, "--", label=f"batch {batch}, floor", **look | {"markerfacecolor": "white"})
        for n, time, floor in zip(x, times, floors, strict=True):
            table.append(
                {"batch": batch, "context_tokens": n, "step_ms": time, "floor_ms": floor, "ratio": time / floor}
            )
        alt += f" Batch {batch}: {times[0]:.2f} ms at {x[0]:,} tokens, {times[-1]:.2f} at {x[-1]:,};"
        alt += f" floor {floors[0]:.2f} and {floors[-1]:.2f}."
    log_axis(ax.xaxis, [4**k for k in range(6, 11)], tokens)
    ax.set(xlabel="context, tokens", ylabel="milliseconds a step")
    ax.set_ylim(bottom=0)
    ax.grid(True, axis="y")
    ax.legend(ncols=2)
    return Drawing("step-time", title, figure, alt, table)


def parts(rows: Sequence[Row]) -> dict[tuple[str, str, int, int], dict[str, float]]:
    """Microseconds by part, for every (model, backend, batch, context) of a profile."""
    found: dict[tuple[str, str, int, int], dict[str, float]] = {}
    for row in rows:
        case = found.setdefault((row["model"], row["backend"], int(row["batch"]), int(row["context"])), {})
        case[row["part"]] = case.get(row["part"], 0.0) + float(row["us"])
    return found


@styled
def step_parts(rows: Sequence[Row] | None = None, model: str = "v4.1-flash", backend: str = "triton") -> Drawing:
    """Where the time of a step goes: kernel time of every part of the model."""
    rows = measured("fullsize_profile") if rows is None else rows
    rows = [row for row in rows if (row["model"], row["backend"]) == (model, backend)]
    cases = sorted(parts(rows).items())
    names = sorted({p for _, times in cases for p in times}, key=lambda p: -sum(t.get(p, 0) for _, t in cases))
    title = f"{_look(model).label}: where the time of a decode step goes"
    figure, ax = new_figure(9.5, 1.9 + 0.5 * len(cases), title, f"Sum of kernel times, one by one. {provenance(rows)}")
    table, alt = [], "Stacked bars: milliseconds of kernels by part of the model."
    for y, ((_, _, batch, context), times) in enumerate(cases):
        left = 0.0
        for i, part in enumerate(names):
            width = times.get(part, 0.0) / MILLI
            look = {"color": COLOURS[i % 8], "hatch": HATCHES[i % 8] if i < 8 else "xx", "edgecolor": "white"}
            ax.barh(y, width, 0.65, left=left, label=part.replace("_", " ") if y == 0 else None, **look)
            left += width
            table.append({"batch": batch, "context_tokens": context, "part": part, "ms": width})
        ax.annotate(f" {left:.2f}", (left, y), va="center", fontsize=9)
        most = max(times, key=times.get)
        alt += f" Batch {batch}, {context:,} tokens: {left:.2f} ms, most of it {most} ({times[most] / MILLI:.2f})."
    ax.set_yticks(range(len(cases)), [f"batch {b}, {tokens(n)}" for (_, _, b, n), _ in cases])
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.1)
    ax.set_xlabel("milliseconds")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return Drawing("step-parts", title, figure, alt, table)


@styled
def prompts(rows: Sequence[Row] | None = None) -> Drawing:
    """Time to the first token: prefill by half a model and by all of it; a kept prefix replayed in three ways."""
    rows = measured("fullsize_prompts") if rows is None else rows
    title = "Time to the first token at full size"
    figure, axes = new_figure(11, 4.6, title, provenance(rows), ncols=2)
    table, alt = [], "Two line charts: seconds to the first token against tokens of the prompt."
    names = {"prefill": ("full", "exact", "bounded"), "replay": ("cold", "exact", "bounded")}
    for ax, (kind, modes) in zip(axes, names.items(), strict=True):
        for i, mode in enumerate(modes):
            mine = sorted((r for r in rows if (r["kind"], r["mode"]) == (kind, mode)), key=lambda r: int(r["tokens"]))
            if not mine:
                continue
            x, y = [int(r["tokens"]) for r in mine], [float(r["seconds"]) for r in mine]
            ax.plot(x, y, color=COLOURS[i], marker=MARKERS[i], linestyle=("-", "--", "-.")[i], label=mode)
            alt += f" {kind} {mode}: {y[0]:.3f} s at {x[0]:,} tokens, {y[-1]:.3f} at {x[-1]:,}."
            table += [
                {"kind": kind, "mode": mode, "tokens": n, "seconds": s, "counted_flops": int(r["counted_flops"])}
                for n, s, r in zip(x, y, mine, strict=True)
            ]
        ticks = sorted({int(r["tokens"]) for r in rows})
        log_axis(ax.xaxis, ticks, tokens)
        ax.set(xlabel="tokens of the prompt", ylabel="seconds", title=PROMPT_TITLES[kind])
        ax.set_ylim(bottom=0)
        ax.grid(True, axis="y")
        ax.legend()
    return Drawing("prompts", title, figure, alt, table)


PROMPT_TITLES = {
    "prefill": "(a) prefill: half a model for all but the tail",
    "replay": "(b) a prompt whose prefix is kept",
}
FIGURES: Mapping[str, tuple[Callable[[], Drawing], str]] = {
    "figure-1b-measured": (cache_memory, "cache_memory"),
    "figure-2-measured": (counted_flops, "fullsize"),
    "step-time": (step_time, "fullsize"),
    "step-parts": (step_parts, "fullsize_profile"),
    "prompts": (prompts, "fullsize_prompts"),
}
"""Every figure, how it is drawn, and the file of its rows."""


def figure(name: str) -> Drawing | str:
    """The figure of this name; where no rows are committed, a sentence that says so.

    Raises:
        FigureError: no figure has this name, or matplotlib is not installed.
    """
    if name not in FIGURES:
        raise FigureError("figure", repr(name), ", ".join(FIGURES))
    make, rows = FIGURES[name]
    if not (data_dir() / "measured" / f"{rows}.csv").is_file():
        return f"{name}: no rows have been measured yet (data/measured/{rows}.csv)"
    return make()


def draw(out: str | Path = "out") -> list[Path]:
    """Write every figure that has rows, as SVG, PNG, CSV and alt text.

    Raises:
        FigureError: matplotlib is not installed.
        OutputError: a folder that cannot be made or written to.
    """
    made = [figure(name) for name in FIGURES]
    with style():
        files = {name: data for one in made if isinstance(one, Drawing) for name, data in one.files().items()}
    return write_files(out, files)


if __name__ == "__main__":
    print("\n".join(str(path) for path in draw()))
