"""Numbers in and out: contexts such as `128Ki`, and the only place that formats a number for people.

GB is 10^9 bytes and GiB is 2^30 bytes; K, M, G are powers of 1000 and Ki, Mi, Gi powers of 1024. A bare `4K` is
therefore 4,000 and `4Ki` is 4,096. Whatever was parsed is always shown again as a plain number.
"""

from __future__ import annotations

import re
from fractions import Fraction

from flashsim.reading import shorten

SUFFIXES = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
}
MAX_CONTEXT = 10**9
"""The longest context that is computed, in tokens: a thousand times what any released model was made for."""

_NUMBER = re.compile(r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:_\d{3})+|\d+))(\.\d+)?\s*([a-zA-Z]*)\Z", re.ASCII)


class ContextError(ValueError):
    """A context that is not a number of tokens from 1 to `MAX_CONTEXT`."""


def parse_context(text: str | int) -> int:
    """Tokens named by `text`: `4096`, `4Ki` (4,096), `128Ki`, `1M` (1,000,000), `1Mi` (1,048,576).

    Raises:
        ContextError: not a whole number of tokens from 1 to `MAX_CONTEXT`.

    >>> parse_context("128Ki"), parse_context("1M"), parse_context("1.5K"), parse_context("1,000,000")
    (131072, 1000000, 1500, 1000000)
    """
    accepted = f"a whole number of tokens from 1 to {MAX_CONTEXT:,}, such as 4096, 4Ki, 128Ki, 1M or 1Mi"
    shown = shorten(text)
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise ContextError(f"context is {shown}; accepted: {accepted}")
    if isinstance(text, int):
        tokens = Fraction(text)
    else:
        match = _NUMBER.match(text.strip()) if len(text) < 40 else None
        if not match or match[3].upper() not in SUFFIXES:
            raise ContextError(f"context is {shown}; accepted: {accepted}")
        digits = match[1].replace(",", "").replace("_", "")
        tokens = Fraction(digits + (match[2] or "")) * SUFFIXES[match[3].upper()]
    if tokens.denominator != 1 or not 1 <= tokens <= MAX_CONTEXT:
        raise ContextError(f"context is {shown}; accepted: {accepted}")
    return int(tokens)


def parse_contexts(context: int | str | list | tuple) -> tuple[tuple[int, ...], bool]:
    """One context or a sequence of them, as (tokens, whether it was a single one)."""
    if isinstance(context, list | tuple | range):
        if not context:
            raise ContextError("context is an empty sequence; accepted: one or more numbers of tokens")
        return tuple(parse_context(c) for c in context), False
    return (parse_context(context),), True


def plain(value: int | float | Fraction) -> int | float:
    """A number JSON can hold: an int where the value is whole, else the nearest double.

    >>> plain(Fraction(14057, 4)), plain(Fraction(6, 2))
    (3514.25, 3)
    """
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def number(value: int | float | Fraction) -> str:
    """A number with thousands separators, and as many decimals as it needs, up to four.

    >>> number(389120), number(Fraction(14057, 4)), number(Fraction(1, 3))
    ('389,120', '3,514.25', '0.3333')
    """
    value = plain(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4f}".rstrip("0").rstrip(".")


def number_of_bytes(value: int | float | Fraction) -> str:
    """Bytes for people, in both unit systems: `890,000,000 bytes (0.89 GB, 0.829 GiB)`.

    >>> number_of_bytes(890_000_000)
    '890,000,000 bytes (0.89 GB, 0.829 GiB)'
    >>> number_of_bytes(890)
    '890 bytes'
    """
    text = f"{number(value)} bytes"
    for power, decimal, binary in ((4, "TB", "TiB"), (3, "GB", "GiB"), (2, "MB", "MiB"), (1, "kB", "KiB")):
        if value >= 1000**power / 2 and value >= 1000:
            return f"{text} ({_short(value / 1000**power)} {decimal}, {_short(value / 1024**power)} {binary})"
    return text


def tokens(value: int) -> str:
    """A context as an axis label: `4Ki`, `1M`, or the plain number.

    >>> [tokens(n) for n in (4096, 131072, 1_000_000, 1_048_576, 1000)]
    ['4Ki', '128Ki', '1M', '1Mi', '1K']
    """
    for factor, suffix in ((2**20, "Mi"), (10**6, "M"), (2**10, "Ki"), (10**3, "K")):
        if value >= factor and value % factor == 0:
            return f"{value // factor}{suffix}"
    return f"{value:,}"


def _short(value: int | float | Fraction) -> str:
    return f"{float(value):.3g}" if value < 1000 else f"{float(value):,.0f}"
