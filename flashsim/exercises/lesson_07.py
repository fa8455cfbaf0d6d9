"""Lesson 07, the hierarchical indexer."""

from fractions import Fraction

from flashsim.config import V41Config, load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.formats import FP8
from flashsim.kv_cache import index_record
from flashsim.pictures.selection import best
from flashsim.schedule import LayerPlan, layer_plan

TOKENS = 10**6
FEWER = 300_000
WIDER = 16
SCORES = (0, 3, 0, 1, 0, 2, 0, 0)
KEPT = 5


def _config() -> V41Config:
    return load_config("v4.1-flash")


def _pool() -> int:
    return _config().candidate_topk_blocks * _config().candidate_block_size


def _reindex() -> list[LayerPlan]:
    return [plan for plan in layer_plan(_config()) if plan.scores_candidates]


def _key_bytes(entries: int, nbytes: int = 0) -> int:
    """Index keys that all Reindex layers load, of so many entries each."""
    return len(_reindex()) * entries * (nbytes or index_record(_config()).nbytes)


def _scans() -> Fraction:
    """Entries that the layers without a pool score."""
    full = [plan for plan in layer_plan(_config()) if plan.selects and not plan.scores_candidates]
    return sum((Fraction(FEWER // plan.compress_ratio) for plan in full), Fraction(0))


EXERCISES = (
    Exercise(
        "07.1",
        f"One decode step of V4.1-Flash with {TOKENS:,} tokens in the cache: how many bytes of indexer keys do "
        "the four "
        "Reindex layers load, all four together?",
        "bytes",
        lambda: _key_bytes(_pool()),
        "Four layers, 2,048 blocks of 8 entries, 68 bytes a key. The length of the context does not appear in it.",
        "How many entries are in the pool, and how many bytes has the key of one?",
        (
            Mistake(lambda: _key_bytes(TOKENS), "You let them scan every entry. They score the candidate pool alone."),
            Mistake(lambda: _key_bytes(_pool()) // len(_reindex()), "That is one layer. There are four of them."),
            Mistake(
                lambda: _key_bytes(_config().candidate_topk_blocks),
                "You counted blocks. Every entry of a block is scored, so every key is loaded.",
            ),
            Mistake(
                lambda: _key_bytes(_pool(), FP8.nbytes(_config().index_head_dim)),
                "You took the FP8 key of V3.2. The keys here are MXFP4.",
            ),
            Mistake(
                lambda: _key_bytes(_pool(), _config().index_head_dim // 2),
                "Those are the elements of the keys alone. A key has scales as well.",
            ),
        ),
    ),
    Exercise(
        "07.2",
        f"Suppose the blocks of V4.1-Flash had {WIDER} entries, and the pool still {_config().candidate_topk_blocks:,} "
        "blocks. What is the smallest context, in tokens, at which the pool leaves some entry out? (Layer 20 keeps one "
        "entry for each token.)",
        "tokens",
        lambda: _config().candidate_topk_blocks * WIDER + 1,
        "The pool holds 2,048 x 16 entries. One more begins a block for which there is no place.",
        "How many entries does the full pool hold? With exactly so many, is anything left out?",
        (
            Mistake(
                lambda: _config().candidate_topk_blocks * WIDER,
                "With so many entries the pool holds them all. It takes a little more.",
            ),
            Mistake(lambda: _pool() + 1, "That is the released pool, with blocks of 8."),
            Mistake(
                lambda: 2 * _config().candidate_topk_blocks * WIDER + 2,
                "So it would be with one entry for two tokens. Layer 20 and those that read it have one for each.",
            ),
            Mistake(lambda: _config().candidate_topk_blocks + 1, "That is a number of blocks. Count entries."),
            Mistake(lambda: _config().index_topk + 1, "That is where selecting begins. The pool is wider than that."),
        ),
    ),
    Exercise(
        "07.3",
        f"The scores of eight entries are {', '.join(map(str, SCORES))}. Which {KEPT} entries are selected? Give their "
        "numbers (from 0) in ascending order.",
        "list of entries",
        lambda: best(SCORES, KEPT),
        "Entries 1, 3 and 5 have a score above zero; of the five with exactly zero the two lowest numbers follow.",
        "First by score. Among equal scores, which entry comes first?",
        (
            Mistake(
                lambda: sorted(sorted(range(len(SCORES)), key=lambda e: (-SCORES[e], -e))[:KEPT]),
                "You let the newest entries win the tie. Here the lower number does.",
            ),
            Mistake(
                lambda: sorted(range(len(SCORES)), key=lambda e: (-SCORES[e], e))[:KEPT],
                "The right ones, in the order of their scores. The selection is stored in ascending order.",
            ),
            Mistake(
                lambda: [entry for entry, score in enumerate(SCORES) if score > 0],
                "An entry with score zero may be selected too; only entries that cannot be seen may not.",
            ),
        ),
    ),
    Exercise(
        "07.4",
        f"With {FEWER:,} tokens in the cache, how many times fewer entries does a step of V4.1-Flash score in all its "
        "layers together, compared with the same model without a pool, whose Reindex layers scan everything? Two "
        "digits "
        "after the point will do.",
        "times",
        lambda: (_scans() + len(_reindex()) * FEWER) / (_scans() + len(_reindex()) * _pool()),
        "The full scans of layers 2, 8, 14 (half the entries each) and 20 remain, and from now on they are nearly all.",
        "List the eight layers that select. Which scan the entries of every second token, which of every token?",
        (
            Mistake(
                lambda: Fraction(FEWER, _pool()),
                "That is the gain of one Reindex layer. Four other layers still scan everything.",
            ),
            Mistake(
                lambda: Fraction((1 + len(_reindex())) * FEWER, FEWER + len(_reindex()) * _pool()),
                "You left out layers 2, 8 and 14, which scan caches of their own.",
            ),
            Mistake(
                lambda: Fraction((4 + len(_reindex())) * FEWER, 4 * FEWER + len(_reindex()) * _pool()),
                "The caches of layers 2, 8 and 14 have one entry for two tokens.",
            ),
        ),
        tolerance=0.005,
    ),
)
