"""The cache between requests: the numbers of generations.md 8.1, and plain arithmetic for every config."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim import ContextError, kv_bytes_per_token, kv_cache, load_config, persistent_cache
from flashsim.config import PRESETS
from flashsim.persistent import (
    pool_sequences,
    replay_tokens,
    turn_tokens_for_window_share,
    window_bytes_per_token,
    window_snapshot_bytes,
)


def window_of(case):
    """(windowed layers, bytes of a full window of all of them)."""
    rows = {row.layer: row.bytes_per_record for row in kv_cache(case.config, 1).rows if row.tier == "window"}
    windows = {layer.i: layer.window for layer in case.layers if layer.window}
    return len(windows), sum(windows[i] * rows[i] for i in windows)


def test_a_turn_adds_global_bytes_and_for_v4_two_snapshots(case):
    _, window = window_of(case)
    snapshots = 2 if case.d.model_type == "deepseek_v4" else 0
    for turn in (1, 2, 1829, 100_001):
        by = persistent_cache(case.config, turn).by("tier")
        assert by.get("global", 0) == turn * kv_bytes_per_token(case.config)
        assert by.get("window", 0) == snapshots * window


def test_v4_flash_as_printed(models):
    config = models["v4-flash"]
    report = persistent_cache(config, [1, 1829, 2236])
    assert report.by("tier")["window"] == [6_428_672] * 3
    assert report.by("tier")["global"] == [Fraction("3514.25") * turn for turn in (1, 1829, 2236)]
    assert round(turn_tokens_for_window_share(config, Fraction(1, 2))) == 1829
    assert round(turn_tokens_for_window_share(config, Fraction(45, 100))) == 2236
    for turn, share in ((1829, "0.500"), (2236, "0.450")):
        by = persistent_cache(config, turn).by("tier")
        assert f"{float(by['window'] / (by['window'] + by['global'])):.3f}" == share


def test_v41_against_v4_flash_is_one_eighth(models):
    turn = turn_tokens_for_window_share(models["v4-flash"], Fraction(1, 2))
    before = 2 * Fraction(persistent_cache(models["v4-flash"], 1).by("tier")["global"]) * turn
    ratio = 890 * turn / before
    assert f"{float(ratio):.4f}" == "0.1266"
    assert f"{float(1 / ratio):.1f}" == "7.9"
    assert persistent_cache(models["v4.1-flash"], 1000).by("tier") == {"global": 890_000}


def test_windows_kept_for_every_token(models):
    assert window_bytes_per_token(models["v4-flash"]) == 25_112 == 43 * 584
    assert window_bytes_per_token(models["v4-pro"]) == 35_624 == 61 * 584
    for name, times in (("v4-flash", "8.0"), ("v4-pro", "7.9")):
        main = kv_cache(models[name], 1)
        per_token = sum(
            Fraction(row.bytes_per_record, row.tokens_per_record) for row in main.rows if row.component == "main_kv"
        )
        assert f"{float(window_bytes_per_token(models[name]) / per_token):.1f}" == times


def test_the_window_pool_of_v41(models):
    config = models["v4.1-flash"]
    assert window_snapshot_bytes(config, half="encoder") == 1_351_680 == 20 * 128 * 528
    assert window_snapshot_bytes(config, half="decoder") == 1_351_680
    assert window_snapshot_bytes(config) == 2_703_360
    assert window_snapshot_bytes(models["v4-flash"]) == 3_214_336
    assert pool_sequences(config, 10**12) == 10**11 // 1_351_680
    assert pool_sequences(config, 13_516_799) == 0
    assert pool_sequences(config, 13_516_800) == 1
    assert pool_sequences(config, 10**12, share=Fraction(1)) == 10**12 // 1_351_680


def test_replayed_tokens(models):
    assert replay_tokens(models["v4.1-flash"]) == {"none": 0, "bounded": 128, "exact": 5120}
    assert replay_tokens(models["v4-flash"])["exact"] == 43 * 128
    assert replay_tokens(models["v4-pro"])["exact"] == 61 * 128


def test_snapshots_of_every_config_with_windows(case):
    if case.d.model_type not in ("deepseek_v4", "deepseek_v41"):
        return
    layers, window = window_of(case)
    assert window_snapshot_bytes(case.config) == window
    assert window_bytes_per_token(case.config) * case.d.sliding_window == window
    assert replay_tokens(case.config)["exact"] == layers * case.d.sliding_window
    if case.d.model_type == "deepseek_v41":
        halves = [window_snapshot_bytes(case.config, half=half) for half in ("encoder", "decoder")]
        assert sum(halves) == window
        encoder = sum(1 for layer in case.layers if not layer.decoder)
        assert halves[0] * layers == encoder * window


def test_layouts_and_snapshots_can_be_changed(models):
    config = models["v4-flash"]
    assert persistent_cache(config, 100, snapshots=0).by("tier") == {"global": Fraction("351425")}
    assert persistent_cache(config, 100, snapshots=5).by("tier")["window"] == 5 * 3_214_336
    assert persistent_cache(config, 4, layout="fp8-indexer").by("tier")["global"] == 15_401
    assert persistent_cache(models["v4.1-flash"], 10, snapshots=1).by("tier")["window"] == 2_703_360
    assert window_snapshot_bytes(config, layout="bf16") == 43 * 128 * 1024


@pytest.mark.parametrize("snapshots", [-1, True, 1.0, "2"])
def test_snapshots_that_are_none(models, snapshots):
    with pytest.raises(ValueError, match=r"snapshots is .*; accepted: a whole number from 0"):
        persistent_cache(models["v4-flash"], 10, snapshots=snapshots)


def test_other_bad_arguments(models):
    with pytest.raises(ContextError):
        persistent_cache(models["v4-flash"], 0)
    for half in ("middle", "", 1):
        with pytest.raises(ValueError, match=r"half is .*; accepted: encoder, decoder"):
            window_snapshot_bytes(models["v4.1-flash"], half=half)
    for share in (0, 1, -1, 2):
        with pytest.raises(ValueError, match=r"share is .*; accepted"):
            turn_tokens_for_window_share(models["v4-flash"], share)


@given(name=st.sampled_from(PRESETS), turn=st.integers(1, 10**6), more=st.integers(0, 1000))
def test_a_longer_turn_adds_no_less(name, turn, more):
    low, high = persistent_cache(load_config(name), [turn, turn + more]).total()
    assert high - low == more * kv_bytes_per_token(load_config(name))
