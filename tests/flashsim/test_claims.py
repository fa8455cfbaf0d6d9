"""The published side and the computed side, kept apart; verdicts that can fail."""

from fractions import Fraction

import pytest

from flashsim import claims
from flashsim.claims import VERDICTS, _judge, check_claims, published_figures

CLAIMS = {claim.id: claim for claim in check_claims()}


def test_every_verdict_is_the_expected_one():
    assert [claim.id for claim in CLAIMS.values() if claim.verdict != claim.expected] == []


def test_every_published_number_is_there_once():
    assert list(CLAIMS) == list(published_figures())
    assert set(claims._COMPUTED) <= set(published_figures())


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        ("kv_bytes_per_token.V1", "exact"),
        ("kv_bytes_per_token.V3.2", "exact"),
        ("kv_bytes_per_token.V4-Flash", "within stated rounding"),
        ("kv_bytes_per_token.V4.1-Flash", "exact"),
        ("kv_ratio.V3.2_over_V4-Pro_at_1M", "within stated rounding"),  # 9.545 with the window, 9.55 without
        ("decode_flops_growth.V4.1-Flash_4K_to_1M", "approximate"),
        ("decode_flops_crossing.V4.1-Flash_V4-Flash", "approximate"),
        ("persistent_kv_ratio.V4.1_over_V4-Flash", "approximate"),
        ("price.V3.2.2025-12.cache_hit", "not reproducible"),
    ],
)
def test_verdicts_of_the_known_claims(claim, verdict):
    assert CLAIMS[claim].verdict == verdict


def test_known_residuals_are_shown():
    assert round(float(CLAIMS["decode_flops_growth.V4.1-Flash_4K_to_1M"].residual), 2) == 1.97  # 27.0 % against 25 %
    assert CLAIMS["decode_flops_crossing.V4.1-Flash_V4-Flash"].residual == 7_648


def test_a_claim_without_a_computed_side_says_why():
    silent = [claim.id for claim in CLAIMS.values() if claim.computed is None and claim.how == "not computed here"]
    assert silent == []


@pytest.mark.parametrize(
    ("published", "rounding", "mode", "computed", "verdict"),
    [
        (890, 1, None, 890, "exact"),
        (890, 1, None, Fraction(8904, 10), "within stated rounding"),
        (890, 1, None, 891, "approximate"),
        (890, 1, None, 1780, "not reproducible"),
        (9.5, 0.1, None, Fraction(955, 100), "within stated rounding"),
        (9.5, 0.1, None, Fraction(9551, 1000), "approximate"),
        (196, 1, "truncate", Fraction(1966, 10), "within stated rounding"),
        (196, 1, "truncate", Fraction(1959, 10), "approximate"),
        (0.125, 0, None, Fraction(127, 1000), "approximate"),
        ([2, 8], 0, None, [2, 8], "exact"),
        ([2, 8], 0, None, [2, 9], "not reproducible"),
        ([100, 200], 0, None, 150, "within stated rounding"),
        ([100, 200], 0, None, 201, "not reproducible"),
        (5, 0, None, None, "not reproducible"),
    ],
)
def test_judgement(published, rounding, mode, computed, verdict):
    entry = {"value": published, "rounding": rounding} | ({"rounding_mode": mode} if mode else {})
    assert _judge(entry, computed)[0] == verdict


def test_a_wrong_formula_does_not_hold(monkeypatch):
    """A cache that forgets the indexer's keys, the mistake that several calculators made."""
    monkeypatch.setitem(claims._COMPUTED, "kv_bytes_per_token.V3.2", ("without indexer keys", lambda: 61 * 656))
    wrong = {claim.id: claim for claim in check_claims()}["kv_bytes_per_token.V3.2"]
    assert not wrong.holds and VERDICTS.index(wrong.verdict) > VERDICTS.index("exact")


def test_every_claim_is_plain_json():
    import json

    assert json.loads(json.dumps([claim.to_dict() for claim in CLAIMS.values()]))
