"""Bytes read and written by one decode step: against a count layer by layer and the published totals."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim import decode_read, decode_write, kv_bytes_per_token, kv_cache, load_config
from flashsim.config import PRESETS
from flashsim.traffic import engram_read_bytes

CONTEXTS = [*range(1, 301), 2047, 2048, 2049, 16_383, 16_385, 100_000, 1_000_001]


def records(case):
    """(main entry, indexer key, window entry) of the layers that have them, from a cache of one full group."""
    sizes = {row.component: row.bytes_per_record for row in kv_cache(case.config, 1).rows}
    return sizes.get("main_kv", 0), sizes.get("index_key", 0), sizes.get("window_kv", 0)


def read(case, n):
    """{(layer, component): bytes} that one decode step looks at, one layer at a time."""
    main, key, window = records(case)
    result = {}
    for layer in case.layers:
        if layer.window:
            result[layer.i, "window_kv"] = window * min(n, layer.window)
        if layer.source is None:
            continue
        entries = n // layer.ratio
        if layer.chosen:
            result[layer.i, "main_kv"] = main * min(entries, case.d.index_topk)
            if layer.selects:
                pool = case.d.candidate_topk_blocks * case.d.candidate_block_size if layer.pool else entries
                result[layer.i, "index_key"] = key * min(entries, pool)
        else:
            result[layer.i, "main_kv"] = main * entries
    return result


def test_read_bytes_equal_a_count_layer_by_layer(case):
    report = decode_read(case.config, CONTEXTS)
    for i, n in enumerate(CONTEXTS):
        assert {(row.layer, row.component): row.values[i] for row in report.rows} == read(case, n), f"N = {n}"
    for key in ("layer", "component", "tier"):
        assert [sum(values) for values in zip(*report.by(key).values(), strict=True)] == report.total()


def test_written_bytes_are_a_window_record_a_layer_and_a_share_of_an_entry(case):
    main, key, window = records(case)
    expected = Fraction(0)
    for layer in case.layers:
        expected += window if layer.window else 0
        if layer.owns:
            expected += Fraction(main + (key if layer.chosen else 0), layer.ratio)
    assert decode_write(case.config).total() == expected


# v1-v4-attention.md 4.3 and 5.11, once N is past every limit
@pytest.mark.parametrize(
    ("model", "slope", "constant"),
    [
        ("deepseek-llm-67b", 389_120, 0),
        ("v2", 69_120, 0),
        ("v3", 70_272, 0),
        ("v3.2", 8_052, 81_952_768),
        ("v4-flash", Fraction("448.25"), 9_493_504),
        ("v4-pro", 30 * 17 + Fraction(31 * 584, 128), 22_500_352),
    ],
)
def test_published_totals_for_long_contexts(models, model, slope, constant):
    contexts = [128 * 1000, 128 * 4096, 10**6 // 128 * 128, 2**20]
    expected = [slope * n + constant for n in contexts]
    assert decode_read(models[model], contexts).total() == expected


def test_v4_pro_slope_is_the_printed_one():
    assert round(30 * 17 + 31 * 584 / 128, 2) == 651.44


def test_v41_reads_at_a_million(models):
    """Windows of 40 layers, 512 entries in 38, full scans of 3 layers at N/2 and one at N, four pools of 16,384."""
    expected = 40 * 128 * 528 + 38 * 512 * 288 + 68 * (3 * 500_000 + 1_000_000 + 4 * 16_384)
    assert decode_read(models["v4.1-flash"], "1M").total() == expected


def test_published_writes(models):
    assert decode_write(models["v4.1-flash"]).total() == 40 * 528 + 890
    assert decode_write(models["v4-flash"]).total() == 43 * 584 + Fraction("3514.25")
    assert decode_write(models["v3.2"]).total() == 48_068


def test_written_on_average_is_what_the_global_cache_grows_by(preset):
    window = decode_write(preset.config).by("tier").get("window", 0)
    assert decode_write(preset.config).total() - window == kv_bytes_per_token(preset.config)


def test_layouts_change_what_is_read(models):
    assert decode_read(models["v4-flash"], 4096, layout="fp8-indexer").by("component")["index_key"] == 21 * 1024 * 132
    assert decode_write(models["v4-flash"], layout="fp8-indexer").total() == 43 * 584 + Fraction("3850.25")
    assert decode_read(models["v3"], 10, layout="main=fp8+bf16rope").total() == 61 * 656 * 10


def test_engram_rows_of_one_token(models, derive):
    assert engram_read_bytes(models["v4.1-flash"]) == 2 * 24 * (256 + 8) == 2 * 6336
    config = load_config(derive("v4.1-flash", engram_n_heads=3, engram_head_dim=64, engram_max_ngram_size=3))
    assert engram_read_bytes(config) == 2 * (2 * 3) * (64 + 2)


# --- mistakes that tools made (pitfalls.md) ---------------------------------------------------------------------------


def test_a_shared_vector_is_read_once_for_all_heads(models):
    for name in ("v2", "v3", "v3.2", "v4-flash", "v4-pro", "v4.1-flash"):
        config = models[name]
        more_heads = replace(config, num_attention_heads=4 * config.num_attention_heads)
        assert decode_read(more_heads, 10_000).total() == decode_read(config, 10_000).total()


def test_read_and_stored_are_different_quantities(models):
    assert decode_read(models["v3.2"], "1M").total() < kv_cache(models["v3.2"], "1M").total() / 5
    assert decode_read(models["v3"], 1000).total() == kv_cache(models["v3"], 1000).total()


# --- properties -------------------------------------------------------------------------------------------------------


@given(name=st.sampled_from(PRESETS), n=st.integers(1, 2_000_000), more=st.integers(0, 5000))
def test_reads_never_fall_with_the_context(name, n, more):
    low, high = decode_read(load_config(name), [n, n + more]).total()
    assert low <= high


@given(name=st.sampled_from(PRESETS), n=st.integers(1, 2_000_000))
def test_no_layer_reads_an_entry_that_no_layer_stores(name, n):
    """Each layer's reads of one kind are at most what its source stores, so at most the whole cache a layer."""
    config = load_config(name)
    stored = kv_cache(config, n)
    largest = max(row.values[0] for row in stored.rows if row.component in ("main_kv", "window_kv", "index_key"))
    assert all(row.values[0] <= largest for row in decode_read(config, n).rows)
