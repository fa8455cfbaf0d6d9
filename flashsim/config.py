"""Model configs: one frozen dataclass per family, with the field names of the released `config.json`.

`load_config` takes a preset name, a path or a dict and dispatches on the exact `model_type`. Nothing falls back
silently: an unknown type, a missing field, a contradiction or a field of another mechanism is a `ConfigError`.

| family | `model_type` | attention |
| --- | --- | --- |
| `GQAConfig` | llama, mistral, qwen2, qwen3 | grouped-query attention, with sliding-window layers where configured |
| `MLAConfig` | deepseek_v2, deepseek_v3 | multi-head latent attention |
| `DSAConfig` | deepseek_v32 | MLA plus an indexer (DeepSeek sparse attention) |
| `V4Config` | deepseek_v4 | window, CSA and HCA layers |
| `V41Config` | deepseek_v41 | window and CSA2 layers: Full, Reindex, Reuse |
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from flashsim.paths import data_dir
from flashsim.reading import ConfigError, Missing, read_json_object, shorten

PRESETS = ("deepseek-llm-67b", "v2", "v3", "v3.2", "v4-flash", "v4-pro", "v4.1-flash")
"""The released models that are shipped, in order of release; each is `data/configs/<name>.json`."""

SMALL_PRESETS = ("tiny", "mini")
"""V4.1 configs with small numbers, one for tests and one for lessons: every role and mechanism, random weights."""

LADDER_PRESETS = tuple(f"ladder-{name}" for name in ("v1", "v2", "v3", "v3.2", "v4-flash", "v4-pro", "v4.1"))
"""Every generation at one small scale: 16 layers, 8 heads, cached vectors of 160 channels (V1: 2 KV heads of 128)."""

ALIASES = {
    "v1": "deepseek-llm-67b",
    "deepseek-67b": "deepseek-llm-67b",
    "v4": "v4-flash",
    "v4.1": "v4.1-flash",
    # refreshes with an unchanged architecture
    "v4-flash-0731": "v4-flash",
    "v4.1-flash-1017": "v4.1-flash",
}
"""Other names of the presets. `deepseek-ai/`, `deepseek-` and upper case are accepted before any of them."""


# --- the kinds of field -----------------------------------------------------------------------------------------------


def _field(check: str, default: Any, **limits: Any) -> Any:
    return dataclasses.field(default=default, metadata={"check": check, **limits})


def count(default: Any = MISSING, *, low: int = 1, high: int = 2**31, optional: bool = False) -> Any:
    """A whole number in [low, high]; `optional` also takes null."""
    return _field("count", default, low=low, high=high, optional=optional)


def ids(default: Any = MISSING, *, low: int = 0, high: int = 2**40) -> Any:
    """A list of whole numbers in [low, high]."""
    return _field("ids", default, low=low, high=high)


def real(default: Any = MISSING, *, low: float = 0.0, optional: bool = False) -> Any:
    """A finite number of at least `low`."""
    return _field("real", default, low=low, optional=optional)


def flag(default: Any = MISSING, *, optional: bool = False) -> Any:
    """true or false; `optional` also takes null."""
    return _field("flag", default, optional=optional)


def text(default: Any = MISSING) -> Any:
    """A string, or null."""
    return _field("text", default)


def _check_field(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    kind = limits["check"]
    if limits.get("optional") and value is None:
        return
    if kind == "count":
        low, high = limits["low"], limits["high"]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(name, value, f"a whole number from {low} to {high}")
    elif kind == "ids":
        low, high = limits["low"], limits["high"]
        good = (
            isinstance(value, tuple)
            and len(value) <= 10_000
            and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        )
        if not good or not all(low <= v <= high for v in value):
            raise ConfigError(name, value, f"a list of whole numbers from {low} to {high}")
    elif kind == "real":
        if isinstance(value, bool) or not isinstance(value, int | float) or not limits["low"] <= value < float("inf"):
            raise ConfigError(name, value, f"a finite number of at least {limits['low']}")
    elif kind == "flag":
        if not isinstance(value, bool):
            raise ConfigError(name, value, "true or false")
    elif kind == "text" and value is not None and not isinstance(value, str):
        raise ConfigError(name, value, "a string")


# --- what all families share ------------------------------------------------------------------------------------------

# Fields that belong to one mechanism. A config of another family that carries one, switched on, would be computed
# wrongly without it. What no family here has is listed too.
_MECHANISM_FIELDS = (
    *("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "first_k_dense_replace", "moe_layer_freq"),
    *("index_topk", "index_n_heads", "index_head_dim", "sliding_window", "layer_types", "mlp_layer_types"),
    *("compress_ratios", "compress_rates", "compress_rate_csa", "compress_rate_hca", "compress_rope_theta"),
    *("o_groups", "o_lora_rank", "hc_mult", "num_hash_layers", "kv_source_layer_ids", "index_source_layer_ids"),
    *("candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size"),
    *("engram_layer_ids", "engram_num_embeddings", "engram_n_heads", "engram_head_dim"),
    *("n_routed_experts", "moe_intermediate_size", "num_experts", "num_local_experts", "mlp_only_layers"),
    *("attention_bias", "mlp_bias", "attention_chunk_size", "num_kv_shared_layers", "cross_attention_layers"),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every family has. Subclasses add their fields; all are checked when an instance is made."""

    model_types: ClassVar[tuple[str, ...]] = ()

    name: str = dataclasses.field(default="", compare=False)
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    model_type: str = text()
    vocab_size: int = count()
    hidden_size: int = count()
    num_hidden_layers: int = count(high=1000)
    num_attention_heads: int = count(high=2**20)
    max_position_embeddings: int = count(high=2**40)
    tie_word_embeddings: bool = flag(False)
    rms_norm_eps: float = real(1e-6)
    rope_theta: float = real(10000.0)
    rope_scaling: tuple[tuple[str, Any], ...] | None = dataclasses.field(default=None)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, field.name, value)
            if "check" in field.metadata:
                _check_field(field.name, value, field.metadata)
        if self.model_type not in self.model_types:
            raise ConfigError("model_type", self.model_type, ", ".join(self.model_types))
        self._check()

    def _check(self) -> None:
        """Contradictions between fields."""

    def needs(self, *fields: str) -> None:
        """Whether the file said these; what only a running model needs has no default here.

        Raises:
            ConfigError: it did not, naming the field.
        """
        for field in fields:
            if getattr(self, field) is None:
                raise ConfigError(field, Missing(), "a value: models of this family differ in it")

    def _require(self, good: bool, field: str, accepted: str) -> None:
        if not good:
            raise ConfigError(field, getattr(self, field), accepted)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str = "") -> Config:
        """A config from released field names in either spelling. Unknown fields that change no count are ignored.

        Raises:
            ConfigError: a field is missing, malformed, contradictory, or belongs to another mechanism.
        """
        cls._check_presence(data)
        data = {key: value for key, value in data.items() if value is not None}
        for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim"):
            if key in data:
                _check_field(key, data[key], {"check": "count", "low": 1, "high": 2**31})
        fields = {field.name: field for field in dataclasses.fields(cls)}
        _check_field("num_hidden_layers", data.get("num_hidden_layers", 1), fields["num_hidden_layers"].metadata)
        data = cls._respell(_rope(data))
        for key in _MECHANISM_FIELDS:
            if data.get(key, 0) not in (0, False, "", [], ()) and key not in fields:
                raise ConfigError(key, data[key], f"nothing, as model_type {data['model_type']} has no such field")
        for field in fields.values():
            if field.default is MISSING and field.name not in data:
                raise ConfigError(field.name, Missing(), _accepted(field))
        values = {key: value for key, value in data.items() if key in fields and key not in ("name", "notes")}
        return cls(**values, name=_printable(name or data["model_type"]), notes=_quantization_notes(cls, data))

    @classmethod
    def _check_presence(cls, data: Mapping[str, Any]) -> None:
        """Fields that may be null but not absent."""

    @classmethod
    def _respell(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Newer spellings turned into the released ones."""
        return data

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON values under released names; `load_config` of it gives an equal config."""
        result = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "notes"):
                continue
            if field.name == "rope_scaling" and value is not None:
                value = {key: _thawed(part) for key, part in value}
            result[field.name] = list(value) if isinstance(value, tuple) else value
        return result

    def layers(self) -> range:
        """The layer numbers, 0 to num_hidden_layers - 1."""
        return range(self.num_hidden_layers)


