"""Capacity worked out by hand, fronts checked pair by pair, and one sentence for what cannot be."""

import time
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsim import budget
from flashsim.budget import (
    OBJECTIVES,
    Constraints,
    Fleet,
    capacity,
    compare,
    pareto,
    search,
    variant,
    weight_bytes,
)
from flashsim.config import PRESETS, load_config
from flashsim.hardware import device
from flashsim.kv_cache import kv_bytes_per_token, kv_cache
from flashsim.params import parameters
from flashsim.reading import ConfigError
from flashsim.schedule import layer_plan
from flashsim.units import ContextError

ALONE = load_config(
    load_config("v4.1-flash").to_dict()
    | {
        "compress_ratios": [0] * 40,
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": -1,
    }
)
"""V4.1 without a layer that has a cache."""

# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_of_the_released_formats():
    assert weight_bytes("v1") == 2 * 67_425_001_472
    assert weight_bytes("v2") == 2 * parameters(load_config("v2")).total()
    v3, head = parameters(load_config("v3")).total(), 2 * 129280 * 7168
    assert weight_bytes("v3") == pytest.approx((v3 - head) * (1 + 4 / 16384) + 2 * head, rel=1e-7)


def test_weights_are_those_of_the_checkpoint_within_one_percent():
    """The sum over every tensor of the released layout, which `model` knows one by one."""
    fullsize = pytest.importorskip("model.fullsize")
    config = load_config("v4.1-flash")
    exact = fullsize.weight_bytes(config, tie_experts=False, engram_rows=None)
    counted = weight_bytes(config, lookup_tables=True)
    assert 0.99 * exact < counted <= exact
    tables = 196_613_849_600 * 33 // 32
    assert counted - weight_bytes(config) == tables


# --- capacity ---------------------------------------------------------------------------------------------------------


