"""Stored and reserved bytes: against the record sizes of the released kernels, layer by layer."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim import ContextError, LayoutError, ParallelError, kv_bytes_per_token, kv_cache, kv_reserved, load_config
from flashsim.config import PRESETS

CONTEXTS = [*range(1, 301), 511, 512, 1023, 4095, 4096, 65_537, 999_999, 1_000_001, 2**20, 2**20 + 1]


def record_bytes(d):
    """(main entry, indexer key, window entry) in bytes, from the parts of each record."""
    if d.model_type in ("llama", "mistral", "qwen2", "qwen3"):
        both = 2 * d.num_key_value_heads * d.head_dim * 2  # K and V, two bytes an element
        return both, 0, both
    if d.model_type in ("deepseek_v2", "deepseek_v3"):
        return (d.kv_lora_rank + d.qk_rope_head_dim) * 2, 0, 0
    if d.model_type == "deepseek_v32":
        scales = max(d.kv_lora_rank // 128, 1)
        key_scales = max(d.index_head_dim // 128, 1)
        return d.kv_lora_rank + 4 * scales + 2 * d.qk_rope_head_dim, d.index_head_dim + 4 * key_scales, 0
    key = d.index_head_dim // 2 + max(d.index_head_dim // 32, 1)
    if d.model_type == "deepseek_v4":
        plain = d.head_dim - d.qk_rope_head_dim
        scales = plain // 64
        padded = scales if scales % 8 == 0 else scales + 8 - scales % 8
        entry = plain + 2 * d.qk_rope_head_dim + padded
        return entry, key, entry
    return d.head_dim // 2 + d.head_dim // 16, key, d.head_dim + max(d.head_dim // 32, 1)


def stored(case, n):
    """{(layer, component): (tier, bytes)} after n tokens, one layer at a time."""
    main, key, window = record_bytes(case.d)
    result = {}
    for layer in case.layers:
        if layer.owns:
            groups = n // layer.ratio
            result[layer.i, "main_kv"] = "global", main * groups
            if layer.chosen:
                result[layer.i, "index_key"] = "global", key * groups
        if layer.window:
            result[layer.i, "window_kv"] = "window", window * min(n, layer.window)
        if case.d.model_type not in ("deepseek_v4", "deepseek_v41") or not layer.owns:
            continue
        pending = n - n // layer.ratio * layer.ratio
        if (
            layer.kind == "csa"
        ):  # value and gate, float32, both halves of an open group; the last complete group's first
            for prefix, width in (("", case.d.head_dim), ("indexer_", case.d.index_head_dim)):
                result[layer.i, f"{prefix}compressor_state"] = "state", pending * 2 * (2 * width) * 4
                complete = layer.ratio if n >= layer.ratio else 0
                result[layer.i, f"{prefix}compressor_overlap"] = "state", complete * 2 * width * 4
        elif layer.ratio > 1:
            result[layer.i, "compressor_state"] = "state", pending * 2 * case.d.head_dim * 4
    return result


def test_stored_bytes_equal_a_count_layer_by_layer(case):
    report = kv_cache(case.config, CONTEXTS)
    rows = {(row.layer, row.component): row for row in report.rows}
    assert len(rows) == len(report.rows)
    total = report.total()
    for i, n in enumerate(CONTEXTS):
        expected = stored(case, n)
        assert {key: (row.tier, row.values[i]) for key, row in rows.items()} == expected, f"N = {n}"
        assert total[i] == sum(nbytes for _, nbytes in expected.values())


def test_records_times_record_size_is_the_number_of_bytes(case):
    report = kv_cache(case.config, CONTEXTS)
    for row in report.rows:
        assert row.values == tuple(row.bytes_per_record * n for n in row.records)
        if row.tier == "global":
            assert row.records == tuple(n // row.tokens_per_record for n in CONTEXTS)


def test_per_token_bytes_are_records_divided_by_their_tokens(case):
    main, key, _ = record_bytes(case.d)
    expected = Fraction(0)
    for layer in case.layers:
        if layer.owns:
            expected += Fraction(main + (key if layer.chosen else 0), layer.ratio)
    assert kv_bytes_per_token(case.config) == expected
    assert kv_cache(case.config, [1, 77]).per_token_bytes() == expected


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [
        ("deepseek-llm-67b", 389_120),
        ("v2", 69_120),
        ("v3", 70_272),
        ("v3.2", 48_068),
        ("v4-flash", Fraction("3514.25")),
        ("v4-pro", Fraction("5031.4375")),
        ("v4.1-flash", 890),
    ],
)
def test_published_bytes_per_token(models, model, nbytes):
    assert kv_bytes_per_token(models[model]) == nbytes


def test_published_ratios_between_generations(models):
    per_token = {name: Fraction(kv_bytes_per_token(config)) for name, config in models.items()}
    assert round(float(per_token["deepseek-llm-67b"] / per_token["v3.2"]), 1) == 8.1
    assert round(float(per_token["v3.2"] / per_token["v4-flash"]), 1) == 13.7
    assert round(float(per_token["v4-flash"] / per_token["v4.1-flash"]), 1) == 3.9
    assert round(float(per_token["deepseek-llm-67b"] / per_token["v4.1-flash"]), 1) == 437.2
    assert round(float(100 * per_token["v4-pro"] / per_token["v3.2"]), 2) == 10.47
    assert round(float(100 * per_token["v4-flash"] / per_token["v3.2"]), 2) == 7.31


def test_figure_1_of_the_v4_report_counts_the_window_too(models):
    accumulated = {name: kv_cache(models[name], "1M") for name in ("v3.2", "v4-pro")}
    pro = accumulated["v4-pro"]
    ratio = accumulated["v3.2"].total() / (pro.tier_bytes("global") + pro.tier_bytes("window"))
    assert round(ratio, 3) == 9.545
    assert round(accumulated["v3.2"].per_token_bytes() / float(pro.per_token_bytes()), 2) == 9.55


@pytest.mark.parametrize(
    ("model", "nbytes"), [("v4-flash", 3_214_336), ("v4-pro", 4_559_872), ("v4.1-flash", 2_703_360)]
)
def test_window_bytes_of_a_sequence(models, model, nbytes):
    assert kv_cache(models[model], [128, 4096, "1M"]).tier_bytes("window") == [nbytes] * 3


@pytest.mark.parametrize("model", ["deepseek-llm-67b", "v2", "v3", "v3.2"])
def test_earlier_generations_have_neither_window_nor_state(models, model):
    report = kv_cache(models[model], 5000)
    assert report.tier_bytes("window") == report.tier_bytes("state") == 0
    assert kv_cache(models[model], [1, 2]).tier_bytes("window") == [0, 0]


def test_global_bytes_hold_complete_groups_only(models):
    document = kv_cache(models["v4.1-flash"], 1_000_001).to_json()
    assert document["global_bytes"] == 890_000_356
    assert document["window_bytes"] == 2_703_360
    assert document["state_bytes"] == 3 * 2 * 512 * 4  # three ratio-2 layers with one pending token
    assert document["total_bytes"] == 890_000_356 + 2_703_360 + 12_288
    assert document["per_token_bytes"] == 890
    assert kv_cache(models["v4-flash"], 10**6).to_json()["per_token_bytes"] == 3514.25


def test_the_headline_million_tokens(models):
    assert kv_cache(models["v4.1-flash"], "1M").tier_bytes("global") == 890_000_000
    flash = kv_cache(models["v4-flash"], "1M").tier_bytes("global")
    assert flash == 21 * 652 * 250_000 + 20 * 584 * 7812
    assert round(flash / 10**9, 2) == 3.51


def test_json_has_one_row_for_each_layer_and_component(models):
    document = kv_cache(models["v4.1-flash"], 1_000_001).to_json()
    fields = {"layer", "component", "tier", "bytes_per_record", "tokens_per_record", "records", "bytes"}
    fields |= {"formula", "source"}
    assert all(set(row) == fields for row in document["rows"])
    assert sum(row["bytes"] for row in document["rows"]) == document["total_bytes"]
    rows = {(row["layer"], row["component"]): row for row in document["rows"]}
    assert {key: rows[2, "main_kv"][key] for key in list(fields - {"formula", "source", "bytes"})} == {
        "layer": 2, "component": "main_kv", "tier": "global", "bytes_per_record": 288, "tokens_per_record": 2,
        "records": 500_000,
    }  # fmt: skip
    several = kv_cache(models["v4.1-flash"], [4096, 1_000_001]).to_json()
    assert several["reports"][1]["total_bytes"] == document["total_bytes"]


# --- compressor state (v1-v4-attention.md 5.10) -----------------------------------------------------------------------


def test_what_must_survive_of_an_open_group(models):
    layer = kv_cache(models["v4-flash"], 7).where(layer=2, tier="state").by("component")  # 4 tokens, then 3 pending
    assert layer["compressor_state"] + layer["compressor_overlap"] == 40_960
    assert layer["indexer_compressor_state"] + layer["indexer_compressor_overlap"] == 10_240
    assert kv_cache(models["v4-flash"], 127).where(layer=3, tier="state").total() == 127 * 512 * 2 * 4
    assert kv_cache(models["v4-flash"], 128).where(layer=3, tier="state").total() == 0


def test_compressor_buffers_of_the_reference_code(models):
    flash, pro = (kv_reserved(models[name], 5000).where(tier="state") for name in ("v4-flash", "v4-pro"))
    assert flash.where(layer=2).by("component") == {"compressor_state": 65_536, "indexer_compressor_state": 16_384}
    assert flash.where(layer=3).total() == 524_288
    assert flash.total() == 12_206_080 == 21 * 81_920 + 20 * 524_288
    assert pro.total() == 18_710_528 == 30 * 81_920 + 31 * 524_288


def test_state_is_bounded_by_the_buffers(case):
    contexts = [*range(1, 300), 1000, 4095]
    stored_state = kv_cache(case.config, contexts).tier_bytes("state")
    buffers = kv_reserved(case.config, contexts).tier_bytes("state")
    assert all(a <= b for a, b in zip(stored_state, buffers, strict=True))
    assert len(set(buffers)) == 1


# --- reserved ---------------------------------------------------------------------------------------------------------


def test_reserved_bytes_are_whole_pages_and_rings(case):
    contexts = [1, 63, 64, 65, 127, 128, 129, 1000, 65_537]
    alignment = {"deepseek_v4": 576, "deepseek_v41": 512}.get(case.d.model_type, 1)
    main, key, window = record_bytes(case.d)

    def pages(records, size):
        page = 64 * size
        while page % alignment:
            page += 1
        return (records + 63) // 64 * page

    reserved = kv_reserved(case.config, contexts)
    for i, n in enumerate(contexts):
        tiers = {"global": 0, "window": 0}
        for layer in case.layers:
            if layer.owns:
                tiers["global"] += pages(n // layer.ratio, main)
                tiers["global"] += pages(n // layer.ratio, key) if layer.chosen else 0
            if layer.window:
                tiers["window"] += pages(layer.window, window)
        for tier, nbytes in tiers.items():
            assert reserved.tier_bytes(tier)[i] == nbytes, (n, tier)


def test_reserved_is_never_less_than_stored(case):
    contexts = [*range(1, 200), 4097]
    stored_bytes, reserved = kv_cache(case.config, contexts), kv_reserved(case.config, contexts)
    for tier in ("global", "window", "state"):
        pairs = zip(stored_bytes.tier_bytes(tier), reserved.tier_bytes(tier), strict=True)
        assert all(a <= b for a, b in pairs), tier
    assert all(a <= b for a, b in zip(stored_bytes.total(), reserved.total(), strict=True))


def test_reserved_rows_say_how_many_records_they_hold(models):
    report = kv_reserved(models["v3.2"], 65, page_records=64)
    rows = report.where(layer=0).rows
    assert {row.component: row.records for row in rows} == {"main_kv": (128,), "index_key": (128,)}
    assert {row.component: row.values for row in rows} == {"main_kv": (128 * 656,), "index_key": (128 * 132,)}
    assert kv_reserved(models["v3.2"], 65, page_records=1).total() == kv_cache(models["v3.2"], 65).total()


@pytest.mark.parametrize("page_records", [0, -1, True, 1.5, "64", None])
def test_page_records_that_are_none(models, page_records):
    with pytest.raises(ValueError, match=r"page_records is .*; accepted: a whole number from 1"):
        kv_reserved(models["v3"], 10, page_records=page_records)


# --- other record layouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout", "nbytes"),
    [
        ("v4.1-flash", "bf16", 3_200),
        ("v4.1-flash", "mxfp8", 1_490),
        ("v4.1-flash", "mxfp8,index=mxfp4", 1_490),
        ("v4.1-flash", "mxfp8,index=fp8", 1_650),
        ("v4.1-flash", "mxfp8, fp8-indexer", 1_650),
        ("v4.1-flash", {"main": "mxfp8", "index": "fp8"}, 1_650),
        ("v4.1-flash", "fp8-indexer", 890 + 2.5 * (132 - 68)),
        ("v4.1-flash", "main=v4", 2.5 * (584 + 68)),
        ("v4.1-flash", "released", 890),
        ("v4.1-flash", None, 890),
        ("v4-flash", "fp8-indexer", 3850.25),
        ("v4-flash", "index=fp8", 3850.25),
        ("v4-flash", "bf16", 21 * (1024 + 256) / 4 + 20 * 1024 / 128),
        ("v2", "6bit", 25_920),
        ("v3", "main=fp8+bf16rope", 61 * 656),
        ("v3.2", "bf16", 61 * (1152 + 256)),
        ("v3.2", "main=bf16", 61 * (1152 + 132)),
        ("deepseek-llm-67b", "fp8-plain", 389_120 // 2),
        ("deepseek-llm-67b", "mxfp8", 95 * 2 * (1024 + 32)),
    ],
)
def test_other_record_layouts(models, model, layout, nbytes):
    assert kv_bytes_per_token(models[model], layout=layout) == nbytes


def test_the_window_has_a_layout_of_its_own(models):
    config = models["v4.1-flash"]
    assert kv_cache(config, 4096, layout="window=v4").tier_bytes("window") == 40 * 128 * 584
    assert kv_cache(config, 4096, layout="bf16").tier_bytes("window") == 40 * 128 * 1024
    assert kv_cache(config, 4096, layout="window=v4").per_token_bytes() == 890
    assert kv_cache(config, 4096, layout="main=bf16").tier_bytes("window") == 2_703_360


def test_the_deployed_v2_is_93_percent_below_67b(models):
    share = 1 - kv_bytes_per_token(models["v2"], layout="6bit") / kv_bytes_per_token(models["deepseek-llm-67b"])
    assert round(100 * share, 2) == 93.34


@pytest.mark.parametrize("layout", ["int3", "", "main=", "main=int8", "color=fp4", "fp4,,", {"main": "x"}, 7])
def test_layouts_that_do_not_exist(models, layout):
    with pytest.raises(LayoutError) as error:
        kv_cache(models["v4.1-flash"], 10, layout=layout)
    assert "\n" not in str(error.value)
    assert "accepted" in str(error.value)


def test_a_layout_that_does_not_fit_the_width(derive):
    config = load_config(derive("v3", kv_lora_rank=200))
    assert kv_bytes_per_token(config) == 61 * (200 + 64) * 2
    with pytest.raises(LayoutError, match=r"200.* accept.*multiples of its block of 128"):
        kv_cache(config, 10, layout="main=fp8+bf16rope")


# --- tensor parallel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "share"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (32, 1), (64, 1)])
def test_gqa_shards_down_to_one_kv_head(models, ranks, share):
    report = kv_cache(models["deepseek-llm-67b"], 1000, tensor_parallel=ranks)
    assert report.total() == 1000 * 389_120 * share // 8


@pytest.mark.parametrize("model", ["v2", "v3", "v3.2", "v4-flash", "v4-pro", "v4.1-flash"])
def test_latents_and_indexer_keys_are_on_every_rank(models, model):
    one = kv_cache(models[model], 1001).total()
    assert [kv_cache(models[model], 1001, tensor_parallel=ranks).total() for ranks in (2, 8, 64)] == [one] * 3


def test_a_sliding_window_shards_like_the_rest(derive):
    config = load_config(
        derive(
            "deepseek-llm-67b",
            num_hidden_layers=2,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
        )
    )
    assert kv_cache(config, 100).by("tier") == {"window": 16 * 4096, "global": 100 * 4096}
    assert kv_cache(config, 100, tensor_parallel=4).by("tier") == {"window": 16 * 1024, "global": 100 * 1024}


@pytest.mark.parametrize("ranks", [0, -2, 3, 128, True, 2.0, "8", None])
def test_ranks_that_do_not_divide_the_heads(models, ranks):
    with pytest.raises(ParallelError, match=r"tensor_parallel is .*; accepted: a divisor of num_attention_heads, 64"):
        kv_cache(models["deepseek-llm-67b"], 10, tensor_parallel=ranks)


def test_kv_heads_that_neither_divide_nor_are_divided(derive):
    config = load_config(derive("deepseek-llm-67b", num_attention_heads=12, num_key_value_heads=6, head_dim=64))
    with pytest.raises(ParallelError, match="num_key_value_heads, 6"):
        kv_cache(config, 10, tensor_parallel=4)


# --- mistakes that tools made (pitfalls.md) ---------------------------------------------------------------------------

WRONG_PER_TOKEN = [
    ("v3", 124_928, "the latent counted as K and V, without RoPE"),
    ("v3", 61 * 512 * 2, "the RoPE part of the latent dropped"),
    ("v3", 61 * 572 * 2, "part of the RoPE part dropped"),
    ("deepseek-llm-67b", 3_112_960, "query heads used for KV heads"),
    ("v3.2", 40_016, "indexer keys left out"),
    ("v4-flash", 3850.25, "the FP8 row of an indexer key counted where 68 bytes are stored"),
    ("v4.1-flash", 800, "scale bytes ignored"),
    ("v4.1-flash", 720, "indexer keys left out"),
]


@pytest.mark.parametrize(("model", "wrong", "why"), WRONG_PER_TOKEN)
def test_known_wrong_numbers_are_not_ours(models, model, wrong, why):
    assert kv_bytes_per_token(models[model]) != wrong, why


def test_query_heads_do_not_change_a_shared_latent(models):
    for name in ("v2", "v3", "v3.2", "v4-flash", "v4-pro", "v4.1-flash"):
        config = models[name]
        doubled = replace(config, num_attention_heads=2 * config.num_attention_heads)
        assert kv_bytes_per_token(doubled) == kv_bytes_per_token(config)


def test_the_head_dim_of_the_file_is_used(named):
    config = named("qwen3-4b").config
    assert kv_bytes_per_token(config) == 36 * 2 * 8 * 128 * 2
    assert kv_bytes_per_token(config) != 36 * 2 * 8 * (2560 // 32) * 2


def test_eight_bit_kv_is_not_twice_890(models):
    eight_bit = {kv_bytes_per_token(models["v4.1-flash"], layout=name) for name in ("mxfp8", "mxfp8,index=fp8")}
    assert eight_bit == {1_490, 1_650}


def test_window_layers_do_not_grow_with_the_context(case):
    if not any(layer.window for layer in case.layers):
        return
    longest = max(layer.window for layer in case.layers)
    sizes = kv_cache(case.config, [longest, 4096, "1M"]).tier_bytes("window")
    assert len(set(sizes)) == 1


def test_stored_and_reserved_are_different_numbers(models):
    stored_bytes, reserved = kv_cache(models["v4-flash"], 65), kv_reserved(models["v4-flash"], 65)
    assert reserved.tier_bytes("global") > stored_bytes.tier_bytes("global")
    assert kv_bytes_per_token(models["v4-flash"]) == 3514.25


def test_cache_size_does_not_follow_the_parameter_count(models):
    assert kv_bytes_per_token(models["v4.1-flash"]) * 437 < kv_bytes_per_token(models["deepseek-llm-67b"])


# --- properties -------------------------------------------------------------------------------------------------------

contexts_of_any_size = st.integers(1, 2_000_000)


@given(name=st.sampled_from(PRESETS), n=contexts_of_any_size, more=st.integers(0, 5000))
def test_global_and_window_bytes_never_fall(name, n, more):
    report = kv_cache(load_config(name), [n, n + more])
    for tier in ("global", "window"):
        low, high = report.tier_bytes(tier)
        assert low <= high
    assert report.total()[0] > 0


@given(name=st.sampled_from(PRESETS), n=contexts_of_any_size)
def test_layers_components_and_tiers_each_add_up_to_the_total(name, n):
    report = kv_cache(load_config(name), n)
    for key in ("layer", "component", "tier", "precision"):
        assert sum(report.by(key).values()) == report.total()
    assert sum(report.by("layer", "component").values()) == report.total()
    assert sum(report.where(layer=i).total() for i in load_config(name).layers()) == report.total()


@given(name=st.sampled_from(PRESETS), n=contexts_of_any_size)
def test_average_growth_is_the_per_token_figure(name, n):
    """Over a whole number of groups of every ratio, the global cache grows by exactly the per-token bytes."""
    config, period = load_config(name), 128
    low, high = kv_cache(config, [n, n + period]).tier_bytes("global")
    assert high - low == period * kv_bytes_per_token(config)


@given(name=st.sampled_from(PRESETS), n=st.integers(1, 10_000), ranks=st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_a_rank_never_holds_more_than_the_whole_nor_less_than_its_share(name, n, ranks):
    config = load_config(name)
    whole, rank = kv_cache(config, n).total(), kv_cache(config, n, tensor_parallel=ranks).total()
    assert whole <= rank * ranks
    assert rank <= whole


@pytest.mark.parametrize("context", [0, -1, True, 1.5, "4Q", None, [], 10**12])
def test_contexts_that_are_none(models, context):
    with pytest.raises(ContextError, match="accepted"):
        kv_cache(models["v4.1-flash"], context)


def test_a_context_beyond_the_model_is_computed_and_noted(models):
    report = kv_cache(models["deepseek-llm-67b"], "1M")
    assert report.tier_bytes("global") == 389_120_000_000
    (note,) = report.notes
    assert "4,096" in note and "1,000,000" in note and "extrapolates" in note
    assert kv_cache(models["deepseek-llm-67b"], 4096).notes == ()
