"""Which query heads share keys and values. `shared_by` has the plain numbers, `heads` draws them."""

from __future__ import annotations

from collections.abc import Mapping

from flashsim.drawing import LESS, MORE, MUTED, Drawing, FigureError, new_figure, styled


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
        words.append(f"{kind}: KV heads {number}, query heads that read each {query_heads // number}")
    return Drawing(name, "Heads that share keys and values", figure, f"{'; '.join(words)}.", rows)