def test_capacity_by_hand():
    """V1 in BF16: eight KV heads of 128, two vectors, two bytes, 95 layers, one head a GPU."""
    fit = capacity("v1", Fleet("h100-sxm", gpus=16, tensor_parallel=8, weights_bytes=134_850_002_944), "4Ki")
    sequence = 4096 * 95 * 2 * 128 * 2
    free = 80_000_000_000 * 9 // 10 - 134_850_002_944 // 8
    assert fit.sequence_bytes == {4096: sequence} and fit.free_bytes == free
    assert fit.by_context == {4096: free // sequence} and fit.sequences == 2 * (free // sequence)
    assert fit.tokens == fit.sequences * 4096
    assert fit.tier_bytes == {"global": fit.per_replica * sequence}


def test_a_latent_is_on_every_gpu_of_a_replica():
    one, eight = (
        capacity("v4.1-flash", Fleet("h200-sxm", tp, tp, weights_bytes=0), "128Ki").sequence_bytes for tp in (1, 8)
    )
    assert one == eight == {131072: kv_cache(load_config("v4.1-flash"), 131072).total()}


def test_a_mix_keeps_its_shares_and_fills_what_there_is():
    fit = capacity("v4.1-flash", Fleet("h200-sxm", 8, 8), {"4Ki": 3, "128Ki": 1})
    short, long = fit.by_context[4096], fit.by_context[131072]
    assert abs(short - 3 * long) <= 3
    taken = short * fit.sequence_bytes[4096] + long * fit.sequence_bytes[131072]
    assert taken == sum(fit.tier_bytes.values()) <= fit.free_bytes
    assert fit.free_bytes - taken < 3 * fit.sequence_bytes[4096] + fit.sequence_bytes[131072]
    assert "left on each GPU" in fit.limit and fit.limit in str(fit)


@settings(max_examples=30, deadline=None)
@given(
    memory_gb=st.integers(1, 400),
    shares=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    weights=st.integers(0, 10**12),
)
def test_more_memory_never_holds_less(memory_gb, shares, weights):
    from dataclasses import replace

    from flashsim.hardware import device

    mix = {4096 * 8**i: share for i, share in enumerate(shares)}
    some, more = (
        capacity("v4-flash", Fleet(replace(device("b200"), memory_bytes=gb * 10**9), weights_bytes=weights), mix)
        for gb in (memory_gb, memory_gb + 7)
    )
    assert some.sequences <= more.sequences
    assert sum(some.tier_bytes.values()) <= some.free_bytes
    for n, count in some.by_context.items():
        assert abs(count - some.per_replica * some.mix[n]) < 1


@pytest.mark.parametrize(
    ("sizes", "shares", "free"),
    [((1, 1000), (999, 1), 400), ((1, 1000), (999, 1), 1500), ((3, 7, 50), (5, 3, 1), 999), ((9, 9), (1, 1), 100)],
)
def test_the_most_that_fit_against_trying_every_number(sizes, shares, free):
    """Rounded by hand: of the largest, of the two largest, ... together, half up."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])

    def counts(number):
        sums = [0]
        for j in range(len(order)):
            part = sum(shares[i] for i in order[: j + 1])
            sums.append((2 * number * part + sum(shares)) // (2 * sum(shares)))
        return {i: sums[j + 1] - sums[j] for j, i in enumerate(order)}

    fitting = [n for n in range(free + 2) if sum(sizes[i] * c for i, c in counts(n).items()) <= free]
    assert fitting == list(range(len(fitting)))
    mix = {i: Fraction(share, sum(shares)) for i, share in enumerate(shares)}
    found = budget._counts(dict(enumerate(sizes)), mix, free)
    assert found == counts(fitting[-1]) and sum(found.values()) == fitting[-1]


def test_a_rare_long_sequence_costs_no_time():
    start = time.perf_counter()
    fit = capacity("v1", Fleet("h200-sxm", 8, 8), {1: 1, 10**9: 1e-9})
    assert fit.by_context[10**9] == 0 and fit.by_context[1] > 10**6
    assert time.perf_counter() - start < 1


def test_what_does_not_fit_says_so():
    assert capacity("v3", Fleet("rtx-4090"), "4Ki").limit.startswith("weights: they take 673,0")
    fit = capacity("v1", Fleet("rtx-4090", weights_bytes=0), "1M")
    assert fit.sequences == 0 and fit.limit.startswith("one sequence: it takes 389,120,000,000 bytes")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Fleet("h200-sxm", gpus=6, tensor_parallel=4), "gpus is 6; accepted: a multiple of tensor_parallel, 4"),
        (lambda: Fleet("h200-sxm", gpus=0), "gpus is 0; accepted: a whole number from 1"),
        (lambda: Fleet("h200-sxm", gpus=True), "gpus is True"),
        (lambda: Fleet("tpu"), "device is 'tpu'; accepted: a100-80gb"),
        (lambda: Fleet("b200", kept_free=1), "kept_free is 1; accepted: a share from 0 to below 1"),
        (lambda: Fleet("b200", weights_bytes=-1), "weights_bytes is -1"),
        (lambda: capacity("v1", Fleet("b200"), {}), "context_mix is 'empty'"),
        (lambda: capacity("v1", Fleet("b200"), {"4Ki": 0}), "context_mix is 0; accepted: a share above 0"),
        (lambda: capacity("v1", Fleet("b200"), {"4Ki": float("nan")}), "context_mix is nan"),
        (lambda: search(0), "budget_bytes_per_token is 0"),
        (lambda: search(890, objectives=("quality",)), "objectives is 'quality'; accepted: stored_bytes"),
        (lambda: Constraints(window=()), "window is 'empty'"),
        (lambda: search(890, Constraints(encoder_owners=99)), "encoder_owners is 99; accepted: at most its 18 layers"),
        (lambda: search(890, Constraints(base="v3")), "config is 'v3'; accepted: a V4.1 config"),
        (lambda: variant(window=0), "window is 0; accepted: a whole number from 1"),
        (lambda: variant(decoder_owners=True), "decoder_owners is True; accepted: a whole number from 1"),
        (lambda: variant(ALONE, encoder_owners=1), "encoder_owners is 1; accepted: at most its 0 layers with a cache"),
        (lambda: variant(ALONE, decoder_ratio=2), "decoder_ratio is 2; accepted: None, as no layer there has a cache"),
        (lambda: search(890, Constraints(base=ALONE)), "encoder_ratio is 1; accepted: None"),
        (lambda: Fleet(["h200-sxm"]), "device is ['h200-sxm']; accepted: a100-80gb"),
        (lambda: Fleet(replace(device("b200"), memory_bytes=float("nan"))), "device.memory_bytes is nan"),
        (lambda: capacity("v1", "h200-sxm", "4Ki"), "fleet is 'h200-sxm'; accepted: a Fleet"),
        (lambda: compare(["v1"], "4Ki", "h200-sxm"), "fleet is 'h200-sxm'; accepted: a Fleet"),
        (lambda: compare("v1"), "configs is 'v1'; accepted: a list of configs"),
        (lambda: search(890, {"main": "fp4"}), "constraints is {'main': 'fp4'}; accepted: a Constraints"),
        (lambda: search(890, objectives="stored_bytes"), "objectives is 'stored_bytes'; accepted: a list of stored_b"),
        (lambda: search(890, objectives=()), "objectives is (); accepted: a list of stored_bytes"),
        (lambda: search(890, objectives=(["window_bytes"],)), "objectives is ['window_bytes']; accepted: stored_bytes"),
        (lambda: Constraints(encoder_ratio=2.0), "encoder_ratio is 2.0; accepted: one value or several"),
        (lambda: Constraints(main=None), "main is None; accepted: one value or several"),
    ],
)
def test_what_cannot_be_is_one_sentence(make, text):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(text)


def test_a_context_that_is_none():
    with pytest.raises(ContextError):
        capacity("v1", Fleet("b200"), "long")
    with pytest.raises(ContextError):
        Constraints(context="-1")


# --- other models -----------------------------------------------------------------------------------------------------


def test_windows_alone_keep_their_window():
    assert variant(ALONE) == ALONE and variant(ALONE, window=7).sliding_window == 7


def test_nothing_asked_is_the_release():
    assert variant() == load_config("v4.1-flash")


@pytest.mark.parametrize("encoder_owners", [1, 2, 3, 5, 18])
@pytest.mark.parametrize("decoder_owners", [1, 3, 20])
@pytest.mark.parametrize("ratios", [(2, 1), (4, 4), (1, 2)])
def test_bytes_of_a_variant_are_owners_over_ratio(encoder_owners, decoder_owners, ratios):
    config = variant(
        encoder_owners=encoder_owners, decoder_owners=decoder_owners, encoder_ratio=ratios[0], decoder_ratio=ratios[1]
    )
    record = 512 // 2 + 512 // 16 + 128 // 2 + 128 // 32
    expected = record * (Fraction(encoder_owners, ratios[0]) + Fraction(decoder_owners, ratios[1]))
    assert kv_bytes_per_token(config) == expected
    roles = [plan.role for plan in layer_plan(config)]
    assert roles.count("full") == encoder_owners + decoder_owners and roles.count("window") == 2


def test_search_finds_the_release_and_keeps_the_budget():
    found = search(890)
    released = load_config("v4.1-flash")
    mine = [p for p in found.points if p.config == released and str(p.layout) == "main=fp4,index=mxfp4"]
    assert len(mine) == 1 and mine[0].stored_bytes == 890
    assert all(point.stored_bytes <= 890 for point in found.points)
    assert not [p for p in search(889).points if p.config == released and p.choice["main"] == "fp4"]
    for point in found.points[::17]:
        assert kv_bytes_per_token(point.config, layout=point.layout) == point.stored_bytes


@pytest.mark.parametrize("objectives", [("stored_bytes", "kept_numbers"), tuple(OBJECTIVES)])
def test_the_front_has_nothing_beaten_and_leaves_nothing_out(objectives):
    found = search(1500, Constraints(window=(64, 128), main="fp4"), objectives=objectives)

    def beats(a, b):
        pairs = [(OBJECTIVES[o] * getattr(a, o), OBJECTIVES[o] * getattr(b, o)) for o in objectives]
        return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)

    assert not [p for p in found.front for q in found.points if beats(q, p)]
    beaten = [p for p in found.points if any(beats(q, p) for q in found.front)]
    equal = {tuple(getattr(p, o) for o in objectives) for p in found.front}
    rest = [p for p in found.points if p not in beaten]
    assert {tuple(getattr(p, o) for o in objectives) for p in rest} == equal


def test_an_empty_search_is_empty():
    found = search(1)
    assert found.points == found.front == () and found.tried > 100
    assert pareto((), ("stored_bytes",)) == ()


def test_compare_every_release():
    rows = compare(list(PRESETS), "128Ki", Fleet("h200-sxm", 16, 16))
    assert [row["stored_bytes_per_token"] for row in rows] == [kv_bytes_per_token(load_config(n)) for n in PRESETS]
    by_name = {row["model"]: row["sequences"] for row in rows}
    assert by_name["v4.1-flash"] > by_name["v4-flash"] > by_name["v3.2"]


def test_the_unchanged_config_is_a_point_where_the_budget_allows():
    found = search(890)
    assert found.unchanged in found.points and found.unchanged.stored_bytes == 890
    assert found.unchanged.config == load_config("v4.1-flash")
    assert search(889).unchanged is None
