"""Solutions of lesson 09."""

from fractions import Fraction

answers = {
    "09.1": 100 * 2**30 // (20 * 128 * 528),  # 20 encoder layers, 128 positions, 528 bytes a record
    "09.2": (50_000 - 49_000) + 128,  # the new tokens, and one window before them
    "09.3": round(
        3 * 2 * 43 * 128 * 584 / Fraction("3514.25")
    ),  # a quarter of the sum: entries are three times as much
    "09.4": 64 + 4 * 63,  # layers 7 to 11: one window, and 63 rows more for each of four layers below
}
