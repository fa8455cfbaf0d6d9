"""Lesson 15, what-if KV budgeting."""

from fractions import Fraction

from flashsim.budget import Fleet, capacity, variant, weight_bytes
from flashsim.config import load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.hardware import device
from flashsim.kv_cache import kv_bytes_per_token, kv_cache

GPU, GPUS, CONTEXT = "mi300x", 8, 64 * 1024
NINE, ONE = 4096, 10**6
WANTED, REPLICA = 10_000, 8


def _free(memory: int, kept: Fraction = Fraction(1, 10)) -> int:
    """Bytes of one GPU left for V3.2's caches."""
    return int(memory * (1 - kept)) - -(-weight_bytes("v3.2") // GPUS)


def _memory() -> int:
    return device(GPU).memory_bytes


def _conversation() -> int:
    return kv_cache("v3.2", CONTEXT).total()


def _bytes(tokens: int) -> int:
    return kv_cache("v4.1-flash", tokens).total()


def _in_all(tensor_parallel: int) -> int:
    return capacity("v4-flash", Fleet("h200-sxm", 8, tensor_parallel), "128Ki").sequences


def _best_degree() -> int:
    return max((1, 2, 4, 8), key=_in_all)


def _record(*, scales: bool = True, index: bool = True) -> int:
    rows = {row.component: row.bytes_per_record for row in kv_cache("v4.1-flash").rows if row.tier == "global"}
    numbers = {"main_kv": load_config("v4.1-flash").head_dim, "index_key": load_config("v4.1-flash").index_head_dim}
    return sum(rows[name] if scales else numbers[name] // 2 for name in rows if index or name == "main_kv")


def _owners_over_ratios() -> Fraction:
    config = _changed()
    return sum(Fraction(1, config.compress_ratios[layer]) for layer in config.kv_source_layer_ids)


def _changed(**other):
    return variant(**({"encoder_owners": 2, "decoder_ratio": 4} | other))


def _per_replica() -> int:
    return capacity("v4.1-flash", Fleet("h200-sxm", REPLICA, REPLICA), "128Ki").sequences


EXERCISES = (
    Exercise(
        "15.1",
        f"{GPUS} MI300X (192 GB each, 10 % kept free) share one replica of V3.2, whose weights take "
        f"{weight_bytes('v3.2'):,} bytes. How many whole conversations of {CONTEXT:,} tokens fit?",
        "conversations",
        lambda: capacity("v3.2", Fleet(GPU, GPUS, GPUS), CONTEXT).sequences,
        "Every GPU keeps the whole latent of every conversation, so one GPU's free bytes decide.",
        "Look at one GPU: nine tenths of its memory, less its share of the weights, divided by one conversation.",
        (
            Mistake(
                lambda: _free(_memory()) * GPUS // _conversation(),
                "That adds up the free bytes of all GPUs. A latent serves all heads, so each GPU keeps a copy.",
            ),
            Mistake(
                lambda: _free(_memory(), Fraction(0)) // _conversation(),
                "That fills the GPU to the brim. A tenth was to stay free.",
            ),
            Mistake(
                lambda: _free(_memory() * 2**30 // 10**9) // _conversation(),
                "A data sheet's GB is 10^9 bytes; the one of 2^30 bytes is a GiB.",
            ),
            Mistake(
                lambda: _free(_memory()) // kv_cache("v3.2", CONTEXT).where(component="main_kv").total(),
                "The latents alone would fit that often. V3.2 keeps keys for its indexer as well.",
            ),
            Mistake(
                lambda: (_memory() * 9 // 10) // _conversation(),
                "Weights are on these GPUs too: an eighth of them on each.",
            ),
        ),
    ),
    Exercise(
        "15.2",
        f"Of ten conversations with V4.1-Flash, nine have {NINE:,} tokens and one has {ONE:,}. How many bytes does a "
        "conversation take on average, windows included?",
        "bytes",
        lambda: Fraction(9 * _bytes(NINE) + _bytes(ONE), 10),
        "The one long conversation takes 94 % of the bytes. A fleet is sized for its long readers.",
        "Take the bytes of a short and of a long conversation from `kv_cache`, and weigh them nine to one.",
        (
            Mistake(
                lambda: Fraction(_bytes(NINE) + _bytes(ONE), 2),
                "That is the middle of the two. Nine of ten are short.",
            ),
            Mistake(
                lambda: 890 * Fraction(9 * NINE + ONE, 10),
                "That is what grows with the context. A conversation has windows as well, however short it is.",
            ),
            Mistake(
                lambda: Fraction(_bytes(NINE) + 9 * _bytes(ONE), 10),
                "That is nine long ones and one short one.",
            ),
        ),
        tolerance=1e-6,
    ),
    Exercise(
        "15.3",
        "V4-Flash on 8 H200, conversations of 128Ki tokens. Which `tensor_parallel`, 1, 2, 4 or 8, holds the most "
        "of them in all?",
        "GPUs that share a replica",
        _best_degree,
        "Here the fewest GPUs that hold the weights: they leave room, and more would keep more copies of a cache.",
        "Ask `capacity` for each of the four, and compare `sequences`, which counts all replicas.",
        (
            Mistake(lambda: 1, "One GPU is too small for the weights alone."),
            Mistake(
                lambda: 4,
                "Better than 8. Would a replica of fewer GPUs still hold the weights, and how much beside them?",
            ),
            Mistake(lambda: 8, "That leaves most memory free on each GPU, and keeps every cache eight times."),
        ),
    ),
    Exercise(
        "15.4",
        "V4.1-Flash, changed: two layers of the encoder own a cache instead of three, and the decoder's cache has one "
        "entry for 4 tokens. How many bytes does a token store? Try it with a pencil first.",
        "bytes",
        lambda: kv_bytes_per_token(_changed()),
        "Two owners with half a record each, one with a quarter: 5/4 of 356 bytes.",
        "Owners divided by tokens an entry, added up over both halves, times the 356 bytes of an entry and its key.",
        (
            Mistake(
                lambda: kv_bytes_per_token(_changed(decoder_ratio=1)),
                "The decoder changes too: its entry now serves four tokens.",
            ),
            Mistake(
                lambda: kv_bytes_per_token(_changed(encoder_owners=3)),
                "That still has three owners in the encoder.",
            ),
            Mistake(
                lambda: _record() * len(_changed().kv_source_layer_ids),
                "An entry stands for several tokens. Divide by them.",
            ),
            Mistake(
                lambda: _record(index=False) * _owners_over_ratios(),
                "Those are the entries alone. Each has an indexer key beside it.",
            ),
            Mistake(
                lambda: _record(scales=False) * _owners_over_ratios(),
                "Numbers in 4 bits come with scales, and these take bytes.",
            ),
        ),
    ),
    Exercise(
        "15.5",
        f"{WANTED:,} readers keep a conversation of 128Ki tokens each with V4.1-Flash, on H200 in replicas of "
        f"{REPLICA}. How many GPUs do you order?",
        "GPUs",
        lambda: -(-WANTED // _per_replica()) * REPLICA,
        "Whole replicas only, and the last one is not full.",
        "How many conversations does one replica hold? How many whole replicas is that, and how many GPUs?",
        (
            Mistake(
                lambda: WANTED // _per_replica() * REPLICA, "Some readers would be left without a place. Round up."
            ),
            Mistake(lambda: -(-WANTED // _per_replica()), "Those are replicas. How many GPUs has each?"),
            Mistake(
                lambda: -(-WANTED * REPLICA // _per_replica()),
                "A replica runs on all of its GPUs or not at all. Round up the replicas, then multiply.",
            ),
        ),
    ),
)
