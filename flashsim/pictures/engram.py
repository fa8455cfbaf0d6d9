"""Engram's hash, one operation at a time, and which table rows a text looks up.

    >>> for step in hash_steps([7, 3], [5, 9], [[11]], [[22]]):
    ...     print(step)
    Step(what='c_0 m_0', numbers='7 x 5', result=35)
    Step(what='XOR c_1 m_1', numbers='35 ^ 3 x 9', result=56)
    Step(what='2-gram, head 0', numbers='56 mod 11 + 22', result=23)

Plain integers, no torch. Source: V4.1 report, Engram; `model.engram` and `kernels/engram.py` compute the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flashsim.drawing import INK, LESS, MORE, MUTED, Drawing, FigureError, new_figure, styled
from flashsim.pictures import plain_rows


class Step(NamedTuple):
    """One operation of the hash, in symbols, in numbers, and what comes out."""

    what: str
    numbers: str
    result: int


def hash_steps(
    gram: Sequence[int],
    multipliers: Sequence[int],
    primes: Sequence[Sequence[int]],
    offsets: Sequence[Sequence[int]],
) -> list[Step]:
    """Every operation from an n-gram of compressed ids, the newest first, to its table rows.

    primes, offsets: one list of heads for each order from 2 on, as `model.engram.HashTable` has them. The rows are the
    results of the steps that name a head.

    Raises:
        FigureError: lengths that do not fit each other.
    """
    order = len(gram)
    if order < 2 or len(multipliers) != order or len(primes) != order - 1 or len(offsets) != order - 1:
        lengths = f"{order} ids, {len(multipliers)} multipliers, {len(primes)} and {len(offsets)} lists of heads"
        raise FigureError("gram", lengths, "n ids from 2 on, n multipliers, n - 1 lists of primes and of offsets")
    ids, factors = ([int(value) for value in values] for values in (gram, multipliers))
    acc = ids[0] * factors[0]
    steps = [Step("c_0 m_0", f"{ids[0]} x {factors[0]:,}", acc)]
    for n in range(1, order):
        mixed = acc ^ ids[n] * factors[n]
        steps.append(Step(f"XOR c_{n} m_{n}", f"{acc:,} ^ {ids[n]} x {factors[n]:,}", mixed))
        acc = mixed
        for head, (prime, offset) in enumerate(zip(primes[n - 1], offsets[n - 1], strict=True)):
            numbers = f"{acc:,} mod {int(prime):,} + {int(offset):,}"
            steps.append(Step(f"{n + 1}-gram, head {head}", numbers, acc % int(prime) + int(offset)))
    return steps


def met_before(grams: Any, rows: Any, heads: int) -> list[list[str]]:
    """For rows [positions, columns] of n-grams [positions, order]: `new`, `again` or `collision`, each.

    `again`: an earlier position had the same n-gram, and so the same row. `collision`: another n-gram had the row.
    heads: columns of one order; the first are those of 2-grams.

    >>> met_before([[5, 4], [6, 5], [5, 4]], [[30], [30], [30]], heads=1)
    [['new'], ['collision'], ['again']]
    """
    known: dict[int, set[tuple]] = {}
    result = []
    for gram, row in zip(plain_rows(grams), plain_rows(rows), strict=True):
        states = []
        for j, value in enumerate(row):
            there, mine = known.setdefault(value, set()), tuple(gram[: j // heads + 2])
            states.append("again" if mine in there else "collision" if there else "new")
            there.add(mine)
        result.append(states)
    return result


@styled
def lookups(tokens: Sequence[str], grams: Any, rows: Any, heads: int, *, title: str, name: str = "lookups") -> Drawing:
    """Rows [positions, columns] that the n-grams [positions, order] of a text look up, and which were met before.

    heads: columns of one order; the first are those of 2-grams.
    """
    from matplotlib.patches import Patch, Rectangle

    grid, states = plain_rows(rows), met_before(grams, rows, heads)
    if len(tokens) != len(grid):
        raise FigureError("tokens", len(tokens), f"one for each of the {len(grid)} positions")
    looks = {"again": (LESS, "", "the same n-gram again"), "collision": (MORE, "//", "another n-gram, the same row")}
    width, height = len(grid[0]), len(grid)
    figure, ax = new_figure(max(5.0, min(8.6, 0.42 * height + 1.6)), 0.34 * width + 2.1, title)
    for i, (values, met) in enumerate(zip(grid, states, strict=True)):
        for j, (value, state) in enumerate(zip(values, met, strict=True)):
            if state != "new":
                colour, hatch, _ = looks[state]
                box = {"facecolor": colour, "hatch": hatch, "edgecolor": "#F6C9A8", "linewidth": 0}
                ax.add_patch(Rectangle((i - 0.48, j - 0.46), 0.96, 0.92, **box))
            ink = INK if state == "new" else "white"
            ax.text(
                i, j, value, ha="center", va="center", fontsize=7, color=ink, fontweight="bold" if ink != INK else None
            )
    for order in range(1, width // heads):
        ax.axhline(order * heads - 0.5, color=MUTED, linewidth=0.8)
    columns = [f"{j // heads + 2}-gram, head {j % heads}" for j in range(width)]
    ax.set(xlim=(-0.6, height - 0.4), ylim=(width - 0.4, -0.6), xlabel="token")
    ax.set_xticks(range(height), tokens)
    ax.set_yticks(range(width), columns)
    ax.tick_params(length=0)
    handles = [Patch(facecolor=c, hatch=h, edgecolor="#F6C9A8", label=words) for c, h, words in looks.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    counts = {state: sum(row.count(state) for row in states) for state in looks}
    alt = (
        f"{width} table rows for each of {height} tokens: {counts['again']} were looked up before by the same n-gram, "
        f"{counts['collision']} by another one alone."
    )
    table = [
        {"position": i, "token": tokens[i], "column": columns[j], "row": value, "state": states[i][j]}
        for i, values in enumerate(grid)
        for j, value in enumerate(values)
    ]
    return Drawing(name, title, figure, alt, table)
