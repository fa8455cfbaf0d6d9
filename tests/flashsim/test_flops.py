"""FLOPs of a decode step and of a prefill: against the tables of generations.md, one layer and one row at a time."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim import WEIGHTS, decode_flops, load_config, prefill_flops, prefill_flops_per_token
from flashsim.config import PRESETS

CONTEXTS = [*range(1, 301), 511, 513, 1025, 2047, 2049, 16_383, 16_385, 99_999, 1_000_001, 2**20]
QUARTERS = {"bf16": 4, "fp32": 4, "fp8": 2, "fp4": 1}  # weights of the V4.1 report's Figure 2, in quarters


def layer_flops(d, layer, n):
    """{(component, precision): raw FLOPs} of one layer for one decoded token with n tokens visible."""
    work = {}
    D, H = d.hidden_size, d.num_attention_heads
    if d.model_type in ("llama", "mistral", "qwen2", "qwen3"):
        keys = min(n, layer.window) if layer.window else n
        work["q_projection", "bf16"] = 2 * D * (H * d.head_dim)
        work["kv_projection", "bf16"] = 2 * (2 * D * (d.num_key_value_heads * d.head_dim))
        work["attention", "bf16"] = (2 + 2) * H * d.head_dim * keys  # scores, then values
        work["o_projection", "bf16"] = 2 * (H * d.head_dim) * D
        work["dense_ffn", "bf16"] = 3 * 2 * D * d.intermediate_size
        return work
    linear = "bf16" if d.model_type == "deepseek_v2" else "fp8"
    if d.model_type in ("deepseek_v2", "deepseek_v3", "deepseek_v32"):
        c, r, p, v = d.kv_lora_rank, d.qk_rope_head_dim, d.qk_nope_head_dim, d.v_head_dim
        if d.q_lora_rank is None:
            work["q_projection", linear] = 2 * D * H * (p + r)
        else:
            work["q_projection", linear] = 2 * D * d.q_lora_rank + 2 * d.q_lora_rank * H * (p + r)
        work["kv_projection", linear] = 2 * D * (c + r)
        work["up_projection", "bf16"] = 2 * H * p * c + 2 * H * c * v
        keys = min(n, d.index_topk) if layer.chosen else n
        work["attention", "bf16"] = 2 * H * keys * (c + r) + 2 * H * keys * c
        work["o_projection", linear] = 2 * (H * v) * D
        if layer.selects:
            hi, ni = d.index_head_dim, d.index_n_heads
            work["indexer_query", "fp8"] = 2 * d.q_lora_rank * ni * hi
            work["indexer_key", "fp8"] = 2 * D * hi
            work["indexer_weights", "bf16"] = 2 * D * ni
            work["indexer_scores", "fp8"] = 2 * ni * hi * n
    else:
        h, ni, hi, m = d.head_dim, d.index_n_heads, d.index_head_dim, layer.ratio
        work["q_projection", "fp8"] = 2 * D * d.q_lora_rank + 2 * d.q_lora_rank * H * h
        work["kv_projection", "fp8"] = 2 * D * h
        work["attention_window", "bf16"] = 4 * H * h * min(n, layer.window)
        work["o_projection_group", "fp8"] = d.o_groups * 2 * (H // d.o_groups * h) * d.o_lora_rank
        work["o_projection_output", "fp8"] = 2 * (d.o_groups * d.o_lora_rank) * D
        entries = n // m if m else 0
        if layer.owns and layer.kind == "csa":
            work["compressor", "bf16"] = 2 * D * (2 * h) + 2 * D * (2 * h)  # value and gate, both twice as wide
            work["indexer_key_compressor", "bf16"] = 2 * D * (2 * hi) + 2 * D * (2 * hi)
        elif layer.owns and layer.kind == "hca":
            work["compressor", "bf16"] = 2 * D * h + 2 * D * h
        elif layer.owns:
            work["compressor", "bf16"] = 2 * D * h if m == 1 else 2 * D * h + 2 * D * h
            work["indexer_key", "bf16"] = Fraction(2 * h * hi, m)  # once an entry
        if layer.selects:
            work["indexer_query", "fp8"] = 2 * d.q_lora_rank * ni * hi
            work["indexer_weights", "bf16"] = 2 * D * ni
            if layer.pool:
                pool = d.candidate_topk_blocks * d.candidate_block_size
                work["indexer_scores_candidates", "fp4"] = 2 * ni * hi * min(entries, pool)
            else:
                work["indexer_scores", "fp4"] = 2 * ni * hi * entries
        if layer.chosen:
            work["attention_selected", "bf16"] = 4 * H * h * min(entries, d.index_topk)
        elif layer.kind == "hca":
            work["attention_compressed", "bf16"] = 4 * H * h * entries
        streams = d.hc_mult
        work["hyper_connection", "fp32"] = 2 * (2 * (2 * streams + streams * streams) * (streams * D))
        if layer.engram is not None:
            looked_up = (d.engram_max_ngram_size - 1) * d.engram_n_heads * d.engram_head_dim
            work["engram_projection", "fp8"] = 2 * looked_up * (streams * D + D)
    if layer.dense:
        work["dense_ffn", linear] = 3 * 2 * D * d.intermediate_size
    else:
        work["routed_experts", linear] = d.num_experts_per_tok * 3 * 2 * D * d.moe_intermediate_size
        work["shared_experts", linear] = d.n_shared_experts * 3 * 2 * D * d.moe_intermediate_size
        gate = "fp32" if d.model_type in ("deepseek_v4", "deepseek_v41") else "bf16"
        work["router", gate] = 2 * D * d.n_routed_experts
    return work


def decode(case, n):
    """{(layer, component, precision): raw FLOPs} of one decode step."""
    work = {}
    for layer in case.layers:
        for (component, precision), flops in layer_flops(case.d, layer, n).items():
            work[layer.i, component, precision] = flops
    work[None, "lm_head", "bf16"] = 2 * case.d.hidden_size * case.d.vocab_size
    if case.d.model_type == "deepseek_v4":  # the streams are mixed once more before the head
        work[None, "hyper_connection", "fp32"] = 2 * case.d.hc_mult * (case.d.hc_mult * case.d.hidden_size)
    return work


def test_decode_flops_equal_a_count_layer_by_layer(case):
    report = decode_flops(case.config, CONTEXTS)
    rows = {(row.layer, row.component, row.precision): row.values for row in report.rows}
    assert len(rows) == len(report.rows)
    total, weighted = report.total(), report.weighted_total()
    for i, n in enumerate(CONTEXTS):
        expected = decode(case, n)
        assert {key: values[i] for key, values in rows.items()} == expected, f"N = {n}"
        assert total[i] == sum(expected.values())
        assert 4 * weighted[i] == sum(QUARTERS[precision] * flops for (_, _, precision), flops in expected.items())


# --- the closed forms that generations.md prints ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4096, 4097, 10**6])
def test_v1_as_printed(models, n):
    L, d, f, H, G, h, V = 95, 8192, 22_016, 64, 8, 128, 102_400
    printed = 2 * L * d**2 + 4 * L * d * G * h + 2 * L * d**2 + 4 * L * H * h * n + 6 * L * d * f + 2 * d * V
    report = decode_flops(models["deepseek-llm-67b"], n)
    assert report.total() == report.weighted_total() == printed


@pytest.mark.parametrize("n", [1, 2048, 2049, 10**6])
def test_v3_and_v32_as_printed(models, n):
    L, Ld, d, f, e, E, S, k, V = 61, 3, 7168, 18_432, 2048, 256, 1, 8, 129_280
    H, rq, c, r, p, v = 128, 1536, 512, 64, 128, 128
    Lm = L - Ld
    fp8 = 2 * L * (d * rq + rq * H * (p + r)) + 2 * L * d * (c + r) + 2 * L * H * v * d
    fp8 += 6 * Ld * d * f + 6 * Lm * k * d * e + 6 * Lm * S * d * e
    bf16 = 2 * L * H * c * (p + v) + 2 * Lm * d * E + 2 * d * V
    attention = 2 * L * H * (c + r + c)
    v3 = decode_flops(models["v3"], n)
    assert v3.by("precision") == {"fp8": fp8, "bf16": bf16 + attention * n}
    Hi, hi, K = 64, 128, 2048
    v32 = decode_flops(models["v3.2"], n)
    assert v32.by("precision") == {
        "fp8": fp8 + 2 * L * (rq * Hi * hi + d * hi) + 2 * L * Hi * hi * n,
        "bf16": bf16 + attention * min(n, K) + 2 * L * d * Hi,
    }


@pytest.mark.parametrize("n", [1, 127, 128, 2047, 2048, 4096, 10**6, 2**20])
def test_v41_as_printed(models, n):
    L, d, H, h, rq, g, o, w = 40, 5120, 64, 512, 1280, 8, 1024, 128
    Hi, hi, K, P, e, E, k, streams, V = 32, 128, 512, 16_384, 2304, 384, 6, 4, 129_280
    by = decode_flops(models["v4.1-flash"], n).by("component")
    assert by == {
        "q_projection": 2 * L * (d * rq + rq * H * h),
        "kv_projection": 2 * L * d * h,
        "o_projection_group": 2 * L * H * h * o,
        "o_projection_output": 2 * L * g * o * d,
        "compressor": 2 * d * h * (2 + 2 + 2 + 1),
        "indexer_query": 2 * 8 * rq * Hi * hi,
        "indexer_weights": 2 * 8 * d * Hi,
        "indexer_key": 2 * h * hi * 5 // 2,
        "indexer_scores": 2 * Hi * hi * (3 * (n // 2) + n),
        "indexer_scores_candidates": 2 * Hi * hi * 4 * min(n, P),
        "attention_window": 4 * L * H * h * min(n, w),
        "attention_selected": 4 * H * h * (18 * min(n // 2, K) + 20 * min(n, K)),
        "routed_experts": 6 * L * k * d * e,
        "shared_experts": 6 * L * d * e,
        "router": 2 * L * d * E,
        "hyper_connection": 2 * (2 * L * (2 + streams) * streams * streams * d),
        "engram_projection": 2 * 2 * (3 * 8 * 256) * 5 * d,
        "lm_head": 2 * d * V,
    }


@pytest.mark.parametrize(("model", "A", "B"), [("v4-flash", 21, 20), ("v4-pro", 30, 31)])
@pytest.mark.parametrize("n", [1, 127, 129, 4095, 10**6, 2**20])
def test_v4_as_printed(models, model, A, B, n):
    config = models[model]
    L, d, H, h, rq = config.num_hidden_layers, config.hidden_size, config.num_attention_heads, 512, config.q_lora_rank
    Hi, hi, K, streams = 64, 128, config.index_topk, 4
    by = decode_flops(config, n).by("component")
    assert by["compressor"] == 2 * A * 4 * d * h + 2 * B * 2 * d * h
    assert by["indexer_key_compressor"] == 2 * A * 4 * d * hi
    assert by["indexer_query"] == 2 * A * rq * Hi * hi
    assert by["indexer_scores"] == 2 * A * Hi * hi * (n // 4)
    assert by["attention_window"] == 4 * L * H * h * min(n, 128)
    assert by["attention_selected"] == 4 * A * H * h * min(n // 4, K)
    assert by["attention_compressed"] == 4 * B * H * h * (n // 128)
    assert by["hyper_connection"] == 2 * (2 * L * (2 + streams) * streams * streams * d + streams * streams * d)


# --- published costs (generations.md 9.2 and 9.3) ---------------------------------------------------------------------

MILLION, MEBI = 10**6, 2**20
ATTENTION = ("attention", "attention_window", "attention_selected", "attention_compressed")
SMALL = ("compressor", "indexer_key", "indexer_key_compressor", "indexer_weights", "router", "hyper_connection")


class Counting:
    """Weighted decode FLOPs of the presets with one choice changed: some components left out, or other precisions."""

    def __init__(self, models, left_out=(), precision=None, only=("v3.2", "v4-flash", "v4-pro", "v4.1-flash")):
        self.models, self.left_out, self.precision, self.only = models, left_out, precision or {}, only

    def at(self, name, n):
        config = self.models[name]
        known = {row.component for row in decode_flops(config, 1).rows}
        changes = {key: value for key, value in self.precision.items() if key in known and name in self.only}
        by = decode_flops(config, n, precision=changes).weighted_by("component")
        return sum(value for key, value in by.items() if name not in self.only or key not in self.left_out)

    def row(self):
        """(V3.2 / V4-Pro, V3.2 / V4-Flash at 10^6, V4.1 growth 4,096 to 2^20, crossing in thousands) as printed."""
        low, high = 4096, MEBI
        while high - low > 1:
            middle = (low + high) // 2
            if self.at("v4.1-flash", middle) > self.at("v4-flash", middle):
                low = middle
            else:
                high = middle
        v32 = self.at("v3.2", MILLION)
        return (
            f"{float(v32 / self.at('v4-pro', MILLION)):.2f}",
            f"{float(v32 / self.at('v4-flash', MILLION)):.2f}",
            f"{float(self.at('v4.1-flash', MEBI) / self.at('v4.1-flash', 4096)):.3f}",
            f"{high / 1000:.0f}K",
        )


FROM_V4 = ("v4-flash", "v4-pro", "v4.1-flash")
TABLE_9_3 = {
    "none": ({}, ("3.70", "9.85", "1.270", "108K")),
    "routed experts at FP4 weight": (
        {"precision": {"routed_experts": "fp4"}, "only": FROM_V4},
        ("4.01", "10.43", "1.341", "81K"),
    ),
    "indexer scores at FP8 weight": (
        {"precision": dict.fromkeys(("indexer_scores", "indexer_scores_candidates"), "fp8"), "only": FROM_V4},
        ("3.09", "7.19", "1.538", "77K"),
    ),
    "attention products at FP8 weight": (
        {"precision": dict.fromkeys(ATTENTION, "fp8")},
        ("4.70", "11.85", "1.293", "129K"),
    ),
    "LM head not counted": ({"left_out": ("lm_head",)}, ("3.73", "10.00", "1.289", "100K")),
    "grouped output first stage in BF16": (
        {"precision": {"o_projection_group": "bf16"}},
        ("3.61", "9.61", "1.253", "105K"),
    ),
    # those of V4 and V4.1: V3.2's router is BF16 work too, and leaving it out as well would print 9.97
    "small BF16-class products not counted": ({"left_out": SMALL, "only": FROM_V4}, ("3.75", "9.98", "1.273", "121K")),
    "Engram projection not counted": ({"left_out": ("engram_projection",)}, ("3.70", "9.85", "1.274", "99K")),
}


@pytest.mark.parametrize("change", TABLE_9_3)
def test_table_of_choices_that_the_published_numbers_settle(models, change):
    choice, printed = TABLE_9_3[change]
    assert Counting(models, **choice).row() == printed


def test_published_cost_claims(models):
    weighted = {name: decode_flops(config, [4096, MILLION, MEBI]).weighted_total() for name, config in models.items()}
    v32, pro, flash, v41 = (weighted[name] for name in ("v3.2", "v4-pro", "v4-flash", "v4.1-flash"))
    assert [f"{float(v32[i] / pro[i]):.2f}" for i in (1, 2)] == ["3.70", "3.75"]
    assert [f"{float(v32[i] / flash[i]):.2f}" for i in (1, 2)] == ["9.85", "9.92"]
    assert [f"{float(value) / 1e9:.1f}" for value in (v41[0], v41[2])] == ["20.2", "25.7"]
    assert [f"{float(value) / 1e9:.1f}" for value in (flash[0], flash[2])] == ["16.5", "60.3"]


def test_beyond_the_pool_only_the_full_scans_of_v41_grow(models):
    """5,120 weighted FLOPs a token: 32 heads x 128 wide x 2 FLOPs x (3/2 + 1) scans x 1/4."""
    contexts = [16_384, 16_386, 100_000, 200_000, MILLION]
    values = decode_flops(models["v4.1-flash"], contexts).weighted_total()
    for n, value in zip(contexts, values, strict=True):
        assert value - values[0] == 5_120 * (n - 16_384)


# --- precision and weights --------------------------------------------------------------------------------------------


def test_precision_of_each_product(models):
    """generations.md 1.3, for what is easily got wrong: the product's precision, not the storage's."""
    precision = {
        name: {row.component: row.precision for row in decode_flops(config, 1).rows} for name, config in models.items()
    }
    assert set(precision["deepseek-llm-67b"].values()) == set(precision["v2"].values()) == {"bf16"}
    for name in FROM_V4:
        assert precision[name]["routed_experts"] == "fp8"  # FP4 weights, FP8 path
        assert precision[name]["indexer_scores"] == "fp4"
        assert precision[name]["router"] == precision[name]["hyper_connection"] == "fp32"
        assert {precision[name][key] for key in ATTENTION if key in precision[name]} == {"bf16"}
    assert precision["v3.2"]["indexer_scores"] == "fp8"
    assert precision["v3"]["router"] == precision["v3"]["up_projection"] == "bf16"
    assert {values["lm_head"] for values in precision.values()} == {"bf16"}


def test_weights_can_be_changed(models):
    report = decode_flops(models["v4.1-flash"], [4096, MILLION])
    ones = dict.fromkeys(WEIGHTS, 1)
    assert report.weighted_total(ones) == report.total()
    twice = [2 * value for value in report.weighted_total()]
    assert report.weighted_total({key: 2 * value for key, value in WEIGHTS.items()}) == twice
    difference = [a - b for a, b in zip(report.weighted_total({"fp4": 1}), report.weighted_total(), strict=True)]
    assert difference == [Fraction(3, 4) * value for value in report.by("precision")["fp4"]]
    by = report.weighted_by("component", weights={"fp8": 1})
    assert [sum(values) for values in zip(*by.values(), strict=True)] == report.weighted_total({"fp8": 1})


def test_the_default_weights_are_the_published_ones():
    assert dict(WEIGHTS) == {"fp32": 1, "bf16": 1, "fp8": Fraction(1, 2), "fp4": Fraction(1, 4)}


@pytest.mark.parametrize("weights", [{"int8": 1}, {"fp8": "x"}, {"fp8": None}, {"fp8": -1}, {"fp8": float("nan")}])
def test_weights_that_do_not_exist(models, weights):
    with pytest.raises(ValueError, match=r"(weight of|precision is) .*accepted"):
        decode_flops(models["v3"], 1).weighted_total(weights)


@pytest.mark.parametrize("changes", [{"lm_haed": "fp8"}, {"lm_head": "int8"}, {"attention_window": "fp8"}])
def test_precision_of_a_component_that_is_not_there(models, changes):
    with pytest.raises(ValueError, match=r"(precision of|component is) .*accepted"):
        decode_flops(models["v3"], 1, precision=changes)


def test_changing_a_precision_changes_no_raw_flops(models):
    plain, changed = (decode_flops(models["v3"], 999, precision=p) for p in (None, {"lm_head": "fp8"}))
    assert plain.total() == changed.total()
    assert plain.weighted_total() - changed.weighted_total() == 7168 * 129_280


# --- prefill ----------------------------------------------------------------------------------------------------------


def prompt_layer_flops(d, layer, n):
    """As at decode, with dense MLA in the naive form: per-head keys and values, expanded once a token."""
    work = layer_flops(d, layer, n)
    if layer.kind == "mla":
        flops = work.pop(("up_projection", "bf16"))
        work["up_projection", "bf16"] = flops
        per_key = 2 * d.num_attention_heads * (d.qk_nope_head_dim + d.qk_rope_head_dim) + (
            2 * d.num_attention_heads * d.v_head_dim
        )
        work["attention", "bf16"] = per_key * n
    return work


def prompt(case, n, tail=None):
    """{(layer, component, precision): FLOPs} of a whole prompt: position after position, layer after layer."""
    tail = case.d.sliding_window if tail is None and case.layers[-1].window else tail
    work = Counter()
    for layer in case.layers:
        first_source = layer.decoder and layer.owns and not any(
            other.owns and other.i > layer.i for other in case.layers
        )  # fmt: skip
        for position in range(1, n + 1):
            rows_left = n - position  # rows after this one
            for (component, precision), flops in prompt_layer_flops(case.d, layer, position).items():
                key = layer.i, component, precision
                if component == "indexer_key" and case.d.model_type == "deepseek_v41":
                    # a key is made when its group is complete
                    work[key] += 2 * case.d.head_dim * case.d.index_head_dim if position % layer.ratio == 0 else 0
                elif not layer.decoder or (first_source and component == "compressor"):
                    work[key] += flops
                elif rows_left < tail:
                    if component == "attention_window":  # the window holds replayed rows only
                        replayed = position - max(n - tail, 0)
                        flops = layer_flops(case.d, layer, replayed)[component, precision]
                    work[key] += flops
                else:
                    work[key] += 0
    work[None, "lm_head", "bf16"] = 2 * case.d.hidden_size * case.d.vocab_size
    if case.d.model_type == "deepseek_v4":
        work[None, "hyper_connection", "fp32"] = 2 * case.d.hc_mult**2 * case.d.hidden_size
    return work


@pytest.mark.parametrize("n", [1, 2, 7, 19, 20, 63])
def test_prefill_of_a_short_prompt_equals_the_sum_over_its_rows(case, n):
    report = prefill_flops(case.config, n)
    assert {(row.layer, row.component, row.precision): row.values[0] for row in report.rows} == prompt(case, n)


@pytest.mark.parametrize("n", [128, 129, 301])
def test_prefill_past_the_window(named, n):
    for name in ("v3.2 with another indexer", "v4 with other ratios", "v4.1 with other sources", "golden a32"):
        case = named(name)
        report = prefill_flops(case.config, n)
        assert {(row.layer, row.component, row.precision): row.values[0] for row in report.rows} == prompt(case, n)


@pytest.mark.parametrize("tail", [1, 3, 40, 41, 500])
def test_the_tail_can_be_chosen(named, tail):
    case = named("v4.1 with other sources")
    report = prefill_flops(case.config, 41, tail=tail)
    assert {(row.layer, row.component, row.precision): row.values[0] for row in report.rows} == prompt(case, 41, tail)


def test_one_prompt_token_outside_the_tail(case):
    """The encoder, and of the decoder the compressor and indexer key of its source alone."""
    contexts = [1, 2, 100, 129, 4095, 10**6]
    report = prefill_flops_per_token(case.config, contexts)
    last_source = max((layer.i for layer in case.layers if layer.owns), default=None)
    for i, n in enumerate(contexts):
        expected = {}
        for layer in case.layers:
            for (component, precision), flops in prompt_layer_flops(case.d, layer, n).items():
                if layer.decoder and (layer.i != last_source or component not in ("compressor", "indexer_key")):
                    continue
                expected[layer.i, component, precision] = flops
        assert {(row.layer, row.component, row.precision): row.values[i] for row in report.rows} == expected, n


def test_long_prompts_of_the_causal_encoder_decoder(models):
    """At N = 10^6 nearly all of the work is the encoder's: half of the layers."""
    config = models["v4.1-flash"]
    whole, everywhere = prefill_flops(config, "1M"), prefill_flops(config, "1M", tail=10**6)
    assert 0.4 < whole.weighted_total() / everywhere.weighted_total() < 0.75
    decoder = sum(v for layer, v in whole.by("layer").items() if layer is not None and layer >= 20)
    assert decoder < whole.total() / 1000 + 10**6 * 2 * (5120 * 512 + 512 * 128)


