"""Lesson 03, sparse attention with an indexer."""

from flashsim.config import load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.flops import decode_flops
from flashsim.kv_cache import index_record, main_record
from flashsim.pictures.selection import best
from flashsim.traffic import decode_read

V32 = load_config("v3.2")
TOKENS = 100_000
SCORES, CHOSEN = (0.0, 1.5, 0.0, -0.2, 2.0, 0.0, 0.0), 4
LATENT, KEY = main_record(V32).nbytes, index_record(V32).nbytes


def _equal(flops_of_a_byte: int = 1) -> int:
    """Tokens at which scoring all costs what attending to the chosen costs."""
    long = 10**6
    parts = decode_flops(V32, long).by("component")
    return parts["attention"] * long * flops_of_a_byte // parts["indexer_scores"]


def _largest(scores, k: int) -> list[int]:
    """The best k, of equal ones the later."""
    last = len(scores) - 1
    return sorted(last - t for t in best(scores[::-1], k))


EXERCISES = (
    Exercise(
        "03.1",
        "An index key of V3.2 has index_head_dim 128 numbers in FP8 and one scale in FP32 for all of them. There "
        "are 64 index "
        "heads. How many bytes is its record?",
        "bytes",
        lambda: KEY,
        "128 bytes of numbers and 4 of scale; one key serves all index heads.",
        "A byte for each number. What else must be kept to read them back?",
        (
            Mistake(
                lambda: V32.index_head_dim, "An FP8 number means nothing without its scale, which is kept with it."
            ),
            Mistake(lambda: KEY * V32.index_n_heads, "The index heads have a query each, and share the key."),
            Mistake(lambda: 2 * V32.index_head_dim, "FP8 is one byte, and the scale is missing."),
            Mistake(lambda: V32.index_head_dim + 4 * 4, "The latent has a scale for 128 numbers. How many are here?"),
        ),
    ),
    Exercise(
        "03.2",
        f"V3.2 writes a token with {TOKENS:,} tokens visible. How many bytes of cache does one layer read? The "
        "record of a latent "
        "is 656 bytes.",
        "bytes",
        lambda: decode_read(V32, TOKENS).where(layer=0).total(),
        "Every index key, and the latents of 2,048 tokens.",
        "The indexer looks at every token; attention at index_topk of them. Two kinds of record.",
        (
            Mistake(lambda: LATENT * V32.index_topk, "Before that the indexer has to score all tokens."),
            Mistake(lambda: (LATENT + KEY) * TOKENS, "That is what is stored. Which latents are read?"),
            Mistake(lambda: LATENT * TOKENS, "Not every latent is read, but every index key."),
            Mistake(
                lambda: (LATENT + KEY) * V32.index_topk, "The indexer cannot know the best before it has scored all."
            ),
            Mistake(lambda: KEY * TOKENS, "And the latents that were chosen?"),
        ),
    ),
    Exercise(
        "03.3",
        "In a layer of V3.2, one token costs the indexer 2 x 64 x 128 FLOPs, and one chosen token costs "
        "attention 2 x 128 x (576 "
        "+ 512). With 2,048 chosen tokens: at how many tokens of context do the two cost the same? (FLOPs, not "
        "weighted.)",
        "tokens",
        _equal,
        "Beyond that the search costs more than what it searches for.",
        "Attention costs the same at any long context. How many scores does it pay for?",
        (
            Mistake(lambda: 2 * _equal(), "That counts FP8 products as half. Here every FLOP counts as one."),
            Mistake(lambda: _equal() * V32.index_n_heads, "The indexer has 64 heads, and each scores every token."),
            Mistake(
                lambda: _equal() // V32.index_topk, "That is for one chosen token. Attention reads index_topk of them."
            ),
        ),
    ),
    Exercise(
        "03.4",
        f"The index scores of tokens 0 to {len(SCORES) - 1} are {', '.join(map(str, SCORES))}. All are visible, "
        f"and {CHOSEN} are "
        "kept. Which ones? Give a list of numbers from low to high.",
        "token numbers",
        lambda: best(SCORES, CHOSEN),
        "Two stand out; of the four zeros the earlier tokens are taken.",
        "First the highest scores. Where scores are equal, which token goes first?",
        (
            Mistake(
                lambda: sorted(range(len(SCORES)), key=lambda t: (-SCORES[t], t))[:CHOSEN],
                "The right ones, in the order of their scores. Give them from low to high.",
            ),
            Mistake(lambda: _largest(SCORES, CHOSEN), "Of equal scores the earlier token is taken."),
            Mistake(
                lambda: [t for t, score in enumerate(SCORES) if score > 0], "A zero may be chosen as well: fill up."
            ),
            Mistake(
                lambda: best([abs(score) for score in SCORES], CHOSEN),
                "A negative score is below zero: its size does not count.",
            ),
        ),
    ),
)
