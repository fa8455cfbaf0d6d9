"""The replay pictures: the map of rows by brute force, and what every drawing has."""

import pytest

from flashsim import kv_bytes_per_token, load_config
from flashsim.persistent import REPLAY_MODES, replay_rows, replay_tokens, tail_rows
from flashsim.pictures.replay import STATES, is_exact, replay, replay_map, window_marks, windows
from flashsim.schedule import last_kv_source, layer_plan

CASES = [(60, 40), (60, 41), (160, 100), (160, 101), (151, 150), (120, 120), (60, 5), (9, 0), (1, 1), (260, 199)]


def states_by_hand(config, rows):
    """{(layer, position): state}, row by row from the definitions: slow, and without a formula."""
    window, boundary, plans = config.sliding_window, last_kv_source(config), layer_plan(config)
    states, bad_entries = {}, set()
    for plan in plans:
        first = rows.decoder_start if boundary is not None and plan.layer >= boundary else rows.encoder_start
        input_first = rows.encoder_start if boundary is not None and plan.layer <= boundary else first
        below = {p: states.get((plan.layer - 1, p), "exact") for p in range(input_first, rows.prompt)}
        if plan.owns_kv:
            ratio = plan.compress_ratio
            for entry in range(rows.prefix // ratio, rows.prompt // ratio):
                if any(below.get(p) != "exact" for p in range(entry * ratio, (entry + 1) * ratio)):
                    bad_entries.add((entry + 1) * ratio - 1)
        for p in range(rows.prompt):
            if p < first:
                states[plan.layer, p] = "not run"
                continue
            seen = [below.get(q, "not run") for q in range(max(p - window + 1, 0), p + 1)]
            if "cut" in seen or "not run" in seen:
                states[plan.layer, p] = "cut"
            else:
                entry = "entry" in seen or any(q <= p for q in bad_entries)
                states[plan.layer, p] = "entry" if entry else "exact"
    return states


@pytest.mark.parametrize(("prompt", "prefix"), CASES)
@pytest.mark.parametrize("mode", REPLAY_MODES)
@pytest.mark.parametrize("name", ["tiny", "mini"])
def test_every_row_has_the_state_it_has_by_hand(name, mode, prompt, prefix):
    config = load_config(name)
    rows = replay_rows(config, prompt, prefix, mode)
    behind, by_hand = replay_map(config, rows), states_by_hand(config, rows)
    for layer in behind:
        assert [span.low for span in layer.spans[1:]] == [span.high for span in layer.spans[:-1]]
        assert (layer.spans[0].low, layer.spans[-1].high) == (0, prompt)
        for span in layer.spans:
            assert {by_hand[layer.layer, p] for p in range(span.low, span.high)} == {span.state}, (layer, span)
    assert is_exact(config, rows) or mode == "bounded"
    stored = 0 if mode == "cold" else kv_bytes_per_token(config) * (prefix - prefix % 2)
    assert stored <= sum(layer.stored_bytes for layer in behind) <= stored + kv_bytes_per_token(config)


def test_rows_of_the_release():
    config = load_config("v4.1-flash")
    assert tail_rows(config) == 2414 and tail_rows(config, 8) == 2422
    bounded = replay_rows(config, 100_000, 99_000)
    assert (bounded.replayed, bounded.decoder_rows) == (128, 128)
    exact = replay_rows(config, 99_000, 99_000, "exact")
    assert 40 * 127 <= exact.replayed <= replay_tokens(config)["exact"]
    behind = replay_map(config, bounded)
    assert behind[0].rows("cut") == 127 and behind[1].rows("cut") == 2 * 127
    assert [layer.stored_bytes > 0 for layer in behind] == [i in (2, 8, 14, 20) for i in range(40)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "warm"}, "mode is 'warm'; accepted: cold, exact, bounded"),
        ({"prefix": 61}, "prefix is 61; accepted: at most the prompt's 60 tokens"),
        ({"prompt": 0}, "prompt is 0; accepted: a whole number from 1"),
        ({"prefix": 2.5}, "prefix is 2.5"),
        ({"config": "v4-flash"}, "model_type is 'deepseek_v4'"),
        ({"first": 60}, "first is 60; accepted: a position from 0 to 59"),
    ],
)
def test_one_sentence_says_what_is_accepted(change, words):
    given = {"config": "tiny", "prompt": 60, "prefix": 40} | change
    with pytest.raises(ValueError, match=words):
        replay(load_config(given.pop("config")), **given)


def test_windows():
    assert window_marks(3, [4, 5], 1, start=4) == [[0, 0.35, 0.35, 1, 0], [0, 0, 0.35, 1, 1]]
    drawing = windows(8, range(32, 44), start=32)
    assert [row["read"] for row in drawing.rows] == [*range(1, 8), 8, 8, 8, 8, 8]
    assert all(row["read"] + row["missing"] == 8 for row in drawing.rows)
    assert drawing.svg().startswith("<?xml") and "Query 32 reads 1 rows and lacks 7" in drawing.alt


def test_a_drawing_has_words_and_rows():
    config = load_config("v4.1-flash")
    for mode in REPLAY_MODES:
        drawing = replay(config, 10_000, 8_000, mode)
        assert len(drawing.rows) == 40 and "40 layers for 10,000 tokens" in drawing.alt
        assert drawing.rows[-1]["rows run"] == (128 if mode == "bounded" else 2414)
        assert drawing.svg() == replay(config, 10_000, 8_000, mode).svg()
    assert set(STATES) == {"not run", "exact", "cut", "entry"}
