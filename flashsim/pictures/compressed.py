"""Compressed attention of V4: which tokens make an entry, and which tokens a query reaches, as records or in entries.

    >>> [feed.token for feed in feeds(12, 4, overlap=True) if feed.entry == 1]
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> found = reach(9, window=2, ratio=4)
    >>> found.window, found.entries, found.missed
    (range(8, 10), [0, 1], [])

Entry t of ratio r has the tokens r t .. r t + r - 1 as its own and is visible once the last of them is there. Plain
numbers, standard library; `model.v4_compressor` and `model.attention` are the same in PyTorch. Source: DeepSeek-V4
reference code, Compressor and get_compress_topk_idxs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashsim.drawing import LESS, MORE, MUTED, PALE, Drawing, FigureError, new_figure, styled

WINDOW, MISSED = "#009E73", PALE


class Feed(NamedTuple):
    """A token that goes into an entry: as one of its own group, or (`before`) of the group before that."""

    entry: int
    token: int
    before: bool


def _whole(field: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise FigureError(field, repr(value), f"a whole number from {low}")


def feeds(tokens: int, ratio: int, *, overlap: bool) -> list[Feed]:
    """What goes into the entries that so many tokens complete, by entry, then by token.

    With `overlap` (CSA) an entry also takes the tokens of the group before its own; entry 0 has none before.

    Raises:
        FigureError: `tokens` or `ratio` is not a whole number from 1.
    """
    _whole("tokens", tokens, 1)
    _whole("ratio", ratio, 1)
    return [
        Feed(entry, token, token < entry * ratio)
        for entry in range(tokens // ratio)
        for token in range(max(entry - overlap, 0) * ratio, (entry + 1) * ratio)
    ]


@dataclass(frozen=True)
class Reach:
    """What one query attends to.

    window: positions of the records that it sees. visible: how many entries are there for it; entries: those that it
    attends to, ascending. missed: tokens that are in neither, ascending. open_group: tokens that have no entry yet.
    """

    position: int
    ratio: int
    window: range
    visible: int
    entries: list[int]
    missed: list[int]
    open_group: range

    @property
    def vectors(self) -> int:
        """Records and entries in the softmax, without the sink."""
        return len(self.window) + len(self.entries)


def reach(position: int, *, window: int, ratio: int = 0, chosen: Sequence[int] | None = None) -> Reach:
    """What the query at `position` reaches by a window and entries of `ratio` tokens (0: no entries).

    chosen: the entries it selects, -1 for none; all that are visible where it is None. An entry counts for the tokens
    of its own group.

    Raises:
        FigureError: a number out of range, or a chosen entry that is not visible yet.
    """
    for field, value, low in (("position", position, 0), ("window", window, 1), ("ratio", ratio, 0)):
        _whole(field, value, low)
    visible = (position + 1) // ratio if ratio else 0
    entries = list(range(visible)) if chosen is None else sorted(int(entry) for entry in chosen if entry >= 0)
    if entries and entries[-1] >= visible:
        raise FigureError("chosen", entries[-1], f"entries below {visible}, which position {position} sees")
    seen = range(max(position - window + 1, 0), position + 1)
    covered = {token for entry in entries for token in range(entry * ratio, (entry + 1) * ratio)}
    missed = [token for token in range(seen[0]) if token not in covered]
    return Reach(position, ratio, seen, visible, entries, missed, range(visible * ratio, position + 1))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, last) of unbroken runs."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


@styled
def groups_picture(tokens: int, ratio: int, *, overlap: bool, title: str = "", name: str = "groups") -> Drawing:
    """A table of entries and tokens: own tokens solid, those of the group before hatched, an open group grey."""
    from matplotlib.patches import Rectangle

    made, count = feeds(tokens, ratio, overlap=overlap), tokens // ratio
    kind = "Overlapping" if overlap else "Disjoint"
    title = title or f"{kind} groups: {tokens} tokens, one entry for {ratio}"
    note = "Blue: the entry's own tokens."
    note += " Orange, hatched: the group before." if overlap else ""
    note += " Grey: no entry yet." if tokens % ratio else ""
    figure, ax = new_figure(max(5.0, min(9.0, 0.42 * tokens + 1.6)), 0.42 * max(count, 1) + 1.5, title, note)
    for feed in made:
        look = {"facecolor": MORE, "hatch": "//"} if feed.before else {"facecolor": LESS}
        ax.add_patch(Rectangle((feed.token - 0.45, feed.entry - 0.4), 0.9, 0.8, edgecolor="white", **look))
    for token in range(count * ratio, tokens):
        ax.add_patch(Rectangle((token - 0.45, -0.4), 0.9, max(count, 1) - 0.2, facecolor=PALE))
    ax.set(xlim=(-0.6, tokens - 0.4), ylim=(max(count, 1) - 0.5, -0.5), xlabel="token", ylabel="entry")
    ax.set_xticks(range(0, tokens, 1 if tokens <= 24 else ratio))
    ax.set_yticks(range(count))
    ax.tick_params(length=0)
    alt = f"{count} entries of {tokens} tokens. "
    alt += " ".join(
        f"Entry {entry}: tokens {mine[0]} to {mine[-1]}."
        for entry in range(count)
        if (mine := [feed.token for feed in made if feed.entry == entry])
    )
    rows = [feed._asdict() for feed in made] or [{"entry": "none complete yet"}]
    return Drawing(name, title, figure, alt.strip(), rows)


@styled
def reach_picture(lanes: Mapping[str, Reach], title: str, *, name: str = "reach") -> Drawing:
    """One lane for each kind of layer: the tokens a query reaches in its window and in entries, and those it misses."""
    from matplotlib.patches import Patch, Rectangle

    if not lanes:
        raise FigureError("lanes", "empty", "at least one")
    figure, ax = new_figure(9.0, 0.75 * len(lanes) + 1.7, title)
    last = max(found.position for found in lanes.values())
    rows, words = [], []
    for y, (label, found) in enumerate(lanes.items()):
        for first, end in _runs(found.missed):
            box = (first - 0.5, y - 0.3), end - first + 1, 0.6
            ax.add_patch(Rectangle(*box, facecolor=MISSED, hatch="//", edgecolor="white", linewidth=0))
        ax.add_patch(Rectangle((found.window[0] - 0.5, y - 0.3), len(found.window), 0.6, facecolor=WINDOW))
        for entry in found.entries:
            first, end = entry * found.ratio, (entry + 1) * found.ratio
            inside = max(first, min(end, found.window[0]))  # from here on the upper half, above the window's records
            for low, high, height in ((first, inside, 0.6), (inside, end, 0.3)):
                box = (low - 0.5, y - 0.3), high - low, height
                ax.add_patch(Rectangle(*box, facecolor=MORE, edgecolor="white", linewidth=0.8 if high > low else 0))
        ax.text(last + 0.012 * last + 1, y, f"{found.vectors} vectors", va="center", fontsize=8.5, color=MUTED)
        rows.append(
            {
                "layer": label,
                "window_records": len(found.window),
                "visible_entries": found.visible,
                "entries_attended_to": len(found.entries),
                "tokens_missed": len(found.missed),
            }
        )
        words.append(
            f"{label}: {len(found.window)} window records, {len(found.entries)} of {found.visible} entries, "
            f"{len(found.missed)} earlier tokens in neither."
        )
    ax.set(xlim=(-1, last * 1.012 + 1 + 0.13 * last), ylim=(len(lanes) - 0.4, -0.6), xlabel="token")
    ax.set_yticks(range(len(lanes)), list(lanes))
    ax.set_xticks([tick for tick in ax.get_xticks() if 0 <= tick <= last])
    ax.tick_params(axis="y", length=0)
    handles = [Patch(facecolor=WINDOW), Patch(facecolor=MORE)]
    handles.append(Patch(facecolor=MISSED, hatch="//", edgecolor="white"))
    labels = ["in the window, one record each", "in an entry attended to", "in neither"]
    ax.legend(handles, labels, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0), handlelength=1.5, borderpad=0)
    return Drawing(name, title, figure, " ".join(words), rows)
