"""Which layer does what: the schedules of the released models, and every derived one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim import layer_plan, load_config
from flashsim.config import PRESETS
from flashsim.schedule import last_kv_source


def test_plan_agrees_with_the_config_file_read_plainly(case):
    plan = layer_plan(case.config)
    assert len(plan) == case.d.num_hidden_layers
    attention = {"full": "gqa"}
    for layer, p in zip(case.layers, plan, strict=True):
        gqa = case.d.model_type in ("llama", "mistral", "qwen2", "qwen3")
        assert p.layer == layer.i
        assert p.attention == ("gqa" if gqa else attention.get(layer.kind, layer.kind))
        assert p.owns_kv == layer.owns
        assert p.selects == layer.selects
        assert (p.selection_source is not None) == layer.chosen
        assert p.owns_index_keys == (layer.owns and layer.chosen)
        assert p.scores_candidates == layer.pool
        assert (p.window or 0) == layer.window
        assert p.kv_source == layer.source
        assert p.engram == layer.engram
        assert p.compress_ratio == (0 if layer.kind == "window" else layer.ratio)
        assert p.feed_forward == ("dense" if layer.dense else "moe_hash" if layer.hashed else "moe")
        if case.d.model_type == "deepseek_v41":
            assert p.half == ("decoder" if layer.decoder else "encoder")
            assert p.selection_source == layer.selection
        else:
            assert p.half is None


def test_v41_flash_layer_by_layer(models):
    """v41-architecture.md 1.5."""
    plan = layer_plan(models["v4.1-flash"])
    kv = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    selection = kv[:24] + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [p.kv_source for p in plan] == kv
    assert [p.selection_source for p in plan] == selection
    roles = ["window"] * 2 + ["full", *["reuse"] * 5] * 3 + ["full", *["reuse"] * 3] + ["reindex", *["reuse"] * 3] * 4
    assert [p.role for p in plan] == roles
    assert {role: roles.count(role) for role in set(roles)} == {"window": 2, "full": 4, "reindex": 4, "reuse": 30}
    assert [p.half for p in plan] == ["encoder"] * 20 + ["decoder"] * 20
    assert [p.layer for p in plan if p.builds_candidates] == [20]
    assert [p.layer for p in plan if p.scores_candidates] == [24, 28, 32, 36]
    assert [p.engram for p in plan if p.engram is not None] == [0, 1]
    assert [p.layer for p in plan if p.engram is not None] == [1, 14]
    assert [p.index_key_source for p in plan if p.selects] == [2, 8, 14, 20, 20, 20, 20, 20]
    assert all(p.window == 128 for p in plan)
    assert [p.compress_ratio for p in plan] == [0] * 2 + [2] * 18 + [1] * 20
    assert last_kv_source(models["v4.1-flash"]) == 20


@pytest.mark.parametrize(
    ("model", "counts", "first"),
    [
        ("v4-flash", {"window": 2, "csa": 21, "hca": 20}, ["window", "window", "csa", "hca"]),
        ("v4-pro", {"csa": 30, "hca": 31}, ["hca", "hca", "csa", "hca"]),
        ("deepseek-llm-67b", {"gqa": 95}, ["gqa"] * 4),
        ("v2", {"mla": 60}, ["mla"] * 4),
        ("v3", {"mla": 61}, ["mla"] * 4),
        ("v3.2", {"dsa": 61}, ["dsa"] * 4),
    ],
)
def test_kinds_of_earlier_generations(models, model, counts, first):
    kinds = [p.attention for p in layer_plan(models[model])]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == counts
    assert kinds[:4] == first
    assert last_kv_source(models[model]) is None


def test_v4_flash_parity_of_layers(models):
    plan = layer_plan(models["v4-flash"])
    assert [p.layer for p in plan if p.attention == "csa"] == list(range(2, 43, 2))
    assert [p.layer for p in plan if p.attention == "hca"] == list(range(3, 42, 2))
    assert [p.feed_forward for p in plan] == ["moe_hash"] * 3 + ["moe"] * 40


@pytest.mark.parametrize(("model", "dense"), [("deepseek-llm-67b", 95), ("v2", 1), ("v3", 3), ("v3.2", 3)])
def test_dense_layers_come_first(models, model, dense):
    kinds = [p.feed_forward for p in layer_plan(models[model])]
    assert kinds == ["dense"] * dense + ["moe"] * (len(kinds) - dense)


def test_a_plan_names_only_layers_that_have_what_is_read(case):
    plan = layer_plan(case.config)
    for p in plan:
        if p.kv_source is not None:
            assert p.kv_source <= p.layer and plan[p.kv_source].owns_kv
            assert plan[p.kv_source].compress_ratio == p.compress_ratio
        if p.selection_source is not None:
            assert p.selection_source <= p.layer and plan[p.selection_source].selects
            assert p.kv_source <= p.selection_source  # a selection is of the cache that is read
        if p.selects:
            assert plan[p.index_key_source].owns_index_keys
        assert p.role in ("dense", "window", "full", "reindex", "reuse")
        assert (p.role == "reuse") == (p.kv_source is not None and not p.owns_kv and not p.selects)


def test_layers_of_equal_kind_differ_in_their_numbers_alone(models):
    plan = layer_plan(models["v4.1-flash"])
    assert plan[3].kind() == plan[4].kind() == plan[9].kind()
    distinct = [plan[i].kind() for i in (0, 1, 2, 3, 14, 20, 21, 24)]
    assert len(set(distinct)) == len(distinct)


@st.composite
def v41_schedules(draw):
    """Ratios, sources and index sources of a V4.1 config that hangs together."""
    layers = draw(st.integers(1, 16))
    sources = sorted(draw(st.sets(st.integers(0, layers - 1), max_size=4)))
    ratio, ratios = 0, []
    for layer in range(layers):
        if layer in sources:
            ratio = draw(st.integers(1, 6))
        ratios.append(ratio)
    others = draw(st.sets(st.integers(sources[0], layers - 1), max_size=4)) if sources else set()
    index = sorted(set(sources) | others)
    candidate = draw(st.sampled_from([-1, *index]))
    return layers, ratios, sources, index, candidate


@given(schedule=v41_schedules())
def test_any_schedule_that_hangs_together_has_a_plan(schedule):
    layers, ratios, sources, index, candidate = schedule
    config = load_config(
        load_config("v4.1-flash").to_dict()
        | {"num_hidden_layers": layers, "compress_ratios": ratios, "kv_source_layer_ids": sources}
        | {"index_source_layer_ids": index, "candidate_source_layer_id": candidate}
        | {"engram_layer_ids": [], "engram_num_embeddings": []}
    )
    plan = layer_plan(config)
    assert [p.layer for p in plan if p.owns_kv] == sources
    assert [p.layer for p in plan if p.selects] == index
    assert [p.layer for p in plan if p.builds_candidates] == [candidate] * (candidate >= 0)
    pooled = [p.layer for p in plan if p.scores_candidates]
    for layer in pooled:
        assert layer > candidate >= plan[layer].kv_source
        assert layer not in sources
    assert [p.half for p in plan].count("encoder") == (sources[-1] if sources else layers)


@given(name=st.sampled_from(PRESETS))
def test_plans_are_the_same_object_each_time(name):
    assert layer_plan(load_config(name)) is layer_plan(load_config(name))
