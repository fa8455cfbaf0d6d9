"""What a figure is and how it looks: the parts that all of `flashsim.figures` share.

matplotlib is imported when something is drawn, and nothing of pyplot or of a reader's matplotlibrc is touched.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.sax.saxutils import escape

from flashsim.units import number, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


SHRINKS = 'style="max-width:100%;height:auto"'
"""What lets a figure be as narrow as the page that shows it."""
PAGE = 630
"""Points. JupyterLab cuts off what is wider than its page, and that is 636 points in a window of 1,280 pixels."""


class FigureError(ValueError):
    """A figure cannot be drawn: names the field, its value and what is accepted."""

    def __init__(self, field: str, value: Any, accepted: str):
        super().__init__(f"{field} is {value}; accepted: {accepted}")
        self.field, self.value, self.accepted = field, value, accepted


class Drawing(NamedTuple):
    """One figure, the words that replace it, and the numbers it shows; units stand in the names of the columns."""

    name: str
    title: str
    figure: Figure
    alt: str
    rows: list[dict[str, Any]]

    def svg(self) -> str:
        """The figure as SVG with <title> and <desc>; the same bytes in every run."""
        buffer = io.StringIO()
        with style(self.name):
            self.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        head, tag, rest = buffer.getvalue().partition("<svg ")
        attributes, _, body = rest.partition(">")
        label = f'role="img" aria-labelledby="{self.name}-title {self.name}-desc"'
        title = f'<title id="{self.name}-title">{escape(self.title)}</title>'
        words = f'<desc id="{self.name}-desc">{escape(self.alt)}</desc>'
        return f"{head}{tag}{label} {SHRINKS} {attributes}>\n {title}\n {words}{body}"

    def png(self) -> bytes:
        """The figure as PNG, 150 dots an inch."""
        buffer = io.BytesIO()
        with style(self.name):
            self.figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
        return buffer.getvalue()

    def csv(self) -> str:
        """The numbers drawn, one line per row; a cell is empty where a row has no such number."""
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, list(self.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: plain(value) for key, value in row.items()} for row in self.rows)
        return buffer.getvalue()

    def files(self) -> dict[str, bytes]:
        """File name to contents."""
        contents = {"svg": self.svg().encode(), "png": self.png(), "csv": self.csv().encode()}
        return {f"{self.name}.{kind}": data for kind, data in (contents | {"txt": f"{self.alt}\n".encode()}).items()}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.alt}>"

    def _repr_svg_(self) -> str:
        """The SVG, at most `PAGE` wide, on one line: a notebook keeps each line as a string, half as much again."""
        line = " ".join(line.strip() for line in self.svg().splitlines())
        return re.sub(r' width="([\d.]+)pt" height="([\d.]+)pt"', _fitting, line, count=1)


def _fitting(size: re.Match[str]) -> str:
    width, height = map(float, size.groups())
    shrunk = min(1, PAGE / width)
    return f' width="{width * shrunk:g}pt" height="{height * shrunk:g}pt"'


# --- one style ------------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """How a model is drawn everywhere; `label` is also its generation in `data/published_figures.json`."""

    label: str
    colour: str
    marker: str


LOOKS = {
    "deepseek-llm-67b": Look("V1", "#444444", "o"),
    "v2": Look("V2", "#CC79A7", "v"),
    "v3": Look("V3", "#E69F00", "^"),
    "v3.2": Look("V3.2", "#009E73", "s"),
    "v4-flash": Look("V4-Flash", "#0072B2", "D"),
    "v4-pro": Look("V4-Pro", "#56B4E9", "P"),
    "v4.1-flash": Look("V4.1-Flash", "#D55E00", "*"),
}
"""The presets in the palette of Okabe and Ito, which stays apart for every kind of colour vision."""

LESS, MORE, PALE, RULE, MUTED, INK = "#0072B2", "#D55E00", "#DDDDDD", "#E4E4E4", "#555555", "#222222"

_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.labelsize": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "grid.color": RULE,
    "legend.frameon": False,
    "legend.handlelength": 3.5,
    "lines.markersize": 7,
    "text.color": INK,
    "svg.fonttype": "path",
}


@contextmanager
def style(salt: str = "flashsim") -> Iterator[None]:
    """matplotlib with this style and nothing of the reader's own; `salt` fixes the ids inside an SVG.

    Raises:
        FigureError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise FigureError("matplotlib", "not installed", "pip install 'flashsim-kv[figures]'") from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC | {"svg.hashsalt": salt})
        yield


def styled(build: Callable[..., Drawing]) -> Callable[..., Drawing]:
    """A function that draws, run with `style`."""

    @wraps(build)
    def drawn(*args: Any, **options: Any) -> Drawing:
        with style():
            return build(*args, **options)

    return drawn


def new_figure(width: float, height: float, title: str, note: str = "", **grid: Any) -> tuple[Figure, Any]:
    """A figure (inches) with its axes, a title above and a line below that says how to read it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08, wspace=0.05, hspace=0.03)
    figure.suptitle(title, x=0.1 / width, ha="left", fontsize=12, fontweight="bold")
    if note:
        figure.supxlabel(note, x=0.1 / width, ha="left", fontsize=9, color=MUTED)
    return figure, figure.subplots(**grid)


def log_axis(axis: Axis, ticks: Sequence[int | float], text: Callable[[Any], str] = number) -> None:
    """Makes an axis logarithmic, with these ticks and no others, written as plain numbers."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(lambda value, place=None: text(value if place is None else ticks[place]))
    axis.set_minor_locator(NullLocator())
    axis.axes.grid(True, axis=axis.axis_name)


def beside(ax: Axes, x: float, y: float, text: str, **looks: Any) -> None:
    """Text at height y of the data, x widths of the axes from their left edge."""
    ax.text(x, y, text, transform=ax.get_yaxis_transform(), va="center", **looks)


def near(ax: Axes, x: float, y: float, text: str, offset: tuple[float, float], **looks: Any) -> None:
    """Text `offset` points away from a point of the data."""
    label = ax.annotate(text, (x, y), offset, textcoords="offset points", va="center", **looks)
    label.set_in_layout(False)


def spread(values: Sequence[float], factor: float) -> list[float]:
    """Heights of labels on a logarithmic axis: from the top down, each at least `factor` below the one above.

    >>> spread([10, 100, 99], 2)
    [10, 100, 50.0]
    """
    heights: dict[int, float] = {}
    above = float("inf")
    for i in sorted(range(len(values)), key=lambda i: -values[i]):
        above = heights[i] = min(values[i], above / factor)
    return [heights[i] for i in range(len(values))]


# --- writing ----------------------------------------------------------------------------------------------------------
