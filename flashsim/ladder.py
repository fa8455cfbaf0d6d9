"""The ladder from 389,120 bytes a token to 890: one rung for each change, each rung an executable config.

Every rung names a config and a record layout; its bytes are `kv_bytes_per_token` of the two, and what a change bought
is the difference to the rung before. Rungs between two released models are configs that were never released: they
show one change at a time. How much a change buys depends on the order in which changes are taken; the released rungs
do not.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from flashsim.config import Config, DSAConfig, GQAConfig, MLAConfig, V4Config, V41Config, load_config
from flashsim.formats import Layout
from flashsim.kv_cache import kv_bytes_per_token


class Rung(NamedTuple):
    """One step of the ladder.

    `change` says what is done to the config before it, `mechanism` the room of the course that teaches it. `released`
    is the preset that the rung is, or None. `per_token_bytes` is exact, `change_bytes` its difference to the rung
    before.
    """

    change: str
    mechanism: str
    released: str | None
    config: Config
    layout: Layout
    per_token_bytes: int | Fraction
    change_bytes: int | Fraction


def ladder() -> tuple[Rung, ...]:
    """The rungs in order, from DeepSeek-LLM 67B to V4.1-Flash.

    >>> rungs = ladder()
    >>> rungs[0].per_token_bytes, rungs[-1].per_token_bytes, int(sum(rung.change_bytes for rung in rungs[1:]))
    (389120, 890, -388230)
    """
    rungs: list[Rung] = []
    for change, mechanism, released, config, layout in _steps():
        value = kv_bytes_per_token(config, layout=layout)
        before = rungs[-1].per_token_bytes if rungs else value
        rungs.append(Rung(change, mechanism, released, config, Layout.of(layout), value, value - before))
    return tuple(rungs)


def _steps():
    v1: GQAConfig = load_config("deepseek-llm-67b")
    v2: MLAConfig = load_config("v2")
    v3: MLAConfig = load_config("v3")
    v32: DSAConfig = load_config("v3.2")
    v4: V4Config = load_config("v4-flash")
    v41: V41Config = load_config("v4.1-flash")

    yield "V1: 8 KV heads, K and V in BF16", "grouped-query attention", "deepseek-llm-67b", v1, None
    yield "60 layers instead of 95", "depth", None, replace(v1, num_hidden_layers=v2.num_hidden_layers), None
    yield "V2: one latent for all heads", "multi-head latent attention", "v2", v2, None
    yield "V3: 61 layers", "depth", "v3", v3, None
    yield "latent in FP8", "block formats", None, v3, f"main={_FP8_LATENT}"
    yield "V3.2: indexer keys added", "sparse attention with an indexer", "v3.2", v32, None

    depth, csa = v4.num_hidden_layers, v4.compress_rate_csa
    shallow = replace(v32, num_hidden_layers=depth)
    yield f"{depth} layers instead of {v32.num_hidden_layers}", "depth", None, shallow, None
    # V4's attention with an entry for every token, an indexer in every layer, and V3.2's FP8 indexer keys.
    unpooled = replace(v4, compress_ratios=(1,) * depth, compress_rate_csa=1)
    yield "one vector as key and value, RoPE inside", "compressed attention", None, unpooled, "index=fp8"
    yield "indexer keys in FP4", "block formats", None, unpooled, None
    pooled = replace(v4, compress_ratios=(csa,) * depth)
    yield f"CSA: one entry for {csa} tokens", "compressed attention", None, pooled, None
    heavy = tuple(ratio or csa for ratio in v4.compress_ratios)
    yield (
        f"HCA: one for {max(heavy)} in every other layer",
        "compressed attention",
        None,
        replace(v4, compress_ratios=heavy),
        None,
    )
    yield "V4-Flash: the first layers window only", "sliding window", "v4-flash", v4, None

    # V4.1's schedule with a cache of its own in every layer, still in V4's records.
    owners = tuple(layer for layer, ratio in enumerate(v41.compress_ratios) if ratio)
    own = replace(v41, kv_source_layer_ids=owners, index_source_layer_ids=owners, candidate_source_layer_id=-1)
    yield "40 layers, pooled by 2 and by 1", "compressed attention", None, own, "main=v4"
    yield "entries in FP4", "block formats", None, own, None
    boundary = max(v41.kv_source_layer_ids)
    encoder = tuple(layer for layer in v41.kv_source_layer_ids if layer < boundary)
    shared = (*encoder, *(layer for layer in owners if layer >= boundary))
    half = replace(own, kv_source_layer_ids=shared, index_source_layer_ids=shared)
    yield f"encoder layers share {len(encoder)} caches", "CSA2", None, half, None
    yield "V4.1-Flash: decoder layers share one", "causal encoder-decoder", "v4.1-flash", v41, None


_FP8_LATENT = "fp8+bf16rope"
