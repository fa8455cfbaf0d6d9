"""Lesson 00, the tour."""

from fractions import Fraction

from flashsim.config import load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.kv_cache import KVReport, kv_bytes_per_token, kv_cache

FREE_BYTES = 100 * 10**9
TOKENS = 128 * 1024


def _per_token(name: str) -> int | Fraction:
    return kv_bytes_per_token(load_config(name))


def _conversation() -> KVReport:
    return kv_cache("v4.1-flash", TOKENS)


def _index_keys() -> KVReport:
    return _conversation().where(component="index_key")


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
    Exercise(
        "00.2",
        f"{FREE_BYTES // 10**9} GB of a GPU are free for caches. How many whole conversations of {TOKENS:,} tokens fit "
        "with V4.1-Flash, their windows included?",
        "conversations",
        lambda: FREE_BYTES // _conversation().total(),
        "The global cache grows with the context; the windows of 40 layers add 2,703,360 bytes to each conversation.",
        "What does one conversation take, global and window together? Ask `flashsim.kv_cache` at this context.",
        (
            Mistake(
                lambda: FREE_BYTES // _conversation().tier_bytes("global"),
                "Each conversation has a window as well, in every one of the 40 layers.",
            ),
            Mistake(
                lambda: FREE_BYTES * 2**30 // 10**9 // _conversation().total(),
                "A GB is 10^9 bytes; the one of 2^30 bytes is a GiB.",
            ),
            Mistake(
                lambda: FREE_BYTES // (_per_token("v1") * TOKENS),
                "That many would fit with V1. Take the bytes of V4.1-Flash.",
            ),
        ),
    ),
    Exercise(
        "00.3",
        "How many of the 890 bytes of a token belong to the indexer's keys, in all layers together?",
        "bytes",
        lambda: _index_keys().per_token_bytes(),
        "Three caches with half a key for each token, and one with a whole key: 3 x 34 + 68.",
        "Look at the rows named index_key: how many layers, how many bytes a record, how many tokens for each record?",
        (
            Mistake(
                lambda: sum(row.bytes_per_record for row in _index_keys().rows),
                "In some of these layers one key serves two tokens.",
            ),
            Mistake(
                lambda: _index_keys().rows[-1].bytes_per_record,
                "That is one key. Four layers keep keys.",
            ),
            Mistake(
                lambda: _conversation().where(component="main_kv").per_token_bytes(),
                "Those are the entries that attention reads. The keys that find them are the rows named index_key.",
            ),
        ),
    ),
)
