"""Parameter counts: against published totals, checkpoints of every generation, and sums layer by layer."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim import load_config, parameters
from flashsim.config import PRESETS

GIGA = 10**9


def layer_parameters(d, layer):
    """{component: numbers stored} of one layer: matrices, norms, biases."""
    D, H = d.hidden_size, d.num_attention_heads
    stored = {"layer_norms": 2 * D}
    if d.model_type in ("llama", "mistral", "qwen2", "qwen3"):
        q, kv = H * d.head_dim, d.num_key_value_heads * d.head_dim
        stored |= {"q_projection": D * q, "kv_projection": 2 * D * kv, "o_projection": q * D}
        stored["dense_ffn"] = 3 * D * d.intermediate_size
        if d.model_type == "qwen2":
            stored["attention_bias"] = q + 2 * kv
        elif d.attention_bias:
            stored["attention_bias"] = q + 2 * kv + D
        if d.mlp_bias:
            stored["mlp_bias"] = 2 * d.intermediate_size + D
        if d.model_type == "qwen3":
            stored["qk_norm"] = 2 * d.head_dim
        return stored
    rq = d.q_lora_rank
    if d.model_type in ("deepseek_v2", "deepseek_v3", "deepseek_v32"):
        c, r, p, v = d.kv_lora_rank, d.qk_rope_head_dim, d.qk_nope_head_dim, d.v_head_dim
        stored["q_projection"] = D * H * (p + r) if rq is None else rq * D + rq + H * (p + r) * rq
        stored["kv_projection"] = (c + r) * D + c
        stored["up_projection"] = H * (p + v) * c
        stored["o_projection"] = D * H * v
        if layer.selects:
            stored["indexer_query"] = d.index_n_heads * d.index_head_dim * rq
            stored["indexer_key"] = d.index_head_dim * D + 2 * d.index_head_dim  # a LayerNorm, with bias
            stored["indexer_weights"] = d.index_n_heads * D
    else:
        h, hi, m, n = d.head_dim, d.index_head_dim, layer.ratio, d.hc_mult
        stored["q_projection"] = rq * D + rq + H * h * rq
        stored["kv_projection"] = h * D + h
        stored["attention_sink"] = H
        stored["o_projection_group"] = d.o_groups * d.o_lora_rank * (H // d.o_groups * h)
        stored["o_projection_output"] = D * d.o_groups * d.o_lora_rank
        site = (2 * n + n * n) * (n * D) + (2 * n + n * n) + 3  # fn, base, scale
        stored["hyper_connection"] = 2 * site
        if layer.kind == "csa":  # wkv, wgate, position bias, norm
            stored["compressor"] = 2 * (2 * h * D) + m * 2 * h + h
            stored["indexer_key_compressor"] = 2 * (2 * hi * D) + m * 2 * hi + hi
        elif layer.kind == "hca":
            stored["compressor"] = 2 * (h * D) + m * h + h
        elif layer.owns:
            stored["compressor"] = (1 if m == 1 else 2) * h * D + h
            stored["indexer_key"] = hi * h + hi
        if layer.selects:
            stored["indexer_query"] = d.index_n_heads * hi * rq
            stored["indexer_weights"] = d.index_n_heads * D
        if layer.engram is not None:
            row = (d.engram_max_ngram_size - 1) * d.engram_n_heads * d.engram_head_dim
            stored["engram_projection"] = (n + 1) * D * row + 2 * n * D
            stored["engram_tables"] = d.engram_num_embeddings[layer.engram] * d.engram_head_dim
    if layer.dense:
        stored["dense_ffn"] = 3 * D * d.intermediate_size
    else:
        expert = 3 * D * d.moe_intermediate_size
        biases = 0
        if d.topk_method == "noaux_tc" and not layer.hashed:
            biases = 2 if d.model_type == "deepseek_v41" else 1  # V4.1: one for text, one for images
        stored["routed_experts"] = d.n_routed_experts * expert
        stored["shared_experts"] = d.n_shared_experts * expert
        stored["router"] = d.n_routed_experts * D + biases * d.n_routed_experts
    return stored


def ends(d):
    """{component: numbers stored} outside the layers."""
    stored = {"embedding": d.vocab_size * d.hidden_size, "final_norm": d.hidden_size}
    if not d.tie_word_embeddings:
        stored["lm_head"] = d.vocab_size * d.hidden_size
    if d.model_type == "deepseek_v4":
        stored["hyper_connection"] = d.hc_mult * (d.hc_mult * d.hidden_size) + d.hc_mult + 1
    return stored


def test_stored_numbers_equal_a_sum_layer_by_layer(case):
    expected = {(None, name): value for name, value in ends(case.d).items()}
    for layer in case.layers:
        expected |= {(layer.i, name): value for name, value in layer_parameters(case.d, layer).items()}
    report = parameters(case.config)
    assert {(row.layer, row.component): row.values[0] for row in report.rows} == expected
    assert report.total() == sum(expected.values())
    tables = sum(value for (_, name), value in expected.items() if name == "engram_tables")
    assert report.engram_parameters() == tables
    assert report.total_parameters() == sum(expected.values()) - tables


def one_token(d, name, stored):
    """How many of a component's numbers one token multiplies with."""
    if name == "routed_experts":
        return d.num_experts_per_tok * 3 * d.hidden_size * d.moe_intermediate_size
    if name == "engram_tables":
        return (d.engram_max_ngram_size - 1) * d.engram_n_heads * d.engram_head_dim
    return stored


