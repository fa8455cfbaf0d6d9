"""Contexts in, numbers out."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim import ContextError, parse_context
from flashsim.units import MAX_CONTEXT, number, number_of_bytes, parse_contexts, plain, tokens


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (1, 1),
        (MAX_CONTEXT, 10**9),
        ("4096", 4096),
        (" 4096 ", 4096),
        ("+7", 7),
        ("4K", 4000),
        ("4k", 4000),
        ("4Ki", 4096),
        ("4ki", 4096),
        ("4 KI", 4096),
        ("128Ki", 131_072),
        ("1M", 10**6),
        ("1Mi", 2**20),
        ("1m", 10**6),
        ("0.5Mi", 2**19),
        ("1.5K", 1500),
        ("1,000,001", 1_000_001),
        ("1_000_001", 1_000_001),
        ("1G", 10**9),
        ("0.25Gi", 2**28),
        ("1.0", 1),
    ],
)
def test_contexts(text, value):
    assert parse_context(text) == value
    assert type(parse_context(text)) is int


@pytest.mark.parametrize(
    "text",
    [
        0, -1, "0", "-5", "-1M", 10**9 + 1, 10**12, "10^12", "1e6", "1T", "1Gi", "2G", "1.5", "0.0003K", "1KB", "",
        " ", "M", "one", "1 0 0", "--4", "4K4", "0x10", "inf", "nan", "NaN", "١", "1\n2", "9" * 39, "9" * 10_000,
        True, False, None, 1.0, 4096.0, float("nan"), float("inf"), [], {}, b"4096", Fraction(4),
    ],
)  # fmt: skip
def test_contexts_that_are_none(text):
    with pytest.raises(ContextError) as error:
        parse_context(text)
    message = str(error.value)
    assert message.startswith("context is ") and "accepted: a whole number of tokens from 1 to 1,000,000,000" in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["positive", "negative"])
def test_a_number_too_long_to_print(value):
    with pytest.raises(ContextError, match=r"^context is .{1,60}; accepted: a whole number of tokens"):
        parse_context(value)


def test_a_context_error_is_a_value_error():
    assert issubclass(ContextError, ValueError)


def test_one_context_or_several():
    assert parse_contexts("4Ki") == ((4096,), True)
    assert parse_contexts([4096, "1M"]) == ((4096, 10**6), False)
    assert parse_contexts(("1",)) == ((1,), False)
    assert parse_contexts(range(1, 4)) == ((1, 2, 3), False)
    for bad in ([], (), range(0), [0], [1, None], [[1]]):
        with pytest.raises(ContextError):
            parse_contexts(bad)


@given(st.integers(1, MAX_CONTEXT))
def test_an_axis_label_reads_back_as_the_same_number(n):
    assert parse_context(tokens(n)) == n


@given(st.integers(1, MAX_CONTEXT))
def test_every_whole_number_is_a_context(n):
    assert parse_context(n) == parse_context(str(n)) == parse_context(f"{n:,}") == n


@given(st.text(max_size=60))
def test_any_text_is_a_context_or_a_context_error(text):
    try:
        assert 1 <= parse_context(text) <= MAX_CONTEXT
    except ContextError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (389_120, "389,120"),
        (Fraction(14_057, 4), "3,514.25"),
        (Fraction("5031.4375"), "5,031.4375"),
        (Fraction(6, 2), "3"),
        (Fraction(1, 3), "0.3333"),
        (1e6, "1,000,000"),
        (1234.5, "1,234.5"),
        (100, "100"),
        (Fraction(-7, 2), "-3.5"),
    ],
)
def test_numbers_for_people(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (890, "890 bytes"),
        (Fraction(14_057, 4), "3,514.25 bytes (3.51 kB, 3.43 KiB)"),
        (70_272, "70,272 bytes (70.3 kB, 68.6 KiB)"),
        (890_000_000, "890,000,000 bytes (0.89 GB, 0.829 GiB)"),
        (2_703_360, "2,703,360 bytes (2.7 MB, 2.58 MiB)"),
        (2**40, "1,099,511,627,776 bytes (1.1 TB, 1 TiB)"),
        (0, "0 bytes"),
    ],
)
def test_bytes_in_both_unit_systems(value, text):
    """GB for GiB and KB for KiB are 2-7 % apart (pitfalls.md): both are printed, each under its name."""
    assert number_of_bytes(value) == text


def test_numbers_that_json_can_hold():
    assert plain(Fraction(14_057, 4)) == 3514.25
    assert plain(Fraction(8, 4)) == 2 and type(plain(Fraction(8, 4))) is int
    assert plain(7) == 7 and plain(0.5) == 0.5
