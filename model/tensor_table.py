"""Every tensor that a checkpoint of a config has: name, shape, how it is stored. One function, derived from the config.

A state dict is a checkpoint: parameters carry the released names. `tensors` gives the logical tensors, one for each
parameter; `stored` gives what lies in the files, where a quantised weight is a pair `X.weight`, `X.scale`.

| kind | released type | scales |
| --- | --- | --- |
| `bf16` | BF16 | |
| `f32` | F32: router biases, attention sinks, hyper-connections | |
| `fp8` | F8_E4M3 [o, i]: dense linears | UE8M0, one for each tile of 32 x 32 |
| `fp4` | I8 [o, i / 2], two E2M1 a byte, low nibble first: routed experts | UE8M0, one for each row and 32 inputs |
| `ids` | I64: experts of a token id, V4 | |
| `table` | F8_E4M3 [rows, width]: Engram tables | UE8M0, one for each row and 32 channels |

Parts: `text` is what `model.Transformer` computes, `drafter` is DSpark (`mtp.*`), `vision` the image tower and aligner.
Source: V4.1 architecture, 11.1, 11.2; the released sums are in 11.3, 11.4 and 14.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flashsim.config import V41Config
from flashsim.formats import MXFP4, MXFP8
from flashsim.reading import ConfigError, Missing
from flashsim.schedule import layer_plan

BLOCK = MXFP8.block_size  # 32: side of a tile, length of a group
NIBBLES = 8 // MXFP4.element_bits  # FP4 values in a byte
PARTS = ("text", "drafter", "vision")

DTYPE_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
"""Bytes of one element of each type that a safetensors header may name here."""

WEIGHT_TYPES = {"fp8": "F8_E4M3", "fp4": "I8", "table": "F8_E4M3"}
SCALE_TYPE = "F8_E8M0"
FLOAT_TYPES = {"bf16": "BF16", "f32": "F32"}
ID_TYPE = "I64"


class TensorSpec(NamedTuple):
    """One parameter: its shape as the model computes with it, how it is stored when quantised, and its part."""

    shape: tuple[int, ...]
    kind: str
    part: str = "text"

    @property
    def quantised(self) -> bool:
        """Whether the released layout stores it with scales."""
        return self.kind in WEIGHT_TYPES


class Header(NamedTuple):
    """What a safetensors header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data, an exact integer."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def tensors(config: V41Config, vision: Mapping[str, Any] | None = None) -> dict[str, TensorSpec]:
    """Every parameter of the model under its released name, text first, then drafter, then vision.

    Args:
        config: the text config; its `num_nextn_predict_layers` says how many drafter stages there are.
        vision: the `vision_config` object of `config.json`; without one, or with 0 layers, there is no image part.

    Raises:
        ConfigError: a field of `vision` is missing, or a width does not fit the packed layouts.

    >>> from flashsim.config import load_config
    >>> tensors(load_config("v4.1-flash"))["layers.0.attn.wkv.weight"]
    TensorSpec(shape=(512, 5120), kind='fp8', part='text')
    """
    table = dict(_text(config))
    table.update({name: spec._replace(part="drafter") for name, spec in _drafter(config)})
    table.update({name: spec._replace(part="vision") for name, spec in _vision(config, vision)})
    for name, spec in table.items():
        if spec.kind == "fp4" and spec.shape[1] % NIBBLES:
            field = "moe_intermediate_size" if name.endswith(".w2.weight") else "hidden_size"
            raise ConfigError(field, spec.shape[1], f"a multiple of {NIBBLES}: experts are packed {NIBBLES} a byte")
    return table


def stored(table: Mapping[str, TensorSpec], *, quantised: bool = True, floats: str | None = None) -> dict[str, Header]:
    """The headers of a checkpoint with these parameters.

    Args:
        table: from `tensors`.
        quantised: the released layout; otherwise every parameter is one float tensor.
        floats: type of the tensors that carry no scales: `F32`, `BF16`, or None for the released types (quantised
            weights, when not `quantised`, are BF16 then).
    """
    headers = {}
    for name, spec in table.items():
        if quantised and spec.quantised:
            headers[name], headers[scale_name(name)] = packed(spec)
        else:
            kind = ID_TYPE if spec.kind == "ids" else floats or FLOAT_TYPES.get(spec.kind, "BF16")
            headers[name] = Header(kind, spec.shape)
    return headers


