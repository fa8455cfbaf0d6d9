"""Every published number beside the one computed here, with a verdict and the residual.

`data/published_figures.json` holds the published side: value, unit, source, confidence, and `rounding`, the unit of
the last digit that the source states. This file holds the computed side, one expression for each id, from the
formulas of this library and the released configs; no computed number is typed in.

Verdicts: `exact` (equal); `within stated rounding` (the published value is the computed one at the precision it is
stated with); `approximate` (within 10 %, and the residual is shown); `not reproducible` (further away, or nothing to
compute it
from: a price, a score, a policy, an input).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from flashsim.config import load_config
from flashsim.flops import crossing, decode_flops
from flashsim.formats import ENCODINGS
from flashsim.kv_cache import index_record, kv_bytes_per_token, kv_cache, main_record, window_record
from flashsim.params import parameters
from flashsim.paths import data_dir
from flashsim.persistent import persistent_cache, replay_tokens, turn_tokens_for_window_share, window_bytes_per_token
from flashsim.units import number, plain

MILLION = 10**6
"""1M tokens in a published claim is 10^6, unless the claim says otherwise."""
MEBI = 2**20
"""The longest context the models were made for: 256 times 4,096."""

VERDICTS = ("exact", "within stated rounding", "approximate", "not reproducible")
APPROXIMATE = Fraction(1, 10)
"""How far a computed value may be from the published one, relative to it, to count as approximate."""


class Claim(NamedTuple):
    """One published number and what becomes of it here.

    `computed` is None where there is nothing to compute; `how` says how it was computed, or why not. `residual` is
    computed minus published, in the claim's unit; `expected` the verdict that `flashsim verify` insists on.
    """

    id: str
    generation: str
    published: Any
    unit: str
    computed: Any
    verdict: str
    residual: Any
    expected: str
    how: str
    source: str
    confidence: str
    note: str

    @property
    def holds(self) -> bool:
        """Whether the verdict is at least the expected one."""
        return VERDICTS.index(self.verdict) <= VERDICTS.index(self.expected)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {key: plain(value) for key, value in self._asdict().items()} | {"holds": self.holds}


@lru_cache(maxsize=1)
def published_figures() -> dict[str, dict[str, Any]]:
    """The published side by id, as `data/published_figures.json` has it."""
    entries = json.loads((data_dir() / "published_figures.json").read_text(encoding="utf-8"))
    return {entry["id"]: entry for entry in entries}


def check_claims() -> tuple[Claim, ...]:
    """Every published number, recomputed.

    >>> claims = {claim.id: claim for claim in check_claims()}
    >>> claims["kv_bytes_per_token.V4.1-Flash"].verdict, claims["decode_flops_growth.V4.1-Flash_4K_to_1M"].verdict
    ('exact', 'approximate')
    """
    return tuple(_check(entry) for entry in published_figures().values())


def value_text(value: Any) -> str:
    """A published or computed value for people; a dash where there is none."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    return value if isinstance(value, str) else number(value)


def residual_text(claim: Claim) -> str:
    """The residual of a claim for people, with its share of the published value; a dash where there is none."""
    residual, published = claim.residual, claim.published
    if residual is None or residual == 0 or isinstance(published, list):
        return "0" if residual == 0 else "-"
    share = float(residual / Fraction(str(published)))
    return f"{'+' if residual > 0 else ''}{number(residual)} ({share:+.1%})"


def _check(entry: dict[str, Any]) -> Claim:
    value, how = None, _reason(entry)
    if entry["id"] in _COMPUTED:
        how, compute = _COMPUTED[entry["id"]]
        value = compute()
    verdict, residual = _judge(entry, value)
    return Claim(
        entry["id"],
        entry["generation"],
        entry["value"],
        entry["unit"],
        value,
        verdict,
        residual,
        entry["expected"],
        how,
        entry["source"],
        entry["confidence"],
        entry["note"],
    )


def _judge(entry: dict[str, Any], computed: Any) -> tuple[str, Any]:
    published = entry["value"]
    if computed is None:
        return "not reproducible", None
    if isinstance(published, list):
        if computed == published:
            return "exact", 0
        if len(published) == 2 and not isinstance(computed, list):  # a range
            low, high = published
            inside = low <= computed <= high
            return ("within stated rounding", 0) if inside else ("not reproducible", computed - min(published))
        return "not reproducible", None
    stated = Fraction(str(published))
    residual = Fraction(computed) - stated
    if residual == 0:
        return "exact", 0
    unit = Fraction(str(entry["rounding"]))
    truncated = entry.get("rounding_mode") == "truncate"
    if unit and (0 <= residual < unit if truncated else abs(residual) <= unit / 2):
        return "within stated rounding", residual
    return ("approximate" if abs(residual) <= APPROXIMATE * abs(stated) else "not reproducible"), residual


