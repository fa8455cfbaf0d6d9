"""The ladder: every rung is a config that runs, and the differences add up."""

import itertools
from fractions import Fraction

from flashsim import Config, kv_bytes_per_token, ladder, load_config


def test_the_ends_and_the_sum():
    rungs = ladder()
    assert rungs[0].per_token_bytes == 389_120
    assert rungs[-1].per_token_bytes == 890
    assert rungs[0].change_bytes == 0
    assert rungs[0].per_token_bytes + sum(rung.change_bytes for rung in rungs) == 890


def test_each_rung_is_the_difference_to_the_one_before():
    rungs = ladder()
    for before, rung in itertools.pairwise(rungs):
        assert rung.change_bytes == rung.per_token_bytes - before.per_token_bytes
        assert rung.change_bytes != 0


def test_each_rung_is_what_its_config_comes_to():
    for rung in ladder():
        assert isinstance(rung.config, Config)
        assert kv_bytes_per_token(rung.config, layout=rung.layout) == rung.per_token_bytes


def test_each_config_can_be_written_down_and_loaded():
    for rung in ladder():
        again = load_config(rung.config.to_dict())
        assert kv_bytes_per_token(again, layout=rung.layout) == rung.per_token_bytes


def test_released_rungs_are_the_presets():
    released = {rung.released: rung for rung in ladder() if rung.released}
    assert list(released) == ["deepseek-llm-67b", "v2", "v3", "v3.2", "v4-flash", "v4.1-flash"]
    published = [389_120, 69_120, 70_272, 48_068, Fraction("3514.25"), 890]
    assert [rung.per_token_bytes for rung in released.values()] == published
    for name, rung in released.items():
        assert rung.config == load_config(name)
        assert rung.layout.main is rung.layout.index is rung.layout.window is None


def test_rungs_between_the_releases():
    """Bytes of the steps in between, by hand."""
    values = [rung.per_token_bytes for rung in ladder()]
    expected = [
        389_120,
        60 * 4096,
        60 * 1152,
        61 * 1152,
        61 * 656,
        61 * (656 + 132),
        43 * (656 + 132),
        43 * (584 + 132),
        43 * (584 + 68),
        Fraction(43 * (584 + 68), 4),
        23 * Fraction(584 + 68, 4) + 20 * Fraction(584, 128),
        21 * Fraction(584 + 68, 4) + 20 * Fraction(584, 128),
        18 * Fraction(584 + 68, 2) + 20 * (584 + 68),
        18 * Fraction(288 + 68, 2) + 20 * (288 + 68),
        3 * Fraction(288 + 68, 2) + 20 * (288 + 68),
        3 * Fraction(288 + 68, 2) + (288 + 68),
    ]
    assert values == expected


def test_every_rung_says_what_changed_and_where_it_is_taught():
    rungs = ladder()
    assert len({rung.change for rung in rungs}) == len(rungs)
    assert all(rung.change and rung.mechanism for rung in rungs)
