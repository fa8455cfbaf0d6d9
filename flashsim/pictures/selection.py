"""What one query selects: index scores, the candidate pool, the chosen entries, the window beside them.

    >>> chosen = select([0.0, 2.0, 0.0, 1.0, 3.0, 0.0], 3, position=5, window=2)
    >>> chosen.entries, chosen.window_tokens
    ([1, 3, 4], range(4, 6))
    >>> select([0.0, 2.0, 0.0, 1.0, 3.0, 0.0], 3, position=5, window=2, block_size=2, keep_blocks=2).pool
    [0, 2]

An entry t of ratio r stands for tokens r t .. r t + r - 1 and is visible once the last of them is there. The best `k`
are chosen by score, then by lower entry. The pool ranks blocks of entries by their best score and always keeps the
block with the newest visible entry. Plain numbers, standard library; `model.indexer` is the same in PyTorch. Source:
V4.1 report 2.3 and 2.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashsim.drawing import INK, LESS, MORE, MUTED, PALE, Drawing, FigureError, beside, new_figure, styled


@dataclass(frozen=True)
class Selection:
    """One query's choice among entries.

    scores: one for each visible entry. entries: the chosen ones, ascending. block_maxima: the best score of each block
    of `block_size` entries, the pool's ranking; empty without a pool. pool: the blocks kept or given, ascending; None
    where there is no pool. window_tokens: positions that the query sees in its window. ties: entries that lost although
    their score is that of a chosen one, because their number is higher.
    """

    position: int
    ratio: int
    k: int
    scores: list[float]
    entries: list[int]
    window_tokens: range
    ties: list[int]
    block_size: int = 0
    block_maxima: tuple[float, ...] = ()
    pool: list[int] | None = None

    def tokens(self, entry: int) -> range:
        """The positions that an entry stands for."""
        return range(entry * self.ratio, (entry + 1) * self.ratio)

    def in_pool(self, entry: int) -> bool:
        """Whether the entry lies in a block of the pool; True where there is none."""
        return self.pool is None or entry // self.block_size in self.pool

    def table(self) -> list[dict]:
        """One row a visible entry."""
        return [
            {
                "entry": entry,
                "first_token": self.tokens(entry)[0],
                "last_token": self.tokens(entry)[-1],
                "score": score,
                "in_pool": self.in_pool(entry),
                "chosen": entry in self.entries,
            }
            for entry, score in enumerate(self.scores)
        ]


def best(scores: Sequence[float], k: int) -> list[int]:
    """Places of the k best scores, ascending; of equal scores the lower place, and never one of -infinity.

    >>> best([0.0, 5.0, 0.0, 0.0], 3)
    [0, 1, 2]
    """
    order = sorted((place for place, score in enumerate(scores) if score != -math.inf), key=lambda t: (-scores[t], t))
    return sorted(order[:k])


def select(
    scores: Sequence[float],
    k: int,
    *,
    position: int,
    ratio: int = 1,
    window: int = 0,
    block_size: int = 0,
    keep_blocks: int = 0,
    pool: Sequence[int] | None = None,
) -> Selection:
    """What a query at `position` selects of entries with these `scores`; those that it cannot see yet are left out.

    `block_size` and `keep_blocks` fill a candidate pool beside the selection, which itself is among all entries;
    `block_size` and `pool`, blocks from another layer, limit the selection to them.

    Raises:
        FigureError: a number out of range, or a score that is NaN.
    """
    for field, value, low in (("k", k, 1), ("position", position, 0), ("ratio", ratio, 1), ("window", window, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise FigureError(field, repr(value), f"a whole number from {low}")
    if (keep_blocks or pool is not None) and block_size < 1:
        raise FigureError("block_size", block_size, "a whole number from 1 where there is a pool")
    seen = [float(score) for score in scores][: (position + 1) // ratio]
    if any(math.isnan(score) for score in seen):
        raise FigureError("scores", "a list with NaN", "numbers")
    maxima: tuple[float, ...] = ()
    kept = None if pool is None else sorted(int(block) for block in pool if block >= 0)
    ranked = seen
    if keep_blocks and kept is None:
        maxima = tuple(max(seen[low : low + block_size]) for low in range(0, len(seen), block_size))
        forced = [math.inf if block == len(maxima) - 1 else score for block, score in enumerate(maxima)]
        kept = best(forced, keep_blocks)
    elif kept is not None:
        ranked = [score if entry // block_size in kept else -math.inf for entry, score in enumerate(seen)]
    taken = best(ranked, k)
    worst = min((ranked[entry] for entry in taken), default=None)
    ties = [entry for entry, score in enumerate(ranked) if score == worst and entry not in taken]
    looked = range(max(position - window + 1, 0), position + 1) if window else range(0)
    return Selection(position, ratio, k, seen, taken, looked, ties, block_size, maxima, kept)


@styled
def selection_picture(chosen: Selection, title: str = "", name: str = "selection") -> Drawing:
    """Scores of all visible entries over the tokens that they stand for; chosen ones, the pool's blocks, the window."""
    from matplotlib.patches import Rectangle

    seen, count = chosen.scores, len(chosen.scores)
    title = title or f"The query at position {chosen.position} selects {len(chosen.entries)} of {count} entries"
    note = "orange with a dot: chosen. Blue: visible, not chosen."
    if chosen.pool is not None and any(not chosen.in_pool(entry) for entry in range(count)):
        note += " Grey, hatched: outside the candidate pool."
    figure, ax = new_figure(9.0, 3.4, title, note)
    finite = [s for s in seen if math.isfinite(s)] or [0.0]
    low, high = min(*finite, 0.0), max(*finite, 0.0)
    unit = (high - low) or 1.0
    lanes = [("window", -0.14)] + ([("pool", -0.28)] if chosen.pool is not None else [])
    for entry, score in enumerate(seen):
        tokens, taken = chosen.tokens(entry), entry in chosen.entries
        outside = not chosen.in_pool(entry)
        colour, hatch = (MORE, "") if taken else (PALE, "//") if outside else (LESS, "")
        width = chosen.ratio * 0.9
        height = score if math.isfinite(score) else 0.0
        centre = tokens[0] - 0.5 + chosen.ratio / 2
        edge = MUTED if outside and not taken else colour
        ax.bar(centre, height, width, color=colour, hatch=hatch, edgecolor=edge, linewidth=0.5)
        if taken:
            ax.plot([centre], [height + 0.04 * unit], "o", color=MORE, markersize=4)
        elif height == 0:
            ax.plot([centre], [0], "_", color=MUTED if outside else LESS, markersize=5)
    bottom = low - 0.06 * unit
    for text, shift in lanes:
        y = low + shift * unit
        beside(ax, -0.008, y, text, ha="right", fontsize=8.5, color=MUTED)
        bottom = y - 0.08 * unit
    if chosen.window_tokens:
        first, last = chosen.window_tokens[0], chosen.window_tokens[-1]
        box = (first - 0.5, low - 0.18 * unit), last - first + 1, 0.08 * unit
        ax.add_patch(Rectangle(*box, facecolor="#009E73"))
    for block in chosen.pool or ():
        first = block * chosen.block_size * chosen.ratio
        last = min((block + 1) * chosen.block_size, count) * chosen.ratio - 1
        if first <= last:
            box = (first - 0.45, low - 0.32 * unit), last - first + 0.9, 0.08 * unit
            ax.add_patch(Rectangle(*box, facecolor="#E69F00", edgecolor="white"))
    ax.axhline(0, color=MUTED, linewidth=0.8)
    ax.set(
        xlim=(-0.8, max(chosen.position, 7) + 0.8),
        ylim=(bottom, high + 0.14 * unit),
        xlabel="token",
        ylabel="index score",
    )
    ax.tick_params(colors=INK)
    ticks = [t for t in ax.get_yticks() if low - 0.01 * unit <= t <= high + 0.1 * unit]
    ax.set_yticks(ticks)
    if chosen.ratio > 1:
        ax.set_xlabel(f"token (an entry stands for {chosen.ratio})")
    alt = f"Scores of {count} entries. Chosen: {', '.join(map(str, chosen.entries)) or 'none'}."
    if chosen.pool is not None:
        alt += f" Blocks of {chosen.block_size} in the candidate pool: {', '.join(map(str, chosen.pool))}."
    if chosen.window_tokens:
        alt += f" The window holds tokens {chosen.window_tokens[0]} to {chosen.window_tokens[-1]}."
    if chosen.ties:
        alt += f" Lost a tie to a lower entry: {', '.join(map(str, chosen.ties))}."
    return Drawing(name, title, figure, alt, chosen.table() or [{"entry": "none visible yet"}])
