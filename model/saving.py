"""Writes checkpoints: one of three layouts, one file or shards with an index, all of it or none of it.

| layout | weights that the release packs | other tensors |
| --- | --- | --- |
| `quantised` | FP8 tiles, FP4 rows, FP8 table rows, with UE8M0 scales | the released types, or float32 if asked |
| `bfloat16` | BF16 | the released types |
| `float32` | F32 | F32 |

Tensors are packed and written piece by piece, so memory holds one piece of one tensor, whatever the size of the model.
The folder is written beside its place and moved there when complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashsim.config import Config, V41Config
from flashsim.reading import shorten
from model.checkpoint import CONFIG_FILE, INDEX_FILE, QUANTISATION, SINGLE_FILE
from model.generations import tensors
from model.safetensors_file import TORCH_TYPES, CheckpointError, write_file
from model.stored_weights import StoredWeight, stored_weights
from model.tensor_table import BLOCK, DTYPE_BYTES, Header, TensorSpec, packed, scale_name, stored
from model.tokenizer import TOKEN_MAP_FILE, TOKENIZER_FILE, compressed_ids, token_map_json
from model.weight_formats import WeightValueError, pack

LAYOUTS = ("quantised", "bfloat16", "float32")
SHARD_BYTES = 5 * 10**9
PIECE_ELEMENTS = 2**24
"""Numbers of one tensor that are in memory at a time."""

Rows = Callable[[str, int, int], torch.Tensor]
"""Gives rows start to stop of a named parameter, as floats."""


def save(
    model: nn.Module,
    folder: str | os.PathLike,
    layout: str = "float32",
    *,
    config_json: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Any = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes a model as a checkpoint folder that `model.load` reads.

    Args:
        model: its `state_dict` and its stored weights have the released names, its `config` is the text config.
        folder: must not exist yet, or be empty.
        layout: `quantised` (V4.1 alone), `bfloat16` or `float32`.
        config_json: the whole config.json to base the written one on; by default that of the model, or one that is
            made from `model.config`.
        shard_bytes: a file takes no more than this, unless a single tensor does.
        tokenizer: a `tokenizers.Tokenizer` to write along; by default that of the model. Compressed ids of Engram that
            it does not give, those of random weights, are written as `token_map.json`.
        extra_files: names and bytes of what else is to lie in the folder.

    Raises:
        CheckpointError: the parameters are not those of the config, one has a value that cannot be stored, or the
            folder cannot be written.
    """
    if layout == "quantised" and not isinstance(model.config, V41Config):
        raise CheckpointError(
            f"layout is {layout!r} with model_type {model.config.model_type}; accepted: bfloat16, float32"
        )
    state = model.state_dict() | stored_weights(model)
    table = {name: spec for name, spec in tensors(model.config).items() if spec.part == "text"}
    wrong = sorted(set(table) ^ set(state))
    wrong += [name for name in table if name in state and tuple(state[name].shape) != table[name].shape]
    if wrong:
        raise CheckpointError(f"the model's parameters are not those of its config: {', '.join(wrong[:8])}")
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    config_json = getattr(model, "config_json", None) if config_json is None else config_json
    extra = {TOKENIZER_FILE: tokenizer.to_str().encode()} if tokenizer is not None else {}
    token_map = getattr(model, "token_map", None)
    if token_map is not None:
        token_map = token_map.tolist()
        if tokenizer is None or compressed_ids(tokenizer, model.config.vocab_size) != token_map:
            extra[TOKEN_MAP_FILE] = token_map_json(token_map)
    return write_checkpoint(
        folder,
        table,
        lambda name, start, stop: _rows(state[name], start, stop),
        layout,
        config_json=dict(config_json) if config_json is not None else config_to_json(model.config),
        shard_bytes=shard_bytes,
        extra_files=extra | dict(extra_files or {}),
    )


def _rows(weight: torch.Tensor | StoredWeight, start: int, stop: int) -> torch.Tensor:
    return (weight.rows(start, stop) if isinstance(weight, StoredWeight) else weight[start:stop]).cpu()


def config_to_json(config: Config) -> dict[str, Any]:
    """A whole `config.json` of a text config, in the nesting of the release."""
    if not isinstance(config, V41Config):
        return config.to_dict()
    text = config.to_dict() | {"model_type": f"{config.model_type}_text"}
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": config.model_type,
        "text_config": text,
    }