def test_the_head_runs_for_the_last_row_alone(preset):
    head = 2 * preset.d.hidden_size * preset.d.vocab_size
    assert prefill_flops(preset.config, [1, 5000]).by("component")["lm_head"] == [head, head]
    assert "lm_head" not in prefill_flops_per_token(preset.config, 10).by("component")


def test_a_prefill_of_one_token_is_a_decode_step_where_the_form_is_the_same(models):
    for name in ("deepseek-llm-67b", "v3.2", "v4-flash", "v4-pro"):
        assert prefill_flops(models[name], 1).total() == decode_flops(models[name], 1).total()


@pytest.mark.parametrize("tail", [0, -1, True, 1.5, "128"])
def test_tails_that_are_none(models, tail):
    with pytest.raises(ValueError, match=r"tail is .*; accepted: a whole number of rows from 1"):
        prefill_flops(models["v4.1-flash"], 1000, tail=tail)


# --- mistakes that tools made (pitfalls.md) ---------------------------------------------------------------------------


def test_a_decode_step_is_two_flops_a_parameter_and_not_six(models):
    """V1 at N = 1: 2 per weight of a matrix; 6 would be a training step."""
    matrices = 95 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 22_016) + 8192 * 102_400
    report = decode_flops(models["deepseek-llm-67b"], 1)
    assert report.total() - report.by("component")["attention"] == 2 * matrices


