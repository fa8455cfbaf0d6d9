"""Lesson 05, CSA2: Full, Reindex, Reuse."""

from dataclasses import replace
from fractions import Fraction

from flashsim.config import V41Config, load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.kv_cache import index_record, kv_bytes_per_token, kv_cache, main_record
from flashsim.pictures.schedule import cache_spans
from flashsim.schedule import layer_plan

OWNER, REMOVED, READER = 14, 8, 27
TOKENS = 25


def _config() -> V41Config:
    return load_config("v4.1-flash")


def _readers(owner: int) -> list[int]:
    return [plan.layer for plan in layer_plan(_config()) if plan.kv_source == owner]


def _fewer() -> V41Config:
    """V4.1-Flash without the cache of one layer, which then reads that of the run before it."""
    config = _config()
    keep = {field: tuple(n for n in getattr(config, field) if n != REMOVED) for field in ("kv_source_layer_ids",)}
    keep["index_source_layer_ids"] = tuple(n for n in config.index_source_layer_ids if n != REMOVED)
    return replace(config, **keep)


def _attended() -> tuple[int, int]:
    """(entries, window tokens) of a layer that reuses a selection."""
    config = _config()
    return config.index_topk, config.sliding_window


def _tiny(tokens: int) -> int:
    return kv_cache("tiny", tokens).tier_bytes("global")


EXERCISES = (
    Exercise(
        "05.1",
        f"Which layers of V4.1-Flash read the entries that layer {OWNER} makes? A list, such as `[3, 4]`.",
        "layers",
        lambda: _readers(OWNER),
        "Layer 14 itself, and every layer up to the next one that makes entries.",
        "Find the layer on the map, and the end of its run in the lane of the main KV.",
        (
            Mistake(
                lambda: [layer for layer in _readers(OWNER) if layer != OWNER],
                "Almost: does the layer that makes the entries not read them?",
            ),
            Mistake(
                lambda: list(range(OWNER, cache_spans(_config())[-1].last + 1)),
                "That is every layer from there to the end. The run stops where another layer makes entries.",
            ),
            Mistake(
                lambda: [OWNER],
                "That one makes them. Who else reads them?",
            ),
            Mistake(
                lambda: [*_readers(OWNER), _readers(OWNER)[-1] + 1],
                "One too many: the last of these makes entries of its own.",
            ),
        ),
    ),
    Exercise(
        "05.2",
        f"Suppose layer {REMOVED} became a Reuse layer and its run read the cache of layer 2. How many bytes would a "
        "token of V4.1-Flash take?",
        "bytes",
        lambda: kv_bytes_per_token(_fewer()),
        "One entry and one key for two tokens are gone: half of 288 + 68.",
        "One Full layer less. What did that layer add for each token?",
        (
            Mistake(
                lambda: kv_bytes_per_token(_config()),
                "That is what a token takes now. A cache less is fewer bytes.",
            ),
            Mistake(
                lambda: kv_bytes_per_token(_config()) - main_record(_config()).nbytes - index_record(_config()).nbytes,
                "You took away a whole entry and key for each token. In this layer one pair serves two tokens.",
            ),
            Mistake(
                lambda: kv_bytes_per_token(_config()) - Fraction(main_record(_config()).nbytes, 2),
                "The entries are gone, but the layer made index keys as well.",
            ),
        ),
    ),
    Exercise(
        "05.3",
        f"After a million tokens, to how many vectors does one query attend in layer {READER}?",
        "vectors",
        lambda: sum(_attended()),
        "The selected entries and the window, in one softmax. A million tokens change nothing about it.",
        "Two kinds of vectors meet in the softmax. Both numbers stand in the config.",
        (
            Mistake(lambda: _attended()[0], "Those are the selected entries. What does every layer see besides?"),
            Mistake(
                lambda: _attended()[1],
                "Those are the tokens of the window. A Reuse layer makes no selection, but it uses one.",
            ),
            Mistake(lambda: 10**6, "That would be dense attention. This layer looks at a selection."),
            Mistake(
                lambda: 10**6 + _attended()[1],
                "A million entries are there; the layer attends to selected ones alone.",
            ),
            Mistake(
                lambda: sum(_attended()) * _config().num_attention_heads,
                "All query heads share the same vectors. Count each vector once.",
            ),
        ),
    ),
    Exercise(
        "05.4",
        f"How many bytes of entries and index keys does `tiny` hold after {TOKENS} tokens? Windows and half-finished "
        "pairs do not count. (An entry takes 36 bytes and a key 34; layer 2 has ratio 2, layer 4 ratio 1.)",
        "bytes",
        lambda: _tiny(TOKENS),
        "Layer 2 has an entry for each complete pair, and the odd token waits.",
        "Count the entries of each layer first: whole ones only.",
        (
            Mistake(
                lambda: kv_bytes_per_token(load_config("tiny")) * TOKENS,
                "That gives the odd token half an entry. An entry appears when its pair is complete.",
            ),
            Mistake(
                lambda: 2 * kv_cache("tiny", TOKENS).where(layer=4).tier_bytes("global"),
                "Layer 2 has one entry for two tokens.",
            ),
            Mistake(
                lambda: _tiny(TOKENS + 1),
                "One entry too many: the second token of the last pair has not come yet.",
            ),
            Mistake(
                lambda: kv_cache("tiny", TOKENS).where(component="main_kv").total(),
                "Those are the entries. Each has a key beside it.",
            ),
            Mistake(
                lambda: kv_cache("tiny", TOKENS).total(),
                "Windows and the pair that is not finished are in there. Count the global tier alone.",
            ),
        ),
    ),
)
