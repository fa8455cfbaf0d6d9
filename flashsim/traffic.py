"""KV-cache bytes *read* and *written* by one decode step of one sequence, per layer and component.

A layer reads what its attention looks at: its window, every entry or the selected ones, and the indexer keys it scores.
A vector shared by all heads is read once. Not counted: weights, activations, compressor state, page padding.
Source: DeepSeek-V4 reference code; V4.1 report 2.2-2.4; for V3.2 8,052 N + 81,952,768 bytes once N reaches 2,048.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashsim.config import Config, V41Config, load_config
from flashsim.formats import MXFP8, Layout
from flashsim.kv_cache import check_layout, index_record, main_record, rank_names, window_record
from flashsim.report import Part, Report, build
from flashsim.schedule import LayerPlan

_SOURCE = "what the attention of this layer looks at"


def decode_read(
    config: Config, context: Any = 1_000_000, *, layout: Layout | str | Mapping | None = None, tensor_parallel: int = 1
) -> Report:
    """Cache bytes one decode step reads with N tokens visible, the query's own included.

        window:   bytes_per_record * min(N, sliding_window)
        dense:    bytes_per_record * floor(N / compress_ratio)
        selected: bytes_per_record * min(floor(N / compress_ratio), index_topk), or the candidate pool where it is less
        indexer:  bytes_per_record * floor(N / compress_ratio), or of the candidate pool alone

    Tiers name what is read: `window`, `main`, `index`.

    >>> from flashsim.config import load_config
    >>> decode_read(load_config("v3.2"), 100_000).total() == 8_052 * 100_000 + 81_952_768
    True
    """
    config, layout = load_config(config), Layout.of(layout)
    check_layout(config, layout)
    heads = rank_names(config, tensor_parallel).get("num_key_value_heads")
    names = {}
    if isinstance(config, V41Config):
        names["candidate_pool"] = config.candidate_topk_blocks * config.candidate_block_size

    def parts(plan: LayerPlan) -> list[Part]:
        entries = "N" if plan.compress_ratio == 1 else "(N // compress_ratio)"
        inner = entries.strip("()")
        result = []

        def read(component: str, tier: str, record, records: str) -> None:
            part = Part(component, f"bytes_per_record * {records}", record.precision, tier, _SOURCE, record.nbytes, 1)
            result.append(part._replace(record=record.describe()))

        if plan.window is not None:
            read("window_kv", "window", window_record(config, layout, heads), "min(N, sliding_window)")
        if plan.selection_source is not None:
            if plan.selects:
                scanned = f"min({inner}, candidate_pool)" if plan.scores_candidates else entries
                read("index_key", "index", index_record(config, layout), scanned)
            most = "candidate_pool" if plan.small_pool else "index_topk"
            read("main_kv", "main", main_record(config, layout), f"min({inner}, {most})")
        elif plan.owns_kv:
            read("main_kv", "main", main_record(config, layout, heads), entries)
        return result

    return build(
        config,
        context,
        parts,
        title=f"{config.name}: cache bytes read by one decode step with N tokens visible",
        unit="bytes",
        names=names,
    )


def decode_write(config: Config, *, layout: Layout | str | Mapping | None = None) -> Report:
    """Cache bytes one decode step writes on average: a window record in every layer that has a window, and an entry
    every `compress_ratio` tokens in every layer that owns a cache. Exact fractions.

    >>> from flashsim.config import load_config
    >>> decode_write(load_config("v4.1-flash")).total() == 40 * 528 + 890
    True
    """
    config, layout = load_config(config), Layout.of(layout)
    check_layout(config, layout)

    def parts(plan: LayerPlan) -> list[Part]:
        result = []
        if plan.window is not None:
            result.append(_write("window_kv", "window", window_record(config, layout).nbytes))
        if plan.owns_kv:
            result.append(_write("main_kv", "main", main_record(config, layout).nbytes))
            if plan.owns_index_keys:
                result.append(_write("index_key", "index", index_record(config, layout).nbytes))
        return result

    title = f"{config.name}: cache bytes written by one decode step, on average"
    return build(config, 1, parts, title=title, unit="bytes")


def _write(component: str, tier: str, nbytes: int) -> Part:
    formula = "record_bytes" if tier == "window" else "record_bytes / compress_ratio"
    return Part(component, formula, None, tier, _SOURCE, names={"record_bytes": nbytes})


def engram_read_bytes(config: V41Config) -> int:
    """Bytes of Engram table rows one token looks up: orders x heads rows per table, FP8 with a UE8M0 scale per 32.

    From the table in host memory, not from the cache; 6,336 bytes a table in V4.1-Flash.

    >>> from flashsim.config import load_config
    >>> engram_read_bytes(load_config("v4.1-flash"))
    12672
    """
    rows = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    return len(config.engram_layer_ids) * rows * MXFP8.nbytes(config.engram_head_dim)
