"""Every solution passes its check; every known mistake is wrong and gets its own hint; no hint gives an answer away."""

import itertools
import re
import runpy
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest

from flashsim.exercises import ExerciseError, check, exercise, exercises, hint

SOLUTIONS = Path(__file__).resolve().parents[2] / "notebooks" / "solutions"
ALL = exercises()


@pytest.fixture(scope="module")
def answers():
    """Exercise to answer, as the files of solutions compute them."""
    found = {}
    for path in sorted(SOLUTIONS.glob("lesson_*.py")):
        found |= runpy.run_path(str(path))["answers"]
    return found


def test_every_exercise_has_a_solution(answers):
    assert set(answers) == set(ALL)


@pytest.mark.parametrize("id", ALL)
def test_the_solution_is_right(id, answers):
    verdict = check(id, answers[id])
    assert verdict and str(verdict) == f"Right. {ALL[id].why}"


@pytest.mark.parametrize(("id", "i"), [(id, i) for id, e in ALL.items() for i in range(len(e.mistakes))])
def test_a_known_mistake_gets_its_own_hint(id, i):
    mistake = ALL[id].mistakes[i]
    verdict = check(id, mistake.answer())
    assert not verdict and str(verdict) == f"Not yet. {mistake.hint}"


@pytest.mark.parametrize("id", ALL)
def test_wrong_answers_and_no_answer(id):
    for wrong in (-12345.678, "no such word", [98765], object(), float("nan"), float("inf"), True, b"1", {}):
        verdict = check(id, wrong)
        assert not verdict or wrong is ALL[id].answer()
        assert ALL[id].hint in str(verdict) or isinstance(ALL[id].answer(), bool)
    assert str(check(id)).startswith("Your turn.") and not check(id, None)
    assert hint(id) == exercise(id).hint


@pytest.mark.parametrize("id", ALL)
def test_no_hint_gives_the_answer_away(id):
    answer = ALL[id].answer()
    if isinstance(answer, (int, float, Fraction)) and not isinstance(answer, bool) and abs(answer) >= 20:
        shown = {f"{float(answer):,.{digits}f}" for digits in range(3)} | {str(answer)}
        for text in (ALL[id].hint, ALL[id].question, *(m.hint for m in ALL[id].mistakes)):
            assert not shown & set(re.findall(r"\d[\d,]*(?:\.\d+)?", text)), text


class Array:
    """What numpy and torch have in common: `tolist`."""

    def __init__(self, value):
        self.value = value

    def tolist(self):
        return self.value


# Numbers of numpy had their own width: 890 times a tolerance of 10^9 did not fit it.
@pytest.mark.parametrize("id", ALL)
def test_numbers_of_an_array_are_numbers(id, answers):
    answer = answers[id]
    if isinstance(answer, Sequence) and not isinstance(answer, str):
        assert check(id, Array(list(answer))) and check(id, [Array(a) for a in answer])
    else:
        assert check(id, Array(answer))
    assert not check(id, Array(-12345))


@pytest.mark.parametrize("id", ["00.1", "03.4", "12.1"])
def test_what_has_no_end_or_no_value_is_no_answer(id):
    for wrong in (itertools.count(), itertools.count, Array([[0, 1], [2, 3]]), {1, 2}, 1j):
        assert not check(id, wrong)


def test_an_unknown_exercise():
    with pytest.raises(ExerciseError, match=r"exercise is \[\]; accepted"):
        check([], 1)

    with pytest.raises(ExerciseError, match="99"):
        check("99.1", 3)
