"""FLOPs of one decode step and of a prefill, per layer and component.

Conventions. One multiply-accumulate is 2 FLOPs; only matrix products are counted: not softmax, norms, RoPE, top-k,
pooling, Sinkhorn steps, residual sums, embedding lookup, sampling, draft modules. N is the number of tokens visible to
the query, its own included; divisions are floors. *Weighted* FLOPs multiply each by the weight of the precision that
the multiplication runs in, BF16 1, FP8 1/2, FP4 1/4, FP32 and TF32 as BF16 (V4.1 report, Figure 2). That is the
precision of the product, not of the storage: FP4 expert weights meet FP8 activations on the FP8 path, and cached FP8
or FP4 entries are expanded to BF16 before the attention product.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from flashsim.config import CompressedConfig, Config, GQAConfig, MLAConfig, MoEConfig, V4Config, V41Config, load_config
from flashsim.formula import Formula, Number
from flashsim.report import Part, Report, build, field_names
from flashsim.schedule import LayerPlan, last_kv_source, layer_plan
from flashsim.units import number, parse_context, plain

WEIGHTS: Mapping[str, Fraction] = MappingProxyType(
    {"fp32": Fraction(1), "bf16": Fraction(1), "fp8": Fraction(1, 2), "fp4": Fraction(1, 4)}
)
"""Weight of one FLOP by the precision of the product (V4.1 report, Figure 2 caption; FP32 is BF16 class)."""


MAX_WEIGHT = 10**6
"""The largest weight of a precision that is taken."""


class FlopsReport(Report):
    """FLOPs with the weighted sums of Figure 2. `weights` holds the weights that its sums use where none are given."""

    weights: Mapping[str, Fraction] = WEIGHTS

    def with_weights(self, weights: Mapping[str, Number] | None) -> FlopsReport:
        """The same report with other weights, such as `{"fp4": Fraction(1, 2)}`."""
        copy = self._with_rows(self.rows)
        copy.weights = MappingProxyType(self._weights(weights))
        return copy

    def weighted_total(self, weights: Mapping[str, Number] | None = None) -> Any:
        """Sum of raw FLOPs times the weight of their precision, exact; `weights` changes some of `WEIGHTS`.

        Raises:
            ValueError: a precision without a weight.
        """
        weights = self._weights(weights)
        total = [Fraction(0)] * len(self.contexts)
        for precision, values in self._sums(lambda row: row.precision).items():
            total = [t + weights[precision] * v for t, v in zip(total, values, strict=True)]
        return self._shape(total)

    def weighted_by(self, *keys: str, weights: Mapping[str, Number] | None = None) -> dict[Any, Any]:
        """Weighted sums by `component`, `layer` or `precision`."""
        weights = self._weights(weights)
        result: dict[Any, list] = {}
        for (precision, *name), values in self.by("precision", *keys).items():
            values = [values] if self.single else values
            name = name[0] if len(name) == 1 else tuple(name)
            so_far = result.setdefault(name, [Fraction(0)] * len(self.contexts))
            result[name] = [t + weights[precision] * v for t, v in zip(so_far, values, strict=True)]
        return {name: self._shape(values) for name, values in result.items()}

    def _weights(self, changes: Mapping[str, Number] | None) -> dict[str, Fraction]:
        weights = dict(self.weights)
        for precision, weight in (changes or {}).items():
            if precision not in WEIGHTS:
                raise ValueError(f"precision is {precision!r}; accepted: {', '.join(WEIGHTS)}")
            number = isinstance(weight, int | float | Fraction) and not isinstance(weight, bool)
            if not (number and 0 <= weight <= MAX_WEIGHT):
                raise ValueError(f"weight of {precision} is {weight}; accepted: a number from 0 to {MAX_WEIGHT:,}")
            weights[precision] = Fraction(weight)
        return weights

    def table(self) -> list[dict[str, Any]]:
        rows = super().table()
        for row in rows:
            row["weighted_value"] = plain(self.weights[row["precision"]] * Fraction(row["value"]))
        return rows

    def __str__(self) -> str:
        lines = [super().__str__()]
        by_precision = {key: [v] if self.single else v for key, v in self.by("precision").items()}
        for i, context in enumerate(self.contexts):
            sums = [f"{self.weights[key]} x {number(values[i])} {key}" for key, values in by_precision.items()]
            value = self.weighted_total() if self.single else self.weighted_total()[i]
            at = "" if self.single else f" at N = {context:,}"
            lines.append(f"weighted{at}: {' + '.join(sums)} = {number(value)} FLOPs")
        return "\n".join(lines)

    def to_json(self, weights: Mapping[str, Number] | None = None) -> dict[str, Any]:
        """The JSON of `flashsim flops`: lists with one value per context, rows by component and precision."""
        listed = self._with_rows(self.rows)
        listed.single = False
        return {
            "model": self.model,
            "contexts": list(self.contexts),
            "raw_flops": [plain(v) for v in listed.total()],
            "weighted_flops": [plain(v) for v in listed.weighted_total(weights)],
            "weights": {precision: plain(weight) for precision, weight in self._weights(weights).items()},
            "rows": [
                {"component": component, "precision": precision, "raw_flops": [plain(v) for v in values]}
                for (component, precision), values in listed.by("component", "precision").items()
            ],
            "notes": list(self.notes),
        }


def decode_flops(
    config: Config, context: Any = 1_000_000, *, precision: Mapping[str, str] | None = None
) -> FlopsReport:
    """FLOPs of one decode step with N tokens visible, the query's own included.

    MLA runs in its absorbed form: keys of kv_lora_rank + qk_rope_head_dim and values of kv_lora_rank channels, shared
    by all heads. Compressors work on every token; the indexer key of a V4.1 entry is projected once per
    `compress_ratio`.

    Args:
        config: any family of `flashsim.config`.
        context: tokens, one number or several.
        precision: another precision for some components, such as `{"routed_experts": "fp4"}`.

    Raises:
        ContextError, ValueError: naming the value and what is accepted.

    Source: the tables of each technical report, cited per row; Figure 2 of the V4.1 report for the weights.

    >>> from flashsim.config import load_config
    >>> round(decode_flops(load_config("v4.1-flash"), 4096).weighted_total() / 10**9, 1)
    20.2
    """
    config = load_config(config)
    names, changes = _names(config), _precision_changes(config, precision)
    return build(
        config,
        context,
        lambda plan: _with_precision(_layer(config, plan), changes),
        title=f"{config.name}: FLOPs of one decode step with N tokens visible",
        unit="FLOPs",
        whole_model=_with_precision([*_top(config), _head(config)], changes),
        report=FlopsReport,
        names=names,
    )


def prefill_flops_per_token(
    config: Config, context: Any = 1_000_000, *, precision: Mapping[str, str] | None = None
) -> FlopsReport:
    """FLOPs of one prompt token at position N that is not in the tail of the prompt.

    With a causal encoder-decoder: the layers below the last KV source, and that source's compressor and indexer key.
    Other
    models: every layer. No LM head. MLA runs in its naive form, with keys and values expanded once per token; V3.2's
    sparse attention in the absorbed form, as at decode.

    Source: V4.1 report 2.2 and 3.2.2; DeepSeek-V2, 2.1, for the two forms of MLA.
    """
    config = load_config(config)
    boundary, changes = last_kv_source(config), _precision_changes(config, precision)

    def parts(plan: LayerPlan) -> list[Part]:
        layer = _prompt_layer(config, plan)
        if boundary is not None and plan.layer >= boundary:
            layer = [part for part in layer if plan.layer == boundary and part.component in _SOURCE_COMPONENTS]
        return _with_precision(layer, changes)

    return build(
        config,
        context,
        parts,
        title=f"{config.name}: FLOPs of one prompt token at position N, outside the tail",
        unit="FLOPs",
        report=FlopsReport,
        names=_names(config),
    )


def prefill_flops(
    config: Config, context: Any = 1_000_000, *, precision: Mapping[str, str] | None = None, tail: int | None = None
) -> FlopsReport:
    """FLOPs of prefilling a whole prompt of N tokens.

    With a causal encoder-decoder: the encoder for every token, the decoder for the last `tail` rows (default: the
    sliding window, 128), whose window attention is restricted to those rows (bounded replay), the LM head for the last
    row. Other models: every layer for every token. `tail=N` or more runs the decoder for the whole prompt.

    Source: V4.1 report 2.2 and 3.2.2.
    """
    config = load_config(config)
    boundary, changes = last_kv_source(config), _precision_changes(config, precision)
    names = _names(config)
    if tail is None:
        tail = config.sliding_window if boundary is not None else 0
    elif isinstance(tail, bool) or not isinstance(tail, int) or tail < 1:
        raise ValueError(f"tail is {tail!r}; accepted: a whole number of rows from 1")

    def parts(plan: LayerPlan) -> list[Part]:
        fields = (
            field_names(config) | names | {"compress_ratio": plan.compress_ratio, "sliding_window": plan.window or 0}
        )
        decoder = boundary is not None and plan.layer >= boundary
        result = []
        for part in _prompt_layer(config, plan):
            source = plan.layer == boundary and part.component in _SOURCE_COMPONENTS
            if part.component == "indexer_key" and isinstance(config, V41Config):
                part = part._replace(formula=_INDEX_KEYS)  # one key an entry, complete groups only
                count, rows = Formula.of(part.formula).count(fields), "the prompt"
            elif decoder and not source:
                windowed = part.component == "attention_window"
                count = Formula.of(part.formula).count(fields).over_rows(tail, replayed=windowed)
                # A window that starts with the tail: its j-th row sees j keys, as the j-th row of a prompt does.
                rows = f"i = 1..{tail} of the tail" if windowed else f"i = N - {tail - 1}..N"
            else:
                count, rows = Formula.of(part.formula).count(fields).over_rows(), "i = 1..N"
            result.append(part._replace(count=count, tier=rows))
        return _with_precision(result, changes)

    whole = [part._replace(tier="the last row") for part in _with_precision([_head(config)], changes)]
    top = [
        part._replace(count=Formula.of(part.formula).count(field_names(config) | names), tier="the last row")
        for part in _with_precision(_top(config), changes)
    ]
    return build(
        config,
        context,
        parts,
        title=f"{config.name}: FLOPs of prefilling N tokens; each formula is summed over the rows named beside it",
        unit="FLOPs",
        whole_model=[*top, *whole],
        report=FlopsReport,
        names=names,
    )


# --- the formulas -----------------------------------------------------------------------------------------------------

_SOURCE_COMPONENTS = ("compressor", "indexer_key")
_INDEX_KEYS = "2 * head_dim * index_head_dim * (N // compress_ratio)"

_V1 = "grouped-query attention (arXiv 2305.13245); DeepSeek LLM (arXiv 2401.02954), Table 2"
_V2 = "DeepSeek-V2 (arXiv 2405.04434), 2.1"
_V2_UP = f"{_V2}; folded into query and output at decode (absorbed), applied to every token at prefill (naive)"
_V32 = "DeepSeek-V3.2, sparse attention with a lightning indexer"
_V4 = "DeepSeek-V4 report (arXiv 2606.19348), 2.2-2.3"
_V41 = "DeepSeek-V4.1-Flash report (arXiv 2609.19969), 2.2-2.4"


def _names(config: Config) -> dict[str, Number]:
    if not isinstance(config, V41Config):
        return {}
    return {"candidate_pool": config.candidate_topk_blocks * config.candidate_block_size}


def _precision_changes(config: Config, changes: Mapping[str, str] | None) -> Mapping[str, str]:
    if not changes:
        return {}
    known = {part.component for part in [*_top(config), _head(config)]}
    for plan in _kinds_of_layer(config):
        known |= {part.component for part in _layer(config, plan)}
    for component, precision in changes.items():
        if component not in known:
            raise ValueError(f"component is {component!r}; accepted: {', '.join(sorted(known))}")
        if not isinstance(precision, str) or precision not in WEIGHTS:
            raise ValueError(f"precision of {component} is {precision!r}; accepted: {', '.join(WEIGHTS)}")
    return changes


def _with_precision(parts: list[Part], changes: Mapping[str, str]) -> list[Part]:
    return [part._replace(precision=changes.get(part.component, part.precision)) for part in parts]


def _layer(config: Config, plan: LayerPlan) -> list[Part]:
    """What one layer does for one decoded token."""
    if isinstance(config, GQAConfig):
        return _gqa(plan)
    if isinstance(config, MLAConfig):
        return [*_mla(config, plan), *_feed_forward(config, plan)]
    assert isinstance(config, CompressedConfig)
    return [*_compressed(config, plan), *_feed_forward(config, plan), *_streams(config, plan)]


def _prompt_layer(config: Config, plan: LayerPlan) -> list[Part]:
    """The same for a prompt token: dense MLA in the naive form."""
    parts = _layer(config, plan)
    if plan.attention != "mla":
        return parts
    naive = "2 * num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim + v_head_dim) * N"
    return [part._replace(formula=naive) if part.component == "attention" else part for part in parts]


def _head(config: Config) -> Part:
    return Part(
        "lm_head", "2 * hidden_size * vocab_size", "bf16", source="one matrix product, BF16 in every generation"
    )


def _top(config: Config) -> list[Part]:
    if isinstance(config, V4Config):  # V4 mixes its streams once more before the head; V4.1 does not
        return [Part("hyper_connection", "2 * hc_mult * hc_mult * hidden_size", "fp32", source=f"{_V4}, final mixing")]
    return []


def _gqa(plan: LayerPlan) -> list[Part]:
    keys = "N" if plan.window is None else "min(N, sliding_window)"
    return [
        Part("q_projection", "2 * hidden_size * num_attention_heads * head_dim", "bf16", source=_V1),
        Part("kv_projection", "2 * hidden_size * 2 * num_key_value_heads * head_dim", "bf16", source=_V1),
        Part("attention", f"4 * num_attention_heads * head_dim * {keys}", "bf16", source=f"{_V1}; scores and values"),
        Part("o_projection", "2 * num_attention_heads * head_dim * hidden_size", "bf16", source=_V1),
        Part("dense_ffn", "6 * hidden_size * intermediate_size", "bf16", source=f"{_V1}; SwiGLU: gate, up, down"),
    ]


def _linear_precision(config: Config) -> str:
    """Precision of the large linear layers: BF16 as V2 was released, FP8 from V3 on."""
    return "bf16" if config.model_type == "deepseek_v2" else "fp8"


def _mla(config: MLAConfig, plan: LayerPlan) -> list[Part]:
    linear = _linear_precision(config)
    query = (
        "2 * (hidden_size * q_lora_rank + q_lora_rank * num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim))"
    )
    if config.q_lora_rank is None:
        query = "2 * hidden_size * num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)"
    keys = "min(N, index_topk)" if plan.attention == "dsa" else "N"
    heads = "2 * num_attention_heads"
    parts = [
        Part("q_projection", query, linear, source=_V2),
        Part("kv_projection", "2 * hidden_size * (kv_lora_rank + qk_rope_head_dim)", linear, source=_V2),
        Part("up_projection", f"{heads} * kv_lora_rank * (qk_nope_head_dim + v_head_dim)", "bf16", source=_V2_UP),
        Part("attention", f"{heads} * (kv_lora_rank + qk_rope_head_dim + kv_lora_rank) * {keys}", "bf16", source=_V2),
        Part("o_projection", f"{heads} * v_head_dim * hidden_size", linear, source=_V2),
    ]
    if plan.attention == "dsa":
        parts += [
            Part("indexer_query", "2 * q_lora_rank * index_n_heads * index_head_dim", "fp8", source=_V32),
            Part("indexer_key", "2 * hidden_size * index_head_dim", "fp8", source=_V32),
            Part("indexer_weights", "2 * hidden_size * index_n_heads", "bf16", source=_V32),
            Part("indexer_scores", "2 * index_n_heads * index_head_dim * N", "fp8", source=_V32),
        ]
    return parts


def _feed_forward(config: MoEConfig, plan: LayerPlan) -> list[Part]:
    linear = _linear_precision(config)
    if plan.feed_forward == "dense":
        return [Part("dense_ffn", "6 * hidden_size * intermediate_size", linear, source="SwiGLU: gate, up, down")]
    router = "fp32" if isinstance(config, CompressedConfig) else "bf16"
    packed = "; FP4 weights run on the FP8 path (V4 report)" if isinstance(config, CompressedConfig) else ""
    expert = "hidden_size * moe_intermediate_size"
    experts = f"DeepSeekMoE: SwiGLU experts{packed}"
    return [
        Part("routed_experts", f"6 * num_experts_per_tok * {expert}", linear, source=experts),
        Part("shared_experts", f"6 * n_shared_experts * {expert}", linear, source="DeepSeekMoE: shared experts"),
        Part("router", "2 * hidden_size * n_routed_experts", router, source="DeepSeekMoE: router"),
    ]


def _compressed(config: CompressedConfig, plan: LayerPlan) -> list[Part]:
    source = _V4 if isinstance(config, V4Config) else _V41
    heads = "4 * num_attention_heads * head_dim"
    parts = [
        Part(
            "q_projection",
            "2 * (hidden_size * q_lora_rank + q_lora_rank * num_attention_heads * head_dim)",
            "fp8",
            source=source,
        ),
        Part("kv_projection", "2 * hidden_size * head_dim", "fp8", source=f"{source}; the window entry"),
        Part("attention_window", f"{heads} * min(N, sliding_window)", "bf16", source=source),
        Part(
            "o_projection_group",
            "2 * num_attention_heads * head_dim * o_lora_rank",
            "fp8",
            source=f"{source}; per group",
        ),
        Part("o_projection_output", "2 * o_groups * o_lora_rank * hidden_size", "fp8", source=source),
    ]
    entries = "N" if plan.compress_ratio == 1 else "N // compress_ratio"
    if plan.owns_kv:
        parts += _compressor(config, plan, source)
    if plan.selects:
        scores = "2 * index_n_heads * index_head_dim"
        parts += [
            Part("indexer_query", "2 * q_lora_rank * index_n_heads * index_head_dim", "fp8", source=source),
            Part("indexer_weights", "2 * hidden_size * index_n_heads", "bf16", source=source),
        ]
        if plan.scores_candidates:
            pool = f"{scores} * min({entries}, candidate_pool)"
            parts.append(Part("indexer_scores_candidates", pool, "fp4", source=f"{source}; the candidate pool alone"))
        else:
            parts.append(Part("indexer_scores", f"{scores} * ({entries})", "fp4", source=f"{source}; full scan"))
    if plan.selection_source is not None:
        most = "candidate_pool" if plan.small_pool else "index_topk"
        parts.append(Part("attention_selected", f"{heads} * min({entries}, {most})", "bf16", source=source))
    elif plan.owns_kv:
        parts.append(Part("attention_compressed", f"{heads} * ({entries})", "bf16", source=f"{source}; every entry"))
    if plan.engram is not None:
        rows = "(engram_max_ngram_size - 1) * engram_n_heads * engram_head_dim"
        engram = f"2 * {rows} * (hc_mult + 1) * hidden_size"
        parts.append(Part("engram_projection", engram, "fp8", source=f"{source}; one key per stream and one value"))
    return parts


def _compressor(config: CompressedConfig, plan: LayerPlan, source: str) -> list[Part]:
    """Projections of a layer that owns a cache: value and gate, twice as wide where groups overlap, no gate at ratio
    1.
    """
    if isinstance(config, V4Config):
        if plan.attention == "csa":
            about = f"{source}; value and gate, twice as wide as groups overlap"
            return [
                Part("compressor", "2 * 4 * hidden_size * head_dim", "bf16", source=about),
                Part("indexer_key_compressor", "2 * 4 * hidden_size * index_head_dim", "bf16", source=about),
            ]
        return [Part("compressor", "2 * 2 * hidden_size * head_dim", "bf16", source=f"{source}; value and gate")]
    value = "2 * hidden_size * head_dim" if plan.compress_ratio == 1 else "2 * 2 * hidden_size * head_dim"
    about = f"{source}; value{'' if plan.compress_ratio == 1 else ' and gate'}"
    per_token = "2 * head_dim * index_head_dim / compress_ratio"
    return [
        Part("compressor", value, "bf16", source=about),
        Part("indexer_key", per_token, "bf16", source=f"{source}; from the compressed entry, once an entry"),
    ]


def _streams(config: CompressedConfig, plan: LayerPlan) -> list[Part]:
    sites = "2 * 2 * (2 + hc_mult) * hc_mult * hc_mult * hidden_size"
    return [Part("hyper_connection", sites, "fp32", source="mHC (V4 report 2.2): coefficients of two sites a layer")]


def _kinds_of_layer(config: Config) -> list[LayerPlan]:
    """One plan for each kind of layer."""
    return list({plan.kind(): plan for plan in layer_plan(config)}.values())


def crossing(config: Config, other: Config, low: int = 4096, high: int = 2**20) -> int | None:
    """The first context in low..high from which `config` needs no more weighted decode FLOPs than `other`, or None.

    The difference of the two is taken to change its sign at most once between the two ends.

    >>> from flashsim.config import load_config
    >>> crossing(load_config("v4.1-flash"), load_config("v4-flash"))
    107648
    """

    low, high = parse_context(low), parse_context(high)

    def behind(context: int) -> bool:
        ours, theirs = (decode_flops(each, context).weighted_total() for each in (config, other))
        return ours > theirs

    if not behind(low) or behind(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if behind(middle) else (low, middle)
    return high