def write_checkpoint(
    folder: str | os.PathLike,
    table: Mapping[str, TensorSpec],
    rows: Rows,
    layout: str,
    *,
    config_json: dict[str, Any],
    shard_bytes: int = SHARD_BYTES,
    floats: str | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Path:
    """Writes the parameters of `table`, taken from `rows`, as a folder that appears complete or not at all.

    Args:
        floats: `F32` or `BF16` for every tensor without scales; None for the layout's own.
        progress: called with each tensor's name and its stored bytes once it is written.

    Raises:
        CheckpointError: the folder has something in it or cannot be written, or a value cannot be stored.
    """
    if layout not in LAYOUTS:
        raise CheckpointError(f"layout is {layout!r}; accepted: {', '.join(LAYOUTS)}")
    if not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise CheckpointError(f"shard_bytes is {shard_bytes!r}; accepted: a whole number from 1")
    folder = Path(folder)
    check_place(folder)
    quantised = layout == "quantised"
    headers = stored(table, quantised=quantised, floats=floats or ("F32" if layout == "float32" else None))
    shards = list(_shards(table, headers, shard_bytes))

    partial = _beside(folder)
    try:
        names = [SINGLE_FILE]
        if len(shards) > 1:
            names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            write_file(partial / name, shard, _data(table, shard, rows, progress), {"format": "pt"})
        if len(shards) > 1:
            places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            total = sum(header.nbytes for header in headers.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (partial / INDEX_FILE).write_text(json.dumps(index, indent=1))
        for name, content in (extra_files or {}).items():
            (partial / name).write_bytes(content)
        (partial / CONFIG_FILE).write_text(json.dumps(_config_for(config_json, layout), indent=2))
        partial.chmod(0o755)
        os.replace(partial, folder)  # takes the place of an empty folder too
    except OSError as error:
        raise _unwritable(folder, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing is left there where it was moved
    return folder


def check_place(folder: str | os.PathLike) -> None:
    """Whether a folder can be written there; its parents are made.

    Raises:
        CheckpointError: it has something in it, or cannot be made.
    """
    folder = Path(folder)
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise _unwritable(folder, error) from None
    if taken:
        raise CheckpointError(f"{folder} is there already; accepted: a new folder, or an empty one")
    _beside(folder).rmdir()


def _beside(folder: Path) -> Path:
    """A new folder beside it, to be moved there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    accepted = "a new folder in a place that can be written to"
    return CheckpointError(f"{shorten(str(folder))} cannot be written ({error.strerror}); accepted: {accepted}")


def _config_for(config_json: dict[str, Any], layout: str) -> dict[str, Any]:
    result = {key: value for key, value in config_json.items() if key != "quantization_config"}
    result["dtype"] = "float32" if layout == "float32" else "bfloat16"
    if layout == "quantised":
        result["quantization_config"] = QUANTISATION
    return result


def _shards(
    table: Mapping[str, TensorSpec], headers: Mapping[str, Header], shard_bytes: int
) -> Iterator[dict[str, Header]]:
    """Groups of tensors in model order, a weight and its scales together; in a file wide types come first."""
    shard: dict[str, Header] = {}
    size = 0
    for name in table:
        group = {key: headers[key] for key in (name, scale_name(name)) if key in headers}
        group_bytes = sum(header.nbytes for header in group.values())
        if shard and size + group_bytes > shard_bytes:
            yield _aligned(shard)
            shard, size = {}, 0
        shard |= group
        size += group_bytes
    if shard:
        yield _aligned(shard)


def _aligned(shard: dict[str, Header]) -> dict[str, Header]:
    """Every tensor begins at a multiple of its element's size when wider types go first."""
    return dict(sorted(shard.items(), key=lambda item: -DTYPE_BYTES[item[1].dtype]))


def _data(
    table: Mapping[str, TensorSpec],
    shard: Mapping[str, Header],
    rows: Rows,
    progress: Callable[[str, int], None] | None,
) -> Iterator[torch.Tensor]:
    """The bytes of a shard's tensors in the order of its headers. Weights and scales are packed apart, so big tables
    are packed twice rather than held.
    """
    owners = {scale_name(name): name for name in table if scale_name(name) in shard}
    for key, header in shard.items():
        name = owners.get(key, key)
        spec = table[name]
        is_packed = spec.quantised and header in packed(spec)
        for start, stop in _pieces(spec.shape):
            values = rows(name, start, stop)
            if not is_packed:
                yield _as_float(name, values, TORCH_TYPES[header.dtype])
                continue
            try:
                yield pack(values, spec.kind)[0 if key == name else 1]
            except WeightValueError as error:
                raise CheckpointError(f"{name} cannot be packed: {error}, counted from row {start}") from None
        if progress is not None:
            progress(key, header.nbytes)


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    rows = shape[0]
    width = 1
    for size in shape[1:]:
        width *= size
    step = max(PIECE_ELEMENTS // max(width, 1) // BLOCK, 1) * BLOCK
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _as_float(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = values.to(dtype)
    if not torch.isfinite(values).all():
        raise CheckpointError(f"{name} has a value that is not finite in {dtype}")
    return values
