"""The layer map: every layer of a model, what it keeps, whose cache it reads, whose selection it uses.

    >>> from flashsim.config import load_config
    >>> config = load_config("v4.1-flash")
    >>> [(span.source, span.first, span.last) for span in cache_spans(config)]
    [(2, 2, 7), (8, 8, 13), (14, 14, 19), (20, 20, 39)]
    >>> print(describe(config, 24))
    Layer 24, decoder half, role reindex: a window of 128 tokens; reads the entries of layer 20 (1 for 1 token); \
selects by itself, scoring the candidate pool in the index keys of layer 20.
"""

from __future__ import annotations

import textwrap
from fractions import Fraction
from typing import Any, NamedTuple

from flashsim.config import Config
from flashsim.drawing import INK, LESS, MORE, MUTED, PALE, Drawing, FigureError, new_figure, styled
from flashsim.kv_cache import kv_cache
from flashsim.schedule import LayerPlan, layer_plan

ROLES = {
    "full": ("F", MORE, ""),
    "reindex": ("I", "#E69F00", "//"),
    "reuse": ("R", "#56B4E9", ""),
    "window": ("W", PALE, ""),
    "dense": ("D", "#CC79A7", ".."),
}
"""Role to letter, colour and hatch."""


class Span(NamedTuple):
    """Neighbouring layers `first` .. `last` that read what layer `source` made."""

    source: int
    first: int
    last: int

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.first <= layer <= self.last


def _spans(sources: list[int | None]) -> list[Span]:
    spans: list[Span] = []
    for layer, source in enumerate(sources):
        if source is None:
            continue
        if spans and spans[-1].source == source and spans[-1].last == layer - 1:
            spans[-1] = spans[-1]._replace(last=layer)
        else:
            spans.append(Span(source, layer, layer))
    return spans


def cache_spans(config: Config) -> list[Span]:
    """Which layers read whose main KV, in runs of neighbours."""
    return _spans([plan.kv_source for plan in layer_plan(config)])


def selection_spans(config: Config) -> list[Span]:
    """Which layers attend to whose selection, in runs of neighbours."""
    return _spans([plan.selection_source for plan in layer_plan(config)])


def layer_map(config: Config) -> list[dict[str, Any]]:
    """One row a layer: role, half, whose main KV, index keys and selection it uses, and the bytes it adds a token.

    `stored_bytes_per_token` is what grows with the context, exact; `window_bytes` what its full window takes.
    """
    # At a whole number of every group there is no remainder, and every window is full.
    plans = layer_plan(config)
    tokens = max(plan.window or 1 for plan in plans)
    for plan in plans:
        tokens *= plan.compress_ratio if tokens % max(plan.compress_ratio, 1) else 1
    stored = kv_cache(config, tokens).by("layer", "tier")
    return [
        {
            "layer": plan.layer,
            "half": plan.half or "",
            "role": plan.role,
            "compress_ratio": plan.compress_ratio,
            "kv_source": plan.kv_source,
            "index_key_source": plan.index_key_source,
            "selection_source": plan.selection_source,
            "builds_candidates": plan.builds_candidates,
            "scores_candidates": plan.scores_candidates,
            "stored_bytes_per_token": Fraction(stored.get((plan.layer, "global"), 0)) / tokens,
            "window_bytes": stored.get((plan.layer, "window"), 0),
        }
        for plan in plans
    ]


def _plan(config: Config, layer: int) -> LayerPlan:
    plans = layer_plan(config)
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < len(plans):
        raise FigureError("layer", repr(layer), f"0 to {len(plans) - 1} of {config.name}")
    return plans[layer]


def describe(config: Config, layer: int) -> str:
    """One layer in a sentence.

    Raises:
        FigureError: there is no such layer.
    """
    plan = _plan(config, layer)
    half = f", {plan.half} half" if plan.half else ""
    parts = [f"a window of {plan.window} tokens"] if plan.window else []
    if plan.owns_kv:
        keys = " and index keys" if plan.owns_index_keys else ""
        parts.append(f"keeps entries{keys} of its own ({_ratio(plan)})")
    elif plan.kv_source is not None:
        parts.append(f"reads the entries of layer {plan.kv_source} ({_ratio(plan)})")
    if plan.selects:
        pool = "the candidate pool in " if plan.scores_candidates else ""
        whose = "its own index keys" if plan.index_key_source == layer else f"the index keys of layer {plan.kv_source}"
        parts.append(f"selects by itself, scoring {pool}{whose}")
        if plan.builds_candidates:
            parts.append("fills the candidate pool")
    elif plan.selection_source is not None:
        parts.append(f"takes the selection of layer {plan.selection_source}")
    elif plan.kv_source is not None:
        parts.append("attends to all of them")
    return f"Layer {layer}{half}, role {plan.role}: {'; '.join(parts)}."