def _printable(name: str) -> str:
    """A name from a file as one short line that any terminal can show."""
    return "".join(c if c.isprintable() else "?" for c in name[:80]).encode("utf-8", "replace").decode()


def _quantization_notes(family: type[Config], data: Mapping[str, Any]) -> tuple[str, ...]:
    """What a file says of quantisation that the counts do not follow: they are those of the family as released."""
    notes = []
    scheme = data.get("quantization_config")
    scheme = scheme if isinstance(scheme, Mapping) else {}
    cache = scheme.get("kv_cache_scheme") or scheme.get("kv_cache_quant_algo")
    for value, key in ((cache, "quantization_config"), *((data.get(k), k) for k in ("kv_cache_dtype", "cache_dtype"))):
        if value:
            notes.append(f"{key} asks for a quantised KV cache; bytes are of the released layout, layout= changes it")
    if scheme and issubclass(family, GQAConfig):
        notes.append("FLOPs are counted in BF16 whatever quantization_config says; precision= changes it")
    return tuple(notes)


def _accepted(field: dataclasses.Field) -> str:
    limits = field.metadata
    return {
        "count": f"a whole number from {limits.get('low')} to {limits.get('high')}",
        "ids": "a list of whole numbers",
        "real": "a finite number",
        "flag": "true or false",
    }.get(limits.get("check"), "a value")