def test_sparse_prefill_grows_linearly_past_the_selection(models):
    """Attention over chosen entries costs k a query, not a gather of S x k keys: linear in N, not quadratic."""
    attention = prefill_flops(models["v3.2"], [10_000, 20_000, 40_000]).by("component")["attention"]
    assert attention[2] - attention[1] == 2 * (attention[1] - attention[0])


def test_the_candidate_field_is_not_ignored(models, derive):
    without = load_config(derive("v4.1-flash", candidate_source_layer_id=-1))
    dense, pooled = (decode_flops(config, "1M").by("component") for config in (without, models["v4.1-flash"]))
    assert dense["indexer_scores"] == 2 * 32 * 128 * (3 * 500_000 + 5 * 10**6)
    assert pooled["indexer_scores"] + pooled["indexer_scores_candidates"] == 2 * 32 * 128 * (
        3 * 500_000 + 10**6 + 4 * 16_384
    )


# --- properties -------------------------------------------------------------------------------------------------------

sizes = st.integers(1, 2_000_000)


@given(name=st.sampled_from(PRESETS), n=sizes, more=st.integers(0, 5000))
def test_flops_never_fall_with_the_context(name, n, more):
    for function in (decode_flops, prefill_flops, prefill_flops_per_token):
        report = function(load_config(name), [n, n + more])
        assert report.total()[0] <= report.total()[1]
        assert report.weighted_total()[0] <= report.weighted_total()[1]


