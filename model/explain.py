"""The schedule as a table: each layer's role, whose cache it reads, what it adds to one, and what a decode step costs.

Bytes and FLOPs are those of `flashsim` for the model's config; parameters are counted in the model itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from flashsim.flops import decode_flops
from flashsim.kv_cache import kv_cache
from flashsim.schedule import LayerPlan
from flashsim.traffic import decode_read, decode_write
from flashsim.units import number, plain
from model.stored_weights import stored_weights

if TYPE_CHECKING:
    from model.transformer import Transformer

COLUMNS = (
    "layer",
    "half",
    "role",
    "reads",
    "writes",
    "parameters",
    "stored B",
    "read B/step",
    "written B/step",
    "FLOPs",
)


@dataclass(frozen=True)
class LayerExplanation:
    """One layer. `stored`, `read`, `written` are bytes of one sequence, `flops` those of one decode step."""

    layer: int
    half: str
    role: str
    reads: str
    writes: str
    parameters: int
    stored: int
    read: int
    written: int | Fraction
    flops: int | Fraction

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        return (
            str(self.layer),
            self.half,
            self.role,
            self.reads,
            self.writes,
            *(number(n) for n in (self.parameters, self.stored, self.read, self.written, self.flops)),
        )


@dataclass(frozen=True)
class Explanation:
    """Every layer of a model with `context` tokens visible; prints as a table."""

    title: str
    context: int
    layers: tuple[LayerExplanation, ...]

    def to_dict(self) -> list[dict]:
        """One plain dict a layer."""
        return [{key: plain(value) for key, value in vars(row).items()} for row in self.layers]

    def __str__(self) -> str:
        rows = [COLUMNS, *(row.cells() for row in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        words = 5  # the columns before the numbers are aligned to the left
        lines = [self.title, "=" * len(self.title)]
        for row in rows:
            cells = [c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def explain(model: Transformer, context: int) -> Explanation:
    """The table of a model for one sequence of `context` tokens.

    Raises:
        ContextError: `context` is no number of tokens.
    """
    config = model.config
    reports = [
        report(config, context).by("layer")
        for report in (kv_cache, decode_read, lambda c, _: decode_write(c), decode_flops)
    ]
    rows = []
    for plan, block in zip(model.plans, model.layers, strict=True):
        stored, read, written, flops = (report.get(plan.layer, 0) for report in reports)
        parameters = sum(p.numel() for p in block.parameters())
        parameters += sum(math.prod(weight.shape) for weight in stored_weights(block).values())
        writes = ", ".join(_writes(plan))
        rows.append(
            LayerExplanation(
                plan.layer,
                plan.half,
                plan.role,
                ", ".join(_reads(plan)),
                writes,
                parameters,
                stored,
                read,
                written,
                flops,
            )
        )
    return Explanation(f"{config.name}: one decode step with {context:,} tokens visible", context, tuple(rows))


def _reads(plan: LayerPlan) -> list[str]:
    words = [f"window of {plan.window}"]
    if plan.kv_source is not None:
        words.append(f"entries of {plan.kv_source} (1 : {plan.compress_ratio})")
        if plan.selects:
            pool = "candidates" if plan.scores_candidates else "keys"
            words.append(f"{pool} of {plan.index_key_source}")
        else:
            words.append(f"selection of {plan.selection_source}")
    if plan.engram is not None:
        words.append(f"Engram table {plan.engram}")
    return words


def _writes(plan: LayerPlan) -> list[str]:
    words = ["window"]
    if plan.owns_kv:
        words.append("entries, index keys")
    if plan.selects:
        words.append("selection")
    if plan.builds_candidates:
        words.append("candidates")
    return words
