"""Reports: what every computation returns. One row per layer and component, with the formula it came from.

`print(report)` is a derivation to follow with a pencil; a notebook shows a table; `to_dict` is JSON that round-trips;
`total()` and `by(...)` add up. Values are exact: integers, or fractions where a record covers several tokens.
"""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from flashsim.config import Config, load_config
from flashsim.formula import Count, Formula, Number
from flashsim.schedule import LayerPlan, layer_plan
from flashsim.units import number, parse_contexts, plain

CONTEXT_WARNING = "{name} was made for {limit:,} tokens; {context:,} extrapolates beyond its max_position_embeddings"


class Row(NamedTuple):
    """One component of one layer (`layer` None: of the whole model).

    `values`: one exact number per context of the report. `formula` in config names, `numbers` the same with the numbers
    filled in. Rows of stored bytes also have `bytes_per_record`, `tokens_per_record` and `records` (per context).
    """

    layer: int | None
    component: str
    tier: str | None
    precision: str | None
    values: tuple[Number, ...]
    unit: str
    formula: str
    numbers: str
    source: str
    bytes_per_record: int | None = None
    tokens_per_record: int | None = None
    records: tuple[int, ...] | None = None
    record: str | None = None


class Part(NamedTuple):
    """What one kind of layer contributes: a component with its formula, before the numbers are filled in."""

    component: str
    formula: str
    precision: str | None = None
    tier: str | None = None
    source: str = ""
    bytes_per_record: int | None = None
    tokens_per_record: int | None = None
    record: str | None = None
    names: Mapping[str, Number] = {}
    count: Count | None = None  # given where it is not the formula at N: sums over the rows of a prompt