def test_active_numbers_equal_a_sum_layer_by_layer(case):
    d = case.d
    head = embedding = d.vocab_size * d.hidden_size
    last_source = max((layer.i for layer in case.layers if layer.owns), default=None)
    decode = ends(d).get("hyper_connection", 0)
    prefill = decode
    for layer in case.layers:
        for name, stored in layer_parameters(d, layer).items():
            used = one_token(d, name, stored)
            decode += used
            if not layer.decoder or (layer.i == last_source and name in ("compressor", "indexer_key")):
                prefill += used
    report = parameters(case.config)
    assert report.active() == report.active("decode") == decode + head
    assert report.active(head=False) == decode
    assert report.active(head=False, embedding=True) == decode + embedding
    assert report.active("prefill") == prefill
    assert report.active("prefill", head=True) == prefill + head
    if not d.tie_word_embeddings:
        assert report.active(embedding=True) == decode + head + embedding


def test_a_tied_table_counts_once(named):
    """Embedding and head are one table, so counting both counts its numbers once."""
    case = named("qwen3-4b")
    report = parameters(case.config)
    table = case.d.vocab_size * case.d.hidden_size
    assert "lm_head" not in report.by("component")
    assert report.active(embedding=True) == report.active(head=False) + table


# --- published numbers (generations.md 2-7, v41-architecture.md 14, v1-v4-attention.md 5.12) --------------------------


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        ("deepseek-llm-67b", 67.42, None),
        ("v2", 235.74, 20.85),
        ("v3", 671.03, 36.62),
        ("v3.2", 671.88, None),
        ("v4-flash", 284.33, 13.27),
        ("v4-pro", 1572.99, 48.85),
        ("v4.1-flash", 551.88, 16.13),
    ],
)
def test_published_totals(models, model, total, active):
    """Within the last digit printed: the reference adds up matrices, the library also norms, biases and sinks."""
    report = parameters(models[model])
    assert abs(report.total_parameters() / GIGA - total) < 0.01
    assert active is None or abs(report.active() / GIGA - active) < 0.01


def test_v1_as_printed(models):
    V, d, L, G, h, f = 102_400, 8192, 95, 8, 128, 22_016
    printed = 2 * V * d + L * (2 * d**2 + 2 * d * G * h + 3 * d * f)
    norms = 2 * L * d + d
    assert f"{printed / GIGA:.2f}" == "67.42"
    assert parameters(models["deepseek-llm-67b"]).total() == printed + norms


def test_v3_as_printed(models):
    L, Lm, d, H, rq, c, r, p, v, V = 61, 58, 7168, 128, 1536, 512, 64, 128, 128, 129_280
    attention = d * rq + rq * H * (p + r) + d * (c + r) + c * H * (p + v) + H * v * d
    rest = L * attention + 3 * 3 * d * 18_432 + Lm * 256 * d
    expert = 3 * d * 2048
    vectors = L * (2 * d + rq + c) + Lm * 256  # norms, router biases
    report = parameters(models["v3"])
    assert report.total() == rest + Lm * 257 * expert + 2 * V * d + vectors + d
    assert f"{(report.total() - vectors - d) / GIGA:.2f}" == "671.03"
    assert report.active() == rest + Lm * 9 * expert + V * d + vectors
    assert f"{(report.active() - vectors) / GIGA:.2f}" == "36.62"


def test_v4_pro_as_printed(models):
    report = parameters(models["v4-pro"])
    per_layer = 2 * 7168 + 1536 + 512 + 128 + 384 + 2 * (24 + 3)  # norms, sinks, router bias, mHC base and scale
    csa, hca = 4 * 1024 + 512 + 4 * 256 + 128, 128 * 512 + 512  # position biases and norms of the compressors
    vectors = 61 * per_layer - 3 * 384 + 30 * csa + 31 * hca + 7168 + 5
    assert f"{(report.total() - vectors) / GIGA:.2f}" == "1572.99"
    assert f"{(report.active() - vectors) / GIGA:.2f}" == "48.85"


def test_v3_active_with_both_tables(models):
    assert f"{parameters(models['v3']).active(embedding=True) / GIGA:.2f}" == "37.55"


def test_the_indexer_of_v32_adds_085_billion(models):
    added = parameters(models["v3.2"]).total() - parameters(models["v3"]).total()
    assert f"{added / GIGA:.2f}" == "0.85"
    assert added == 61 * (1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64)