def _same(data: Mapping[str, Any], old: str, new: str, a: Any, b: Any) -> None:
    """Two spellings of one field, if both are there, have to say the same."""
    if old in data and a != b:
        raise ConfigError(old, data[old], f"the value that {new} gives, {b!r}, or only one of the two")


def _rope(data: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, flat or split into main and compress, turned into rope_theta, compress_rope_theta,
    rope_scaling.
    """
    newer = data.pop("rope_parameters", None)
    older = data.pop("rope_scaling", None)
    for name, given in (("rope_parameters", newer), ("rope_scaling", older)):
        if given is not None and not (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
            raise ConfigError(name, given, "an object")
    scaling = None if older is None else _one_type(older)
    if newer is not None:
        if not isinstance(newer, Mapping):
            raise ConfigError("rope_parameters", newer, "an object")
        split = isinstance(newer.get("main"), Mapping) and isinstance(newer.get("compress"), Mapping)
        parts = (
            {"rope_theta": newer["main"], "compress_rope_theta": newer["compress"]} if split else {"rope_theta": newer}
        )
        for key, part in parts.items():
            if "rope_theta" in part:
                _same(data, key, "rope_parameters", data.get(key), part["rope_theta"])
                data[key] = part["rope_theta"]
        part = parts["compress_rope_theta" if split else "rope_theta"]
        if "partial_rotary_factor" in part:
            data.setdefault("partial_rotary_factor", part["partial_rotary_factor"])
        mine = _one_type({key: value for key, value in part.items() if key not in _NOT_SCALING and value is not None})
        if mine.get("rope_type", "default") != "default":
            if scaling is not None and scaling != mine:
                raise ConfigError("rope_scaling", older, f"what rope_parameters says, {mine}, or only one of the two")
            scaling = mine
    if scaling is not None:
        if not all(_is_plain(value) for value in scaling.values()):
            raise ConfigError("rope_scaling", scaling, "an object of strings, numbers and lists")
        data["rope_scaling"] = tuple(sorted((key, _frozen(value)) for key, value in scaling.items()))
    return data


_NOT_SCALING = ("rope_theta", "partial_rotary_factor")


def _one_type(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with `rope_type` for the older `type`."""
    scaling = dict(scaling)
    if "type" in scaling:
        _same(scaling, "rope_type", "type", scaling.get("rope_type"), scaling["type"])
        scaling["rope_type"] = scaling.pop("type")
    return scaling


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(v, str | int | float) for v in value)
    return isinstance(value, str | int | float)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _thawed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# --- grouped-query attention: DeepSeek-LLM (V1), llama, mistral, qwen -------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GQAConfig(Config):
    """Grouped-query attention: `num_key_value_heads` keys and values per token and layer (DeepSeek-LLM, Table 2)."""

    model_types: ClassVar = ("llama", "mistral", "qwen2", "qwen3")

    num_key_value_heads: int = count(high=2**20)
    head_dim: int = count(high=2**20)
    intermediate_size: int = count()
    attention_bias: bool = flag(False)
    mlp_bias: bool = flag(False)
    sliding_window: int | None = count(None, optional=True)
    layer_types: tuple[str, ...] | None = dataclasses.field(default=None)

    def _check(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        self._require(heads % kv_heads == 0, "num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        if self.layer_types is not None:
            known = ("full_attention", "sliding_attention")
            good = isinstance(self.layer_types, tuple) and len(self.layer_types) == self.num_hidden_layers
            good = good and all(kind in known for kind in self.layer_types)
            self._require(good, "layer_types", f"{self.num_hidden_layers} entries, each one of {', '.join(known)}")
            if "sliding_attention" in self.layer_types and self.sliding_window is None:
                raise ConfigError("sliding_window", Missing(), "a window in tokens, as layer_types has sliding layers")

    @classmethod
    def _check_presence(cls, data: Mapping[str, Any]) -> None:
        if data.get("num_key_value_heads") is None:  # never guessed: eight times too much is a common mistake
            accepted = "a whole number; the number of attention heads means multi-head attention"
            raise ConfigError("num_key_value_heads", Missing(), accepted)
        if data["model_type"] == "mistral" and "sliding_window" not in data and "layer_types" not in data:
            raise ConfigError("sliding_window", Missing(), "a window in tokens, or null for full attention")

    @classmethod
    def _respell(cls, data: dict[str, Any]) -> dict[str, Any]:
        kind, layers = data["model_type"], data.get("num_hidden_layers")
        if "head_dim" not in data and kind != "qwen3":
            hidden, heads = data.get("hidden_size"), data.get("num_attention_heads")
            if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
                if hidden % heads:
                    raise ConfigError(
                        "head_dim", Missing(), f"a whole number, as hidden_size {hidden} / {heads} is not one"
                    )
                data["head_dim"] = hidden // heads
        if kind == "qwen2":
            data["attention_bias"] = True  # q, k and v carry one whatever the file says; o does not
        if kind in ("qwen2", "qwen3"):
            _check_field("use_sliding_window", data.get("use_sliding_window", False), {"check": "flag"})
            types = data.get("layer_types")
            sliding = isinstance(types, list | tuple) and "sliding_attention" in types
            if sliding and data.get("use_sliding_window") is False:
                raise ConfigError("use_sliding_window", False, "true, as layer_types has sliding layers")
        window = data.get("sliding_window")
        if window is not None:
            _check_field("sliding_window", window, {"check": "count", "low": 1, "high": 2**31})
        if window is not None and "layer_types" not in data and isinstance(layers, int):
            if kind == "llama":
                raise ConfigError("sliding_window", window, "null with model_type llama, or layer_types that say where")
            first = 0
            if kind in ("qwen2", "qwen3"):  # a window is there only when switched on, and from max_window_layers up
                first = layers
                if data.get("use_sliding_window"):
                    if "max_window_layers" not in data:
                        raise ConfigError("max_window_layers", Missing(), "the first layer with a sliding window")
                    _check_field(
                        "max_window_layers", data["max_window_layers"], {"check": "count", "low": 0, "high": 10_000}
                    )
                    first = min(data["max_window_layers"], layers)
            if first < layers <= 10_000:
                data["layer_types"] = ["full_attention"] * first + ["sliding_attention"] * (layers - first)
            else:
                data.pop("sliding_window")
        return data

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, or None where it attends to everything."""
        sliding = self.layer_types is not None and self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None


# --- experts, shared by V2 to V4.1 ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MoEConfig(Config):
    """Mixture of experts: `num_experts_per_tok` of `n_routed_experts`, plus `n_shared_experts` that always run."""

    moe_intermediate_size: int = count()
    n_routed_experts: int = count(high=2**20)
    n_shared_experts: int = count(low=0, high=2**20)
    num_experts_per_tok: int = count(high=2**20)
    num_nextn_predict_layers: int = count(0, low=0, high=10_000)
    routed_scaling_factor: float | None = real(None, optional=True)  # None: not said; bytes and FLOPs do not need it
    norm_topk_prob: bool | None = flag(None, optional=True)
    scoring_func: str | None = text(None)
    topk_method: str | None = text(None)

    def _check(self) -> None:
        limit = self.n_routed_experts
        self._require(self.num_experts_per_tok <= limit, "num_experts_per_tok", f"at most n_routed_experts, {limit}")


# --- multi-head latent attention: V2, V3; with an indexer: V3.2 -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MLAConfig(MoEConfig):
    """Multi-head latent attention: one latent and one RoPE key per token, shared by all heads (DeepSeek-V2, 2.1)."""

    model_types: ClassVar = ("deepseek_v2", "deepseek_v3")

    intermediate_size: int = count()
    q_lora_rank: int | None = count(None, optional=True)
    kv_lora_rank: int = count()
    qk_nope_head_dim: int = count()
    qk_rope_head_dim: int = count()
    v_head_dim: int = count()
    first_k_dense_replace: int = count(low=0, high=10_000)
    moe_layer_freq: int = count(1, high=10_000)
    n_group: int | None = count(None, optional=True)
    topk_group: int | None = count(None, optional=True)
    rope_interleave: bool = flag(True)  # adjacent channels are a pair; false: channels i and i + r / 2
    attention_bias: bool = flag(False)

    def _check(self) -> None:
        super()._check()
        self._require(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "an even number of channels")
        self._require(not self.attention_bias, "attention_bias", "false: the released models have no biases there")

    @classmethod
    def _check_presence(cls, data: Mapping[str, Any]) -> None:
        if "q_lora_rank" not in data:
            raise ConfigError("q_lora_rank", Missing(), "a whole number, or null for a query without a low-rank step")

    @classmethod
    def _respell(cls, data: dict[str, Any]) -> dict[str, Any]:
        types, mlp_types = data.get("layer_types"), data.pop("mlp_layer_types", None)
        if isinstance(types, list | tuple) and all(kind == "full_attention" for kind in types):
            data.pop("layer_types")  # says what is so anyway
        if mlp_types is not None:
            first, every = data.get("first_k_dense_replace", 0), data.get("moe_layer_freq", 1)
            for name, value in (("first_k_dense_replace", first), ("moe_layer_freq", every)):
                _check_field(name, value, {"check": "count", "low": 0, "high": 10_000})
            layers = range(data.get("num_hidden_layers", 0))
            expected = ["sparse" if layer >= first and layer % max(every, 1) == 0 else "dense" for layer in layers]
            if not isinstance(mlp_types, list | tuple) or list(mlp_types) != expected:
                raise ConfigError("mlp_layer_types", mlp_types, "dense and sparse as first_k_dense_replace says")
        return data

    def is_moe(self, layer: int) -> bool:
        """Whether the layer's feed-forward is a mixture of experts rather than dense."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


@dataclass(frozen=True, kw_only=True)
class DSAConfig(MLAConfig):
    """MLA plus a lightning indexer that picks `index_topk` past tokens per query (DeepSeek-V3.2)."""

    model_types: ClassVar = ("deepseek_v32",)

    q_lora_rank: int = count()  # the indexer's query comes from it
    index_n_heads: int = count()
    index_head_dim: int = count()
    index_topk: int = count()


# --- compressed attention: V4 and V4.1 --------------------------------------------------------------------------------

_V4_LAYER_TYPES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


@dataclass(frozen=True, kw_only=True)
class CompressedConfig(MoEConfig):
    """What V4 and V4.1 share: a window in every layer, compressed entries, an indexer, hyper-connections."""

    num_key_value_heads: int = count()
    head_dim: int = count()
    qk_rope_head_dim: int = count(low=0)
    q_lora_rank: int = count()
    o_lora_rank: int = count()
    o_groups: int = count()
    sliding_window: int = count()
    compress_ratios: tuple[int, ...] = ids(high=2**20)
    compress_rope_theta: float = real(160000.0)
    index_n_heads: int = count()
    index_head_dim: int = count()
    index_topk: int = count()
    hc_mult: int = count(high=1024)
    hc_sinkhorn_iters: int = count(20, low=0)
    hc_eps: float = real(1e-6)
    swiglu_limit: float | None = real(None, optional=True)

    def _check(self) -> None:
        super()._check()
        self._require(
            self.num_key_value_heads == 1, "num_key_value_heads", "1: one vector is key and value for all heads"
        )
        rope, width = self.qk_rope_head_dim, self.head_dim
        self._require(rope <= width and rope % 2 == 0, "qk_rope_head_dim", f"an even number up to head_dim, {width}")
        heads = self.num_attention_heads
        self._require(heads % self.o_groups == 0, "o_groups", f"a divisor of num_attention_heads, {heads}")
        layers, draft = self.num_hidden_layers, max(self.num_nextn_predict_layers, 1)
        given = len(self.compress_ratios)
        good = layers <= given <= layers + draft and not any(self.compress_ratios[layers:])
        self._require(
            good,
            "compress_ratios",
            f"one ratio for each of the {layers} layers (here {given}), then at most {draft} zeros for draft layers",
        )
        object.__setattr__(self, "compress_ratios", self.compress_ratios[:layers])

    @classmethod
    def _respell(cls, data: dict[str, Any]) -> dict[str, Any]:
        factor, head_dim = data.pop("partial_rotary_factor", None), data.get("head_dim")
        if factor is not None and head_dim is not None:
            _check_field("partial_rotary_factor", factor, {"check": "real", "low": 0.0})
            width = round(min(factor, 1.0) * head_dim)
            if abs(factor * head_dim - width) > 1e-6 or data.get("qk_rope_head_dim", width) != width:
                accepted = f"qk_rope_head_dim / head_dim, a whole number of the {head_dim} channels"
                raise ConfigError("partial_rotary_factor", factor, accepted)
            data["qk_rope_head_dim"] = width
        local = data.pop("num_local_experts", None)
        if local is not None:
            _same(data, "n_routed_experts", "num_local_experts", data.get("n_routed_experts"), local)
            data["n_routed_experts"] = local
        types, rates = data.pop("layer_types", None), data.pop("compress_rates", None)
        if types is None and rates:
            cls._check_rates(rates, data.get("compress_ratios"))
        if types is not None:
            ratios = cls._ratios(types, rates or {})
            if "compress_ratios" in data:
                layers = data.get("num_hidden_layers", 0)
                older = data["compress_ratios"]
                if not isinstance(older, list | tuple) or list(older[:layers]) != ratios[:layers]:
                    raise ConfigError("compress_ratios", older, f"what layer_types and compress_rates give, {ratios}")
            else:
                data["compress_ratios"] = ratios
        return data

    @classmethod
    def _check_rates(cls, rates: Any, ratios: Any) -> None:
        """`compress_rates` beside `compress_ratios`, without `layer_types`: each ratio has to be one of the rates."""
        cls._ratios([], rates)
        given = list(rates.values()) + ([4] if _V4_LAYER_TYPES[1] not in rates and cls is V4Config else [])
        only_csa = set(rates) == {_V4_LAYER_TYPES[1]}  # says nothing of the other ratios, but that 4 is none of them
        for ratio in ratios if isinstance(ratios, list | tuple) else ():
            if ratio not in (0, *given) and not (only_csa and ratio != 4):
                raise ConfigError("compress_ratios", ratio, f"0 or a ratio of compress_rates, {rates}")

    @classmethod
    def _ratios(cls, types: Any, rates: Any) -> list[int]:
        if not isinstance(types, list | tuple) or not all(isinstance(kind, str) for kind in types):
            raise ConfigError("layer_types", types, "a list of layer type names")
        if not isinstance(rates, Mapping):
            raise ConfigError("compress_rates", rates, "an object: layer type to ratio")
        for kind, rate in rates.items():
            _check_field(f"compress_rates.{kind}", rate, {"check": "count", "low": 1, "high": 2**20})
        for kind in types:
            if kind != "sliding_attention" and kind not in rates:
                raise ConfigError(
                    "layer_types", kind, f"sliding_attention, {', '.join(rates) or 'or a key of compress_rates'}"
                )
        return [0 if kind == "sliding_attention" else rates[kind] for kind in types]


@dataclass(frozen=True, kw_only=True)
class V4Config(CompressedConfig):
    """V4: ratio 0 is a window-only layer, `compress_rate_csa` (4) a CSA layer with an indexer, any other ratio HCA."""

    model_types: ClassVar = ("deepseek_v4",)

    scoring_func: str | None = text("sqrtsoftplus")
    topk_method: str | None = text("noaux_tc")
    norm_topk_prob: bool | None = flag(True)
    num_hash_layers: int = count(low=0, high=10_000)
    compress_rate_csa: int = count(4, high=2**20)

    def _check(self) -> None:
        super()._check()
        self._require(self.num_hash_layers <= self.num_hidden_layers, "num_hash_layers", "at most num_hidden_layers")

    @classmethod
    def _respell(cls, data: dict[str, Any]) -> dict[str, Any]:
        rates = data.get("compress_rates")
        rates = dict(rates) if isinstance(rates, Mapping) else {} if rates is None else rates
        for key, kind in (("compress_rate_csa", _V4_LAYER_TYPES[1]), ("compress_rate_hca", _V4_LAYER_TYPES[2])):
            if key in data and isinstance(rates, dict):
                _same(rates, kind, key, rates.get(kind), data[key])
                rates[kind] = data[key]
        types = data.get("layer_types")
        data.pop("compress_rate_hca", None)
        if types is not None and isinstance(rates, dict):
            rates = {_V4_LAYER_TYPES[1]: 4, _V4_LAYER_TYPES[2]: 128} | rates  # the released defaults
            if isinstance(types, list | tuple) and not set(map(str, types)) <= set(_V4_LAYER_TYPES):
                wrong = next(kind for kind in types if kind not in _V4_LAYER_TYPES)
                raise ConfigError("layer_types", wrong, ", ".join(_V4_LAYER_TYPES))
            if rates[_V4_LAYER_TYPES[1]] == rates[_V4_LAYER_TYPES[2]] and _V4_LAYER_TYPES[2] in types:
                raise ConfigError("compress_rates", rates, "different ratios for CSA and HCA")
        if isinstance(rates, dict) and _V4_LAYER_TYPES[1] in rates:
            data["compress_rate_csa"] = rates[_V4_LAYER_TYPES[1]]
        data["compress_rates"] = rates
        mlp_types = data.pop("mlp_layer_types", None)
        if mlp_types is not None:
            hashed = list(mlp_types).count("hash_moe") if isinstance(mlp_types, list | tuple) else -1
            layers = data.get("num_hidden_layers", 0)
            if hashed < 0 or list(mlp_types) != ["hash_moe"] * hashed + ["moe"] * (len(mlp_types) - hashed):
                raise ConfigError("mlp_layer_types", mlp_types, "hash_moe for the first layers, then moe")
            if len(mlp_types) != layers:
                raise ConfigError(
                    "mlp_layer_types", f"{len(mlp_types)} entries", f"one for each of the {layers} layers"
                )
            _same(data, "num_hash_layers", "mlp_layer_types", data.get("num_hash_layers"), hashed)
            data["num_hash_layers"] = hashed
        return super()._respell(data)


@dataclass(frozen=True, kw_only=True)
class V41Config(CompressedConfig):
    """V4.1: sources own a cache and keys, the layers after them reuse both (DeepSeek-V4.1-Flash, 2.2-2.4)."""

    model_types: ClassVar = ("deepseek_v41",)

    kv_source_layer_ids: tuple[int, ...] = ids()
    index_source_layer_ids: tuple[int, ...] = ids()
    candidate_source_layer_id: int = count(-1, low=-1, high=10_000)
    candidate_topk_blocks: int = count(0, low=0)
    candidate_block_size: int = count(0, low=0)
    engram_layer_ids: tuple[int, ...] = ids(())
    engram_num_embeddings: tuple[int, ...] = ids((), low=1)
    engram_max_ngram_size: int = count(1)
    engram_n_heads: int = count(0, low=0)
    engram_head_dim: int = count(0, low=0)
    engram_vocab_size: int = count(0, low=0)
    engram_compressed_vocab_size: int = count(0, low=0)
    engram_pad_token_id: int = count(0, low=0)
    dspark_block_size: int = count(0, low=0)
    dspark_noise_token_id: int = count(0, low=0)
    dspark_target_layer_ids: tuple[int, ...] = ids(())
    dspark_markov_rank: int = count(0, low=0)
    dspark_n_routed_experts: int = count(0, low=0)
    dspark_num_experts_per_tok: int = count(0, low=0)

    def _check(self) -> None:
        super()._check()
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            given = getattr(self, name)
            good = all(a < b for a, b in itertools.pairwise(given)) and all(
                layer < self.num_hidden_layers for layer in given
            )
            self._require(good, name, f"rising layer numbers below num_hidden_layers, {self.num_hidden_layers}")
        ratios, sources = self.compress_ratios, self.kv_source_layer_ids
        for layer, ratio in enumerate(ratios):
            source = max((s for s in sources if s <= layer), default=None)
            if ratio and source is None:
                raise ConfigError(
                    "kv_source_layer_ids", sources, f"a source at or before layer {layer}, of ratio {ratio}"
                )
            if ratio and ratios[source] != ratio:
                raise ConfigError(
                    "compress_ratios",
                    f"{ratio} at layer {layer}, whose source, layer {source}, has {ratios[source]}",
                    "the ratio of the source layer that it reads",
                )
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            windows = [layer for layer in getattr(self, name) if not ratios[layer]]
            self._require(not windows, name, f"layers with a compression ratio, which {windows} do not have")
        missing = [layer for layer in sources if layer not in self.index_source_layer_ids]
        self._require(not missing, "index_source_layer_ids", f"every layer of kv_source_layer_ids, {missing} too")
        candidate = self.candidate_source_layer_id
        if candidate >= 0:
            self._require(
                candidate in self.index_source_layer_ids,
                "candidate_source_layer_id",
                f"a layer of index_source_layer_ids, {self.index_source_layer_ids}, or -1 for none",
            )
            for name in ("candidate_topk_blocks", "candidate_block_size"):
                self._require(getattr(self, name) > 0, name, "a whole number from 1, as there is a candidate source")
        tables = len(self.engram_layer_ids)
        self._require(
            len(self.engram_num_embeddings) == tables,
            "engram_num_embeddings",
            f"one number of rows for each of the {tables} engram_layer_ids",
        )
        if tables:
            for name, low in (("engram_max_ngram_size", 2), ("engram_n_heads", 1), ("engram_head_dim", 1)):
                self._require(
                    getattr(self, name) >= low, name, f"a whole number from {low}, as there are Engram layers"
                )

    @classmethod
    def _check_presence(cls, data: Mapping[str, Any]) -> None:
        # Without these two the dense path would run, or no table would be counted, and nobody would notice.
        if data.get("candidate_source_layer_id") is None and data.get("candidate_topk_blocks"):
            accepted = "the layer that builds the candidate pool, or -1 for none"
            raise ConfigError("candidate_source_layer_id", Missing(), accepted)
        for key in ("engram_layer_ids", "engram_num_embeddings"):
            if data.get(key) is None and data.get("engram_n_heads"):
                raise ConfigError(key, Missing(), "a list with an entry for each Engram layer, empty for none")

    @classmethod
    def _respell(cls, data: dict[str, Any]) -> dict[str, Any]:
        data["model_type"] = "deepseek_v41"
        mlp_types = data.pop("mlp_layer_types", None)
        everywhere = ["moe"] * data.get("num_hidden_layers", 0)
        if mlp_types is not None and not (isinstance(mlp_types, list | tuple) and list(mlp_types) == everywhere):
            raise ConfigError("mlp_layer_types", mlp_types, "moe for every layer")
        return super()._respell(data)


FAMILIES: tuple[type[Config], ...] = (GQAConfig, MLAConfig, DSAConfig, V4Config, V41Config)
_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


# --- loading ----------------------------------------------------------------------------------------------------------


def model_types() -> tuple[str, ...]:
    """Every `model_type` that `load_config` accepts."""
    return tuple(_BY_TYPE)


def preset_name(name: str) -> str | None:
    """The preset that a name or alias means, or None.

    >>> preset_name("deepseek-ai/DeepSeek-V4.1-Flash"), preset_name("v1"), preset_name("gpt")
    ('v4.1-flash', 'deepseek-llm-67b', None)
    """
    short = name.strip().lower().removeprefix("deepseek-ai/")
    for candidate in (short, short.removeprefix("deepseek-")):
        candidate = ALIASES.get(candidate, candidate)
        if candidate in (*PRESETS, *SMALL_PRESETS, *LADDER_PRESETS):
            return candidate
    return None


def load_config(source: str | os.PathLike | Mapping[str, Any] | Config) -> Config:
    """The config named by a preset name or alias, a path to a `config.json` or its folder, or a dict.

    A nested `text_config` is read for the text model, `rope_parameters` like `rope_scaling`, `layer_types` with
    `compress_rates` like `compress_ratios`.

    Raises:
        ConfigError: naming the field, its value and what is accepted.

    >>> load_config("v4.1-flash").num_hidden_layers
    40
    """
    if isinstance(source, Config):
        return source
    if isinstance(source, Mapping):
        return _dispatch(dict(source), "")
    preset = preset_name(source) if isinstance(source, str) else None
    if preset is not None:
        return _load_preset(preset)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError("config", source, "a preset name, a path, or an object of config.json fields")
    path = Path(source)
    try:
        if path.is_dir() and (path / "config.json").is_file():
            path = path / "config.json"
        known = path.exists()
    except (OSError, ValueError):
        known = False
    if not known and isinstance(source, str) and os.sep not in source and not source.endswith(".json"):
        near = difflib.get_close_matches(
            source.lower()[:80], (*PRESETS, *SMALL_PRESETS, *LADDER_PRESETS, *ALIASES), n=1
        )
        hint = f" (did you mean {near[0]}?)" if near else ""
        names = ", ".join((*PRESETS, *SMALL_PRESETS))
        raise ConfigError("model", source, f"{names}, or the path of a config.json{hint}")
    label = path.parent.name if path.name == "config.json" else path.stem
    return _dispatch(read_json_object(path), label)


@cache
def _load_preset(name: str) -> Config:
    return _dispatch(read_json_object(data_dir() / "configs" / f"{name}.json"), name)


def _dispatch(data: dict[str, Any], name: str) -> Config:
    for key in data:
        if not isinstance(key, str):
            raise ConfigError("config", key, "string keys")
    root = data
    if isinstance(data.get("text_config"), Mapping):
        nested = dict(data["text_config"])
        outer, inner = data.get("model_type"), nested.get("model_type")
        if isinstance(outer, str) and outer in _BY_TYPE and inner is not None and inner not in (outer, f"{outer}_text"):
            raise ConfigError("text_config.model_type", inner, f"{outer} or {outer}_text, as the file's model_type")
        known = {field.name for family in FAMILIES for field in dataclasses.fields(family)} - {"model_type", "name"}
        for key in sorted((known | set(_MECHANISM_FIELDS)) & set(data)):
            if data[key] is not None and nested.get(key) not in (None, data[key]):
                raise ConfigError(key, data[key], f"the value in text_config, {shorten(nested[key])}, or none")
            nested[key] = data[key] if nested.get(key) is None else nested[key]
        data = nested | {"model_type": outer if outer is not None else inner}
    elif data.get("text_config") is not None:
        raise ConfigError("text_config", data["text_config"], "an object")
    model_type = data.get("model_type")
    if model_type is None:
        raise ConfigError("model_type", Missing(), ", ".join(_BY_TYPE))
    key = model_type.removesuffix("_text") if model_type == "deepseek_v41_text" else model_type
    if not isinstance(key, str) or key not in _BY_TYPE:
        near = difflib.get_close_matches(str(model_type)[:80].lower(), _BY_TYPE, n=1, cutoff=0.8)
        if model_type in ("mixtral", "ministral"):  # models of their own, not a slip of the pen
            near = []
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError("model_type", model_type, f"{', '.join(_BY_TYPE)}{hint}")
    data["model_type"] = key
    return _BY_TYPE[key].from_dict(data, name or str(root.get("_name_or_path") or "") or key)
