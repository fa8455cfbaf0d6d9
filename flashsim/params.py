"""Parameters, per layer and component: in total, and active for one decoded token or one prompt token.

Every stored number is counted once: matrices, norms, biases, sinks, hyper-connection coefficients. Not counted: draft
modules (MTP, DSpark), vision, the token-to-expert tables of hash-routed layers (they hold ids). Active counts leave
out the embedding table, of which one row is looked up, and the final norm (V4.1 architecture, 14.3). A row
holds what is stored; `ParamsReport.active` works out of it what one token multiplies with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashsim.config import (
    CompressedConfig,
    Config,
    DSAConfig,
    GQAConfig,
    MLAConfig,
    MoEConfig,
    V4Config,
    V41Config,
    load_config,
)
from flashsim.report import Part, Report, build
from flashsim.schedule import LayerPlan, last_kv_source

ENGRAM_TABLES = "engram_tables"


class ParamsReport(Report):
    """Parameter counts. `tier` says how a component is used: `always`, `routed`, `looked up`, `head` or `norm`."""

    def total_parameters(self) -> int:
        """Parameters of the backbone, Engram projections included, Engram tables not: the published totals."""
        return self.total() - self.engram_parameters()

    def engram_parameters(self) -> int:
        """Numbers in the Engram tables."""
        return self.by("component").get(ENGRAM_TABLES, 0)

    def active(self, phase: str = "decode", *, embedding: bool = False, head: bool | None = None) -> int:
        """Parameters that one token multiplies with.

        Args:
            phase: `decode`, or `prefill` for a prompt token outside the tail of the prompt.
            embedding: count the whole embedding table too, as some published figures do.
            head: count the LM head; by default at decode and not at prefill, which needs it for one row alone.

        Raises:
            ValueError: another phase.
        """
        if phase not in ("decode", "prefill"):
            raise ValueError(f"phase is {phase!r}; accepted: decode, prefill")
        head = phase == "decode" if head is None else head
        boundary = last_kv_source(self.config) if phase == "prefill" else None
        total = 0
        for row in self.rows:
            if row.tier == "norm" or (row.tier == "head" and not (head and row.component == "lm_head")):
                continue
            decoder = boundary is not None and row.layer is not None and row.layer >= boundary
            source = row.layer == boundary and row.component in ("compressor", "indexer_key")
            if decoder and not source:
                continue
            total += active_share(self.config, row.component, row.values[0])
        if (head and self.config.tie_word_embeddings) or embedding:
            total += self.by("component")["embedding"]
        return total

    def __str__(self) -> str:
        lines = [super().__str__()]
        if tables := self.engram_parameters():
            lines.append(f"of which Engram tables: {tables:,}; the rest: {self.total_parameters():,}")
        lines.append(f"active per decoded token, with the head, without the embedding: {self.active():,}")
        lines.append(f"active per prompt token, without both: {self.active('prefill'):,}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The JSON of `flashsim params`."""
        return {
            "model": self.model,
            "total": self.total_parameters(),
            "active_decode": self.active(),
            "active_prefill": self.active("prefill"),
            "engram": self.engram_parameters(),
            "total_with_engram": self.total(),
            "active_decode_without_head": self.active(head=False),
            "active_decode_with_embedding": self.active(embedding=True),
            "active_prefill_with_head": self.active("prefill", head=True),
            "embedding": self.by("component")["embedding"],
            "lm_head": self.by("component").get("lm_head", 0),
            "rows": [{"component": name, "parameters": value} for name, value in self.by("component").items()],
        }


def active_share(config: Config, component: str, stored: int) -> int:
    """How many of a component's stored parameters one token uses: k of E experts, a few rows of a table."""
    if component == "routed_experts":
        return stored // config.n_routed_experts * config.num_experts_per_tok
    if component == ENGRAM_TABLES:
        rows = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        return rows * config.engram_head_dim
    return stored


def parameters(config: Config) -> ParamsReport:
    """Every parameter of the model, with the formula of each component.

    >>> from flashsim.config import load_config
    >>> report = parameters(load_config("v4.1-flash"))
    >>> report.total_parameters(), report.engram_parameters(), report.active(), report.active("prefill")
    (551880835184, 196613849600, 16130595952, 7895575352)
    """
    config = load_config(config)
    report = build(
        config,
        1,
        lambda plan: _layer(config, plan),
        title=f"{config.name}: parameters",
        unit="parameters",
        whole_model=_ends(config),
        report=ParamsReport,
    )
    report.notes = ()
    return report


def _part(component: str, formula: str, tier: str = "always", names: Mapping[str, int] = {}) -> Part:
    return Part(component, formula, None, tier, "shapes of the released checkpoint", names=names)


def _ends(config: Config) -> list[Part]:
    parts = [_part("embedding", "vocab_size * hidden_size", "head")]
    if not config.tie_word_embeddings:
        parts.append(_part("lm_head", "vocab_size * hidden_size", "head"))
    if isinstance(config, V4Config):
        parts.append(_part("hyper_connection", "hc_mult * hc_mult * hidden_size + hc_mult + 1"))
    return [*parts, _part("final_norm", "hidden_size", "norm")]