def test_v41_exact_sums(models):
    report = parameters(models["v4.1-flash"])
    assert report.total_parameters() - report.by("component")["engram_projection"] == 551_566_180_464
    assert report.by("component")["engram_projection"] == 314_654_720
    assert report.engram_parameters() == 196_613_849_600 == (384_006_168 + 384_016_682) * 256
    assert report.active("prefill") == 7_895_575_352
    assert report.active() == 16_130_595_952
    assert report.active(head=False) == 15_468_682_352
    assert f"{report.active('prefill') / GIGA:.2f}" == "7.90"
    assert report.total() == 551_566_180_464 + 196_928_504_320
    assert f"{(report.total_parameters() - 314_654_720) / GIGA:.2f}" == "551.57"


V41_ATTENTION = (
    "q_projection", "kv_projection", "attention_sink", "o_projection_group", "o_projection_output", "compressor",
    "indexer_key", "indexer_query", "indexer_weights",
)  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "attention"),
    [
        ([0, 3, 19, 21, 39], 126_617_408),
        ([2, 8, 14], 137_333_184),
        ([20], 134_711_744),
        ([24, 28, 32, 36], 132_024_128),
    ],
)
def test_v41_attention_of_a_layer(models, layers, attention):
    by = parameters(models["v4.1-flash"]).by("layer", "component")
    for layer in layers:
        assert sum(by.get((layer, name), 0) for name in V41_ATTENTION) == attention


def test_v41_layer_without_attention(models):
    by = parameters(models["v4.1-flash"]).by("layer", "component")
    for layer in (0, 20, 39):
        assert by[layer, "router"] == 1_966_848
        assert by[layer, "hyper_connection"] == 983_094
        assert by[layer, "layer_norms"] == 10_240
        assert by[layer, "routed_experts"] + by[layer, "shared_experts"] == 385 * 35_389_440
    assert by[20, "compressor"] + by[20, "indexer_key"] == 2_687_616


def test_v4_flash_counts_of_a_layer(models):
    by = parameters(models["v4-flash"]).by("layer", "component")
    core = ("q_projection", "kv_projection", "attention_sink", "o_projection_group", "o_projection_output")
    for layer in (0, 2, 3, 42):
        assert sum(by[layer, name] for name in core) == 106_956_352
        assert by[layer, "hyper_connection"] == 786_486
    assert by[2, "compressor"] == 8_393_216
    assert by[3, "compressor"] == 4_260_352
    indexer = ("indexer_query", "indexer_weights", "indexer_key_compressor")
    assert sum(by[2, name] for name in indexer) == 10_749_056
    assert (0, "compressor") not in by


# numbers in each checkpoint's tensors, summed over the safetensors headers; v4 without tid2eid, which holds ids
CHECKPOINTS = {"v1": 135_744, "v3": 170_100, "v32": 256_372, "v4": 344_561, "a32": 1_067_556, "c32": 155_232}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_golden_checkpoints_hold_as_many_numbers(named, name):
    assert parameters(named(f"golden {name}").config).total() == CHECKPOINTS[name]


# --- the report -------------------------------------------------------------------------------------------------------


def test_json_of_params(models):
    document = parameters(models["v4.1-flash"]).to_json()
    assert json.loads(json.dumps(document)) == document
    assert document["total"] == 551_880_835_184
    assert document["engram"] == 196_613_849_600
    assert document["active_decode"] == 16_130_595_952
    assert document["active_prefill"] == 7_895_575_352
    assert document["total_with_engram"] == document["total"] + document["engram"]
    assert sum(row["parameters"] for row in document["rows"]) == document["total_with_engram"]


def test_the_text_names_the_totals(models):
    text = str(parameters(models["v4.1-flash"]))
    for number in ("16,130,595,952", "7,895,575,352", "196,613,849,600", "551,880,835,184"):
        assert number in text


@pytest.mark.parametrize("phase", ["train", "", None, 1])
def test_phases_that_are_none(models, phase):
    with pytest.raises(ValueError, match=r"phase is .*; accepted: decode, prefill"):
        parameters(models["v3"]).active(phase)


@given(name=st.sampled_from(PRESETS))
def test_layers_and_components_each_add_up(name):
    report = parameters(load_config(name))
    for key in ("layer", "component", "tier"):
        assert sum(report.by(key).values()) == report.total()


@given(name=st.sampled_from(PRESETS[1:]), experts=st.integers(8, 4096))
def test_experts_change_the_total_and_hardly_what_is_active(name, experts):
    config = load_config(name)
    report, other = (parameters(each) for each in (config, replace(config, n_routed_experts=experts)))
    more = experts - config.n_routed_experts
    moe_layers = sum(1 for row in report.rows if row.component == "routed_experts")
    difference = other.total() - report.total()
    expert, row = 3 * config.hidden_size * config.moe_intermediate_size, config.hidden_size
    biases = difference - more * moe_layers * (expert + row)
    assert abs(biases) <= 2 * abs(more) * moe_layers
    assert other.active() - report.active() == difference - more * moe_layers * expert
