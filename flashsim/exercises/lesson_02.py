"""Lesson 02, grouped-query and multi-head latent attention."""

from fractions import Fraction

from flashsim.config import load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.flops import decode_flops
from flashsim.kv_cache import kv_cache, main_record

V1, V2, V3 = (load_config(name) for name in ("v1", "v2", "v3"))
HEAD, RANKS = 35, 8


def _heads_each(config) -> int:
    return config.num_attention_heads // config.num_key_value_heads


def _naive(config) -> int:
    """Numbers of a token when every head keeps a key and a value."""
    return config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)


def _latent(config) -> int:
    return config.kv_lora_rank + config.qk_rope_head_dim


def _absorbed_flops() -> int:
    """Of one head and one cached token in V3."""
    return decode_flops(V3, 1).by("component")["attention"] // (V3.num_hidden_layers * V3.num_attention_heads)


EXERCISES = (
    Exercise(
        "02.1",
        f"V2 has kv_lora_rank {V2.kv_lora_rank}, qk_rope_head_dim {V2.qk_rope_head_dim}, {V2.num_attention_heads} "
        "heads, and "
        "keeps BF16. How many bytes does a token leave in one layer?",
        "bytes",
        lambda: main_record(V2).nbytes,
        "Latent and RoPE key, two bytes a number, once for all heads.",
        "What does a record hold? Two parts, both shared by all heads, in numbers of 2 bytes.",
        (
            Mistake(lambda: 2 * V2.kv_lora_rank, "The RoPE key is missing: the part that carries the position."),
            Mistake(lambda: 2 * 2 * _latent(V2), "Keys and values come from the same latent: it is kept once."),
            Mistake(lambda: _latent(V2), "That is in numbers. BF16 takes two bytes each."),
            Mistake(lambda: 2 * _latent(V2) * V2.num_attention_heads, "All heads share one record."),
            Mistake(
                lambda: 2 * (V2.kv_lora_rank + V2.qk_rope_head_dim * V2.num_attention_heads),
                "The RoPE key is shared by all heads as well.",
            ),
        ),
    ),
    Exercise(
        "02.2",
        f"V1 has {V1.num_attention_heads} query heads and {V1.num_key_value_heads} KV heads. Which KV head does "
        "query head "
        f"{HEAD} read? Both are counted from 0.",
        "number of the KV head",
        lambda: HEAD // _heads_each(V1),
        "Eight neighbours share: heads 32 to 39.",
        "How many query heads share a KV head? They are neighbours.",
        (
            Mistake(
                lambda: HEAD % V1.num_key_value_heads,
                "That would spread neighbours over different KV heads. Here neighbours share one.",
            ),
            Mistake(lambda: HEAD // _heads_each(V1) + 1, "The first KV head is number 0."),
        ),
    ),
    Exercise(
        "02.3",
        f"V3 runs on {RANKS} GPUs, each with its share of the heads (tensor parallel). How many bytes does a "
        "token leave on each "
        "of them?",
        "bytes",
        lambda: kv_cache(V3, 1, tensor_parallel=RANKS).total(),
        "Every head needs the whole latent, so every GPU keeps it whole.",
        "Which part of a latent could a GPU do without, if it computes some of the heads?",
        (
            Mistake(
                lambda: kv_cache(V3, 1).total() // RANKS,
                "KV heads can be divided among GPUs. Which head would do with an eighth of the latent?",
            ),
            Mistake(lambda: main_record(V3).nbytes, "That is one layer."),
        ),
    ),
    Exercise(
        "02.4",
        "Each of V3's 128 heads has keys of 128 + 64 numbers (qk_nope_head_dim, qk_rope_head_dim) and values of "
        "128. How many "
        "times more numbers would a token leave if all of these were kept, instead of the latent and the RoPE key?",
        "times",
        lambda: Fraction(_naive(V3), _latent(V3)),
        "40,960 numbers against 576.",
        "Numbers of all keys and values of a token, divided by the numbers of a record.",
        (
            Mistake(
                lambda: Fraction(V3.num_attention_heads * 2 * V3.v_head_dim, _latent(V3)),
                "A key has a RoPE part as well, and ordinary attention would keep it in every head.",
            ),
            Mistake(lambda: Fraction(_naive(V3), V3.kv_lora_rank), "The record has a RoPE key beside the latent."),
            Mistake(
                lambda: Fraction(V3.num_attention_heads * (V3.qk_nope_head_dim + V3.qk_rope_head_dim), _latent(V3)),
                "Values would be kept too.",
            ),
            Mistake(lambda: Fraction(_latent(V3), _naive(V3)), "That is the share that is left. Turn it around."),
        ),
        tolerance=0.01,
    ),
    Exercise(
        "02.5",
        "In the absorbed form V3's keys are latent and RoPE part, its values the latent alone. How many FLOPs "
        "does one head do "
        "for one cached token, scores and mixing together? A multiplication with its addition is 2 FLOPs.",
        "FLOPs",
        _absorbed_flops,
        "2 (512 + 64) for the score and 2 x 512 for the mix.",
        "A product of vectors of width n is 2 n FLOPs. How wide are the keys, how wide the values?",
        (
            Mistake(lambda: 4 * _latent(V3), "The RoPE part belongs to the key alone; values are not rotated."),
            Mistake(lambda: 4 * V3.kv_lora_rank, "The key has a RoPE part besides the latent."),
            Mistake(lambda: _absorbed_flops() // 2, "A multiplication with its addition counts as two."),
            Mistake(lambda: 2 * _latent(V3), "That is the score. The values are mixed as well."),
            Mistake(
                lambda: 2 * _naive(V3) // V3.num_attention_heads,
                "That is the naive form, with keys and values of the head's own width.",
            ),
        ),
    ),
)
