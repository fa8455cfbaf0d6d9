"""Every solution passes its check; every known mistake is wrong and gets its own hint; no hint gives an answer away."""

import re
import runpy
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


def test_an_unknown_exercise():
    with pytest.raises(ExerciseError, match="99"):
        check("99.1", 3)