def _reason(entry: dict[str, Any]) -> str:
    kinds = {
        "price": "a price: nothing to compute",
        "peak_hours": "a price schedule: nothing to compute",
        "fig1a": "a benchmark score: needs the trained model",
        "kernels_per": "a count of kernel launches in the vendor's own serving code",
        "persistent_residency": "a service policy: nothing to compute",
        "persistent_global_lifetime": "a service policy: nothing to compute",
        "window_pool_share": "a service policy, used as an input in flashsim.persistent",
        "persistent_window_snapshots": "a service policy, used as an input in flashsim.persistent",
        "flops_weight": "a convention, used as an input in flashsim.flops",
    }
    for prefix, reason in kinds.items():
        if entry["id"].startswith(prefix):
            return reason
    if entry["id"] == "persistent_window_share.V4":
        turn = turn_tokens_for_window_share(load_config("v4-flash"), Fraction(1, 2))
        return f"the length of a turn is not published; the share is one half at {round(turn):,} new tokens"
    return "not computed here"


# --- the computed side ------------------------------------------------------------------------------------------------


def _per_token(preset: str, layout: str | None = None) -> Fraction:
    return Fraction(kv_bytes_per_token(load_config(preset), layout=layout))


def _stored(preset: str, context: int, layout: str | None = None) -> Fraction:
    """Global and window bytes of one sequence; compressor state is not in the published sums."""
    report = kv_cache(load_config(preset), context, layout=layout)
    return Fraction(report.tier_bytes("global") + report.tier_bytes("window"))


def _flops(preset: str, context: int) -> Fraction:
    return Fraction(decode_flops(load_config(preset), context).weighted_total())


def _params(preset: str, what: str) -> int:
    report = parameters(load_config(preset))
    return {
        "total": report.total_parameters,
        "engram": report.engram_parameters,
        "decode": report.active,
        "prefill": lambda: report.active("prefill"),
    }[what]()


def _field(preset: str, name: str) -> Any:
    value = getattr(load_config(preset), name)
    return list(value) if isinstance(value, tuple) else value


def _bits_from_reduction() -> Fraction:
    """Bits an element of V2's latent if the deployed cache is as much smaller than V1's as the abstract says."""
    kept = 1 - Fraction(str(published_figures()["kv_reduction.V2_vs_V1"]["value"])) / 100
    latent = _per_token("v2") / _element_bits("bf16")
    return kept * _per_token("deepseek-llm-67b") / latent


def _element_bits(encoding: str) -> int:
    return ENCODINGS[encoding][0].element_bits


def _gqa8_share(preset: str) -> Fraction:
    """Percent of a cache with 8 KV heads of 128 in BF16 in as many layers."""
    config = load_config(preset)
    baseline = config.num_hidden_layers * main_record(load_config("deepseek-llm-67b")).nbytes
    return 100 * _per_token(preset) / baseline


def _main_per_token(preset: str) -> Fraction:
    config = load_config(preset)
    return sum(
        Fraction(row.bytes_per_record, row.tokens_per_record)
        for row in kv_cache(config, 1).rows
        if row.component == "main_kv"
    )


def _persistent_ratio() -> Fraction:
    """V4.1's persistent bytes over V4-Flash's, for turns in which windows are half of what V4-Flash keeps."""
    turn = round(turn_tokens_for_window_share(load_config("v4-flash"), Fraction(1, 2)))
    ours, theirs = (Fraction(persistent_cache(load_config(p), turn).total()) for p in ("v4.1-flash", "v4-flash"))
    return ours / theirs


_RATIO = "bytes per token of one over the other, global KV"
_AT_1M = "weighted FLOPs of one decode step at 10^6 tokens"
_CHART = "weighted FLOPs of one decode step, in 10^9"