def packed(spec: TensorSpec) -> tuple[Header, Header]:
    """The headers of a quantised parameter: its weight and its scales."""
    rows, width = spec.shape
    groups = -(-width // BLOCK)
    weight = Header(WEIGHT_TYPES[spec.kind], (rows, width // NIBBLES if spec.kind == "fp4" else width))
    return weight, Header(SCALE_TYPE, (-(-rows // BLOCK) if spec.kind == "fp8" else rows, groups))


def scale_name(name: str) -> str:
    """The name of the scales that belong to a quantised weight.

    >>> scale_name("layers.0.attn.wkv.weight")
    'layers.0.attn.wkv.scale'
    """
    return name.removesuffix(".weight") + ".scale"


# --- text -------------------------------------------------------------------------------------------------------------


def _text(config: V41Config) -> Iterator[tuple[str, TensorSpec]]:
    vocab, hidden = config.vocab_size, config.hidden_size
    yield "embed.weight", TensorSpec((vocab, hidden), "bf16")
    for plan in layer_plan(config):
        name = f"layers.{plan.layer}"
        if plan.engram is not None:
            yield from _engram(config, f"{name}.engram", config.engram_num_embeddings[plan.engram])
        yield from _block(config, name, config.n_routed_experts)
        if plan.owns_kv:
            yield from _compressor(config, f"{name}.attn", plan.compress_ratio)
        if plan.selects:
            yield from _index_query(config, f"{name}.attn.indexer")
    yield "norm.weight", TensorSpec((hidden,), "bf16")
    if not config.tie_word_embeddings:
        yield "head.weight", TensorSpec((vocab, hidden), "bf16")


def _block(config: V41Config, name: str, experts: int) -> Iterator[tuple[str, TensorSpec]]:
    """What a backbone layer and a drafter stage share: attention core, experts, norms, two hyper-connection sites."""
    hidden, streams = config.hidden_size, config.hc_mult
    for site in ("attn", "ffn"):
        rows = (2 + streams) * streams  # pre, post and the mixing matrix
        yield f"{name}.hc_{site}_fn", TensorSpec((rows, streams * hidden), "f32")
        yield f"{name}.hc_{site}_base", TensorSpec((rows,), "f32")
        yield f"{name}.hc_{site}_scale", TensorSpec((3,), "f32")
        yield f"{name}.{site}_norm.weight", TensorSpec((hidden,), "bf16")

    heads, width, ranks = config.num_attention_heads, config.head_dim, config.o_groups * config.o_lora_rank
    yield f"{name}.attn.attn_sink", TensorSpec((heads,), "f32")
    yield f"{name}.attn.wq_a.weight", TensorSpec((config.q_lora_rank, hidden), "fp8")
    yield f"{name}.attn.q_norm.weight", TensorSpec((config.q_lora_rank,), "bf16")
    yield f"{name}.attn.wq_b.weight", TensorSpec((heads * width, config.q_lora_rank), "fp8")
    yield f"{name}.attn.wkv.weight", TensorSpec((width, hidden), "fp8")
    yield f"{name}.attn.kv_norm.weight", TensorSpec((width,), "bf16")
    yield f"{name}.attn.wo_a.weight", TensorSpec((ranks, heads // config.o_groups * width), "fp8")
    yield f"{name}.attn.wo_b.weight", TensorSpec((hidden, ranks), "fp8")

    yield f"{name}.ffn.gate.weight", TensorSpec((experts, hidden), "bf16")
    for bias in ("bias", "bias_vl"):  # the second for image tokens
        yield f"{name}.ffn.gate.{bias}", TensorSpec((experts,), "f32")
    for expert in range(experts):
        yield from _expert(f"{name}.ffn.experts.{expert}", hidden, config.moe_intermediate_size, "fp4")
    if config.n_shared_experts:
        inner = config.n_shared_experts * config.moe_intermediate_size
        yield from _expert(f"{name}.ffn.shared_experts", hidden, inner, "fp8")


def _expert(name: str, hidden: int, inner: int, kind: str) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{name}.w1.weight", TensorSpec((inner, hidden), kind)
    yield f"{name}.w2.weight", TensorSpec((hidden, inner), kind)
    yield f"{name}.w3.weight", TensorSpec((inner, hidden), kind)


def _compressor(config: V41Config, name: str, ratio: int) -> Iterator[tuple[str, TensorSpec]]:
    """What an owner of a main KV cache has: its compressor, and the indexer's keys made from the same latent."""
    width, keys = config.head_dim, config.index_head_dim
    yield f"{name}.compressor.wkv.weight", TensorSpec((width, config.hidden_size), "bf16")
    if ratio > 1:
        yield f"{name}.compressor.wgate.weight", TensorSpec((width, config.hidden_size), "bf16")
    yield f"{name}.compressor.norm.weight", TensorSpec((width,), "bf16")
    yield f"{name}.indexer.wk.weight", TensorSpec((keys, width), "bf16")
    yield f"{name}.indexer.k_norm.weight", TensorSpec((keys,), "bf16")


def _index_query(config: V41Config, name: str) -> Iterator[tuple[str, TensorSpec]]:
    heads = config.index_n_heads
    yield f"{name}.wq_b.weight", TensorSpec((heads * config.index_head_dim, config.q_lora_rank), "fp8")
    yield f"{name}.weights_proj.weight", TensorSpec((heads, config.hidden_size), "bf16")


def _engram(config: V41Config, name: str, rows: int) -> Iterator[tuple[str, TensorSpec]]:
    hidden, streams, width = config.hidden_size, config.hc_mult, config.engram_head_dim
    looked_up = (config.engram_max_ngram_size - 1) * config.engram_n_heads * width
    yield f"{name}.embed.weight", TensorSpec((rows, width), "table")
    yield f"{name}.wkv.weight", TensorSpec(((streams + 1) * hidden, looked_up), "fp8")
    yield f"{name}.q_weight", TensorSpec((streams, hidden), "bf16")
    yield f"{name}.k_weight", TensorSpec((streams, hidden), "bf16")


# --- drafter and vision -----------------------------------------------------------------------------------------------


def _drafter(config: V41Config) -> Iterator[tuple[str, TensorSpec]]:
    stages, hidden, rank = config.num_nextn_predict_layers, config.hidden_size, config.dspark_markov_rank
    if not stages:
        return
    for stage in range(stages):
        yield from _block(config, f"mtp.{stage}", config.dspark_n_routed_experts)
    last = f"mtp.{stages - 1}"
    yield "mtp.0.main_proj.weight", TensorSpec((hidden, len(config.dspark_target_layer_ids) * hidden), "fp8")
    yield "mtp.0.main_norm.weight", TensorSpec((hidden,), "bf16")
    yield f"{last}.norm.weight", TensorSpec((hidden,), "bf16")
    yield f"{last}.markov_head.embed.weight", TensorSpec((config.vocab_size, rank), "bf16")
    yield f"{last}.markov_head.head.weight", TensorSpec((config.vocab_size, rank), "bf16")
    yield f"{last}.confidence_head.proj.weight", TensorSpec((1, hidden + rank), "bf16")


def _vision(config: V41Config, vision: Mapping[str, Any] | None) -> Iterator[tuple[str, TensorSpec]]:
    if vision is not None and not isinstance(vision, Mapping):
        raise ConfigError("vision_config", vision, "an object, or none")
    if vision is None or not _count(vision, "num_hidden_layers", 0):
        return
    width, inner, patch = (_count(vision, field) for field in ("hidden_size", "intermediate_size", "patch_size"))
    hidden, cell = config.hidden_size, _count(vision, "downsample_ratio")
    for vector in ("start", "newline", "end"):
        yield f"image_{vector}", TensorSpec((hidden,), "bf16")
    yield from _affine("vision.patch_embed.proj", width, 3 * patch * patch)  # three colours
    for layer in range(_count(vision, "num_hidden_layers")):
        name = f"vision.blocks.{layer}"
        yield f"{name}.norm1.weight", TensorSpec((width,), "bf16")
        yield from _affine(f"{name}.attn.wqkv", 3 * width, width)
        yield from _affine(f"{name}.attn.wo", width, width)
        yield f"{name}.norm2.weight", TensorSpec((width,), "bf16")
        yield f"{name}.mlp.w1.weight", TensorSpec((2 * inner, width), "bf16")  # gate, then up
        yield f"{name}.mlp.w2.weight", TensorSpec((width, inner), "bf16")
    yield "vision.norm.weight", TensorSpec((width,), "bf16")
    yield from _affine("aligner.w1", hidden, cell * cell * width)
    yield from _affine("aligner.w2", hidden, hidden)


def _affine(name: str, out: int, into: int) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{name}.weight", TensorSpec((out, into), "bf16")
    yield f"{name}.bias", TensorSpec((out,), "bf16")


def _count(vision: Mapping[str, Any], field: str, low: int = 1) -> int:
    value = vision.get(field, Missing())
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 2**20:
        raise ConfigError(f"vision_config.{field}", value, f"a whole number from {low} to {2**20}")
    return value
