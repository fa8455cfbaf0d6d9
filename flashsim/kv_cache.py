"""KV-cache bytes *stored* after N tokens, per layer and component, and *reserved* once pages and rings are counted.

Tiers. `global` grows with the context: main KV entries and indexer keys, complete groups only; Figure 1(b) of the V4.1
report counts exactly this. `window` is the sliding window, constant once it is full. `state` is what compressors keep
of groups that are not complete. What a decode step *reads* is another quantity: `flashsim.traffic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from flashsim.config import (
    CompressedConfig,
    Config,
    DSAConfig,
    GQAConfig,
    MLAConfig,
    V4Config,
    V41Config,
    load_config,
)
from flashsim.formats import BF16, ENCODINGS, FP32, Layout, LayoutError, Record, encode
from flashsim.report import Part, Report, Row, build
from flashsim.schedule import LayerPlan, layer_plan
from flashsim.units import number, plain


class ParallelError(ValueError):
    """A tensor-parallel degree by which the heads of a model cannot be divided."""


class KVReport(Report):
    """Stored bytes, with the sums that are asked for most."""

    tiers = ("global", "window", "state")

    def per_token_bytes(self) -> int | Fraction:
        """Bytes one more token adds: each global record divided by the tokens it stands for (Figure 1(b))."""
        total = sum(
            (Fraction(row.bytes_per_record, row.tokens_per_record) for row in self.rows if row.tier == "global"),
            Fraction(0),
        )
        return total.numerator if total.denominator == 1 else total

    def tier_bytes(self, tier: str) -> Any:
        """Bytes of one tier: `global`, `window` or `state`."""
        if tier not in self.tiers:
            raise ValueError(f"tier is {tier!r}; accepted: {', '.join(self.tiers)}")
        return self.by("tier").get(tier, 0 if self.single else [0] * len(self.contexts))

    def __str__(self) -> str:
        per_token = [
            f"{times} x {number(Fraction(rows[0].bytes_per_record, rows[0].tokens_per_record))}"
            for rows in self.groups()
            if rows[0].tier == "global"
            for times in [len(rows)]
        ]
        text = super().__str__()
        if per_token:
            text += f"\nglobal, per token: {' + '.join(per_token)} = {number(self.per_token_bytes())} bytes"
        return text

    def to_json(self) -> dict[str, Any]:
        """The JSON of `flashsim kv`: one document per context."""
        documents = []
        for i, context in enumerate(self.contexts):
            tiers = {tier: self._sums(lambda row: row.tier).get(tier) for tier in self.tiers}
            sizes = {tier: plain(values[i]) if values else 0 for tier, values in tiers.items()}
            documents.append(
                {
                    "model": self.model,
                    "context": context,
                    "per_token_bytes": plain(self.per_token_bytes()),
                    "global_bytes": sizes["global"],
                    "window_bytes": sizes["window"],
                    "state_bytes": sizes["state"],
                    "total_bytes": sum(sizes.values()),
                    "rows": [
                        {
                            "layer": row.layer,
                            "component": row.component,
                            "tier": row.tier,
                            "bytes_per_record": row.bytes_per_record,
                            "tokens_per_record": row.tokens_per_record,
                            "records": row.records[i],
                            "bytes": plain(row.values[i]),
                            "formula": row.formula,
                            "source": row.source,
                        }
                        for row in self.rows
                    ],
                    "notes": list(self.notes),
                }
            )
        return documents[0] if self.single else {"model": self.model, "reports": documents}


def kv_cache(
    config: Config, context: Any = 1_000_000, *, layout: Layout | str | Mapping | None = None, tensor_parallel: int = 1
) -> KVReport:
    """Bytes stored in the cache of one sequence after `context` tokens.

        global: bytes_per_record * floor(N / compress_ratio) for every layer that owns a cache
        window: bytes_per_record * min(N, sliding_window) for every layer with a window
        state:  float32 inputs of the groups that are not complete

    Args:
        config: any family of `flashsim.config`.
        context: tokens, one number or several (`4096`, `"128Ki"`, `[4096, "1M"]`).
        layout: another record layout than the released one, see `flashsim.formats.Layout.of`.
        tensor_parallel: ranks; the report is then for one rank. GQA divides its KV heads down to one a rank, a shared
            latent and indexer keys are on every rank.

    Raises:
        ContextError, LayoutError, ParallelError: naming the value and what is accepted.


    >>> from flashsim.config import load_config
    >>> kv_cache(load_config("v4.1-flash")).per_token_bytes()
    890
    """
    config, layout = load_config(config), Layout.of(layout)
    check_layout(config, layout)
    names = rank_names(config, tensor_parallel)
    where = f" on each of {tensor_parallel} ranks" if tensor_parallel > 1 else ""
    where += f", layout {layout}" if layout != Layout() else ""
    return build(
        config,
        context,
        lambda plan: _parts(config, plan, layout, names),
        title=f"{config.name}: KV bytes stored by one sequence of N tokens{where}",
        unit="bytes",
        report=KVReport,
    )


def kv_bytes_per_token(config: Config, *, layout: Layout | str | Mapping | None = None) -> int | Fraction:
    """Bytes one more token adds to the global cache, all layers: the bars of Figure 1(b).

    >>> from flashsim.config import load_config
    >>> [float(kv_bytes_per_token(load_config(m))) for m in ("v1", "v3.2", "v4-flash", "v4.1-flash")]
    [389120.0, 48068.0, 3514.25, 890.0]
    """
    return kv_cache(config, 1, layout=layout).per_token_bytes()


HISTORY_RECORD_BYTES = 8 + 1
"""One place of the token history: an int64 id, and a byte that says whether it stands inside an image span."""


def token_history_bytes(config: Config, context: int) -> int:
    """Bytes of the token history that Engram needs of a sequence of `context` tokens, constant once it is long enough.

        HISTORY_RECORD_BYTES * min(N, engram_max_ngram_size - 1)          where there are Engram layers, else 0

    One history serves all Engram layers. It is not part of `kv_cache`: ids are the request itself, every server has
    them anyway, and no published total counts them.

    Source: DeepSeek-V4.1-Flash reference code, Engram: a hash of the newest token and the n-gram before it.

    >>> from flashsim.config import load_config
    >>> token_history_bytes(load_config("v4.1-flash"), 1_000_000)
    27
    """
    if not isinstance(config, V41Config) or not config.engram_layer_ids:
        return 0
    return HISTORY_RECORD_BYTES * min(context, config.engram_max_ngram_size - 1)


# --- records ----------------------------------------------------------------------------------------------------------


def main_record(config: Config, layout: Layout | str | None = None, kv_heads: int | None = None) -> Record:
    """The record of one main KV entry in one layer."""
    layout = Layout.of(layout)
    if isinstance(config, GQAConfig):
        width = (kv_heads or config.num_key_value_heads) * config.head_dim
        body = ENCODINGS[layout.main or "bf16"][0]
        return Record(((width, body), (width, body)), "num_key_value_heads x head_dim")
    if isinstance(config, MLAConfig):
        released = "fp8+bf16rope" if isinstance(config, DSAConfig) else "bf16"
        width = config.kv_lora_rank + config.qk_rope_head_dim
        if (layout.main or released) == "bf16":
            return Record(((config.kv_lora_rank, BF16), (config.qk_rope_head_dim, BF16)))
        return encode(layout.main or released, width, config.qk_rope_head_dim, "kv_lora_rank + qk_rope_head_dim")
    released = "v4" if isinstance(config, V4Config) else "fp4"
    return encode(layout.main or released, config.head_dim, config.qk_rope_head_dim, "head_dim")


def window_record(config: Config, layout: Layout | str | None = None, kv_heads: int | None = None) -> Record:
    """The record of one token in the sliding window of one layer."""
    layout = Layout.of(layout)
    if isinstance(config, GQAConfig):
        return main_record(config, Layout(main=layout.window), kv_heads)
    released = "v4" if isinstance(config, V4Config) else "mxfp8"
    return encode(layout.window or released, config.head_dim, config.qk_rope_head_dim, "head_dim")


def index_record(config: Config, layout: Layout | str | None = None) -> Record:
    """The record of one indexer key."""
    layout = Layout.of(layout)
    released = "fp8" if isinstance(config, DSAConfig) else "mxfp4"
    return encode(layout.index or released, config.index_head_dim, field="index_head_dim")


_RECORD_SOURCES = {
    GQAConfig: "grouped-query attention (arXiv 2305.13245), K and V in BF16; DeepSeek LLM (arXiv 2401.02954), Table 2",
    MLAConfig: "DeepSeek-V2 (arXiv 2405.04434), 2.1: one latent and one RoPE key for all heads",
    DSAConfig: "FlashMLA README: 656 bytes (512 FP8, 16 scales, 128 RoPE); vLLM pull request 48993: indexer key",
    V4Config: "FlashMLA README: 584 bytes; vLLM pull request 48993: 68-byte indexer key",
    V41Config: "FlashMLA README and pull request 221: 288 and 528 bytes; V4.1 report 2.4.4",
}
_STATE_SOURCES = {
    V4Config: "DeepSeek-V4 reference code, Compressor: float32 values and gates of an open group, and the overlap",
    V41Config: "DeepSeek-V4.1-Flash reference code, Compressor: float32 values and gates of an open group",
}


def _parts(config: Config, plan: LayerPlan, layout: Layout, names: Mapping[str, int]) -> list[Part]:
    kind, heads = type(config), names.get("num_key_value_heads")
    parts = []

    def stored(
        component: str, tier: str, record: Record, formula: str, tokens: int, source: str, about: str = ""
    ) -> None:
        part = Part(component, f"bytes_per_record * {formula}", record.precision, tier, source, record.nbytes, tokens)
        parts.append(part._replace(record=about + record.describe(), names=names))

    source = _RECORD_SOURCES[kind]
    about = ""
    if isinstance(config, GQAConfig):
        about = f"K and V, {heads} KV heads (num_key_value_heads) x {config.head_dim} (head_dim) each: "
    elif isinstance(config, MLAConfig):
        about = "latent (kv_lora_rank) and RoPE key (qk_rope_head_dim): "
    else:
        about = "one vector (head_dim), key and value of all heads: "
    if plan.owns_kv:
        records = "N" if plan.compress_ratio == 1 else "(N // compress_ratio)"
        record = main_record(config, layout, heads)
        stored("main_kv", "global", record, records, plan.compress_ratio, source, about)
        if plan.owns_index_keys:
            stored(
                "index_key",
                "global",
                index_record(config, layout),
                records,
                plan.compress_ratio,
                source,
                "index_head_dim: ",
            )
    if plan.window is not None:
        stored("window_kv", "window", window_record(config, layout, heads), "min(N, sliding_window)", 1, source, about)
    if isinstance(config, CompressedConfig) and plan.owns_kv:
        for component, records, width in _state(config, plan):
            stored(
                component,
                "state",
                Record(((width, FP32), (width, FP32))),
                records,
                1,
                _STATE_SOURCES[kind],
                "value, gate: ",
            )
    return parts


def _state(config: CompressedConfig, plan: LayerPlan) -> list[tuple[str, str, int]]:
    """(component, records, width) of the compressor inputs that have to survive until their group is complete.

    CSA (overlapping groups) keeps both halves of an open group's tokens, and the first half of the complete group
    before it, which the next entry still needs. Ratio 1 has no gate and nothing pending.
    """
    pending, overlap = "(N % compress_ratio)", "compress_ratio * min(N // compress_ratio, 1)"
    if plan.attention == "csa":
        return [
            ("compressor_state", pending, 2 * config.head_dim),
            ("compressor_overlap", overlap, config.head_dim),
            ("indexer_compressor_state", pending, 2 * config.index_head_dim),
            ("indexer_compressor_overlap", overlap, config.index_head_dim),
        ]
    if plan.compress_ratio > 1 or plan.attention == "hca":
        return [("compressor_state", pending, config.head_dim)]
    return []


def check_layout(config: Config, layout: Layout) -> None:
    """Refuses a layout for records that the model does not have; `bf16` for everything is let through."""
    plans = layer_plan(config)
    for kind, there in (
        ("index", any(plan.owns_index_keys for plan in plans)),
        ("window", any(plan.window for plan in plans)),
    ):
        name = getattr(layout, kind)
        if not there and name not in (None, "bf16", layout.main):
            raise LayoutError(f"layout {kind} is {name!r}; accepted: released, as {config.name} has no {kind} records")


def rank_names(config: Config, ranks: int) -> dict[str, int]:
    heads = config.num_attention_heads
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1 or heads % ranks:
        raise ParallelError(f"tensor_parallel is {ranks!r}; accepted: a divisor of num_attention_heads, {heads}")
    if not isinstance(config, GQAConfig):
        return {}
    kv_heads = config.num_key_value_heads
    if kv_heads % ranks and ranks % kv_heads:
        raise ParallelError(
            f"tensor_parallel is {ranks}; accepted: a divisor or a multiple of num_key_value_heads, {kv_heads}"
        )
    return {"num_key_value_heads": max(kv_heads // ranks, 1)}


# --- reserved ---------------------------------------------------------------------------------------------------------

PAGE_RECORDS = 64
"""Records a page of a serving cache holds (FlashMLA)."""

PAGE_ALIGNMENT = {V4Config: 576, V41Config: 512}
"""Bytes to a multiple of which a page is padded (FlashMLA README, pull request 221)."""


def kv_reserved(
    config: Config,
    context: Any = 1_000_000,
    *,
    layout: Layout | str | Mapping | None = None,
    tensor_parallel: int = 1,
    page_records: int = PAGE_RECORDS,
) -> KVReport:
    """Bytes a serving cache takes for one sequence of N tokens: whole pages, full rings, full compressor buffers.

        global: ceil(records / page_records) pages, each padded to the alignment of the model's kernels
        window: the whole ring of sliding_window records, in pages
        state:  buffers of whole groups (V4: 2 * compress_ratio rows for an overlapping compressor)

    Raises:
        ValueError: `page_records` is not a whole number from 1.
    """
    if isinstance(page_records, bool) or not isinstance(page_records, int) or page_records < 1:
        raise ValueError(f"page_records is {page_records!r}; accepted: a whole number from 1")
    stored = kv_cache(config, context, layout=layout, tensor_parallel=tensor_parallel)
    config = load_config(config)
    alignment = PAGE_ALIGNMENT.get(type(config), 1)
    plans = {}
    if isinstance(config, CompressedConfig):
        plans = dict(enumerate(config.compress_ratios))

    def reserve(row: Row) -> Row | None:
        if row.tier == "state":
            if row.component.endswith("overlap"):
                return None  # part of the buffer below
            ratio = plans[row.layer]
            rows = 2 * ratio if isinstance(config, V4Config) and ratio == config.compress_rate_csa else ratio
            records = (rows,) * len(stored.contexts)
            values = tuple(n * row.bytes_per_record for n in records)
            text = f"{rows} rows x {row.bytes_per_record:,}"
        else:
            wanted = row.records
            if row.tier == "window":
                ring = config.window_of(row.layer) if isinstance(config, GQAConfig) else config.sliding_window
                wanted = (ring,) * len(stored.contexts)
            page = -(-page_records * row.bytes_per_record // alignment) * alignment
            records = tuple(-(-n // page_records) * page_records for n in wanted)
            values = tuple(n // page_records * page for n in records)
            text = f"ceil(records / {page_records}) pages of {page:,} bytes"
        return row._replace(values=values, records=records, formula="whole pages, rings and buffers", numbers=text)

    memo: dict[Row, Row | None] = {}
    rows = []
    for row in stored.rows:
        key = row._replace(layer=plans.get(row.layer, -1))
        if key not in memo:
            memo[key] = reserve(row)
        if memo[key] is not None:
            rows.append(memo[key]._replace(layer=row.layer))
    report = stored._with_rows(rows)
    report.title = stored.title.replace("stored by", "reserved for")
    return report
