"""Which layer runs which mechanism: who owns a cache, who scores it, who reuses what.

A V4.1 layer plays one of four roles. `full` owns main KV and indexer keys and scans them all; `reindex` scores another
layer's keys with a query of its own; `reuse` reads another layer's KV through another layer's selection; `window` has
its sliding window alone. Earlier generations have `dense` layers (every entry of their own cache), `full` layers (V3.2,
V4's CSA) and `window` layers. Source: DeepSeek-V4.1-Flash report 2.2-2.4 and the released configuration.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from flashsim.config import Config, DSAConfig, GQAConfig, MLAConfig, V4Config, V41Config


class LayerPlan(NamedTuple):
    """What one layer does.

    attention: `gqa`, `mla`, `dsa`, `window`, `csa`, `hca` or `csa2`.
    role: `dense`, `window`, `full`, `reindex` or `reuse`.
    compress_ratio: tokens per entry of the cache that the layer reads; 0 where it has a window alone.
    window: tokens of its sliding window, its own position included, or None.
    kv_source, index_key_source: the layer whose main KV it reads, whose indexer keys it scores; itself where it owns
    them.
    selection_source: the layer whose selected entries it attends to; itself where it selects.
    builds_candidates, scores_candidates: whether it builds the candidate pool, whether it scores that pool alone.
    small_pool: whether what it attends to comes from a candidate pool of fewer than `index_topk` entries.
    half: `encoder` or `decoder` of the causal encoder-decoder; None where there is none.
    feed_forward: `dense`, `moe`, or `moe_hash` where the token id chooses the experts.
    engram: which Engram table it looks up, or None.
    """

    layer: int
    attention: str
    role: str
    compress_ratio: int = 1
    window: int | None = None
    kv_source: int | None = None
    index_key_source: int | None = None
    selection_source: int | None = None
    builds_candidates: bool = False
    scores_candidates: bool = False
    small_pool: bool = False
    half: str | None = None
    feed_forward: str = "dense"
    engram: int | None = None

    @property
    def owns_kv(self) -> bool:
        """Whether the layer stores a main KV cache of its own."""
        return self.kv_source == self.layer

    @property
    def owns_index_keys(self) -> bool:
        """Whether the layer stores indexer keys; where there is an indexer, the owner of the main KV does."""
        return self.owns_kv and self.selection_source is not None

    @property
    def selects(self) -> bool:
        """Whether the layer runs an indexer query of its own."""
        return self.selection_source == self.layer

    def kind(self) -> LayerPlan:
        """The plan without its layer numbers: layers of equal kind cost the same."""
        return self._replace(
            layer=-1,
            kv_source=None if self.kv_source is None else -1 if self.owns_kv else -2,
            selection_source=None if self.selection_source is None else -1 if self.selects else -2,
            index_key_source=None,
        )


@lru_cache(maxsize=256)
def layer_plan(config: Config) -> tuple[LayerPlan, ...]:
    """The plan of every layer, in order.

    >>> from flashsim.config import load_config
    >>> [(p.layer, p.role, p.kv_source, p.selection_source) for p in layer_plan(load_config("v4.1-flash"))[19:25]]
    [(19, 'reuse', 14, 14), (20, 'full', 20, 20), (21, 'reuse', 20, 20), (22, 'reuse', 20, 20), (23, 'reuse', 20, 20), \
(24, 'reindex', 20, 24)]
    """
    plan = _PLANNERS[type(config)]
    return tuple(plan(config, layer) for layer in config.layers())


def last_kv_source(config: Config) -> int | None:
    """The layer at which the decoder half begins: the last that compresses its input into a cache (V4.1 report 2.2).

    A prompt token that is not in the tail needs the layers below it and this layer's compressor, and nothing else.
    None where there is no encoder-decoder.
    """
    return max(config.kv_source_layer_ids, default=None) if isinstance(config, V41Config) else None


def _gqa(config: GQAConfig, layer: int) -> LayerPlan:
    window = config.window_of(layer)
    if window is not None:
        return LayerPlan(layer, "gqa", "window", compress_ratio=0, window=window)
    return LayerPlan(layer, "gqa", "dense", kv_source=layer)


def _mla(config: MLAConfig, layer: int) -> LayerPlan:
    feed_forward = "moe" if config.is_moe(layer) else "dense"
    if isinstance(config, DSAConfig):
        return LayerPlan(layer, "dsa", "full", 1, None, layer, layer, layer, feed_forward=feed_forward)
    return LayerPlan(layer, "mla", "dense", kv_source=layer, feed_forward=feed_forward)


def _v4(config: V4Config, layer: int) -> LayerPlan:
    ratio, window = config.compress_ratios[layer], config.sliding_window
    feed_forward = "moe_hash" if layer < config.num_hash_layers else "moe"
    if ratio == 0:
        return LayerPlan(layer, "window", "window", 0, window, feed_forward=feed_forward)
    if ratio == config.compress_rate_csa:
        return LayerPlan(layer, "csa", "full", ratio, window, layer, layer, layer, feed_forward=feed_forward)
    return LayerPlan(layer, "hca", "dense", ratio, window, layer, feed_forward=feed_forward)


def _v41(config: V41Config, layer: int) -> LayerPlan:
    ratio = config.compress_ratios[layer]
    engram = config.engram_layer_ids.index(layer) if layer in config.engram_layer_ids else None
    boundary = last_kv_source(config)
    half = "decoder" if boundary is not None and layer >= boundary else "encoder"
    shared = {"window": config.sliding_window, "half": half, "feed_forward": "moe", "engram": engram}
    if ratio == 0:
        return LayerPlan(layer, "window", "window", 0, **shared)
    kv_source = max(source for source in config.kv_source_layer_ids if source <= layer)
    selection = max(source for source in config.index_source_layer_ids if source <= layer)
    candidates = config.candidate_source_layer_id
    role = "full" if kv_source == layer else "reindex" if selection == layer else "reuse"
    pooled = selection > candidates >= kv_source
    return LayerPlan(
        layer,
        "csa2",
        role,
        ratio,
        kv_source=kv_source,
        index_key_source=kv_source if selection == layer else None,
        selection_source=selection,
        builds_candidates=candidates == layer,
        scores_candidates=pooled and role == "reindex",
        small_pool=pooled and config.candidate_topk_blocks * config.candidate_block_size < config.index_topk,
        **shared,
    )


_PLANNERS = {GQAConfig: _gqa, MLAConfig: _mla, DSAConfig: _mla, V4Config: _v4, V41Config: _v41}
