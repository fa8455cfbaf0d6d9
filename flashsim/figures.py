"""The figures: bytes a token, decode FLOPs, the ladder, FLOPs by component, the cache between requests.

Each is a function that returns a `Drawing`: the matplotlib figure, its alt text, and the rows of numbers it was drawn
from. `draw` writes them as SVG, PNG, CSV and text. Every number is computed by this library or, where it says
*published*, read from `data/published_figures.json`. Models differ in marker as well as in colour, and what is dashed,
hollow or hatched is explained in the figure, so that a grey print says the same.

matplotlib is imported when something is drawn: `pip install 'flashsim-kv[figures]'`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashsim.claims import published_figures
from flashsim.config import PRESETS, load_config
from flashsim.drawing import (
    INK,
    LESS,
    LOOKS,
    MORE,
    MUTED,
    PALE,
    Drawing,
    FigureError,
    beside,
    log_axis,
    near,
    new_figure,
    spread,
    style,
    styled,
)
from flashsim.flops import crossing, decode_flops
from flashsim.kv_cache import kv_bytes_per_token
from flashsim.ladder import ladder as ladder_rungs
from flashsim.paths import write_files
from flashsim.persistent import persistent_cache, turn_tokens_for_window_share
from flashsim.units import number, tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHORT, LONG = 4096, 2**20
"""The two ends of Figure 2 of the V4.1 report, in tokens."""
GIGA, MEGA = 10**9, 10**6
WEIGHTED = "GFLOPs per token, weighted: BF16 1, FP8 1/2, FP4 1/4"


def draw(names: str | Iterable[str] | None = None, out: str | os.PathLike[str] = "out") -> list[Path]:
    """Draw figures (default: all of `FIGURES`) into the folder `out` as SVG, PNG, CSV and alt text (.txt).

    Returns:
        The paths written, four for each figure. A run that fails writes none.

    Raises:
        FigureError: an unknown name, or matplotlib is not installed.
        OutputError: a folder that cannot be made or written to.
    """
    names = list(FIGURES) if names is None else [names] if isinstance(names, str) else list(dict.fromkeys(names))
    if not names:
        raise FigureError("figure", "an empty list", ", ".join(FIGURES))
    for name in names:
        if name not in FIGURES:
            raise FigureError("figure", repr(name), ", ".join(FIGURES))
    with style():
        files = {file: data for name in names for file, data in FIGURES[name]().files().items()}
        return write_files(out, files)


@styled
def figure_1b(*, derived: bool = False) -> Drawing:
    """Global KV bytes a token adds, beside the published value and the steps between (V4.1 report, Figure 1(b)).

    Args:
        derived: also V2, V3 and V4-Pro, which are not in the published figure.
    """
    rows = [row for row in _bars() if derived or row["published_kv_bytes_per_token"]]
    charted = [row for row in rows if row["published_kv_bytes_per_token"]]
    first, last = charted[0], charted[-1]
    start, end = (number(row["kv_bytes_per_token"]) for row in (first, last))
    title = f"Global KV cache: from {start} bytes a token to {end}"
    figure, ax = new_figure(8.5, 1.4 + 0.7 * len(rows), title)
    left, right = 100, 10**6
    box = {"color": "white", "pad": 1.0}

    def step(high: float, low: float, y: float, words: str, **looks: Any) -> None:
        ax.annotate("", (low, y), (high, y), arrowprops={"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "color": INK})
        ax.text(high * 1.06, y, words, va="center", bbox=box, **looks)

    before = None
    for y, row in enumerate(rows):
        value, known = float(row["kv_bytes_per_token"]), row in charted
        face = {"color": LOOKS[row["model"]].colour} if known else {"color": "white", "hatch": "////"}
        ax.barh(y, value - left, left=left, height=0.5, edgecolor=INK, zorder=3, **face)
        words = f"{number(row['kv_bytes_per_token'])}  ({_beside_published(row)})"
        ax.text(value * 1.06, y, words, va="center", fontsize=10, bbox=box)
        if known and before:
            above, high = before
            ax.plot([high, high], [above + 0.25, y - 0.5], color=MUTED, linewidth=1, linestyle=":", zorder=2)
            step(high, value, y - 0.5, _factor(row))
        before = (y, value) if known else before
    whole = f"{float(last['smaller_than_V1_factor']):.0f} times smaller in all"
    whole += f" (published {number(last['published_smaller_than_V1_factor'])})"
    ends = (float(row["kv_bytes_per_token"]) for row in (first, last))
    step(*ends, len(rows) - 0.5, whole, fontweight="bold")
    ax.set(ylim=(len(rows) - 0.2, -0.4), xlim=(left, 15 * right))
    ax.set_xlabel(f"bytes per token, global KV (logarithmic axis, bars start at {left})", loc="left")
    log_axis(ax.xaxis, [10**k for k in range(2, 7)])
    ax.spines.bottom.set_bounds(left, right)
    ax.set_yticks(range(len(rows)), [row["generation"] for row in rows], fontsize=10)
    ax.tick_params(axis="y", length=0)

    alt = "Bar chart, logarithmic axis: bytes that one token adds to the global KV cache."
    for row in rows:
        alt += f" {row['generation']} {number(row['kv_bytes_per_token'])} bytes per token ({_beside_published(row)}"
        alt += f"; {_factor(row)} than the bar before in the published figure)." if _factor(row) else ")."
    return Drawing("figure-1b", title, figure, f"{alt} V1 to V4.1-Flash: {whole}.", rows)


def _published(key: str) -> Fraction | None:
    entry = published_figures().get(key)
    return entry and Fraction(str(entry["value"]))


def _bars() -> list[dict[str, Any]]:
    """All presets; the factors only for those in the published figure, each against the one before it there."""
    rows: list[dict[str, Any]] = []
    first = last = None
    for preset in PRESETS:
        label, value = LOOKS[preset].label, Fraction(kv_bytes_per_token(load_config(preset)))
        stated = _published(f"kv_bytes_per_token.{label}")
        before, first = (last, first or (label, value)) if stated else (None, first)
        rows.append(
            {
                "generation": label,
                "model": preset,
                "kv_bytes_per_token": value,
                "published_kv_bytes_per_token": stated,
                "smaller_than_previous_factor": before and before[1] / value,
                "published_smaller_than_previous_factor": before and _published(f"kv_ratio.{before[0]}_over_{label}"),
                "smaller_than_V1_factor": before and first[1] / value,
                "published_smaller_than_V1_factor": before and _published(f"kv_ratio.{first[0]}_over_{label}"),
            }
        )
        last = (label, value) if stated else last
    return rows


def _beside_published(row: Mapping[str, Any]) -> str:
    if row["published_kv_bytes_per_token"]:
        return f"published {number(row['published_kv_bytes_per_token'])}"
    elsewhere = _published(f"kv_bytes_per_token.{row['generation']}.kb")
    return f"derived; published elsewhere: {number(elsewhere)} kB" if elsewhere else "derived"


def _factor(row: Mapping[str, Any]) -> str:
    factor, stated = row["smaller_than_previous_factor"], row["published_smaller_than_previous_factor"]
    return factor and f"{float(factor):.1f} times smaller (published {number(stated)})"


@styled
def figure_2() -> Drawing:
    """Weighted decode FLOPs a token against the context (V4.1 report, Figure 2), and where the Flash models cross."""
    octaves = range(SHORT.bit_length() - 1, LONG.bit_length() - 1)
    grid = [2**k + j * 2 ** (k - 3) for k in octaves for j in range(8)] + [LONG]
    pair = ("v4.1-flash", "v4-flash")
    met = crossing(*map(load_config, pair), SHORT, LONG)
    rows: list[dict[str, Any]] = []

    def record(preset: str, kind: str, context: int, value: Fraction) -> None:
        row = {"generation": LOOKS[preset].label, "model": preset, "kind": kind, "context_tokens": context}
        rows.append(row | {"weighted_flops_per_token": value})

    limits = {preset: load_config(preset).max_position_embeddings for preset in PRESETS}
    curves: dict[str, dict[int, Fraction]] = {}
    for preset, limit in limits.items():
        contexts = sorted({*grid, min(max(limit, SHORT), LONG), *([met] if preset in pair else [])})
        curves[preset] = dict(zip(contexts, decode_flops(load_config(preset), contexts).weighted_total(), strict=True))
        for context, value in curves[preset].items():
            kind = "crossing" if context == met else "computed"
            record(preset, "computed beyond max_position_embeddings" if context > limit else kind, context, value)
    for preset in pair:
        for word, context in (("4K", SHORT), ("1M", LONG)):
            value = _published(f"decode_weighted_gflops.{LOOKS[preset].label}.{word}")
            record(preset, "chart reading", context, value * GIGA)
    readings = [row for row in rows if row["kind"] == "chart reading"]

    title = f"Decode FLOPs per token: V4.1-Flash needs less than V4-Flash from {met:,} tokens on"
    note = "Dashed lines and hollow markers: beyond the model's max_position_embeddings. "
    note += "Large circles: chart readings, values read off the published chart."
    figure, (ax, flash) = new_figure(11, 5.2, title, note, ncols=2)
    heights = spread([float(curve[LONG] / GIGA) for curve in curves.values()], 1.4)
    for i, (preset, height) in enumerate(zip(PRESETS, heights, strict=True)):
        _curve(ax, preset, curves[preset], limits[preset], grid[8 * (i % 2) :: 16])
        look = LOOKS[preset]
        key = {"transform": ax.get_yaxis_transform(), "clip_on": False, "color": look.colour}
        ax.plot(1.06, height, look.marker, **key)
        beside(ax, 1.09, height, f"{look.label}: {number(round(curves[preset][LONG] / GIGA))}")
    beside(ax, 1.045, 3 * 10**4, "at 1Mi:", color=MUTED)
    ax.set_title("(a) seven models, both axes logarithmic")
    ax.set(ylim=(10, 3 * 10**4), ylabel=WEIGHTED)
    log_axis(ax.yaxis, [10**k for k in range(1, 5)])

    for preset in pair:
        _curve(flash, preset, curves[preset], limits[preset], grid[::8])
    for row, up in zip(readings, (16, -26, -20, 16), strict=True):
        context, value = row["context_tokens"], float(row["weighted_flops_per_token"] / GIGA)
        flash.plot(context, value, "o", markersize=14, markerfacecolor="none", color=INK, clip_on=False)
        shift, side = (4, "left") if context == SHORT else (-4, "right")
        near(flash, context, value, f"chart reading {value:g}", (shift, up), ha=side)
    height = float(curves[pair[0]][met] / GIGA)
    flash.plot([met, met], [0, height], color=INK, linewidth=1, linestyle=":")
    flash.plot(met, height, "X", color=INK, markersize=10, zorder=5)
    near(flash, met, 0, f"crossing: {met:,} tokens,\n{height:.1f} GFLOPs", (-8, 24), ha="right")
    for preset, point, side in ((pair[0], 2**15, "left"), (pair[1], 2**19, "right")):
        shift = (0 if side == "left" else -10, 12)
        near(flash, point, float(curves[preset][point] / GIGA), LOOKS[preset].label, shift, ha=side, fontweight="bold")
    flash.set_title("(b) the two Flash models, GFLOPs linear")
    flash.set(ylim=(0, 70), ylabel="GFLOPs per token, weighted")
    flash.grid(True, axis="y")
    for axes in (ax, flash):
        axes.set(xlim=(SHORT, LONG), xlabel="context, tokens (Ki = 1,024)")
        log_axis(axes.xaxis, [4**k for k in range(6, 11)], tokens)

    alt = f"Line chart: weighted decode GFLOPs per token (BF16 1, FP8 1/2, FP4 1/4) at {SHORT:,} and {LONG:,} tokens."
    for preset, curve in curves.items():
        alt += f" {LOOKS[preset].label} {_gflops(curve[SHORT])} and {_gflops(curve[LONG])}"
        alt += f", dashed beyond its {limits[preset]:,} tokens." if limits[preset] < LONG else "."
    alt += f" V4.1-Flash and V4-Flash cross at {met:,} tokens and {height:.1f} GFLOPs. Readings of the published chart:"
    for row in readings:
        alt += f" {row['generation']} {number(row['weighted_flops_per_token'] / GIGA)} at {row['context_tokens']:,};"
    return Drawing("figure-2", title, figure, f"{alt[:-1]}.", rows)


def _curve(ax: Axes, preset: str, curve: Mapping[int, Fraction], limit: int, marked: Sequence[int]) -> None:
    """A curve in GFLOPs: solid with filled markers up to `limit`, dashed with hollow ones beyond it."""
    look = LOOKS[preset]
    for beyond in (False, True):
        line = [n for n in curve if (n >= limit if beyond else n <= limit)]
        dots = [n for n in marked if (n > limit) == beyond]
        both = {"color": look.colour, "clip_on": False}
        if len(line) > 1:
            ax.plot(line, [float(curve[n] / GIGA) for n in line], "--" if beyond else "-", linewidth=1.6, **both)
        both |= {"markerfacecolor": "white"} if beyond else {}
        if dots:
            ax.plot(dots, [float(curve[n] / GIGA) for n in dots], look.marker, zorder=3, **both)


def _gflops(value: Fraction) -> str:
    """10^9 FLOPs, three significant digits or all of the whole ones."""
    giga = float(value / GIGA)
    return f"{giga:#.3g}".rstrip(".") if giga < 1000 else f"{giga:,.0f}"


@styled
def ladder() -> Drawing:
    """A waterfall over `flashsim.ladder`: which change removed how many bytes on the way from V1 to V4.1-Flash."""
    rungs = ladder_rungs()
    start, end = (number(rung.per_token_bytes) for rung in (rungs[0], rungs[-1]))
    title = f"The ladder: which change took a token's cache from {start} bytes to {end}"
    note = (
        "Bold, with a grey bar: a released model. Hatched: a config never released, which shows one change at a time.\n"
        "Arrowhead to the left: bytes removed; to the right: bytes added. How much depends on the order of the changes."
    )
    figure, ax = new_figure(10, 7.2, title, note)
    left, rows = 500, []
    alt = f"Waterfall, logarithmic axis: bytes of global KV cache per token, from {start} to {end}."
    for y, rung in enumerate(rungs):
        after, change = rung.per_token_bytes, rung.change_bytes
        rows.append(
            {
                "change": rung.change,
                "mechanism": rung.mechanism,
                "released_model": rung.released,
                "before_bytes_per_token": after - change,
                "change_bytes_per_token": change,
                "after_bytes_per_token": after,
            }
        )
        signed = ("+" if change > 0 else "\N{MINUS SIGN}") + number(abs(change))
        if rung.released:
            ax.barh(y, float(after) - left, left=left, height=0.62, color=PALE, edgecolor=INK, linewidth=1.2, zorder=2)
        if change:
            colour = LESS if change < 0 else MORE
            face = {"color": colour} if rung.released else {"color": "white", "hatch": "/////"}
            ax.barh(y, float(change), left=float(after - change), height=0.36, edgecolor=colour, zorder=3, **face)
            head = {"color": colour, "markeredgecolor": INK, "markersize": 9, "zorder": 4}
            ax.plot(float(after), y, "<" if change < 0 else ">", **head)
            near(ax, float(max(after, after - change)), y, signed, (9, 0))
        if y + 1 < len(rungs):
            ax.plot([float(after)] * 2, [y, y + 1], color=MUTED, linewidth=0.8, zorder=1)
        beside(ax, 1.1, y, number(after), ha="right", fontweight="bold" if rung.released else "normal")
        alt += f" {rung.change} ({'released' if rung.released else 'never released'}): "
        alt += f"{signed}, leaving {number(after)}." if change else f"{number(after)}."
    beside(ax, 1.1, -0.9, "bytes left", ha="right", color=MUTED)
    ax.set(ylim=(len(rungs) - 0.4, -0.6), xlim=(left, 10**6))
    ax.set_xlabel(f"bytes per token, global KV (logarithmic axis, from {left})")
    log_axis(ax.xaxis, [10**k for k in range(3, 7)])
    ax.set_yticks(range(len(rungs)), [rung.change for rung in rungs])
    for tick, rung in zip(ax.get_yticklabels(), rungs, strict=True):
        tick.set_fontweight("bold" if rung.released else "normal")
    ax.tick_params(axis="y", length=0)
    return Drawing("ladder", title, figure, alt, rows)


GROUPS: Mapping[str, tuple[str, ...]] = {
    "experts, FFN, router": ("dense_ffn", "routed_experts", "shared_experts", "router"),
    "q, kv, o projections": (
        *("q_projection", "kv_projection", "up_projection"),
        *("o_projection", "o_projection_group", "o_projection_output"),
    ),
    "attention scores, values": ("attention", "attention_window", "attention_selected", "attention_compressed"),
    "indexer scores": ("indexer_scores", "indexer_scores_candidates"),
    "indexer projections": ("indexer_query", "indexer_key", "indexer_weights", "indexer_key_compressor"),
    "entry compressor": ("compressor",),
    "head, streams, Engram": ("lm_head", "hyper_connection", "engram_projection"),
}
"""What the components of `decode_flops` are called together, so that a group means the same in every generation."""


@styled
def components() -> Drawing:
    """Weighted decode FLOPs by group of components, at 4Ki and at 1Mi."""
    models = ("v3.2", "v4-flash", "v4.1-flash")
    columns = [f"weighted_flops_per_token_at_{context}_tokens" for context in (SHORT, LONG)]
    reports = {preset: decode_flops(load_config(preset), [SHORT, LONG]) for preset in models}
    by_component = {preset: report.weighted_by("component") for preset, report in reports.items()}
    grouped = {name for names in GROUPS.values() for name in names}
    assert all(grouped >= set(parts) for parts in by_component.values()), "a component that is in no group"
    rows = []
    for group, names in (*GROUPS.items(), ("total", ())):
        for preset, parts in by_component.items():
            values = [[0, 0], *(parts[name] for name in names if name in parts)]
            sums = reports[preset].weighted_total() if group == "total" else list(map(sum, zip(*values, strict=True)))
            row = {"group": group, "generation": LOOKS[preset].label, "model": preset}
            if any(sums):
                rows.append(row | dict(zip(columns, sums, strict=True)))

    scores = {row["model"]: _gflops(row[columns[1]]) for row in rows if row["group"] == "indexer scores"}
    title = f"Decode FLOPs by component: at {tokens(LONG)} indexer scores take {scores['v3.2']} GFLOPs in V3.2, "
    title += f"{scores['v4.1-flash']} in V4.1-Flash"
    limit = load_config("v3.2").max_position_embeddings
    note = f"Hollow: at {SHORT:,} tokens. Filled: at {LONG:,} tokens, or at both where nothing grows. "
    note += f"Dashed: V3.2 beyond the\n{limit:,} tokens of its max_position_embeddings. "
    figure, ax = new_figure(9.5, 7.8, title, f"{note}A model without a row has no such component.")
    y, ticks = 0.0, []
    alt = f"Dot chart, logarithmic axis: weighted decode GFLOPs per token at {SHORT:,} and {LONG:,} tokens."
    for group in (*GROUPS, "total"):
        members = [row for row in rows if row["group"] == group]
        beside(ax, -0.13, y + (len(members) - 1) / 2, group, ha="right", fontsize=10, fontweight="bold")
        said = []
        for row in members:
            look, (low, high) = LOOKS[row["model"]], (float(row[column] / GIGA) for column in columns)
            dashed = load_config(row["model"]).max_position_embeddings < LONG
            mark = {"color": look.colour, "markersize": 11 if look.marker == "*" else 8, "markeredgewidth": 1.3}
            ax.plot([low, high], [y, y], "--" if dashed else "-", color=look.colour, linewidth=2)
            if low != high:
                ax.plot(low, y, look.marker, markerfacecolor="white", **mark)
            ax.plot(high, y, look.marker, **mark)
            words = list(dict.fromkeys(_gflops(row[column]) for column in columns))
            near(ax, high, y, " \N{RIGHTWARDS ARROW} ".join(words), (10, 0))
            said.append(f"{look.label} {' to '.join(words)}")
            ticks.append((y, look.label))
            y += 1
        y += 0.7
        if group != "total":
            ax.axhline(y - 0.85, color="#BBBBBB", linewidth=0.8)
        alt += f" {group[0].upper()}{group[1:]}: {', '.join(said)}."
    ax.set(ylim=(y - 1, -0.7), xlim=(0.02, 4000), xlabel=f"{WEIGHTED} (logarithmic axis)")
    log_axis(ax.xaxis, [0.1, 1, 10, 100, 1000])
    ax.set_yticks(*zip(*ticks, strict=True))
    ax.tick_params(axis="y", length=0)
    return Drawing("components", title, figure, f"{alt} V3.2 was made for {limit:,} tokens.", rows)


@styled
def persistent() -> Drawing:
    """Bytes a turn adds to the persistent cache against its new tokens, and the ratio of V4.1-Flash to V4-Flash."""
    old, new = load_config("v4-flash"), load_config("v4.1-flash")
    half = round(turn_tokens_for_window_share(old, Fraction(1, 2)))
    ticks = [2**k for k in range(7, 18, 2)]
    turns = sorted({2**k + j * 2 ** (k - 2) for k in range(7, 17) for j in range(4)} | {*ticks, half})
    report, kept = persistent_cache(old, turns), persistent_cache(new, turns).total()
    tiers = report.by("tier")
    rows = [
        {
            "turn_new_tokens": turn,
            "v4_flash_global_bytes": grown,
            "v4_flash_window_bytes": window,
            "v4_flash_total_bytes": total,
            "v4.1_flash_total_bytes": ours,
            "v4_flash_window_share": Fraction(window) / total,
            "v4.1_flash_to_v4_flash_ratio": Fraction(ours) / total,
        }
        for turn, grown, window, total, ours in zip(
            turns, tiers["global"], tiers["window"], report.total(), kept, strict=True
        )
    ]
    at_half = rows[turns.index(half)]
    ratio, stated = at_half["v4.1_flash_to_v4_flash_ratio"], _published("persistent_kv_ratio.V4.1_over_V4-Flash")
    long_turns = Fraction(kv_bytes_per_token(new)) / kv_bytes_per_token(old)
    title = f"Persistent cache: at {half:,} tokens a turn V4.1-Flash keeps 1/{float(1 / ratio):.1f} of V4-Flash's bytes"
    figure, (ax, low) = new_figure(8.5, 7, title, nrows=2, sharex=True, height_ratios=(1.7, 1))
    for key, label, preset, line in (
        ("v4_flash_total_bytes", "V4-Flash, all", "v4-flash", "-"),
        ("v4_flash_window_bytes", "V4-Flash, windows (snapshots)", "v4-flash", "--"),
        ("v4_flash_global_bytes", "V4-Flash, global", "v4-flash", ":"),
        ("v4.1_flash_total_bytes", "V4.1-Flash, all (global alone)", "v4.1-flash", "-"),
    ):
        whole = line == "-"
        looks = {"color": LOOKS[preset].colour, "linewidth": 2.2 if whole else 1.6, "clip_on": False, "label": label}
        looks |= {"marker": LOOKS[preset].marker, "markevery": [turns.index(n) for n in ticks]} if whole else {}
        ax.plot(turns, [float(row[key] / MEGA) for row in rows], line, **looks)
    ax.legend(loc="upper left")
    ax.set(ylim=(0.1, 700), ylabel="MB (10$^6$ bytes) a turn adds")
    log_axis(ax.yaxis, [0.1, 1, 10, 100])
    ring = {"color": INK, "markersize": 8, "markerfacecolor": "white", "zorder": 5}
    drop = {"color": MUTED, "linewidth": 1, "linestyle": (0, (1, 3))}
    height = float(at_half["v4_flash_window_bytes"] / MEGA)
    ax.plot([half, half], [0.1, height], **drop)
    ax.plot(half, height, "o", **ring)
    near(ax, half, 0.25, f"at {half:,} new tokens windows are\nhalf of what V4-Flash keeps", (8, 0))

    low.plot(turns, [float(row["v4.1_flash_to_v4_flash_ratio"]) for row in rows], color=INK, linewidth=2)
    low.plot([half, half], [float(ratio), 0.28], **drop)
    low.plot(half, float(ratio), "o", **ring)
    near(low, half, float(ratio), f"1/{float(1 / ratio):.1f} at {half:,} tokens", (-8, 12), ha="right")
    for value, line in ((stated, "--"), (long_turns, ":")):
        low.axhline(float(value), color=MUTED, linestyle=line, linewidth=1.2)
    near(low, turns[-1], float(stated), f"published: about {stated}", (-4, -9), ha="right")
    near(low, turns[0], float(long_turns), f"bytes per token alone: 1/{float(1 / long_turns):.2f}", (6, -9))
    low.set(ylim=(0, 0.28), yticks=[k / 20 for k in range(6)], ylabel="V4.1-Flash / V4-Flash")
    low.set_xlabel("new tokens of a turn, input and output together (Ki = 1,024)")
    low.grid(True, axis="y")
    for axes in (ax, low):
        axes.set_xlim(turns[0], turns[-1])
        log_axis(axes.xaxis, ticks, tokens)

    keys = ("v4_flash_window_bytes", "v4_flash_total_bytes", "v4.1_flash_total_bytes")
    window, theirs, ours = (number(at_half[key]) for key in keys)
    grows = [number(kv_bytes_per_token(config)) for config in (old, new)]
    alt = (
        f"Two line charts against the new tokens of a turn, {turns[0]:,} to {turns[-1]:,}. Above, what a turn adds to "
        f"the persistent cache: V4-Flash {grows[0]} bytes a token and {window} bytes of windows, V4.1-Flash {grows[1]} "
        f"bytes a token and no windows. At {half:,} new tokens windows are half of what V4-Flash keeps, and it keeps "
        f"{theirs} bytes against {ours}. Below, the ratio of V4.1-Flash to V4-Flash: 1/{float(1 / ratio):.1f} there, "
        f"published as about {stated}; in long turns it rises towards 1/{float(1 / long_turns):.2f}."
    )
    return Drawing("persistent", title, figure, alt, rows)


FIGURES: dict[str, Callable[[], Drawing]] = {
    "figure-1b": figure_1b,
    "figure-2": figure_2,
    "ladder": ladder,
    "components": components,
    "persistent": persistent,
}
"""Every figure by name, in the order in which they are drawn."""
