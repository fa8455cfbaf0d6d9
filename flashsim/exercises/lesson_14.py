"""Lesson 14, the whole model: measured against predicted."""

from fractions import Fraction

from flashsim.config import load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.flops import decode_flops
from flashsim.hardware import device
from flashsim.kv_cache import kv_bytes_per_token, kv_cache

READ_GB, BATCH = 13, 32
NEAR, FAR = 2**18, 2**20
STATED = device("h200-sxm").rates.hbm_bytes_per_s
MEASURED = device("h200-sxm").measured.hbm_bytes_per_s


def _release():
    return load_config("v4.1-flash")


def _account(tokens: int) -> int:
    return int(kv_cache(_release(), tokens).total())


def _touched(batch: int) -> Fraction:
    picked = Fraction(_release().num_experts_per_tok, _release().n_routed_experts)
    return 100 * (1 - (1 - picked) ** batch)


def _growth(weighted: bool) -> Fraction:
    report = decode_flops(_release(), [4096, 2**20])
    short, long = report.weighted_total() if weighted else report.total()
    return Fraction(long) / short


EXERCISES = (
    Exercise(
        "14.1",
        f"A step at batch 1 has to read {READ_GB} GB of weights. A copy on this GPU was measured at "
        f"{MEASURED / 10**12:.2f} TB/s. How many milliseconds does the reading take at least?",
        "milliseconds, to three digits",
        lambda: Fraction(1000 * READ_GB * 10**9, MEASURED),
        "Bytes over bytes a second. That is the floor: no kernel, however good, is below it.",
        "Divide the bytes by the bytes of one second, and remember how many milliseconds a second has.",
        (
            Mistake(
                lambda: Fraction(1000 * READ_GB * 10**9, STATED),
                "That is the bandwidth of the data sheet. A floor for a measured time wants the measured rate.",
            ),
            Mistake(lambda: Fraction(1000 * READ_GB * 2**30, MEASURED), "GB are asked for, 10^9 bytes each, not GiB."),
            Mistake(lambda: Fraction(READ_GB * 10**9, MEASURED), "Those are seconds."),
        ),
        tolerance=0.005,
    ),
    Exercise(
        "14.2",
        f"A router picks 6 of 384 experts for each token. If it picks evenly, what share of all experts does a batch "
        f"of {BATCH} tokens touch, on average, in per cent?",
        "per cent, to a tenth",
        lambda: _touched(BATCH),
        "An expert is missed by one token with 378/384, by all of them with that to the power of the batch.",
        "Two tokens may pick the same expert. What is the chance that none of the tokens picks a given one?",
        (
            Mistake(
                lambda: Fraction(100 * BATCH * 6, 384),
                "That counts an expert twice that two tokens picked. It would pass 100 % at 65 tokens.",
            ),
            Mistake(lambda: _touched(1), "That is one token. Each further one adds new experts, and some old ones."),
            Mistake(lambda: 100 - _touched(BATCH), "That is the share that nobody picked."),
        ),
        tolerance=0.003,
    ),
    Exercise(
        "14.3",
        f"The tokens of one sequence store {_account(NEAR):,} bytes in a cache of V4.1-Flash at {NEAR:,} tokens and "
        f"{_account(FAR):,} at {FAR:,}. How many of these bytes do not depend on the context?",
        "bytes",
        lambda: _account(FAR) - kv_bytes_per_token(_release()) * FAR,
        "The line through the two points has the slope 890. What is left at no tokens is the windows: 40 x 128 x 528.",
        "Draw the straight line through both points. Where does it meet the axis?",
        (
            Mistake(lambda: _account(FAR) - _account(NEAR), "That is what grew between the two lengths."),
            Mistake(
                lambda: Fraction(_account(FAR) - _account(NEAR), FAR - NEAR),
                "That is the slope: bytes a token. The question is about the part that has no slope.",
            ),
            Mistake(lambda: 0, "A line through the origin does not meet both points. Try the slope first."),
        ),
    ),
    Exercise(
        "14.4",
        "By what factor do the FLOPs of a decode step of V4.1-Flash grow from 4,096 to 1,048,576 tokens, if BF16 "
        "counts 1, FP8 1/2 and FP4 1/4?",
        "times, to a hundredth",
        lambda: _growth(True),
        "The scan of the first indexer level is all that still grows with the context, and it is in FP4.",
        "`flashsim.decode_flops` takes a list of contexts, and `weighted_total()` weighs by precision.",
        (
            Mistake(lambda: _growth(False), "That counts every product alike. FP4 counts a quarter."),
            Mistake(lambda: 256, "The context grows that much. Most of a step does not look at the context."),
            Mistake(lambda: _growth(True) - 1, "That is the growth alone. As a factor it is one more."),
        ),
        tolerance=0.004,
    ),
)