@given(name=st.sampled_from(PRESETS), n=sizes)
def test_layers_components_and_precisions_each_add_up(name, n):
    for function in (decode_flops, prefill_flops, prefill_flops_per_token):
        report = function(load_config(name), n)
        for key in ("layer", "component", "precision", "tier"):
            assert sum(report.by(key).values()) == report.total()
            assert sum(report.weighted_by(key).values()) == report.weighted_total()


@given(name=st.sampled_from(PRESETS), n=sizes)
def test_weighted_lies_between_a_quarter_of_raw_and_raw(name, n):
    report = decode_flops(load_config(name), n)
    assert report.total() / 4 <= report.weighted_total() <= report.total()


@given(name=st.sampled_from(["deepseek-llm-67b", "v3.2", "v4-flash", "v4-pro"]), n=st.integers(2, 3000))
def test_one_more_prompt_token_costs_its_own_row(name, n):
    """Without an encoder-decoder a prompt is the sum of its rows."""
    config = load_config(name)
    longer, shorter = prefill_flops(config, [n, n - 1]).total()
    assert longer - shorter == prefill_flops_per_token(config, n).total()


def test_json_has_lists_of_one_value_a_context(models):
    report = decode_flops(models["v4.1-flash"], [4096, MILLION])
    document = report.to_json()
    assert document["contexts"] == [4096, MILLION]
    assert document["raw_flops"] == report.total()
    assert document["weighted_flops"] == [float(value) for value in report.weighted_total()]
    for i in range(2):
        assert sum(row["raw_flops"][i] for row in document["rows"]) == report.total()[i]
    assert {"component", "precision", "raw_flops"} == set(document["rows"][0])
    assert decode_flops(models["v4.1-flash"], 4096).to_json()["raw_flops"] == report.total()[:1]
