"""Lesson 00, the tour."""

from fractions import Fraction

from flashsim.config import load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.kv_cache import kv_bytes_per_token


def _per_token(name: str) -> int | Fraction:
    return kv_bytes_per_token(load_config(name))


EXERCISES = (
    Exercise(
        "00.1",
        "How many times smaller is the cache of a token in V4.1-Flash than in V1? Round to a whole number.",
        "times",
        lambda: round(_per_token("v1") / _per_token("v4.1-flash")),
        "389,120 / 890 is a little over 437: the same token, 2023 and 2026.",
        "Divide the bytes of a token in V1 by those in V4.1-Flash.",
        (
            Mistake(
                lambda: _per_token("v4.1-flash") / _per_token("v1"),
                "That is the share that is left. How many times does the new record go into the old one?",
            ),
        ),
        tolerance=0.02,
    ),
)
