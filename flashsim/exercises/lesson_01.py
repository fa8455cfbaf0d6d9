"""Lesson 01, the KV cache."""

from dataclasses import replace

from flashsim.config import load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.kv_cache import kv_bytes_per_token, kv_cache, kv_reserved
from flashsim.params import parameters

TEXT = 500
LAYERS, HEADS = 32, 32


def _model(kv_heads: int):
    """V1 with other numbers of layers and heads."""
    config = load_config("v1")
    return replace(
        config, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=kv_heads, hidden_size=4096
    )


def _weights_over_cache(bytes_a_number: int = 2, context: int = 4096) -> int:
    return -(-bytes_a_number * parameters(load_config("v1")).total() // kv_cache("v1", context).total())


EXERCISES = (
    Exercise(
        "01.1",
        f"A model writes a text of {TEXT} tokens, from an empty prompt, without a cache: for each new token it "
        "runs all "
        "tokens so far, the new one included. How many rows (tokens, counted again for each call) go through its "
        "layers?",
        "rows",
        lambda: TEXT * (TEXT + 1) // 2,
        "1 + 2 + ... + n = n (n + 1) / 2: quadratic, where a cache makes it n.",
        "The first call has 1 row, the second 2, the last as many as the text. Add them up.",
        (
            Mistake(lambda: TEXT, "That is the number with a cache: one row a call."),
            Mistake(lambda: TEXT * TEXT, "The early calls are shorter: the first has only one row."),
            Mistake(
                lambda: TEXT * (TEXT - 1) // 2,
                "The new token goes through the layers as well: the last call has the whole text.",
            ),
        ),
    ),
    Exercise(
        "01.2",
        f"A model has {LAYERS} layers, {HEADS} query heads, 8 KV heads of 128 numbers, and keeps BF16 (2 bytes). "
        "How many bytes "
        "does a token leave in its cache?",
        "bytes",
        lambda: kv_bytes_per_token(_model(8)),
        "32 layers x 2 vectors x 8 KV heads x 128 numbers x 2 bytes.",
        "Layers, keys and values, KV heads, numbers of a head, bytes of a number: five factors.",
        (
            Mistake(
                lambda: kv_bytes_per_token(_model(HEADS)),
                "Query heads leave nothing behind. Which heads have keys and values?",
            ),
            Mistake(
                lambda: kv_bytes_per_token(_model(8)) // 2, "One factor of two is missing: K and V, and 2 bytes each."
            ),
            Mistake(lambda: kv_bytes_per_token(_model(8)) // LAYERS, "That is one layer."),
        ),
    ),
    Exercise(
        "01.3",
        "How many GiB does a conversation of 4,096 tokens store in V1? Two decimals are enough.",
        "GiB",
        lambda: kv_cache("v1", 4096).total() / 2**30,
        "Divided by 2^30, as tools do; in GB the number is 7 % larger.",
        "Take the bytes of a token times the tokens, and divide by 2^30.",
        (
            Mistake(lambda: kv_cache("v1", 4096).total() / 10**9, "That is in GB, 10^9 bytes. A GiB is 2^30 bytes."),
            Mistake(lambda: kv_cache("v1", 4096).total() / 2**20, "That is in MiB, 2^20 bytes."),
        ),
        tolerance=0.005,
    ),
    Exercise(
        "01.4",
        "A server keeps V1's records in pages of 64. How many bytes does a conversation of 100 tokens reserve "
        "without "
        "storing anything in them?",
        "bytes",
        lambda: kv_reserved("v1", 100).total() - kv_cache("v1", 100).total(),
        "Two pages hold 128 records; 28 of them are empty, in every layer.",
        "How many whole pages do 100 records need, and how many places of these stay empty?",
        (
            Mistake(lambda: 28, "That is a number of records. How many bytes does a token leave in all layers?"),
            Mistake(lambda: kv_reserved("v1", 100).total(), "That is all that is reserved. Take off what is stored."),
            Mistake(lambda: 36 * kv_bytes_per_token(load_config("v1")), "One page is too few: round the pages up."),
            Mistake(
                lambda: 28 * kv_bytes_per_token(load_config("v1")) // 95,
                "That is one layer. Every layer has pages of its own.",
            ),
        ),
    ),
    Exercise(
        "01.5",
        f"V1 has {parameters(load_config('v1')).total():,} parameters in BF16. From how many conversations of "
        "4,096 tokens on do "
        "the caches take more bytes than the weights?",
        "conversations",
        _weights_over_cache,
        "Weights are there once for all conversations, a cache for each. The weights lose the race quite early.",
        "Bytes of the weights divided by the bytes of one conversation, rounded up.",
        (
            Mistake(lambda: _weights_over_cache(1), "A parameter in BF16 takes two bytes."),
            Mistake(lambda: _weights_over_cache() - 1, "Then the weights are still a little larger. Round up."),
            Mistake(lambda: _weights_over_cache(context=1), "That is in tokens. A conversation has 4,096 of them."),
        ),
    ),
)