def _ratio(plan: LayerPlan) -> str:
    return f"1 for {plan.compress_ratio} token{'s' * (plan.compress_ratio > 1)}"


@styled
def layer_picture(config: Config, layer: int | None = None, title: str = "", name: str = "layer-map") -> Drawing:
    """The map of all layers in three lanes: roles, whose main KV, whose selection; `layer` is framed and described.

    Raises:
        FigureError: there is no such layer.
    """
    from matplotlib.patches import Rectangle

    plans = layer_plan(config)
    note = "" if layer is None else describe(config, layer)
    count, caches, selections = len(plans), cache_spans(config), selection_spans(config)
    owners = sum(plan.owns_kv for plan in plans)
    title = title or f"{config.name}: {count} layers, {owners} caches that grow with the context"
    figure, ax = new_figure(9.0, 3.0, title, _wrapped(note))
    ax.set(xlim=(-0.6, count - 0.4), ylim=(-2.75, 1.35), yticks=[0, -1, -2])
    ax.set_yticklabels(["role", "main KV of", "selection of"])
    step = max(1, -(-count // 24)) if count > 40 else (2 if count > 20 else 1)
    ax.set_xticks(range(0, count, step))
    ax.set_xlabel("layer")
    ax.tick_params(length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    letters = count <= 64
    for plan in plans:
        letter, colour, hatch = ROLES[plan.role]
        look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white"}
        ax.add_patch(Rectangle((plan.layer - 0.45, -0.36), 0.9, 0.72, **look))
        if letters:
            ax.text(plan.layer, 0, letter, ha="center", va="center", fontsize=8, color=INK)
    for y, spans, colours in ((-1, caches, (LESS, "#009E73")), (-2, selections, ("#7A5195", "#B58900"))):
        for i, span in enumerate(spans):
            faded = 0.25 if layer is not None and layer not in span else 1
            ax.add_patch(
                Rectangle(
                    (span.first - 0.45, y - 0.3),
                    span.last - span.first + 0.9,
                    0.6,
                    facecolor=colours[i % 2],
                    alpha=faded,
                )
            )
            if span.last - span.first + 1 >= count / 40:
                ax.text(
                    span.first,
                    y,
                    str(span.source),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if faded == 1 else INK,
                )
    for half in dict.fromkeys(plan.half for plan in plans if plan.half):
        members = [plan.layer for plan in plans if plan.half == half]
        ax.plot([members[0] - 0.4, members[-1] + 0.4], [0.58, 0.58], color=MUTED, linewidth=1.5)
        ax.text((members[0] + members[-1]) / 2, 0.66, f"{half} half", ha="center", va="bottom", color=MUTED)
    if layer is not None:
        frame = {"fill": False, "edgecolor": INK, "linewidth": 2}
        ax.add_patch(Rectangle((layer - 0.5, -2.4), 1.0, 2.85, **frame))
    used = [role for role in ROLES if any(plan.role == role for plan in plans)]
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=ROLES[role][1], hatch=ROLES[role][2], edgecolor="white") for role in used
    ]
    labels = [f"{ROLES[role][0]} {role} ({sum(plan.role == role for plan in plans)})" for role in used]
    ax.legend(handles, labels, ncols=len(used), loc="lower right", bbox_to_anchor=(1, 0.98), handlelength=1.2)
    said = [f"Layers {s.first} to {s.last} read the entries of layer {s.source}." for s in _few(caches)]
    said += [f"Layers {s.first} to {s.last} use the selection of layer {s.source}." for s in _few(selections)]
    alt = f"{count} layers: {', '.join(labels)}. {' '.join(said)} {note}".strip()
    return Drawing(name, title, figure, alt, layer_map(config))


def _few(spans: list[Span]) -> list[Span]:
    """The runs of more than one layer; runs of one need no words."""
    return [span for span in spans if span.last > span.first]


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 130))
