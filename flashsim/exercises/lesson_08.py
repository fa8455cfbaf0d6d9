"""Lesson 08, block formats."""

from flashsim.config import load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.formats import FP4, MXFP4
from flashsim.kv_cache import KVReport, kv_bytes_per_token, kv_cache
from flashsim.pictures.formats import E2M1, E4M3, encode_block

WIDTH = 256
GIVEN = (0.125, 0.625, 1.25, 2.5, -0.875)
SCALE = 0.5
LARGEST = 2.5
OUTLIER = 24.0


def _rounded() -> list[float]:
    return [E2M1.decode(E2M1.encode(value / SCALE)) * SCALE for value in GIVEN]


def _ties_go(up: bool) -> list[float]:
    """The values with every tie rounded to the larger magnitude, or to the smaller."""
    chosen = []
    for value in GIVEN:
        below = max(m for m in E2M1.magnitudes if m <= abs(value) / SCALE)
        above = min(m for m in E2M1.magnitudes if m >= abs(value) / SCALE)
        chosen.append((above if up else below) * (-SCALE if value < 0 else SCALE))
    return chosen


def _scale(kind: str, largest: float) -> float:
    return encode_block([largest, 0.0], kind).scale


def _lost_below() -> float:
    """Halfway between zero and the smallest value, times the scale; the tie itself goes to zero."""
    return E2M1.magnitudes[1] / 2 * _scale("fp4", OUTLIER)


def _wider() -> KVReport:
    """The global cache with FP8 main entries."""
    return kv_cache("v4.1-flash", "128Ki", layout="main=mxfp8").where(tier="global")


EXERCISES = (
    Exercise(
        "08.1",
        f"A model has head_dim = {WIDTH} and keeps its entries as V4.1-Flash does: FP4 (E2M1) in blocks of 16, "
        "with one "
        "E4M3 scale each. How many bytes is one entry?",
        "bytes",
        lambda: FP4.nbytes(WIDTH),
        "Half a byte an element, and a byte for each of the 16 blocks: 4.5 bits an element in all.",
        "Count two parts: the elements at half a byte, and one byte of scale for each block.",
        (
            Mistake(lambda: WIDTH * FP4.element_bits // 8, "That is the elements alone. Every block has a scale."),
            Mistake(
                lambda: MXFP4.nbytes(WIDTH), "You counted a scale for every 32 elements, as the indexer's keys have."
            ),
            Mistake(lambda: FP4.nbytes(2 * WIDTH), "You counted a key and a value. One vector serves as both."),
            Mistake(lambda: WIDTH * 2, "That is two bytes an element, BF16. An FP4 element takes four bits."),
        ),
    ),
    Exercise(
        "08.2",
        f"A block of E2M1 has the scale {SCALE}. As what do the numbers {', '.join(map(str, GIVEN))} come back? "
        "Give a list.",
        "list of five numbers",
        _rounded,
        "Divided by the scale all five lie exactly halfway, and the neighbour with the even code wins: 0, 1, 2, "
        "4 and -2.",
        "Divide by the scale, round to 0, 0.5, 1, 1.5, 2, 3, 4 or 6 (codes 0 to 7), multiply again. What happens "
        "at a tie?",
        (
            Mistake(
                lambda: _ties_go(up=True), "You rounded every tie up. A tie goes to the neighbour with the even code."
            ),
            Mistake(
                lambda: _ties_go(up=False), "You cut every tie down. A tie goes to the neighbour with the even code."
            ),
            Mistake(
                lambda: [value / SCALE for value in _rounded()],
                "Those are the stored elements. They come back multiplied by the scale.",
            ),
            Mistake(
                lambda: [abs(value) for value in _rounded()], "The last number is negative, and a code has a sign."
            ),
        ),
    ),
    Exercise(
        "08.3",
        f"The largest magnitude in a block of an indexer key (MXFP4) is {LARGEST}. What is the scale of the block?",
        "one number",
        lambda: _scale("mxfp4", LARGEST),
        "2.5 / 6 is 0.4167, and a UE8M0 scale is a power of two: the smallest that is not below it.",
        "Divide by the largest E2M1 magnitude, 6. Which powers of two are near, and which of them lets 2.5 fit?",
        (
            Mistake(
                lambda: _scale("mxfp4", LARGEST) / 2,
                "With that scale the largest number of a block would be cut off: the elements end at 6.",
            ),
            Mistake(lambda: LARGEST / E2M1.largest, "That is what the scale should be. UE8M0 has only powers of two."),
            Mistake(
                lambda: _scale("fp4", LARGEST),
                "That is an E4M3 scale, as the main entries have it. An indexer key has UE8M0 scales.",
            ),
            Mistake(lambda: LARGEST / E4M3.largest, "448 is the largest number of E4M3. The elements here are E2M1."),
        ),
        tolerance=1e-3,
    ),
    Exercise(
        "08.4",
        f"The largest magnitude in a block of a main entry (FP4, 16 numbers) is {OUTLIER:g}. Up to which "
        "magnitude do the "
        "other fifteen numbers come back as zero?",
        "one number",
        _lost_below,
        "The scale is 24 / 6 = 4. Up to 0.25 of it a number is nearer to 0 than to 0.5, and the tie goes to 0 as well.",
        "First the scale. Then: which magnitudes, divided by it, are rounded to code 0?",
        (
            Mistake(
                lambda: E2M1.magnitudes[1] * _scale("fp4", OUTLIER),
                "That is the smallest value that is not zero. Numbers above half of it are rounded up to it.",
            ),
            Mistake(
                lambda: E2M1.magnitudes[1] / 2, "So it would be with a scale of 1. What is the scale of this block?"
            ),
            Mistake(lambda: OUTLIER / E2M1.largest, "That is the scale. Which part of it is still rounded to zero?"),
        ),
        tolerance=1e-9,
    ),
    Exercise(
        "08.5",
        "Suppose the main entries of V4.1-Flash were FP8 like its window (528 bytes each), the indexer's keys "
        "staying as "
        "they are. How many bytes would a token store?",
        "bytes",
        lambda: _wider().per_token_bytes(),
        "Three half entries and one whole: 2.5 x (528 + 68). The main entries nearly double, the keys do not change.",
        "How many entries does a token make in all four caches together? Each has a main record and a key.",
        (
            Mistake(lambda: _wider().where(component="main_kv").per_token_bytes(), "And the keys of the indexer?"),
            Mistake(
                lambda: _wider().where(layer=20).per_token_bytes(),
                "That is one cache, the one with an entry for every token. Three others keep an entry for two tokens.",
            ),
            Mistake(
                lambda: sum(row.bytes_per_record for row in _wider().rows),
                "Three of the four caches keep one entry for two tokens: half a record a token.",
            ),
            Mistake(
                lambda: kv_bytes_per_token(load_config("v4.1-flash"), layout="mxfp8,index=fp8"),
                "There the indexer's keys are FP8 too. Here they stay at 68 bytes.",
            ),
            Mistake(lambda: kv_bytes_per_token(load_config("v4.1-flash")), "That is the released cache, in FP4."),
        ),
    ),
)
