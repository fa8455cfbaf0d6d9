"""Pictures of lessons: small tensors with their numbers, bars and curves. Each is a `Drawing`, with words and rows.

One file a mechanism stands beside these three. Values may be nested lists, numpy arrays or tensors. matplotlib is
imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashsim.drawing import INK, LESS, MORE, MUTED, Drawing, FigureError, log_axis, new_figure, styled
from flashsim.units import number

COLOURS = (LESS, MORE, "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#444444", "#F0E442")
"""The palette of Okabe and Ito; series differ in marker, dash or hatch as well."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")


def plain_rows(values: Any) -> list[list[float]]:
    """A matrix as lists of numbers; a vector is one row.

    Raises:
        FigureError: neither, or no number in it.
    """
    rows = values.tolist() if hasattr(values, "tolist") else [list(v) if hasattr(v, "__iter__") else v for v in values]
    if rows and not isinstance(rows[0], list):
        rows = [rows]
    if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows) or isinstance(rows[0][0], list):
        raise FigureError("values", "not a matrix", "rows of equal length, at least one number")
    return rows


@styled
def heatmap(
    values: Any,
    title: str,
    alt: str,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    row_name: str = "",
    column_name: str = "",
    numbers: str | None = None,
    marks: Sequence[tuple[int, int]] = (),
    note: str = "",
    name: str = "heatmap",
    size: tuple[float, float] | None = None,
    diverging: bool = False,
    colour_bar: bool = True,
) -> Drawing:
    """A matrix as colours, its numbers in the format `numbers`, frames around the cells (row, column) of `marks`.

    `diverging`: blue below zero and orange above, white at zero; else pale to dark blue. Empty cells are NaN.
    """
    import matplotlib

    grid = plain_rows(values)
    height, width = len(grid), len(grid[0])
    size = size or (max(4.0, min(9.0, 0.55 * width + 1.6)), max(1.8, min(7.0, 0.42 * height + 1.3)))
    figure, ax = new_figure(*size, title, note)
    finite = [v for row in grid for v in row if v == v and abs(v) != float("inf")] or [0.0]
    low, high = min(finite), max(finite)
    if diverging:
        high = max(abs(low), abs(high)) or 1.0
        low = -high
    colours = matplotlib.colors.LinearSegmentedColormap.from_list(
        "house", [LESS, "white", MORE] if diverging else ["#F4F8FB", LESS, "#00263E"]
    )
    colours.set_bad("#EEEEEE")
    image = ax.imshow(grid, cmap=colours, vmin=low, vmax=high if high > low else low + 1, aspect="auto")
    for axis, names, length in ((ax.xaxis, columns, width), (ax.yaxis, rows, height)):
        if names or length == 1:
            axis.set_ticks(range(length) if names else [], names or [])
        else:
            axis.set_major_locator(matplotlib.ticker.MaxNLocator(8, integer=True))
    ax.set(xlabel=column_name, ylabel=row_name)
    ax.tick_params(length=0)
    if numbers is not None:
        for i, row in enumerate(grid):
            for j, value in enumerate(row):
                if value == value:
                    red, green, blue, _ = image.cmap(image.norm(value))
                    ink = INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
                    ax.text(j, i, format(value, numbers), ha="center", va="center", fontsize=8, color=ink)
    elif colour_bar:
        figure.colorbar(image, ax=ax, shrink=0.8)
    for i, j in marks:
        box = matplotlib.patches.Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor=MORE, linewidth=2)
        ax.add_patch(box)
    table = [
        {"row": rows[i] if rows else i, "column": columns[j] if columns else j, "value": value}
        for i, row in enumerate(grid)
        for j, value in enumerate(row)
    ]
    return Drawing(name, title, figure, alt, table)


@styled
def bars(
    values: Mapping[str, Any],
    title: str,
    alt: str,
    *,
    unit: str,
    others: Mapping[str, Any] | None = None,
    labels: tuple[str, str] = ("measured", "predicted"),
    log: bool = False,
    note: str = "",
    name: str = "bars",
) -> Drawing:
    """Horizontal bars with their numbers; `others`, where given, are hatched ones below each."""
    keys, thick = list(values), 0.38 if others else 0.6
    figure, ax = new_figure(7.5, max(1.8, (0.62 if others else 0.42) * len(keys) + 1.2), title, note)
    series = [(values, 0.0 if not others else -thick / 2, LESS, "", labels[0])]
    if others:
        series.append((others, thick / 2, MORE, "//", labels[1]))
    for data, shift, colour, hatch, label in series:
        lengths = [float(data[key]) for key in keys]
        places = [i + shift for i in range(len(keys))]
        ax.barh(places, lengths, thick, color=colour, hatch=hatch, edgecolor="white", label=label if others else None)
        for place, key in zip(places, keys, strict=True):
            ax.annotate(f" {number(data[key])}", (float(data[key]), place), va="center", fontsize=8.5)
    ax.set_yticks(range(len(keys)), keys)
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(unit)
    if log:
        ax.set_xscale("log")
    ax.margins(x=0.18)
    if others:
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    rows = [{"name": key, unit: values[key], **({labels[1]: others[key]} if others else {})} for key in keys]
    return Drawing(name, title, figure, alt, rows)


@styled
def curves(
    x: Sequence[Any],
    series: Mapping[str, Sequence[Any]],
    title: str,
    alt: str,
    *,
    x_name: str,
    y_name: str,
    log_x: Sequence[int] = (),
    log_y: Sequence[int | float] = (),
    note: str = "",
    name: str = "curves",
    points: bool = True,
) -> Drawing:
    """Lines over x, each with colour, marker and dash of its own; `log_x`, `log_y` are ticks of logarithmic axes."""
    figure, ax = new_figure(7.5, 4.2, title, note)
    for i, (label, values) in enumerate(series.items()):
        look = {"color": COLOURS[i % 8], "linestyle": DASHES[i % 4], "marker": MARKERS[i % 8] if points else None}
        ax.plot([float(v) for v in x], [float(v) for v in values], label=label, **look)
    if log_x:
        log_axis(ax.xaxis, list(log_x))
    if log_y:
        log_axis(ax.yaxis, list(log_y))
    ax.set(xlabel=x_name, ylabel=y_name)
    ax.grid(True, axis="y")
    ax.tick_params(colors=INK, labelcolor=MUTED)
    if len(series) > 1:
        ax.legend()
    rows = [{x_name: a, **{label: values[i] for label, values in series.items()}} for i, a in enumerate(x)]
    return Drawing(name, title, figure, alt, rows)
