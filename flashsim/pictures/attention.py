"""Pictures of attention: which heads share keys and values, and what a query of V4 can see.

`shared_by` and `seen_from` are the plain numbers underneath; the pictures draw them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from flashsim.drawing import INK, LESS, MORE, MUTED, PALE, Drawing, FigureError, new_figure, styled

GREEN = "#009E73"


def shared_by(query_heads: int, kv_heads: int) -> list[int]:
    """The KV head that each query head reads; heads of a group are neighbours.

    Raises:
        FigureError: the query heads cannot be divided evenly.

    >>> shared_by(8, 2)
    [0, 0, 0, 0, 1, 1, 1, 1]
    """
    if kv_heads < 1 or query_heads < 1 or query_heads % kv_heads:
        raise FigureError("kv_heads", kv_heads, f"a divisor of query_heads, {query_heads}")
    return [head // (query_heads // kv_heads) for head in range(query_heads)]


@styled
def heads(kinds: Mapping[str, int], query_heads: int, *, name: str = "heads") -> Drawing:
    """Query heads above, the KV heads they read below; `kinds` names a number of KV heads for each panel."""
    figure, axes = new_figure(
        2.9 * len(kinds), 2.6, f"{query_heads} query heads, and the keys and values they read", ncols=len(kinds)
    )
    rows, words = [], []
    for ax, (kind, number) in zip([axes] if len(kinds) == 1 else axes, kinds.items(), strict=True):
        reads = shared_by(query_heads, number)
        places = [(i + 0.5) * query_heads / number for i in range(number)]
        for head, kv in enumerate(reads):
            ax.plot([head + 0.5, places[kv]], [1, 0], color=MUTED, linewidth=1, zorder=1)
            rows.append({"kind": kind, "query_head": head, "reads_kv_head": kv})
        ax.plot([head + 0.5 for head in range(query_heads)], [1] * query_heads, "o", color=LESS, markersize=11)
        ax.plot(places, [0] * number, "s", color=MORE, markersize=12)
        ax.set_title(f"{kind}: {number}", loc="left")
        ax.set(xlim=(0, query_heads), ylim=(-0.35, 1.35))
        ax.set_yticks([0, 1], ["KV", "query"])
        ax.set_xticks([])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        words.append(f"{kind}: {number} KV heads, each read by {query_heads // number} query heads")
    return Drawing(name, "Heads that share keys and values", figure, f"{'; '.join(words)}.", rows)


class Seen(NamedTuple):
    """What a query sees: positions of the window, numbers of complete entries, and the tokens of one entry."""

    window: list[int]
    entries: list[int]
    tokens: dict[int, list[int]]


def seen_from(position: int, window: int, ratio: int, overlap: bool = False) -> Seen:
    """What the query at `position` sees with a window of so many tokens and one entry for `ratio` tokens.

    Entry j is there once its last token is: (j + 1) ratio <= position + 1. With `overlap` an entry is made of its own
    group and the one before.

    >>> seen_from(9, 4, 4, overlap=True)
    Seen(window=[6, 7, 8, 9], entries=[0, 1], tokens={0: [0, 1, 2, 3], 1: [0, 1, 2, 3, 4, 5, 6, 7]})
    """
    for field, value, least in (("position", position, 0), ("window", window, 1), ("ratio", ratio, 1)):
        if value < least:
            raise FigureError(field, value, f"a whole number from {least}")
    entries = list(range((position + 1) // ratio))
    back = ratio if overlap else 0
    tokens = {j: list(range(max(j * ratio - back, 0), (j + 1) * ratio)) for j in entries}
    return Seen(list(range(max(position - window + 1, 0), position + 1)), entries, tokens)


@styled
def reach(
    position: int,
    window: int,
    ratio: int,
    *,
    selected: Collection[int] | None = None,
    overlap: bool = False,
    title: str = "",
    name: str = "reach",
) -> Drawing:
    """A strip of tokens, the window of the query at `position` in it, and below the entries made of them.

    `selected`: the entries that are read; None is all that are complete. `overlap` draws a line over the tokens that
    each entry is made of.
    """
    from matplotlib.patches import Rectangle

    seen = seen_from(position, window, ratio, overlap)
    chosen = set(seen.entries if selected is None else selected)
    if not chosen <= set(seen.entries):
        raise FigureError("selected", sorted(chosen), f"entries that are complete, 0 to {len(seen.entries) - 1}")
    length = -(-(position + 1) // ratio) * ratio
    title = title or f"What token {position} sees: a window of {window}, and entries for {ratio} tokens each"
    key = "Blue: the window. Green: entries that are read. Grey: entries that are not. Dashed: not complete yet."
    figure, ax = new_figure(max(6.0, min(11.0, 0.27 * length + 1.6)), 2.9 if overlap else 2.3, title, key)
    font: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8 if length <= 40 else 6}
    step = 1 if length <= 40 else 4
    for token in range(length):
        there, inside = token <= position, token in seen.window
        look = {"facecolor": LESS if inside else "white", "edgecolor": INK, "linestyle": "-" if there else ":"}
        if token == position:
            look |= {"edgecolor": MORE, "linewidth": 2.5, "zorder": 3}
        ax.add_patch(Rectangle((token + 0.06, 1.1), 0.88, 0.8, **look))
        if token % step == 0 or token == position:
            ax.text(token + 0.5, 1.5, str(token), color="white" if inside else INK, **font)
    for entry in range(length // ratio):
        complete, taken = entry in seen.tokens, entry in chosen
        face = GREEN if taken else PALE if complete else "white"
        box = (entry * ratio + 0.06, 0), ratio - 0.12, 0.8
        look = {"linestyle": "-" if complete else "--", "edgecolor": INK if complete else MUTED}
        ax.add_patch(Rectangle(*box, facecolor=face, **look))
        middle = (entry + 0.5) * ratio
        ax.text(middle, 0.4, str(entry) if complete else "", color="white" if taken else INK, **font)
        if overlap and complete:
            tokens, height = seen.tokens[entry], -0.25 - 0.25 * (entry % 2)
            ax.plot([tokens[0] + 0.1, tokens[-1] + 0.9], [height] * 2, color=INK, linewidth=2)
            ax.plot([middle, middle], [height, 0], color=MUTED, linewidth=0.8)
    ax.set(xlim=(-0.1, length + 0.1), ylim=(-0.75 if overlap else -0.1, 2))
    ax.set_yticks([0.4, 1.5] + ([-0.38] if overlap else []), ["entries", "tokens"] + (["made of"] if overlap else []))
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    rows = [{"kind": "token", "number": t, "read": t in seen.window} for t in range(position + 1)]
    rows += [{"kind": "entry", "number": j, "read": j in chosen} for j in seen.entries]
    read, groups = ", ".join(map(str, sorted(chosen))) or "none", ", made of two groups" if overlap else ""
    alt = (
        f"A strip of {position + 1} tokens. The query at token {position} reads the window of tokens {seen.window[0]} "
    )
    alt += (
        f"to {position} and the entries {read} of {len(seen.entries)} complete ones, each for {ratio} tokens{groups}."
    )
    return Drawing(name, title, figure, alt, rows)
