"""`python -m model.ladder`: every generation measured at one small scale, equal to what is predicted."""

import json
from fractions import Fraction

import pytest

from flashsim.config import LADDER_PRESETS, PRESETS, load_config
from flashsim.kv_cache import kv_bytes_per_token
from model import ladder
from model.flop_counter import REASONS

CONTEXT = 45


@pytest.fixture(scope="module")
def rungs():
    return ladder.climb("Ladder. ", CONTEXT)


def test_every_generation_in_order(rungs):
    assert [rung.released for rung in rungs] == list(PRESETS)
    assert [rung.small for rung in rungs] == list(LADDER_PRESETS)
    for small, released in zip(LADDER_PRESETS, PRESETS, strict=True):
        assert type(load_config(small)) is type(load_config(released))


def test_measured_is_predicted(rungs):
    """Seen red with one layer's records left out of nbytes, and with the indexer's label left out."""
    for rung in rungs:
        assert rung.measured.stored_bytes_per_token == rung.predicted.stored_bytes_per_token
        assert rung.measured.window_bytes == rung.predicted.window_bytes
        assert rung.measured.read_bytes_per_step == rung.predicted.read_bytes_per_step and not rung.read_differences
        beyond = sum(row.counted - row.predicted for row in rung.flops_differences.values())
        assert rung.measured.decode_flops - beyond == rung.predicted.decode_flops
        assert set(rung.flops_differences) <= set(REASONS)


def test_the_shape_of_the_release(rungs):
    """Each step of the ladder goes the same way at both sizes, and V4 has a window where V1 to V3.2 have none."""
    charted = [rung for rung in rungs if rung.released in ("deepseek-llm-67b", "v3.2", "v4-flash", "v4.1-flash")]
    for name in ("measured", "predicted_released"):
        bars = [getattr(rung, name).stored_bytes_per_token for rung in charted]
        assert bars == sorted(bars, reverse=True) and bars[0] > 90 * bars[-1]
    assert [rung.predicted_released.stored_bytes_per_token for rung in charted] == [
        389_120,
        48_068,
        Fraction(14057, 4),
        890,
    ]
    assert [bool(rung.measured.window_bytes) for rung in rungs] == [False] * 4 + [True] * 3


def test_the_table_can_be_read(rungs):
    text = ladder.table(rungs)
    assert max(map(len, text.splitlines())) <= 150
    for words in ("45 tokens visible", "16,384", "160.5", "389,120", "890", "Figure 1(b)", "hyper_connection_mixing"):
        assert words in text
    for rung in rungs:
        assert sum(line.startswith(rung.generation + " ") for line in text.splitlines()) == 2


def test_command_line(rungs, monkeypatch, capsys, tmp_path):
    asked = []
    monkeypatch.setattr(ladder, "climb", lambda prompt, context, progress: asked.append((prompt, context)) or rungs)
    assert ladder.main([]) == 0
    assert capsys.readouterr().out.strip() == ladder.table(rungs).strip()
    assert ladder.main(["--context", "1.5Ki", "--prompt", "abc"]) == 0
    assert asked == [(ladder.PROMPT, ladder.CONTEXT), ("abc", 1536)]
    assert ladder.main(["--context", "abc"]) == 1
    assert "context is 'abc'; accepted: a whole number of tokens" in capsys.readouterr().err
    assert ladder.main(["--json", "--figure", str(tmp_path / "new" / "ladder.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[-1]["measured"]["stored_bytes_per_token"] == float(kv_bytes_per_token(load_config("ladder-v4.1")))
    assert found[-1]["flops_differences"]["indexer_key"]["reason"] == REASONS["indexer_key"]
    svg = (tmp_path / "new" / "ladder.svg").read_text()
    assert "<title" in svg and "V4.1-Flash: small model 160.5 bytes a token measured, 160.5 predicted" in svg
    assert ladder.main(["--figure", str(tmp_path / "ladder.gif")]) == 1
    assert "accepted: a path that ends in .svg or .png" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("text", 0), "context is 0; accepted: 1 to 4095 tokens"),
        (("text", 10**7), "context is 10000000; accepted: 1 to 4095 tokens"),
        (("",), "prompt is empty"),
    ],
)
def test_what_it_refuses(arguments, text):
    with pytest.raises(ladder.LadderError, match=text):
        ladder.climb(*arguments)
