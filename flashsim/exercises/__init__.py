"""Exercises of the lessons, and a check that says right, wrong and why, and never the answer.

    >>> from flashsim.exercises import check
    >>> print(check("00.1", 437))
    Right. 389,120 / 890 is a little over 437: the same token, 2023 and 2026.
    >>> print(check("00.1", 0.0023))
    Not yet. That is the share that is left. How many times does the new record go into the old one?

An answer is recomputed from the formulas each time, so no file holds it. A wrong answer that is a known mistake gets a
hint of its own; any other gets the hint of the exercise. `lesson_NN.py` holds the exercises of lesson NN.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from numbers import Real
from pkgutil import iter_modules
from typing import Any

Answer = Real | str | bool | Sequence


class ExerciseError(ValueError):
    """There is no such exercise."""


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that people give, computed as they compute it, and what to say to it."""

    answer: Callable[[], Answer]
    hint: str


@dataclass(frozen=True, repr=False)
class Exercise:
    """One question.

    id: lesson and number, `"02.3"`. unit: of the answer (`bytes`, `tokens`, `layers`...). answer: computes it.
    why: one sentence for who has it. hint: one for who has not. tolerance: relative, 0 where the answer is exact.
    """

    id: str
    question: str
    unit: str
    answer: Callable[[], Answer]
    why: str
    hint: str
    mistakes: tuple[Mistake, ...] = ()
    tolerance: float = 0.0

    def _repr_markdown_(self) -> str:
        return f"**Exercise {self.id}.** {self.question} *Unit: {self.unit}.*"

    def __str__(self) -> str:
        return f"Exercise {self.id}. {self.question} Unit: {self.unit}."

    __repr__ = __str__  # a notebook keeps it beside the Markdown: no hint, no reason


@dataclass(frozen=True)
class Verdict:
    """What `check` says; true where the answer is right."""

    right: bool
    text: str
    answered: bool = True

    def __bool__(self) -> bool:
        return self.right

    def __str__(self) -> str:
        return f"{'Right.' if self.right else 'Not yet.' if self.answered else 'Your turn.'} {self.text}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour = "#0072B2" if self.right else "#D55E00" if self.answered else "#555555"
        mark, _, rest = str(self).partition(".")
        style = f"border-left:4px solid {colour};padding:0.2em 0.8em"
        return f'<div style="{style}"><b style="color:{colour}">{mark}.</b>{html.escape(rest)}</div>'


@lru_cache
def exercises() -> dict[str, Exercise]:
    """Every exercise by its id, in order of the lessons."""
    names = sorted(module.name for module in iter_modules(__path__) if module.name.startswith("lesson_"))
    found = [exercise for name in names for exercise in import_module(f"{__name__}.{name}").EXERCISES]
    return {exercise.id: exercise for exercise in found}


def exercise(id: str) -> Exercise:
    """The exercise of this id; a notebook shows it.

    Raises:
        ExerciseError: there is none.
    """
    known = exercises()
    if not isinstance(id, str) or id not in known:
        raise ExerciseError(f"exercise is {id!r}; accepted: {', '.join(known)}")
    return known[id]


def hint(id: str) -> str:
    """A hint before any answer."""
    return exercise(id).hint


def check(id: str, answer: Any = ...) -> Verdict:
    """Says whether an answer is right, and why; `...` or None is no answer yet.

    A number may be an int, a float or a Fraction, a text `"890"`; a list any sequence, in the order that was asked for;
    and arrays and tensors count as the numbers that they hold.

    Raises:
        ExerciseError: there is no such exercise.
    """
    asked = exercise(id)
    if answer is None or answer is ...:
        return Verdict(False, f"Put your answer ({asked.unit}) where the dots are.", answered=False)
    expected = asked.answer()
    try:
        given = _like(answer, expected)
    except ValueError as error:
        return Verdict(False, f"{error}. {asked.hint}")
    if _same(given, expected, asked.tolerance):
        return Verdict(True, asked.why)
    for mistake in asked.mistakes:
        if _same(given, mistake.answer(), max(asked.tolerance, 1e-9)):
            return Verdict(False, mistake.hint)
    return Verdict(False, asked.hint)


def _like(answer: Any, expected: Answer) -> Any:
    """The answer as the kind of value that is asked for."""
    answer = _plain(answer)
    if isinstance(expected, bool):
        if not isinstance(answer, bool):
            raise ValueError("The answer is True or False")
        return answer
    if isinstance(expected, str):
        if not isinstance(answer, str):
            raise ValueError("The answer is a word in quotes")
        return answer.strip().lower()
    if isinstance(expected, Real):
        try:
            number = answer.replace(",", "").replace("_", "") if isinstance(answer, str) else answer
            if isinstance(number, bool):
                raise TypeError
            return Fraction(number)
        except (TypeError, ValueError, OverflowError, ZeroDivisionError):
            raise ValueError("The answer is one number, without its unit") from None
    if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
        raise ValueError("The answer is a list")
    return [_plain(value) for value in answer]


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as those of Python, which have no width."""
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) and not isinstance(value, type) else value


def _same(given: Any, expected: Answer, tolerance: float) -> bool:
    if isinstance(expected, str):
        return given == expected.strip().lower()
    if isinstance(expected, bool) or isinstance(given, bool):
        return given is expected
    if isinstance(expected, Real):
        if not isinstance(given, Fraction):
            return False
        exact = Fraction(expected)
        return abs(given - exact) <= abs(exact) * Fraction(tolerance)
    if not isinstance(given, list) or len(given) != len(expected):
        return False
    try:
        return all(
            abs(Fraction(a) - Fraction(b)) <= abs(Fraction(b)) * Fraction(tolerance)
            for a, b in zip(given, expected, strict=True)
        )
    except (TypeError, ValueError, OverflowError):
        return list(given) == list(expected)
