"""Formulas: what is printed is what is computed, and sums over a prompt equal adding its rows up."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim import decode_flops, kv_cache, load_config
from flashsim.config import PRESETS
from flashsim.formula import Count, Formula, Term, add

ratios = st.integers(1, 40)
limits = st.none() | st.integers(0, 60)
contexts = st.integers(0, 400)


def entries(n, ratio, limit):
    """min(floor(n / ratio), limit), by counting complete groups."""
    groups = sum(1 for last in range(1, n + 1) if last % ratio == 0)
    return groups if limit is None else min(groups, limit)


@given(ratio=ratios, limit=limits, n=contexts)
def test_a_term_counts_complete_groups(ratio, limit, n):
    assert Term(ratio, limit).at(n) == entries(n, ratio, limit)


@given(ratio=ratios, limit=limits, n=contexts)
def test_a_prompt_is_the_sum_of_its_rows(ratio, limit, n):
    assert Term(ratio, limit, rows=0).at(n) == sum(entries(i, ratio, limit) for i in range(1, n + 1))


@given(ratio=ratios, limit=limits, n=contexts, rows=st.integers(1, 50))
def test_a_tail_is_the_sum_of_its_last_rows(ratio, limit, n, rows):
    last = [i for i in range(1, n + 1) if n - i < rows]
    assert Term(ratio, limit, rows=rows).at(n) == sum(entries(i, ratio, limit) for i in last)
    replayed = sum(entries(i - last[0] + 1, ratio, limit) for i in last)
    assert Term(ratio, limit, rows=rows, replayed=True).at(n) == replayed


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 128])
@pytest.mark.parametrize("limit", [None, 0, 1, 2, 5, 128, 512])
def test_every_short_prompt(ratio, limit):
    total = 0
    for n in range(1, 700):
        total += min(n // ratio, limit) if limit is not None else n // ratio
        assert Term(ratio, limit, rows=0).at(n) == total


@given(a=st.integers(-5, 5), b=st.integers(1, 9), c=st.integers(0, 9), n=st.integers(1, 300))
def test_formulas_compute_what_they_say(a, b, c, n):
    names = {"a": a, "b": b, "c": c}
    for text, value in {
        "a * N + c": a * n + c,
        "(a + b) * N - c": (a + b) * n - c,
        "a * (N // b)": a * (n // b),
        "N // b * a": n // b * a,
        "c * (N % b)": c * (n % b),
        "a * min(N, c)": a * min(n, c),
        "a * min(N // b, c) + c * min(N, b)": a * min(n // b, c) + c * min(n, b),
        "min(min(N, b), c)": min(n, b, c),
        "min(c, N)": min(c, n),
        "a * N / b": Fraction(a * n, b),
        "c / b": Fraction(c, b),
        "c // b + c % b": c // b + c % b,
        "2 * (N - N)": 0,
    }.items():
        assert Formula.of(text).count(names).at(n) == value, text


@given(a=st.integers(1, 9), b=st.integers(1, 9), n=st.integers(1, 200))
def test_numbers_filled_in_give_the_same_value(a, b, n):
    """The line a reader follows with a pencil, read back as arithmetic."""
    names = {"a": a, "b": b}
    for text in ("a * (N + b) * 2", "a * (b - 1) - b", "(a + b) * (a * b)", "a - (b - 1)", "a / b", "b * (a / b)"):
        numbers = Formula.of(text).numbers(names)
        readable = numbers.replace(" x ", " * ").replace("N", str(n)).replace(",", "")
        assert abs(eval(readable) - float(Formula.of(text).count(names).at(n))) < 1e-9, (text, numbers)


def test_the_line_of_a_whole_group_division():
    formula = Formula.of("4 * heads * min(N // ratio, topk)")
    names = {"heads": 64, "ratio": 2, "topk": 512}
    assert formula.symbols() == "4 x heads x min(floor(N / ratio), topk)"
    assert formula.numbers(names) == "4 x 64 x min(floor(N / 2), 512)"
    assert Formula.of("1000000 * a").numbers({"a": 4096}) == "1,000,000 x 4,096"


def test_slope_is_the_marginal_growth():
    count = Formula.of("7 * (N // 4) + 3 * N + 100 * min(N, 128) + 5").count({})
    assert count.slope() == Fraction(7, 4) + 3
    assert Formula.of("8 * (N // 4)").count({}).slope() == 2


def test_counts_add_and_scale():
    one, two = Formula.of("3 * N + 1").count({}), Formula.of("N // 2 - 3 * N").count({})
    assert add([one, two]).at(11) == 1 + 5
    assert one.times(4).at(10) == 124
    assert add([]) == Count()
    assert one.plus(one.times(-1)) == Count()


@given(n=st.integers(1, 300), rows=st.integers(1, 40))
def test_counts_over_rows(n, rows):
    count = Formula.of("3 * min(N, 9) + 2 * (N // 4) + 5").count({})
    values = [3 * min(i, 9) + 2 * (i // 4) + 5 for i in range(1, n + 1)]
    assert count.over_rows().at(n) == sum(values)
    assert count.over_rows(rows).at(n) == sum(values[-rows:])


@pytest.mark.parametrize(
    "text", ["N * N", "2 // N", "2 / N", "N ** 2", "max(N, 2)", "min(2 * N, 3)", "(N + 1) // 2", "-N", "1.5 * N"]
)
def test_what_is_no_part_of_the_language(text):
    with pytest.raises(TypeError):
        Formula.of(text).count({})


def test_a_name_without_a_number():
    with pytest.raises(KeyError):
        Formula.of("a * N").count({"b": 1})


@given(name=st.sampled_from(PRESETS), n=st.integers(1, 2**20))
def test_every_printed_line_gives_the_value_beside_it(name, n):
    """The numbers of each row, evaluated apart from the library, are the row's value."""
    reading = {" x ": " * ", " mod ": " % ", ",": ""}
    config = load_config(name)
    for report in (kv_cache(config, n), decode_flops(config, n)):
        for row in {row._replace(layer=0) for row in report.rows}:
            text = row.numbers.replace("min(", "least(").replace(", ", "; ")
            for old, new in reading.items():
                text = text.replace(old, new)
            value = eval(text.replace(";", ","), {"floor": int, "least": min, "N": n})
            assert value == row.values[0], (row.component, row.numbers)
