"""Lesson 10, Engram."""

from fractions import Fraction

from flashsim.config import V41Config, load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.params import parameters
from flashsim.pictures.engram import hash_steps
from flashsim.traffic import engram_read_bytes

ORDER = 5
GRAM, MULTIPLIERS, PRIME, OFFSET = (7, 3), (5, 9), 11, 22


def _release() -> V41Config:
    return load_config("v4.1-flash")


def _columns(orders: int | None = None) -> int:
    config = _release()
    return (config.engram_max_ngram_size - 1 if orders is None else orders) * config.engram_n_heads


def _row(gram=GRAM) -> int:
    return hash_steps(gram, MULTIPLIERS, [[PRIME]], [[OFFSET]])[-1].result


def _layers() -> int:
    return len(_release().engram_layer_ids)


EXERCISES = (
    Exercise(
        "10.1",
        f"Suppose engram_max_ngram_size of V4.1-Flash were {ORDER} and all else as released. How many table rows "
        "would one "
        "token look up, in all its layers together?",
        "rows",
        lambda: _layers() * _columns(ORDER - 1),
        "Two layers, four orders (2- to 5-grams), eight heads.",
        "Count layers with Engram, orders of n-gram from 2 on, and heads of each order.",
        (
            Mistake(lambda: _columns(ORDER - 1), "That is one layer. How many layers have an Engram?"),
            Mistake(lambda: _layers() * _columns(ORDER), "There is no table of 1-grams: orders begin at 2."),
            Mistake(lambda: _layers() * (ORDER - 1), "Each n-gram is looked up once for each head."),
            Mistake(lambda: _layers() * _columns(), "That is the model as released. One more order is asked for."),
        ),
    ),
    Exercise(
        "10.2",
        "And if the tables of the released model were kept in BF16, how many times as many bytes would a token "
        "read of them? "
        "(A row has 256 numbers; MXFP8 has a scale of one byte for every 32.)",
        "times",
        lambda: Fraction(_columns() * _layers() * 2 * _release().engram_head_dim, engram_read_bytes(_release())),
        "512 bytes a row in place of 264: scales cost MXFP8 one byte in 33.",
        "Bytes of a row in BF16, over bytes of a row in MXFP8 with its scales.",
        (
            Mistake(lambda: 2, "Almost. A row of MXFP8 has scales as well."),
            Mistake(
                lambda: Fraction(
                    engram_read_bytes(_release()), _columns() * _layers() * 2 * _release().engram_head_dim
                ),
                "That is MXFP8 over BF16. The question is the other way round.",
            ),
            Mistake(lambda: 4, "BF16 has two bytes a number."),
        ),
        tolerance=1e-3,
    ),
    Exercise(
        "10.3",
        f"Work out a row by hand. The newest token has compressed id {GRAM[0]}, the one before it {GRAM[1]}; the "
        "multipliers "
        f"are {MULTIPLIERS[0]} and {MULTIPLIERS[1]}, the prime is {PRIME}, the offset {OFFSET}. Which row does "
        "the 2-gram have?",
        "row",
        _row,
        "35 XOR 27 is 56, which is 1 more than 5 x 11; the rows of this head begin at 22.",
        "Multiply each id with its multiplier, XOR the two products bit by bit, take the rest modulo the prime, "
        "add the offset.",
        (
            Mistake(
                lambda: _row() - OFFSET, "The heads share one table: each has its own part of it, which begins later."
            ),
            Mistake(
                lambda: (GRAM[0] * MULTIPLIERS[0] + GRAM[1] * MULTIPLIERS[1]) % PRIME + OFFSET,
                "The products are XORed, not added.",
            ),
            Mistake(lambda: _row(GRAM[::-1]), "The newest token comes first: it goes with the first multiplier."),
        ),
    ),
    Exercise(
        "10.4",
        "The second token of a prompt has one token before it, and then nothing. For how many of its columns in "
        "one layer "
        "of V4.1-Flash does at least one place count as the pad id?",
        "columns",
        lambda: _columns() - _columns(1),
        "3-grams and 4-grams reach beyond the start; its 2-gram is whole.",
        "Which orders reach further back than one token, and how many heads has each?",
        (
            Mistake(
                lambda: _columns(1), "3-grams reach beyond the start as well as 4-grams, if you count from this token."
            ),
            Mistake(_columns, "One order finds all it needs."),
            Mistake(lambda: _layers() * (_columns() - _columns(1)), "One layer was asked for."),
        ),
    ),
    Exercise(
        "10.5",
        "What share of all stored parameters of V4.1-Flash, tables included, lies in the Engram tables? In percent.",
        "percent",
        lambda: 100 * parameters(_release()).engram_parameters() / parameters(_release()).total(),
        "196.6 of 748.5 billion, a quarter, of which a token touches 12,288 numbers.",
        "`flashsim.parameters` has both: `engram_parameters()` and `total()`.",
        (
            Mistake(
                lambda: 100 * parameters(_release()).engram_parameters() / parameters(_release()).total_parameters(),
                "That is the tables against everything else. Put them into the whole as well.",
            ),
            Mistake(
                lambda: parameters(_release()).engram_parameters() / parameters(_release()).total(),
                "Percent was asked for.",
            ),
        ),
        tolerance=0.02,
    ),
)
