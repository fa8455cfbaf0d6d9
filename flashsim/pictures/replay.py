"""The sliding window and a kept prefix: which rows run again, and how far a window that begins too late is felt.

Row p of a layer reads the rows p - W + 1 to p of the layer below. If the rows before `start` did not run, W - 1 rows of
the first layer lack a part of their window, twice as many rows of the second lack a part of theirs or read such a row,
and so on: a slope of W - 1 rows a layer. `replay_map` says so for every layer, without torch.
Source: V4.1 report 3.2; `flashsim.persistent.replay_rows` says which rows run, `model.replay` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flashsim.config import Config, V41Config
from flashsim.drawing import INK, LESS, MORE, MUTED, PALE, Drawing, FigureError, new_figure, styled
from flashsim.kv_cache import kv_cache
from flashsim.persistent import ReplayRows, replay_rows
from flashsim.schedule import last_kv_source, layer_plan

STATES = {
    "not run": "did not run in this layer",
    "exact": "equal to a cold run",
    "cut": "a window begins too late, here or below",
    "entry": "may read an entry that such a row wrote",
}
"""What can be said of a row behind a layer; the first three follow from windows, the last from selected entries."""
_LOOKS = {"not run": (PALE, ""), "exact": (LESS, ""), "cut": (MORE, "//"), "entry": ("#F0C8A0", "\\\\")}


class Span(NamedTuple):
    """Rows `low` to `high` - 1 of a layer, all in one state of `STATES`."""

    state: str
    low: int
    high: int


class LayerRows(NamedTuple):
    """One layer of a replay: its rows from the first to the last, in spans, and what of the prefix was stored.

    `stored_bytes` are the entries and index keys of the stored tokens, in the layers that own a cache.
    """

    layer: int
    half: str
    spans: tuple[Span, ...]
    stored_bytes: int

    def rows(self, *states: str) -> int:
        """How many rows are in these states; without one, how many run."""
        chosen = states or tuple(state for state in STATES if state != "not run")
        return sum(span.high - span.low for span in self.spans if span.state in chosen)


def replay_map(config: V41Config, rows: ReplayRows) -> tuple[LayerRows, ...]:
    """The state of every row behind every layer of a replay.

    >>> from flashsim.config import load_config
    >>> config = load_config("tiny")
    >>> behind = replay_map(config, replay_rows(config, 60, 40, "bounded"))
    >>> behind[0].spans
    (Span(state='not run', low=0, high=32), Span(state='cut', low=32, high=39), Span(state='exact', low=39, high=60))
    >>> behind[7].rows(), behind[7].rows("exact")
    (8, 0)
    """
    reach, boundary = config.sliding_window - 1, last_kv_source(config)
    start, prompt, prefix = rows.encoder_start, rows.prompt, rows.prefix
    stored = kv_cache(config, prefix).where(tier="global").by("layer") if prefix and rows.mode != "cold" else {}
    felt_from, result = prompt, []
    for plan in layer_plan(config):
        sound = start + plan.layer * reach if start else 0  # rows of the layer's input from here on are exact
        frozen = prefix - prefix % max(plan.compress_ratio, 1)  # tokens whose entries were stored
        if plan.owns_kv and sound > frozen:
            felt_from = min(felt_from, frozen + plan.compress_ratio - 1)  # sees the first entry that is written anew
        first, exact_from = start, start + (plan.layer + 1) * reach if start else 0
        if boundary is not None and plan.layer >= boundary:
            first = rows.decoder_start
            if first > start:
                # The boundary layer has the input of every row, so its own windows are whole.
                exact_from = max(exact_from, first + (plan.layer - boundary) * reach)
        ends = (("not run", first), ("cut", exact_from), ("exact", felt_from), ("entry", prompt))
        spans, low = [], 0
        for state, end in ends:
            high = min(max(end, low), prompt)
            if high > low:
                spans.append(Span(state, low, high))
            low = high
        result.append(LayerRows(plan.layer, plan.half, tuple(spans), int(stored.get(plan.layer, 0))))
    return tuple(result)


def is_exact(config: V41Config, rows: ReplayRows) -> bool:
    """Whether the last logits are those of a cold run for any weights."""
    return replay_map(config, rows)[-1].spans[-1].state == "exact"


@styled
def replay(
    config: Config,
    prompt: int,
    prefix: int,
    mode: str = "bounded",
    *,
    rollback: int = 0,
    first: int | None = None,
    name: str = "replay",
) -> Drawing:
    """Layers against positions of a prompt: which rows run after a hit of `prefix` tokens, and which are exact.

    first: the first position shown; by default a little before the first row that runs.

    Raises:
        ValueError: as `replay_rows`; FigureError: `first` lies outside the prompt.
    """
    from matplotlib.patches import Patch, Rectangle

    rows = replay_rows(config, prompt, prefix, mode, rollback=rollback)
    layers, boundary = replay_map(config, rows), last_kv_source(config)
    if first is None:
        low = min(rows.encoder_start, prefix)
        first = max(low - max((prompt - low) // 6, 2), 0)
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first < prompt:
        raise FigureError("first", repr(first), f"a position from 0 to {prompt - 1}")
    title = f"{mode.capitalize()} replay of {config.name}: {prefix:,} of {prompt:,} tokens were stored"
    note = (
        f"Run again before token {prefix:,}: {rows.replayed:,} rows. In the decoder half: {rows.decoder_rows:,} rows."
    )
    figure, ax = new_figure(8.5, max(3.2, min(7.5, 0.17 * len(layers) + 2.2)), title)
    for layer in layers:
        for state, low, high in layer.spans:
            if high > first and state != "not run":  # that is the ground
                colour, hatch = _LOOKS[state]
                left = max(low, first)
                box = (left - 0.5, layer.layer - 0.42), high - left, 0.84
                ax.add_patch(Rectangle(*box, facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0))
    ax.set_facecolor(_LOOKS["not run"][0])
    ax.set(xlim=(first - 0.5, prompt - 0.5), ylim=(len(layers) - 0.4, -0.6), xlabel=f"position\n{note}", ylabel="layer")
    owners = [layer.layer for layer in layers if layer.stored_bytes]
    if len(layers) <= 12:
        ax.set_yticks(range(len(layers)))
    ax.tick_params(axis="y", length=0)
    if 0 < prefix < prompt:
        ax.axvline(prefix - 0.5, color=INK, linewidth=1.5)
        ax.annotate("stored | new", (prefix - 0.5, -0.6), (0, 3), textcoords="offset points", ha="center", fontsize=8.5)
    if boundary is not None:
        ax.axhline(boundary - 0.5, color=MUTED, linewidth=1, linestyle="--")
    shown = {span.state for layer in layers for span in layer.spans if span.high > first}
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=STATES[state])
        for state, (colour, hatch) in _LOOKS.items()
        if state in shown
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8.5)
    table = [
        {
            "layer": layer.layer,
            "half": layer.half,
            "rows run": layer.rows(),
            **{f"rows {state}": layer.rows(state) for state in ("exact", "cut", "entry")},
            "stored bytes": layer.stored_bytes,
        }
        for layer in layers
    ]
    kept = f"Layers {', '.join(map(str, owners))} read their stored entries. " if owners else ""
    last = STATES[layers[-1].spans[-1].state]
    alt = (
        f"Rows of {len(layers)} layers for {prompt:,} tokens, {prefix:,} of them stored. The encoder half runs from "
        f"position {rows.encoder_start:,}, the decoder half from {rows.decoder_start:,}. {kept}The last row behind the "
        f"last layer: {last}."
    )
    return Drawing(name, title, figure, alt, table)


def ring_positions(size: int, tokens: int) -> list[int | None]:
    """Which position each slot of a ring of `size` rows holds after so many tokens: p lies in slot p mod size.

    >>> ring_positions(4, 6)
    [4, 5, 2, 3]
    """
    newest = tokens - 1
    held = (newest - (newest - slot) % size for slot in range(size))
    return [position if position >= 0 else None for position in held]


def window_marks(window: int, queries: Sequence[int], first: int, start: int = 0) -> list[list[float]]:
    """Queries against positions from `first` on: 1 where a query's window reads a row, 0.35 where that row did not run.

    >>> window_marks(3, [4, 5], 1, start=4)
    [[0.0, 0.35, 0.35, 1.0, 0.0], [0.0, 0.0, 0.35, 1.0, 1.0]]
    """
    last = max(queries)
    return [
        [0.0 if not q - window < p <= q else 1.0 if p >= start else 0.35 for p in range(first, last + 1)]
        for q in queries
    ]


@styled
def windows(window: int, queries: Sequence[int], *, start: int = 0, name: str = "windows") -> Drawing:
    """The window of each query, a row each: what it reads, what it lacks because rows before `start` did not run."""
    from matplotlib.patches import Patch, Rectangle

    first = max(min(queries) - window + 1, 0)
    grid = window_marks(window, queries, first, start)
    title = f"Windows of {window} positions" + (f", rows from {start} on" if start else "")
    figure, ax = new_figure(max(5.0, 0.32 * len(grid[0]) + 1.8), 0.34 * len(grid) + 2.0, title)
    for i, marks in enumerate(grid):
        for mark, colour, hatch in ((1, LESS, ""), (0.35, MORE, "//")):
            if mark in marks:
                look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
                ax.add_patch(Rectangle((marks.index(mark) - 0.5, i - 0.42), marks.count(mark), 0.84, **look))
    ax.set_xticks([j - 0.5 for j in range(1, len(grid[0]))], minor=True)
    ax.grid(True, axis="x", which="minor", color="white", linewidth=2)
    ax.set_axisbelow(False)
    ax.set_facecolor("#F4F4F4")
    ax.set(xlim=(-0.6, len(grid[0]) - 0.4), ylim=(len(grid) - 0.4, -0.6), xlabel="position read", ylabel="query")
    step = 1 if len(grid[0]) <= 24 else 4
    ax.set_xticks(range(0, len(grid[0]), step), range(first, first + len(grid[0]), step), fontsize=8)
    ax.set_yticks(range(len(grid)), queries)
    ax.tick_params(which="both", length=0)
    missing = [sum(0 < mark < 1 for mark in marks) for marks in grid]
    handles = [Patch(facecolor=LESS, label="read")]
    if any(missing):
        handles.append(Patch(facecolor=MORE, hatch="//", edgecolor="white", label="in the window, but did not run"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8.5)
    rows: list[dict[str, Any]] = [
        {"query": q, "read": sum(mark == 1 for mark in marks), "missing": lost}
        for q, marks, lost in zip(queries, grid, missing, strict=True)
    ]
    alt = "; ".join(f"query {row['query']} reads {row['read']} rows and lacks {row['missing']}" for row in rows)
    return Drawing(name, title, figure, f"{alt[0].upper()}{alt[1:]}.", rows)
