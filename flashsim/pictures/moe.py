"""Mixture of experts: how a token's experts are chosen and weighed, and how many experts a batch touches.

    >>> chosen = route([0.9, 0.5, 0.8], [-0.3, 0.2, 0.1], k=2, scale=1.5)
    >>> chosen.experts, [round(w, 3) for w in chosen.weights]
    ((1, 2), [0.577, 0.923])

Plain numbers, no torch. Source: V4.1 report and released code, mixture of experts; `model.moe` computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from flashsim.drawing import INK, LESS, MORE, MUTED, PALE, Drawing, FigureError, new_figure, styled
from flashsim.pictures import plain_rows


class Routing(NamedTuple):
    """The experts of one token, ascending, and what each of their outputs is multiplied with."""

    experts: tuple[int, ...]
    weights: tuple[float, ...]


def route(scores: Any, bias: Any, k: int, scale: float = 1.0) -> Routing:
    """The k best of scores + bias, ties to the lower expert, weighed by their scores alone, which then sum to `scale`.

    Raises:
        FigureError: scores and bias of different lengths, or k that is not from 1 to their number.
    """
    (scores,), (bias,) = plain_rows(scores), plain_rows(bias)
    if len(scores) != len(bias):
        raise FigureError("bias", f"{len(bias)} numbers", f"one for each of {len(scores)} scores")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= len(scores):
        raise FigureError("k", repr(k), f"a whole number from 1 to {len(scores)}")
    best = sorted(range(len(scores)), key=lambda e: (-scores[e] - bias[e], e))[:k]
    experts = tuple(sorted(best))
    total = sum(scores[e] for e in experts)
    return Routing(experts, tuple(scores[e] / total * scale for e in experts))


def experts_touched(experts: int, k: int, tokens: int) -> Fraction:
    """How many experts a batch touches on average, when each token picks k at random: E (1 - (1 - k / E)^T), exactly.

    >>> float(experts_touched(384, 6, 1)), round(float(experts_touched(384, 6, 64)))
    (6.0, 244)
    """
    if not 0 <= k <= experts or experts < 1 or tokens < 0:
        raise FigureError("k", f"{k} of {experts} experts, {tokens} tokens", "0 to all experts, tokens from 0")
    return experts * (1 - (1 - Fraction(k, experts)) ** tokens)


@styled
def router(scores: Any, bias: Any, k: int, *, title: str = "Who is chosen", name: str = "router") -> Drawing:
    """Scores of one token with the bias of each expert; chosen are the k longest sums."""
    from matplotlib.patches import Patch

    chosen = route(scores, bias, k)
    (scores,), (bias,) = plain_rows(scores), plain_rows(bias)
    figure, ax = new_figure(8.5, 3.4, title)
    best = sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:k]
    for e, (score, shift) in enumerate(zip(scores, bias, strict=True)):
        ax.bar(e, score, 0.7, color=LESS if e in chosen.experts else PALE)
        ax.plot([e, e], [score, score + shift], color=MORE, linewidth=2)
        ax.plot(e, score + shift, marker="^" if shift > 0 else "v", color=MORE, markersize=6)
    sums = sorted((s + b for s, b in zip(scores, bias, strict=True)), reverse=True)
    if k < len(sums):
        ax.axhline((sums[k - 1] + sums[k]) / 2, color=MUTED, linewidth=1, linestyle="--")
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set(xlabel="expert", ylabel="score")
    ax.set_xticks(range(len(scores)))
    ax.tick_params(axis="x", length=0)
    handles = [
        Patch(facecolor=LESS, label="score, chosen"),
        Patch(facecolor=PALE, label="score, not chosen"),
        Patch(facecolor=MORE, label="moved by the bias to here"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    rows = [
        {"expert": e, "score": s, "bias": b, "chosen": e in chosen.experts}
        for e, (s, b) in enumerate(zip(scores, bias, strict=True))
    ]
    alt = (
        f"Chosen of {len(scores)} experts: {', '.join(map(str, chosen.experts))}. By score alone it would be "
        f"{', '.join(map(str, sorted(best)))}."
    )
    return Drawing(name, title, figure, alt, rows)


@styled
def loads(
    before: Sequence[int], after: Sequence[int], labels: tuple[str, str], *, title: str, name: str = "loads"
) -> Drawing:
    """How many tokens each expert had, in two cases, with the mean as a line."""
    figure, axes = new_figure(8.5, 2.9, title, ncols=2, sharey=True)
    rows = []
    for ax, counts, label, colour in zip(axes, (before, after), labels, (MORE, LESS), strict=True):
        mean = sum(counts) / len(counts)
        ax.bar(range(len(counts)), counts, 0.8, color=colour)
        ax.axhline(mean, color=INK, linewidth=1, linestyle="--")
        ax.set_title(f"{label}: fullest has {max(counts) / mean:.1f} times the mean", fontsize=9)
        ax.set_xlabel("expert")
        rows += [{"case": label, "expert": e, "tokens": count} for e, count in enumerate(counts)]
    axes[0].set_ylabel("tokens")
    alt = "; ".join(
        f"{label}: from {min(counts)} to {max(counts)} tokens an expert"
        for label, counts in zip(labels, (before, after), strict=True)
    )
    return Drawing(name, title, figure, f"{alt[0].upper()}{alt[1:]}.", rows)
