"""Pictures of what-if budgets: what lies on a GPU, and the configs within a budget."""

from __future__ import annotations

from collections.abc import Mapping

from flashsim.budget import Capacity, Search
from flashsim.drawing import INK, LESS, MORE, MUTED, PALE, Drawing, FigureError, new_figure, styled
from flashsim.units import number, parse_context, tokens

PARTS = {
    "weights": ("#444444", ""),
    "kept free": (PALE, ""),
    "windows": ("#E69F00", "//"),
    "global cache": (LESS, ""),
    "not used": ("#FFFFFF", "xx"),
}
"""What takes the memory of a GPU, from left to right, with colour and hatch."""


def parts(fit: Capacity) -> dict[str, int]:
    """Bytes of one GPU by what takes them; they add up to its memory, or to more where the weights alone are more.

    `windows` has the states of compressors as well.
    """
    memory = fit.fleet.device.memory_bytes
    usable = int(memory * (1 - fit.fleet.kept_free))
    kept = min(memory - usable, max(memory - fit.weights_bytes, 0))
    cache = fit.tier_bytes.get("global", 0)
    rest = sum(fit.tier_bytes.values()) - cache
    return {
        "weights": fit.weights_bytes,
        "kept free": kept,
        "windows": rest,
        "global cache": cache,
        "not used": max(memory - fit.weights_bytes, 0) - kept - rest - cache,
    }


@styled
def gpu_memory(fits: Mapping[str, Capacity], title: str, *, name: str = "gpu-memory") -> Drawing:
    """One bar a fleet: the memory of one GPU by what takes it, and how many sequences that makes.

    Raises:
        FigureError: no fleet at all.
    """
    if not fits:
        raise FigureError("fits", "empty", "at least one capacity with its name")
    figure, ax = new_figure(8, 0.55 * len(fits) + 1.7, title)
    rows, words = [], []
    for i, (label, fit) in enumerate(fits.items()):
        left, made = 0.0, parts(fit)
        for part, size in made.items():
            colour, hatch = PARTS[part]
            looks = {"color": colour, "hatch": hatch, "edgecolor": MUTED if hatch else "white", "linewidth": 0.5}
            ax.barh(i, size / 1e9, 0.6, left=left, label=part if i == 0 else None, **looks)
            left += size / 1e9
        memory = fit.fleet.device.memory_bytes / 1e9
        ax.plot([memory, memory], [i - 0.42, i + 0.42], color=MORE, linewidth=2)
        failed = "weights do not fit" if fit.free_bytes == 0 else "not one sequence fits"
        said = f"{fit.sequences:,} sequences" if fit.sequences else failed
        ax.annotate(f"  {said}", (max(left, memory), i), va="center", fontsize=8.5, color=INK)
        rows.append({"fleet": label, **{f"{part} (bytes)": size for part, size in made.items()}})
        rows[-1]["sequences"] = fit.sequences
        words.append(f"{label}: {', '.join(f'{part} {size / 1e9:.1f} GB' for part, size in made.items() if size)}")
        words[-1] += f", {said}"
    ax.set_yticks(range(len(fits)), list(fits))
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("GB (10^9 bytes) of one GPU; the orange line is its memory")
    ax.margins(x=0.28)
    ax.set_xlim(left=0)
    ax.legend(ncols=5, loc="lower left", bbox_to_anchor=(0, 1), handlelength=1.5, columnspacing=1.2)
    return Drawing(name, title, figure, f"Memory of one GPU. {'. '.join(words)}.", rows)


@styled
def budget_front(found: Search, title: str, *, name: str = "budget-front") -> Drawing:
    """Every config within a budget by stored bytes and decode FLOPs, the front joined, the base config a star.

    Raises:
        FigureError: no config is within the budget.
    """
    if not found.points:
        raise FigureError("found", "without a point", "a search with at least one config within its budget")
    figure, ax = new_figure(
        7.5,
        4.4,
        title,
        "Points below the front keep fewer numbers. Quality is not on this picture: no formula knows it.",
    )
    base = found.unchanged
    groups: dict[str, list] = {}
    for point in found.points:
        groups.setdefault(point.choice["main"], []).append(point)
    looks = (("o", LESS), ("s", "#009E73"), ("^", "#CC79A7"), ("D", "#E69F00"))
    for (main, points), (marker, colour) in zip(sorted(groups.items()), looks, strict=False):
        places = [(float(p.stored_bytes), float(p.decode_flops) / 1e9) for p in points]
        ax.scatter(*zip(*places, strict=True), s=26, marker=marker, facecolor="none", edgecolor=colour, label=main)
    line = sorted((float(p.stored_bytes), float(p.decode_flops) / 1e9) for p in found.front)
    ax.plot(*zip(*line, strict=True), color=INK, linewidth=1.2, marker=".", label="front")
    if base:
        place = float(base.stored_bytes), float(base.decode_flops) / 1e9
        ax.plot(*place, "*", color=MORE, markersize=14, label=base.config.name)
    ax.set(
        xlabel="stored bytes a token",
        ylabel=f"weighted decode GFLOPs at {tokens(parse_context(found.constraints.context))} tokens",
    )
    ax.grid(True, axis="y")
    ax.legend(title="main entries in")
    alt = (
        f"{len(found.points)} of {found.tried} configs within {number(found.budget_bytes)} bytes a token, by stored "
        f"bytes and decode FLOPs; {len(found.front)} of them on the front"
    )
    alt += f"; {base.config.name} itself stores {number(base.stored_bytes)} bytes." if base else "."
    rows = [point.row() | {"front": point in found.front} for point in found.points]
    return Drawing(name, title, figure, alt, rows)