def _layer(config: Config, plan: LayerPlan) -> list[Part]:
    if isinstance(config, GQAConfig):
        return _gqa(config)
    attention = _mla(config, plan) if isinstance(config, MLAConfig) else _compressed(config, plan)
    return [*attention, *_feed_forward(config, plan), _part("layer_norms", "2 * hidden_size")]


def _gqa(config: GQAConfig) -> list[Part]:
    kind, queries, keys = config.model_type, "num_attention_heads * head_dim", "num_key_value_heads * head_dim"
    parts = [
        _part("q_projection", f"hidden_size * {queries}"),
        _part("kv_projection", f"2 * hidden_size * {keys}"),
        _part("o_projection", f"{queries} * hidden_size"),
        _part("dense_ffn", "3 * hidden_size * intermediate_size"),
        _part("layer_norms", "2 * hidden_size"),
    ]
    if config.attention_bias:
        output = "" if kind == "qwen2" else " + hidden_size"  # qwen2 has none on the output
        parts.append(_part("attention_bias", f"{queries} + 2 * {keys}{output}"))
    if config.mlp_bias:
        parts.append(_part("mlp_bias", "2 * intermediate_size + hidden_size"))
    if kind == "qwen3":
        parts.append(_part("qk_norm", "2 * head_dim"))
    return parts


def _mla(config: MLAConfig, plan: LayerPlan) -> list[Part]:
    query_width = "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)"
    query = f"hidden_size * q_lora_rank + q_lora_rank + q_lora_rank * {query_width}"
    parts = [
        _part("q_projection", f"hidden_size * {query_width}" if config.q_lora_rank is None else query),
        _part("kv_projection", "hidden_size * (kv_lora_rank + qk_rope_head_dim) + kv_lora_rank"),
        _part("up_projection", "kv_lora_rank * num_attention_heads * (qk_nope_head_dim + v_head_dim)"),
        _part("o_projection", "num_attention_heads * v_head_dim * hidden_size"),
    ]
    if isinstance(config, DSAConfig):
        parts += [
            _part("indexer_query", "q_lora_rank * index_n_heads * index_head_dim"),
            _part("indexer_key", "hidden_size * index_head_dim + 2 * index_head_dim"),
            _part("indexer_weights", "hidden_size * index_n_heads"),
        ]
    return parts


def _compressed(config: CompressedConfig, plan: LayerPlan) -> list[Part]:
    parts = [
        _part("q_projection", "hidden_size * q_lora_rank + q_lora_rank + q_lora_rank * num_attention_heads * head_dim"),
        _part("kv_projection", "hidden_size * head_dim + head_dim"),
        _part("attention_sink", "num_attention_heads"),
        _part("o_projection_group", "num_attention_heads * head_dim * o_lora_rank"),
        _part("o_projection_output", "o_groups * o_lora_rank * hidden_size"),
        _part("hyper_connection", "2 * ((2 + hc_mult) * hc_mult * (hc_mult * hidden_size + 1) + 3)"),
    ]
    if plan.owns_kv:
        parts += _compressor(config, plan)
    if plan.selects:
        parts += [
            _part("indexer_query", "q_lora_rank * index_n_heads * index_head_dim"),
            _part("indexer_weights", "hidden_size * index_n_heads"),
        ]
    if plan.engram is not None:
        width = "(engram_max_ngram_size - 1) * engram_n_heads * engram_head_dim"
        rows = {"engram_rows": config.engram_num_embeddings[plan.engram]}
        parts += [
            _part("engram_projection", f"(hc_mult + 1) * hidden_size * {width} + 2 * hc_mult * hidden_size"),
            _part(ENGRAM_TABLES, "engram_rows * engram_head_dim", "looked up", rows),
        ]
    return parts


def _compressor(config: CompressedConfig, plan: LayerPlan) -> list[Part]:
    if isinstance(config, V4Config):
        if plan.attention == "csa":  # value and gate, twice as wide as groups overlap; a position bias; a norm
            wide = "4 * hidden_size * {0} + 2 * compress_ratio * {0} + {0}"
            return [
                _part("compressor", wide.format("head_dim")),
                _part("indexer_key_compressor", wide.format("index_head_dim")),
            ]
        return [_part("compressor", "2 * hidden_size * head_dim + compress_ratio * head_dim + head_dim")]
    projections = "hidden_size * head_dim" if plan.compress_ratio == 1 else "2 * hidden_size * head_dim"
    return [
        _part("compressor", f"{projections} + head_dim"),
        _part("indexer_key", "head_dim * index_head_dim + index_head_dim"),
    ]


def _feed_forward(config: MoEConfig, plan: LayerPlan) -> list[Part]:
    if plan.feed_forward == "dense":
        return [_part("dense_ffn", "3 * hidden_size * intermediate_size")]
    biases = 0 if plan.feed_forward == "moe_hash" or config.topk_method != "noaux_tc" else 1
    if isinstance(config, V41Config):
        biases = 2 * biases  # one for text, one for image tokens
    bias = {0: "", 1: " + n_routed_experts", 2: " + 2 * n_routed_experts"}[biases]
    expert = "3 * hidden_size * moe_intermediate_size"
    return [
        _part("routed_experts", f"n_routed_experts * {expert}", "routed"),
        _part("shared_experts", f"n_shared_experts * {expert}"),
        _part("router", f"hidden_size * n_routed_experts{bias}"),
    ]
