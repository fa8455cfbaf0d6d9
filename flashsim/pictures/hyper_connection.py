"""Hyper-connections: a matrix balanced step by step, and whose coefficients a site uses.

    >>> for step in balance([[0.0, 1.0], [2.0, 0.0]], iterations=1, eps=0.0):
    ...     print(step.what, [[round(x, 3) for x in row] for row in step.matrix])
    softmax of rows [[0.269, 0.731], [0.881, 0.119]]
    columns to 1 [[0.234, 0.86], [0.766, 0.14]]

Plain numbers, no torch. Source: V4.1 report and V4 report 2.2 (mHC); `model.hyper_connection` computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from flashsim.drawing import INK, LESS, MORE, MUTED, Drawing, FigureError, new_figure, styled
from flashsim.pictures import plain_rows


class Balance(NamedTuple):
    """The matrix [source stream, destination stream] after one step."""

    what: str
    matrix: list[list[float]]

    def row_sums(self) -> list[float]:
        """What each stream gives away."""
        return [sum(row) for row in self.matrix]

    def column_sums(self) -> list[float]:
        """What each stream receives."""
        return [sum(column) for column in zip(*self.matrix, strict=True)]

    def error(self) -> float:
        """How far the worst sum is from 1."""
        return max(abs(total - 1) for total in (*self.row_sums(), *self.column_sums()))


def balance(logits: Any, iterations: int = 20, eps: float = 1e-6) -> list[Balance]:
    """Every half step of Sinkhorn's method: the softmax of rows, then columns, rows, columns ... to sum 1.

    Raises:
        FigureError: not a square matrix, or fewer than one iteration.
    """
    grid = plain_rows(logits)
    if len(grid) != len(grid[0]):
        raise FigureError("logits", f"{len(grid)} x {len(grid[0])}", "a square matrix")
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise FigureError("iterations", repr(iterations), "a whole number from 1")
    m = []
    for row in grid:
        powers = [math.exp(x - max(row)) for x in row]
        m.append([p / sum(powers) + eps for p in powers])
    steps = [Balance("softmax of rows", m)]
    for i in range(iterations):
        if i:
            m = [[x / (sum(row) + eps) for x in row] for row in m]
            steps.append(Balance("rows to 1", m))
        sums = [sum(column) + eps for column in zip(*m, strict=True)]
        m = [[x / total for x, total in zip(row, sums, strict=True)] for row in m]
        steps.append(Balance("columns to 1", m))
    return steps


@styled
def balancing(
    logits: Any, shown: Sequence[int] = (0, 1, 2, 3, -1), *, eps: float = 1e-6, name: str = "balance"
) -> Drawing:
    """Some of the half steps of 20 iterations, each matrix with the sums of its rows and columns."""
    import matplotlib

    steps = balance(logits, eps=eps)
    chosen = [range(len(steps))[i] for i in shown]
    size = len(steps[0].matrix)
    title = "Rows to 1, columns to 1, and again"
    figure, axes = new_figure(1.8 * len(chosen), 2.6, title, ncols=len(chosen), squeeze=False)
    colours = matplotlib.colors.LinearSegmentedColormap.from_list("house", ["#F4F8FB", LESS, "#00263E"])
    for ax, i in zip(axes[0], chosen, strict=True):
        step = steps[i]
        ax.imshow(step.matrix, cmap=colours, vmin=0, vmax=1)
        for j, row in enumerate(step.matrix):
            for k, value in enumerate(row):
                ax.text(
                    k, j, f"{value:.2f}", ha="center", va="center", fontsize=7.5, color="white" if value > 0.45 else INK
                )
        for place, sums in ((0, step.row_sums()), (1, step.column_sums())):
            for j, total in enumerate(sums):
                x, y = (size + 0.05, j) if place == 0 else (j, size - 0.15)
                off = abs(total - 1) >= 0.005
                look = {"color": MORE if off else MUTED, "fontweight": "bold" if off else None}
                ax.text(x, y, f"{total:.2f}", ha="center", va="center", fontsize=7.5, **look)
        ax.set(xlim=(-0.5, size + 0.5), ylim=(size + 0.2, -0.5), xticks=[], yticks=[])
        ax.set_title(f"step {i}\n{step.what}", fontsize=9)
        ax.spines[:].set_visible(False)
    rows = [
        {"step": i, "what": steps[i].what, "source": j, "destination": k, "value": value}
        for i in chosen
        for j, row in enumerate(steps[i].matrix)
        for k, value in enumerate(row)
    ]
    first, last = steps[0].error(), steps[-1].error()
    alt = (
        f"{size} streams: after the softmax the worst sum of a row or column is {first:.2f} from 1, after "
        f"{len(steps) - 1} more steps {last:.0e}. Orange sums are not yet 1."
    )
    return Drawing(name, title, figure, alt, rows)


@styled
def single_pass(
    sites: Sequence[str] = ("attention 0", "experts 0", "attention 1", "experts 1"), *, name: str = "pass"
) -> Drawing:
    """Whose coefficients each site uses: its own `post` and `comb`, and the `pre` of the site before it."""
    from matplotlib.patches import FancyBboxPatch

    title = "Each site is entered with the pre of the site before it"
    figure, ax = new_figure(8.5, 3.0, title)
    box = {"boxstyle": "round,pad=0.02,rounding_size=0.06", "linewidth": 1.2, "facecolor": "white", "zorder": 3}
    arrow = {"arrowstyle": "->", "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    label = {"ha": "center", "va": "center", "fontsize": 8.5, "zorder": 4}
    late = arrow | {"color": MORE, "linestyle": "--"}
    ax.annotate("", (len(sites) - 0.3, 0), (-0.95, 0), arrowprops=arrow | {"color": "#BBBBBB", "linewidth": 5})
    ax.text(-0.95, -0.2, "streams", fontsize=8.5, color=MUTED)
    ax.text(-0.95, 0.62, "(1, 0, 0, 0)", fontsize=8.5, color=MORE)
    ax.annotate("", (-0.33, 0.06), (-0.6, 0.57), arrowprops=late)
    for i, site in enumerate(sites):
        ax.add_patch(FancyBboxPatch((i - 0.3, -0.2), 0.6, 0.4, edgecolor=INK, **box))
        ax.text(i, 0, site, **label)
        ax.add_patch(FancyBboxPatch((i - 0.3, 0.8), 0.6, 0.4, edgecolor=LESS, **box))
        ax.text(i, 1.0, "coefficients", **label)
        ax.annotate("", (i, 0.23), (i, 0.78), arrowprops=arrow | {"color": LESS})
        ax.text(i - 0.05, 0.5, "post, comb", fontsize=8.5, color=LESS, ha="right", va="center")
        ax.annotate("", (i + 0.67, 0.06), (i + 0.33, 0.9), arrowprops=late)
        ax.text(i + 0.48, 0.72, "pre", fontsize=8.5, color=MORE)
    ax.set(xlim=(-1.0, len(sites) - 0.2), ylim=(-0.35, 1.3), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    rows: list[dict[str, Any]] = [
        {"site": site, "post and comb of": site, "pre of": sites[i - 1] if i else "(1, 0, ...)"}
        for i, site in enumerate(sites)
    ]
    alt = "; ".join(f"{row['site']} is entered with the pre of {row['pre of']}" for row in rows)
    return Drawing(name, title, figure, f"{alt[0].upper()}{alt[1:]}; each leaves with its own post and comb.", rows)
