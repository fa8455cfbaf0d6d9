"""Lesson 11, hyper-connections."""

import math

from flashsim.config import load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.pictures.hyper_connection import balance

STREAMS = 6
LOGITS = ((0.0, math.log(3)), (0.0, 0.0))
H, Y, POST, COMB = (10, 20), 4, (1.5, 0.25), ((0.9, 0.1), (0.2, 0.7))
LAYER = 5


def _entry(iterations: int, step: int = -1) -> float:
    return balance(LOGITS, iterations, eps=0.0)[step].matrix[0][1]


def _stream(k: int = 1, *, transposed: bool = False, post: float = POST[1]) -> float:
    return post * Y + sum((COMB[k][j] if transposed else COMB[j][k]) * H[j] for j in range(2))


EXERCISES = (
    Exercise(
        "11.1",
        f"How many coefficients does one site compute for a token when there are {STREAMS} streams?",
        "numbers",
        lambda: (2 + STREAMS) * STREAMS,
        "One pre and one post for each stream, and a matrix from every stream to every stream.",
        "Count pre, post and comb separately.",
        (
            Mistake(lambda: STREAMS**2, "That is comb alone. Each stream has a pre and a post as well."),
            Mistake(lambda: 2 * STREAMS, "That is pre and post. The streams are mixed with each other as well."),
            Mistake(lambda: (2 + 4) * 4, "That is for the four streams of the release."),
            Mistake(lambda: 2 * (2 + STREAMS) * STREAMS, "That is a layer, which has two sites."),
        ),
    ),
    Exercise(
        "11.2",
        "Two streams, logits [0, ln 3] and [0, 0]. Do the first iteration by hand: the softmax of rows, then "
        "columns to 1 (leave "
        "the tiny eps out). What is the number from stream 0 to stream 1, in the first row?",
        "share",
        lambda: _entry(1),
        "The softmax gives [1/4, 3/4] and [1/2, 1/2]; the second column adds up to 5/4, and 3/4 of that is 3/5.",
        "exp(ln 3) is 3, so the softmax of the first row is easy. Then divide each number by the sum of its column.",
        (
            Mistake(lambda: _entry(1, 0), "That is after the softmax. The column step is still to come."),
            Mistake(lambda: _entry(2, 2), "That is one step too many: rows have been divided again."),
            Mistake(lambda: balance(LOGITS, 1, eps=0.0)[-1].matrix[1][0], "That is from stream 1 to stream 0."),
        ),
        tolerance=1e-3,
    ),
    Exercise(
        "11.3",
        f"Two streams, one number wide: h = {list(H)}. A site puts out y = {Y}; post = {list(POST)}, comb = "
        f"{[list(row) for row in COMB]}, row: source, column: destination. What does the second stream hold "
        "afterwards?",
        "number",
        _stream,
        "A quarter of y, a tenth of the first stream, seven tenths of the second: 1 + 1 + 14.",
        "post of that stream times y, plus what each stream sends to it: a column of comb.",
        (
            Mistake(
                lambda: _stream(transposed=True),
                "You summed along a row, which says what one stream gives away. What a stream receives stands in "
                "a column.",
            ),
            Mistake(lambda: _stream(post=0), "The output of the site is missing: post times y."),
            Mistake(lambda: _stream(post=POST[0]), "Each stream takes its own share of y. Which post has the second?"),
            Mistake(lambda: _stream(0, post=POST[0]), "That is the first stream."),
        ),
        tolerance=1e-9,
    ),
    Exercise(
        "11.4",
        f"The attention of layer {LAYER} is entered with the pre that the experts of another layer computed. "
        "Which layer?",
        "layer",
        lambda: LAYER - 1,
        "The site before it is the second one of the layer below.",
        "Sites come in the order attention 0, experts 0, attention 1 ... Which one stands just before this attention?",
        (
            Mistake(lambda: LAYER, "The experts of the same layer come after its attention."),
            Mistake(lambda: LAYER + 1, "A site cannot use what is computed after it."),
        ),
    ),
    Exercise(
        "11.5",
        "V4.1-Flash has four streams of 5,120 numbers for each token. How many bytes of them does the KV cache "
        "keep for a token?",
        "bytes",
        lambda: 0,
        "Streams run through the layers and are gone. Four of them make activations larger, not the cache.",
        "What does a later token read of an earlier one? Look at the components of `flashsim.kv_cache`.",
        (
            Mistake(
                lambda: 2 * load_config("v4.1-flash").hc_mult * load_config("v4.1-flash").hidden_size,
                "That is what a token holds while it runs through the layers. What is left of it afterwards?",
            ),
            Mistake(
                lambda: 2 * load_config("v4.1-flash").hidden_size,
                "Not one stream either. Which components does the cache have?",
            ),
        ),
    ),
)
