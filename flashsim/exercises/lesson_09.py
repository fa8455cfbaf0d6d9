"""Lesson 09, windows and replay."""

from dataclasses import replace
from fractions import Fraction

from flashsim.config import load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.persistent import (
    persistent_cache,
    pool_sequences,
    replay_rows,
    replay_tokens,
    tail_rows,
    turn_tokens_for_window_share,
    window_snapshot_bytes,
)

POOL_GIB = 100
PROMPT, PREFIX = 50_000, 49_000
WINDOW = 64


def _release():
    return load_config("v4.1-flash")


def _other():
    return replace(load_config("mini"), sliding_window=WINDOW)


def _sequences(pool_bytes: int) -> int:
    return pool_sequences(_release(), pool_bytes, share=Fraction(1))


def _turn(share: Fraction) -> int:
    return round(turn_tokens_for_window_share(load_config("v4-flash"), share))


EXERCISES = (
    Exercise(
        "09.1",
        f"A pool of {POOL_GIB} GiB of host memory keeps the encoder windows of V4.1-Flash, one full set for each "
        "sequence. "
        "How many whole sequences fit?",
        "sequences",
        lambda: _sequences(POOL_GIB * 2**30),
        "20 layers x 128 positions x 528 bytes are 1,351,680 bytes a sequence, however long it is.",
        "What does one sequence keep: how many layers are in the encoder half, how many positions, how many "
        "bytes a record?",
        (
            Mistake(
                lambda: POOL_GIB * 2**30 // window_snapshot_bytes(_release()),
                "That counts the windows of all 40 layers. The pool keeps one half alone.",
            ),
            Mistake(lambda: _sequences(POOL_GIB * 10**9), "GiB are asked for: 2^30 bytes each. A GB is 10^9."),
            Mistake(
                lambda: POOL_GIB * 2**30 // window_snapshot_bytes(_release(), half="encoder") * 10**9 // 2**30,
                "GiB are asked for: 2^30 bytes each. A GB is 10^9.",
            ),
        ),
    ),
    Exercise(
        "09.2",
        f"A prompt of {PROMPT:,} tokens begins with {PREFIX:,} tokens whose entries were kept, and no window was. "
        "How many "
        "rows does the encoder half of V4.1-Flash run with bounded replay, the new tokens included?",
        "rows",
        lambda: PROMPT - replay_rows(_release(), PROMPT, PREFIX).encoder_start,
        "One window before the hit, and every new token: the prompt from position 48,872 on.",
        "Two kinds of rows run: some of the stored ones, to make windows again, and all the new ones.",
        (
            Mistake(
                lambda: PROMPT - PREFIX,
                "The first new token looks at the window before it, which nobody kept. Some rows before it run again.",
            ),
            Mistake(
                lambda: replay_rows(_release(), PROMPT, PREFIX).replayed,
                "Those are the rows that run again. The new tokens run as well.",
            ),
            Mistake(
                lambda: PROMPT - PREFIX + replay_tokens(_release())["exact"],
                "That is one window for each of the 40 layers, as an exact replay needs. Bounded replay takes "
                "one in all.",
            ),
            Mistake(lambda: PROMPT, "That is a cold run. The stored entries are worth more than that."),
        ),
    ),
    Exercise(
        "09.3",
        "After how many new tokens in a turn are the window snapshots of V4-Flash exactly one quarter of what "
        "the turn adds to "
        "the persistent cache? Round to a whole number.",
        "tokens",
        lambda: _turn(Fraction(1, 4)),
        "The snapshots are 6,428,672 bytes whatever the turn; three times as many bytes of entries take that "
        "many tokens.",
        "Two snapshots stay as they are, 3,514.25 bytes a token grow. How large must the growing part be for the "
        "other to be a "
        "quarter of both?",
        (
            Mistake(lambda: _turn(Fraction(1, 2)), "There the two are equal, so windows are a half."),
            Mistake(
                lambda: round(4 * turn_tokens_for_window_share(load_config("v4-flash"), Fraction(1, 2))),
                "There windows are a quarter of the entries. They are to be a quarter of the sum.",
            ),
            Mistake(
                lambda: round(3 * _snapshot() / _per_token()),
                "A request leaves two snapshots: one where its input ends, one where its output ends.",
            ),
        ),
        tolerance=1e-3,
    ),
    Exercise(
        "09.4",
        f"Take the config mini and make its sliding_window {WINDOW}. How many last rows of a prompt must go "
        "through the decoder "
        "half for the last logits to be exact? (Layer 6 is its last KV source, and it has 12 layers.)",
        "rows",
        lambda: tail_rows(_other()),
        "The five layers after the last KV source: one window for the last of them, 63 rows more for each of the "
        "four below it.",
        "Go down from the last row. The last layer wants 64 rows of the layer below. How many rows further does "
        "each layer below "
        "reach, and how many layers come after the last KV source?",
        (
            Mistake(
                lambda: (_other().num_hidden_layers - 7) * WINDOW,
                "Windows of neighbouring layers overlap in one row: each layer adds one row less than a window.",
            ),
            Mistake(
                lambda: WINDOW + 5 * (WINDOW - 1),
                "One layer too many: layer 6 itself has the input of every row, its windows are whole.",
            ),
            Mistake(lambda: tail_rows(load_config("mini")), "That is for the window that mini has. Take the new one."),
            Mistake(lambda: WINDOW, "That is a bounded tail: its first rows lack a part of their windows."),
        ),
    ),
)


def _snapshot() -> int:
    return window_snapshot_bytes(load_config("v4-flash"))


def _per_token() -> Fraction:
    return persistent_cache(load_config("v4-flash"), 1).by("tier")["global"]