_COMPUTED: dict[str, tuple[str, Callable[[], Any]]] = {
    # Figure 1(b)
    "kv_bytes_per_token.V1": ("kv_bytes_per_token", lambda: _per_token("deepseek-llm-67b")),
    "kv_bytes_per_token.V3.2": ("kv_bytes_per_token", lambda: _per_token("v3.2")),
    "kv_bytes_per_token.V4-Flash": ("kv_bytes_per_token", lambda: _per_token("v4-flash")),
    "kv_bytes_per_token.V4.1-Flash": ("kv_bytes_per_token", lambda: _per_token("v4.1-flash")),
    "kv_ratio.V1_over_V3.2": (_RATIO, lambda: _per_token("deepseek-llm-67b") / _per_token("v3.2")),
    "kv_ratio.V3.2_over_V4-Flash": (_RATIO, lambda: _per_token("v3.2") / _per_token("v4-flash")),
    "kv_ratio.V4-Flash_over_V4.1-Flash": (_RATIO, lambda: _per_token("v4-flash") / _per_token("v4.1-flash")),
    "kv_ratio.V4-Flash_over_V4.1-Flash.text": (_RATIO, lambda: _per_token("v4-flash") / _per_token("v4.1-flash")),
    "kv_ratio.V1_over_V4.1-Flash": (_RATIO, lambda: _per_token("deepseek-llm-67b") / _per_token("v4.1-flash")),
    # other sizes
    "kv_bytes_per_token.V3.kb": ("kv_bytes_per_token / 1000", lambda: _per_token("v3") / 1000),
    "kv_reduction.V2_vs_V1": (
        "with 6 bits an element in V2's latent",
        lambda: 100 * (1 - _per_token("v2", "6bit") / _per_token("deepseek-llm-67b")),
    ),
    "kv_bits_per_element.V2_deployed": ("the bits that give the published 93.3 %", _bits_from_reduction),
    "kv_share.V4-Pro_vs_V3.2_at_1M": (
        "global and window bytes at 10^6 tokens",
        lambda: 100 * _stored("v4-pro", MILLION) / _stored("v3.2", MILLION),
    ),
    "kv_share.V4-Flash_vs_V3.2_at_1M": (
        "global and window bytes at 10^6 tokens",
        lambda: 100 * _stored("v4-flash", MILLION) / _stored("v3.2", MILLION),
    ),
    "kv_ratio.V3.2_over_V4-Pro_at_1M": (
        "global and window bytes at 10^6 tokens",
        lambda: _stored("v3.2", MILLION) / _stored("v4-pro", MILLION),
    ),
    "kv_ratio.V3.2_over_V4-Flash_at_1M": (
        "global and window bytes at 10^6 tokens",
        lambda: _stored("v3.2", MILLION) / _stored("v4-flash", MILLION),
    ),
    "kv_share.V4_vs_bf16_gqa8_at_1M": (
        "V4-Flash against 8 KV heads of 128 in BF16 in as many layers",
        lambda: _gqa8_share("v4-flash"),
    ),
    "window_kv_vs_compressed_kv.V4": (
        "V4-Flash: window records of every token over compressed main KV",
        lambda: window_bytes_per_token(load_config("v4-flash")) / _main_per_token("v4-flash"),
    ),
    "kv_bf16_total.V4-Pro_at_1M": (
        "layout bf16, window included, at 2^20 tokens",
        lambda: _stored("v4-pro", MEBI, "bf16") / 2**30,
    ),
    "kv_bf16_ratio.V3.2_over_V4-Pro_at_1M": (
        "layout bf16, window included, at 2^20 tokens",
        lambda: _stored("v3.2", MEBI, "bf16") / _stored("v4-pro", MEBI, "bf16"),
    ),
    "kv_total_1M.V4.1-Flash": ("bytes per token x 10^6", lambda: _per_token("v4.1-flash") * MILLION / 10**9),
    "kv_total_1M.V4-Flash": ("bytes per token x 10^6", lambda: _per_token("v4-flash") * MILLION / 10**9),
    "hbm_share.V4.1-Flash_vs_V4-Flash": (_RATIO, lambda: _per_token("v4.1-flash") / _per_token("v4-flash")),
    # decode FLOPs
    "flops_share.V4-Pro_vs_V3.2_at_1M": (_AT_1M, lambda: 100 * _flops("v4-pro", MILLION) / _flops("v3.2", MILLION)),
    "flops_share.V4-Flash_vs_V3.2_at_1M": (_AT_1M, lambda: 100 * _flops("v4-flash", MILLION) / _flops("v3.2", MILLION)),
    "flops_ratio.V3.2_over_V4-Pro_at_1M": (_AT_1M, lambda: _flops("v3.2", MILLION) / _flops("v4-pro", MILLION)),
    "flops_ratio.V3.2_over_V4-Flash_at_1M": (_AT_1M, lambda: _flops("v3.2", MILLION) / _flops("v4-flash", MILLION)),
    "decode_flops_growth.V4.1-Flash_4K_to_1M": (
        "weighted FLOPs at 2^20 over those at 4,096 tokens (256-fold), less one",
        lambda: 100 * (_flops("v4.1-flash", MEBI) / _flops("v4.1-flash", 4096) - 1),
    ),
    "decode_flops_crossing.V4.1-Flash_V4-Flash": (
        "first context at which V4.1-Flash needs fewer weighted FLOPs",
        lambda: crossing(load_config("v4.1-flash"), load_config("v4-flash")),
    ),
    "decode_flops_crossing.V4.1-Flash_V4-Flash.range": (
        "first context at which V4.1-Flash needs fewer weighted FLOPs",
        lambda: crossing(load_config("v4.1-flash"), load_config("v4-flash")),
    ),
    "decode_weighted_gflops.V4.1-Flash.4K": (f"{_CHART}, at 4,096 tokens", lambda: _flops("v4.1-flash", 4096) / 10**9),
    "decode_weighted_gflops.V4.1-Flash.1M": (f"{_CHART}, at 2^20 tokens", lambda: _flops("v4.1-flash", MEBI) / 10**9),
    "decode_weighted_gflops.V4-Flash.4K": (f"{_CHART}, at 4,096 tokens", lambda: _flops("v4-flash", 4096) / 10**9),
    "decode_weighted_gflops.V4-Flash.1M": (f"{_CHART}, at 2^20 tokens", lambda: _flops("v4-flash", MEBI) / 10**9),
    # parameters
    "params_total.V1": ("all parameters", lambda: _params("deepseek-llm-67b", "total")),
    "params_total.V2": ("all parameters", lambda: _params("v2", "total")),
    "params_active.V2": ("active, head without embedding", lambda: _params("v2", "decode")),
    "params_total.V3": ("all parameters without the draft layer", lambda: _params("v3", "total")),
    "params_active.V3": ("active, head without embedding", lambda: _params("v3", "decode")),
    "params_active.V3.weight_notes": ("active, head without embedding", lambda: _params("v3", "decode")),
    "params_total.V4-Flash": ("all parameters without the draft layer", lambda: _params("v4-flash", "total")),
    "params_active.V4-Flash": ("active, head without embedding", lambda: _params("v4-flash", "decode")),
    "params_total.V4-Pro": ("all parameters without the draft layer", lambda: _params("v4-pro", "total")),
    "params_active.V4-Pro": ("active, head without embedding", lambda: _params("v4-pro", "decode")),
    "params_backbone.V4.1-Flash": ("all but Engram tables and drafter", lambda: _params("v4.1-flash", "total")),
    "params_engram.V4.1-Flash": ("rows x width of both tables", lambda: _params("v4.1-flash", "engram")),
    "params_active_prefill.V4.1-Flash": ("encoder, last KV source, no head", lambda: _params("v4.1-flash", "prefill")),
    "params_active_decode.V4.1-Flash": ("active, head without embedding", lambda: _params("v4.1-flash", "decode")),
    # records
    "record_bytes.V3.2.main": ("from its parts", lambda: main_record(load_config("v3.2")).nbytes),
    "record_bytes.V4.main": ("from its parts", lambda: main_record(load_config("v4-flash")).nbytes),
    "record_bytes.V4.1.window": ("from its parts", lambda: window_record(load_config("v4.1-flash")).nbytes),
    "record_bytes.V4.1.main": ("from its parts", lambda: main_record(load_config("v4.1-flash")).nbytes),
    "record_bytes.indexer_fp8": ("from its parts", lambda: index_record(load_config("v3.2")).nbytes),
    "record_bytes.indexer_fp4": ("from its parts", lambda: index_record(load_config("v4.1-flash")).nbytes),
    # the cache between requests
    "persistent_kv_ratio.V4.1_over_V4-Flash": ("for turns with half window share", _persistent_ratio),
    "ssd_share.V4.1-Flash_vs_V4-Flash": ("for turns with half window share", _persistent_ratio),
    "replay_tokens.V4.1-Flash.bounded": ("one window", lambda: replay_tokens(load_config("v4.1-flash"))["bounded"]),
    "replay_tokens.V4.1-Flash.exact": ("layers x window", lambda: replay_tokens(load_config("v4.1-flash"))["exact"]),
    # sizes that the report and the released config both state
    "layers.V4.1-Flash": ("num_hidden_layers of the config", lambda: _field("v4.1-flash", "num_hidden_layers")),
    "window.V4.1-Flash": ("sliding_window of the config", lambda: _field("v4.1-flash", "sliding_window")),
    "sparse_topk.V4.1-Flash": ("index_topk of the config", lambda: _field("v4.1-flash", "index_topk")),
    "candidate_pool.V4.1-Flash": (
        "candidate_topk_blocks x candidate_block_size of the config",
        lambda: _field("v4.1-flash", "candidate_topk_blocks") * _field("v4.1-flash", "candidate_block_size"),
    ),
    "kv_source_layers.V4.1-Flash": ("the config", lambda: _field("v4.1-flash", "kv_source_layer_ids")),
    "index_source_layers.V4.1-Flash": ("the config", lambda: _field("v4.1-flash", "index_source_layer_ids")),
}
