"""A formula that is printed is the formula that is computed.

Every row of a report comes from one expression such as

    4 * num_attention_heads * head_dim * min(N // compress_ratio, index_topk)

in the field names of a `config.json`. It is parsed once; with the numbers of a config it becomes a `Count`, an exact
function of the context `N`, and the same text with the numbers filled in is what a reader follows with a pencil.

The language: whole numbers, names, `+ - * / // %`, parentheses, `min(a, b)`. `N` is the context in tokens; it may
appear as `N`, `N // ratio`, `N % ratio` or inside `min(..., limit)`, scaled and added. That is all a cache or a decode
step needs: each is a sum of terms  coefficient * min(floor(N / ratio), limit).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cache
from typing import NamedTuple

Number = int | Fraction


class Term(NamedTuple):
    """min(floor(N / ratio), limit) as a function of the context N; `limit` None means no limit.

    `rows` turns it into the work of a prompt: the sum over the queries at positions 1..N (`rows` = 0), or over the
    last `rows` of them (`rows` > 0). With `replayed` those rows see a window that starts with them, so the query in
    row j of the tail is at position j (bounded replay).
    """

    ratio: int = 1
    limit: int | None = None
    rows: int | None = None
    replayed: bool = False

    def at(self, n: int) -> int:
        """The term's value at context n, an exact integer."""
        if self.rows is None:
            entries = n // self.ratio
            return entries if self.limit is None or entries < self.limit else self.limit
        if self.rows == 0:
            return self._prefix(n)
        if self.replayed:
            return self._prefix(min(n, self.rows))
        return self._prefix(n) - self._prefix(max(n - self.rows, 0))

    def _prefix(self, n: int) -> int:
        """Sum of min(floor(i / ratio), limit) over i = 1..n, in closed form."""
        below = n if self.limit is None else min(n, self.ratio * self.limit - 1)
        full, rest = divmod(below + 1, self.ratio)  # full groups of equal floors 0, 1, ..., full - 1, then the rest
        total = self.ratio * (full * (full - 1) // 2) + rest * full
        return total if self.limit is None else total + (n - below) * self.limit


class Count(NamedTuple):
    """An exact function of the context: `constant` + sum of coefficient * term."""

    constant: Number = 0
    terms: tuple[tuple[Term, Number], ...] = ()

    def at(self, n: int) -> Number:
        """The value at context n, an exact integer, or a Fraction where it is not whole."""
        value = self.constant + sum(coefficient * term.at(n) for term, coefficient in self.terms)
        return value.numerator if isinstance(value, Fraction) and value.denominator == 1 else value

    def slope(self) -> Number:
        """What one more token adds once every limit is reached and groups are averaged: the marginal growth."""
        value = sum((Fraction(c, term.ratio) for term, c in self.terms if term.limit is None), Fraction(0))
        return value.numerator if value.denominator == 1 else value

    def plus(self, other: Count) -> Count:
        merged = dict(self.terms)
        for term, coefficient in other.terms:
            merged[term] = merged.get(term, 0) + coefficient
        return Count(self.constant + other.constant, tuple((t, c) for t, c in merged.items() if c))

    def times(self, factor: Number) -> Count:
        return Count(self.constant * factor, tuple((t, c * factor) for t, c in self.terms if c * factor))

    def over_rows(self, rows: int = 0, *, replayed: bool = False) -> Count:
        """The same work done for every query of a prompt of N tokens, or for its last `rows` queries."""
        terms = {t._replace(rows=rows, replayed=replayed): c for t, c in self.terms}
        count = Count(0, tuple(terms.items()))
        if self.constant:
            done = Term() if rows == 0 else Term(limit=rows)
            count = count.plus(Count(0, ((done, self.constant),)))
        return count


class Formula:
    """One parsed expression. `Formula.of(text)` parses a text once and keeps it.

    >>> rows = Formula.of("4 * heads * width * min(N // ratio, topk)")
    >>> names = {"heads": 64, "width": 512, "ratio": 2, "topk": 512}
    >>> rows.count(names).at(100), rows.numbers(names)
    (6553600, '4 x 64 x 512 x min(floor(N / 2), 512)')
    """

    def __init__(self, text: str):
        self.text = " ".join(text.split())
        self.tree = ast.parse(self.text, mode="eval").body

    @staticmethod
    @cache
    def of(text: str) -> Formula:
        return Formula(text)

    def count(self, names: Mapping[str, Number]) -> Count:
        """The exact function of N that the expression is with these numbers.

        Raises:
            KeyError: a name without a number.
            TypeError: an expression outside the language above.
        """
        value = _evaluate(self.tree, names)
        return value if isinstance(value, Count) else Count(value)

    def symbols(self) -> str:
        """The expression as a reader writes it: `x` for products, `floor(a / b)` for whole division."""
        return _text(self.tree, {})

    def numbers(self, names: Mapping[str, Number]) -> str:
        """The expression with the numbers filled in."""
        return _text(self.tree, names)


def add(counts: Iterable[Count]) -> Count:
    """The sum of several counts."""
    total = Count()
    for count in counts:
        total = total.plus(count)
    return total


def _evaluate(node: ast.expr, names: Mapping[str, Number]) -> Number | Count:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return Count(0, ((Term(), 1),)) if node.id == "N" else names[node.id]
    if isinstance(node, ast.BinOp):
        return _binary(type(node.op), _evaluate(node.left, names), _evaluate(node.right, names))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "min":
        return _least(*(_evaluate(argument, names) for argument in node.args))
    raise TypeError(f"not part of the formula language: {ast.unparse(node)}")


def _binary(op: type[ast.operator], a: Number | Count, b: Number | Count) -> Number | Count:
    if isinstance(a, Count) or isinstance(b, Count):
        if op is ast.Mult and not (isinstance(a, Count) and isinstance(b, Count)):
            return a.times(b) if isinstance(a, Count) else b.times(a)
        if op in (ast.Add, ast.Sub):
            a = a if isinstance(a, Count) else Count(a)
            b = b if isinstance(b, Count) else Count(b)
            return a.plus(b.times(-1) if op is ast.Sub else b)
        if op is ast.Div and not isinstance(b, Count):
            return a.times(Fraction(1, b))
        if op is ast.FloorDiv and a == Count(0, ((Term(), 1),)) and not isinstance(b, Count):
            return Count(0, ((Term(ratio=b), 1),))
        if op is ast.Mod and a == Count(0, ((Term(), 1),)) and not isinstance(b, Count):
            return a.plus(Count(0, ((Term(ratio=b), -b),)))  # N mod b = N - b floor(N / b)
        raise TypeError(f"N may not stand on this side of {op.__name__}")
    if op is ast.Add:
        return a + b
    if op is ast.Sub:
        return a - b
    if op is ast.Mult:
        return a * b
    if op is ast.FloorDiv:
        return a // b
    if op is ast.Mod:
        return a % b
    if op is ast.Div:
        value = Fraction(a, 1) / b
        return value.numerator if value.denominator == 1 else value
    raise TypeError(f"not part of the formula language: {op.__name__}")


def _least(a: Number | Count, b: Number | Count) -> Number | Count:
    if isinstance(b, Count):
        a, b = b, a
    if not isinstance(a, Count):
        return min(a, b)
    ((term, coefficient),) = a.terms
    if isinstance(b, Count) or a.constant or coefficient != 1:
        raise TypeError("min takes N or N // ratio and a whole number")
    return Count(0, ((term._replace(limit=b if term.limit is None else min(b, term.limit)), 1),))


_LEVEL = {ast.Add: 1, ast.Sub: 1, ast.Mult: 2, ast.Div: 2, ast.Mod: 1, ast.FloorDiv: 3}
_SIGN = {ast.Add: "+", ast.Sub: "-", ast.Mult: "x", ast.Div: "/", ast.Mod: "mod"}


def _text(node: ast.expr, names: Mapping[str, Number], level: int = 0) -> str:
    if isinstance(node, ast.Constant):
        return f"{node.value:,}"
    if isinstance(node, ast.Name):
        return f"{names[node.id]:,}" if node.id in names else node.id
    if isinstance(node, ast.Call):
        return f"min({', '.join(_text(argument, names) for argument in node.args)})"
    kind = type(node.op)
    if kind is ast.FloorDiv:
        return f"floor({_text(node.left, names)} / {_text(node.right, names, 3)})"
    mine = _LEVEL[kind]
    right = mine + 1 if kind in (ast.Sub, ast.Div, ast.Mod) else mine
    text = f"{_text(node.left, names, mine)} {_SIGN[kind]} {_text(node.right, names, right)}"
    return f"({text})" if mine < level else text