class Report:
    """Rows with their contexts, and the config they are of. Every method returns new objects."""

    tiers: tuple[str, ...] = ()  # tiers that a report may have, whether or not this one does

    def __init__(
        self,
        title: str,
        rows: Iterable[Row],
        contexts: Sequence[int],
        *,
        unit: str,
        single: bool = True,
        model: str = "",
        notes: Iterable[str] = (),
        config: Config | None = None,
    ):
        self.title, self.unit, self.model = title, unit, model
        self.rows, self.contexts, self.notes = tuple(rows), tuple(contexts), tuple(notes)
        self.single, self.config = single, config

    # --- sums -----------------------------------------------------------------------------------------------------

    def _shape(self, values: Sequence[Number]) -> Any:
        whole = [v.numerator if isinstance(v, Fraction) and v.denominator == 1 else v for v in values]
        return whole[0] if self.single else whole

    def _sums(self, key: Callable[[Row], Any]) -> dict[Any, list[Number]]:
        # Equal layers share one tuple of values: count how often each stands in a group, then add each once.
        groups: dict[Any, dict[int, list]] = {}
        for row in self.rows:
            entry = groups.setdefault(key(row), {}).setdefault(id(row.values), [row.values, 0])
            entry[1] += 1
        result = {}
        for name, entries in groups.items():
            total = [0] * len(self.contexts)
            for values, times in entries.values():
                total = [t + times * v for t, v in zip(total, values, strict=True)]
            result[name] = total
        return result

    def total(self) -> Any:
        """The sum of all rows: a number, or a list with one number per context where several were asked for."""
        sums = self._sums(lambda row: None)
        return self._shape(sums.get(None, [0] * len(self.contexts)))

    def by(self, *keys: str) -> dict[Any, Any]:
        """Sums by `component`, `layer`, `tier` or `precision`; several keys give tuples.

        Raises:
            ValueError: a key that is none of these.
        """
        accepted = ("component", "layer", "tier", "precision")
        for key in keys or (None,):
            if key not in accepted:
                raise ValueError(f"by is {key!r}; accepted: {', '.join(accepted)}")
        if len(keys) == 1:
            sums = self._sums(lambda row: getattr(row, keys[0]))
        else:
            sums = self._sums(lambda row: tuple(getattr(row, key) for key in keys))
        return {name: self._shape(values) for name, values in sums.items()}

    def where(self, **conditions: Any) -> Report:
        """The same report with the rows that match, such as `report.where(tier="global")`.

        Raises:
            ValueError: a key that `by` does not have either, or a value that no row has.
        """
        for key, value in conditions.items():
            there = list(self.by(key)) + list(self.tiers if key == "tier" else ())
            if value not in there:
                raise ValueError(f"{key} is {value!r}; accepted: {', '.join(map(str, there))}")
        rows = [row for row in self.rows if all(getattr(row, key) == value for key, value in conditions.items())]
        return self._with_rows(rows)

    def _with_rows(self, rows: Iterable[Row]) -> Report:
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.rows = tuple(rows)
        return copy

    # --- for machines ----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, exact: a fraction that no double holds, such as a third of a byte, is the text `1/3`.

        `Report.from_dict(report.to_dict()).to_dict() == report.to_dict()`.
        """
        return {
            "title": self.title,
            "model": self.model,
            "unit": self.unit,
            "contexts": list(self.contexts),
            "single": self.single,
            "notes": list(self.notes),
            "config": None if self.config is None else self.config.to_dict(),
            "total": [_exact(v) for v in self._sums(lambda row: None).get(None, [0] * len(self.contexts))],
            "rows": [
                {
                    field: [_exact(v) for v in value] if isinstance(value, tuple) else value
                    for field, value in row._asdict().items()
                    if value is not None or field in ("layer", "tier", "precision")
                }
                for row in self.rows
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report that `to_dict` described, with the values it had."""
        rows = [
            Row(**{key: tuple(map(_read, value)) if isinstance(value, list) else value for key, value in row.items()})
            for row in data["rows"]
        ]
        report = object.__new__(cls)
        Report.__init__(
            report,
            data["title"],
            rows,
            data["contexts"],
            unit=data["unit"],
            single=data["single"],
            model=data["model"],
            notes=data["notes"],
            config=None if data["config"] is None else replace(load_config(data["config"]), name=data["model"]),
        )
        return report

    def table(self) -> list[dict[str, Any]]:
        """One flat dict per row and context, for CSV and data frames."""
        flat = []
        for row in self.rows:
            for i, context in enumerate(self.contexts):
                entry = {"model": self.model, "context": context, "layer": row.layer, "component": row.component}
                entry |= {"tier": row.tier, "precision": row.precision}
                if row.bytes_per_record is not None:
                    entry |= {"bytes_per_record": row.bytes_per_record, "tokens_per_record": row.tokens_per_record}
                    entry["records"] = row.records[i]
                entry |= {"value": plain(row.values[i]), "unit": row.unit, "formula": row.formula, "source": row.source}
                flat.append(entry)
        return flat

    def to_pandas(self):
        """The rows as a pandas DataFrame, one line per row and context.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame(self.table())

    # --- for people -----------------------------------------------------------------------------------------------

    def groups(self) -> list[list[Row]]:
        """Rows of equal layers together, in order of appearance."""
        groups: dict[Any, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row._replace(layer=None), []).append(row)
        return list(groups.values())

    def __str__(self) -> str:
        last = len(self.contexts) - 1
        lines = [self.title, "=" * len(self.title)]
        for rows in self.groups():
            row = rows[0]
            where = f"  [{', '.join(filter(None, (row.tier, row.precision)))}]" if row.tier or row.precision else ""
            lines.append(f"{row.component}{where}, {_layers([r.layer for r in rows])}")
            if row.record:
                lines.append(f"    record: {row.record} = {number(row.bytes_per_record)} bytes")
            lines.append(f"    {row.formula}  ({row.source})" if row.source else f"    {row.formula}")
            for i, context in enumerate(self.contexts):
                if len(self.contexts) > 3 and i not in (0, last):
                    continue
                times = f" a layer, x {len(rows)} = {number(len(rows) * row.values[i])}" if len(rows) > 1 else ""
                filled = re.sub(r"\bN\b", f"{context:,}", row.numbers)
                lines.append(f"    {filled} = {number(row.values[i])}{times} {row.unit}")
        totals = self._sums(lambda row: None).get(None, [0] * len(self.contexts))
        for context, value in zip(self.contexts, totals, strict=True):
            at = f" at N = {context:,}" if len(self.contexts) > 1 else ""
            lines.append(f"total{at}: {number(value)} {self.unit}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.title!r}, {len(self.rows)} rows>"

    def _repr_html_(self) -> str:
        cell = "<td style='text-align:{}'>{}</td>".format
        head = ["component", "tier or precision", "layers", "formula", *(f"N = {c:,}" for c in self.contexts)]
        lines = ["<table>", f"<caption>{html.escape(self.title)}</caption>"]
        lines.append(
            "<thead><tr>" + "".join(f"<th scope='col'>{html.escape(h)}</th>" for h in head) + "</tr></thead><tbody>"
        )
        for rows in self.groups():
            row, times = rows[0], len(rows)
            words = [row.component, row.tier or row.precision or "", _layers([r.layer for r in rows]), row.formula]
            cells = [cell("left", html.escape(word)) for word in words]
            cells += [cell("right", number(times * value)) for value in row.values]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        totals = self._sums(lambda row: None).get(None, [0] * len(self.contexts))
        total = "".join(cell("right", f"<b>{number(value)}</b>") for value in totals)
        lines.append(
            f"<tr><th scope='row' colspan='4'>total, {html.escape(self.unit)}</th>{total}</tr></tbody></table>"
        )
        return "".join(lines)


def _exact(value: Number) -> int | float | str:
    """A number as JSON that says the same: an int, a double where that is exact, or the text of a fraction."""
    short = plain(value)
    return short if short == value else str(value)


def _read(value: int | float | str) -> Number:
    return value if isinstance(value, int) else Fraction(value)


def _layers(layers: Sequence[int | None]) -> str:
    """`layers 0-3, 8`: consecutive numbers as ranges."""
    if layers == [None]:
        return "once"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    if len(runs) > 5 and len({b[0] - a[0] for a, b in itertools.pairwise(runs)}) == 1 and all(a == b for a, b in runs):
        return f"layers {runs[0][0]}, {runs[1][0]}, ..., {runs[-1][0]} ({len(layers)})"
    shown = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"layer{'s' * (len(layers) > 1)} {shown}" + (f" ({len(layers)})" if len(layers) > 1 else "")


def field_names(config: Config) -> dict[str, Number]:
    """The numbers a formula may name: the whole-number fields of a config."""
    return {key: value for key, value in vars(config).items() if isinstance(value, int) and not isinstance(value, bool)}


def build(
    config: Config,
    context: Any,
    parts_of: Callable[[LayerPlan], Iterable[Part]],
    *,
    title: str,
    unit: str,
    whole_model: Iterable[Part] = (),
    report: type[Report] = Report,
    names: Mapping[str, Number] = {},
) -> Report:
    """The report of what each layer contributes, layers of equal kind computed once.

    `parts_of(plan)` gives the parts of one layer; `whole_model` those that belong to none.
    """
    contexts, single = parse_contexts(context)
    fields = field_names(config) | dict(names)
    kinds: dict[LayerPlan, list[Row]] = {}
    rows: list[Row] = []
    for plan in layer_plan(config):
        kind = plan.kind()
        if kind not in kinds:
            layer_names = fields | {"compress_ratio": plan.compress_ratio, "sliding_window": plan.window or 0}
            kinds[kind] = [_row(part, layer_names, contexts, unit) for part in parts_of(plan)]
        rows += [row._replace(layer=plan.layer) for row in kinds[kind]]
    rows += [_row(part, fields, contexts, unit) for part in whole_model]
    notes = list(config.notes)
    beyond = max(contexts)
    if beyond > config.max_position_embeddings:
        notes.append(CONTEXT_WARNING.format(name=config.name, limit=config.max_position_embeddings, context=beyond))
    return report(title, rows, contexts, unit=unit, single=single, model=config.name, notes=notes, config=config)


def _summed(text: str, rows: str | None) -> str:
    """A formula of the row i of a prompt, summed over its rows."""
    return text if rows is None else f"sum over {rows} of " + re.sub(r"\bN\b", "i", text)


def _row(part: Part, names: Mapping[str, Number], contexts: Sequence[int], unit: str) -> Row:
    formula = Formula.of(part.formula)
    summed = part.tier if part.tier and part.tier.startswith("i = ") else None
    names = {**names, **part.names}
    records = None
    if part.bytes_per_record is not None:
        names["bytes_per_record"] = part.bytes_per_record
    count = formula.count(names) if part.count is None else part.count
    values = tuple(count.at(n) for n in contexts)
    if part.bytes_per_record is not None:
        records = tuple(value // part.bytes_per_record for value in values)
    return Row(
        None,
        part.component,
        part.tier,
        part.precision,
        values,
        unit,
        _summed(formula.symbols(), summed),
        _summed(formula.numbers(names), summed),
        part.source,
        part.bytes_per_record,
        part.tokens_per_record,
        records,
        part.record,
    )
