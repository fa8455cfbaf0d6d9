"""`load`: a checkpoint folder, or the name of a config with random weights, as a model that computes.

Weights go to the model in one of three ways:

| | memory | speed |
| --- | --- | --- |
| expanded (default) | every weight as numbers of `dtype` | the fastest |
| `packed=True` | packed weights stay packed; `reference` expands them for each use, kernels do not | slower |
| `offload=True` | matrices stay in the files, memory-mapped | slow; runs models larger than memory |

Safetensors alone are read, and nothing outside the folder. Every tensor is used or named in an error, every parameter
filled or named; a model comes out whole or not at all. Drafter and vision tensors are checked against the config and
left for the modules that compute them. Models of V1 to V4 (`model.generations`) are loaded expanded, from float
tensors. Source: V4.1 architecture 6, 11.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashsim.config import Config, V41Config, load_config, preset_name
from model.checkpoint import Checkpoint
from model.generations import MODELS, is_draft, tensors
from model.memory import require
from model.moe import MoE
from model.parallel import hold
from model.random_weights import randomise
from model.safetensors_file import CheckpointError
from model.stored_weights import STORABLE, ExpertStack, StoredWeight, store
from model.tokenizer import (
    TOKEN_MAP_FILE,
    TOKENIZER_FILE,
    byte_tokenizer,
    compressed_ids,
    engram_table,
    load_tokenizer,
    read_token_map,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
"""What a model computes in. Not float16: an epsilon of 1e-20 is zero there."""

OFFLOAD_BYTES = 2**20
"""With `offload`, a matrix of fewer stored bytes than this is loaded all the same, unless it is a routed expert's."""


def load(
    source: str | os.PathLike | Mapping[str, Any] | Config,
    backend: str = "reference",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    cache_rounding: bool = True,
    *,
    seed: int = 0,
    packed: bool = False,
    offload: bool = False,
    activation_rounding: bool = False,
    experts: range | None = None,
) -> nn.Module:
    """The text model of a checkpoint folder; or of a preset name or config, with random weights.

    Args:
        source: a folder of a checkpoint; or a preset name (`tiny`, `mini`), a config, or its fields; of any generation.
        backend, dtype, device, cache_rounding: as of `model.Transformer`. On device `meta` a preset has no weights.
        seed: of random weights; a checkpoint has none.
        packed: keep packed weights packed in memory, or pack random ones.
        offload: leave matrices in the files and expand what is used.
        activation_rounding: with `packed` or `offload`, round the input of packed linears to FP8 as the trained model
            did (V4.1 architecture 6.5). Without, a packed checkpoint computes with its expanded weights, and its
            experts run in PyTorch under both backends (`model.backend`).
        experts: the routed experts to read from a folder, where other processes have the others (`model.parallel`).

    Returns:
        The model, called with ids [batch, sequence] for float32 logits [batch, sequence, vocab]. It carries `tokenizer`
        (a `tokenizers.Tokenizer` or None), `config_json` (the whole config.json, or None) and `other_tensors` (names of
        drafter and vision tensors that the files have and the text model does not use).

    Raises:
        CheckpointError: the files are damaged, incomplete, or not of this config.
        ConfigError: a field of the config is missing, wrong, or not computed.
        TokenizerError: Engram needs a tokenizer, which is missing or of another model.
        MemoryError: the weights do not fit the memory that is free.
    """
    if activation_rounding and not (packed or offload):
        raise CheckpointError("activation_rounding needs packed weights; accepted: with packed=True or offload=True")
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype is {dtype}; accepted: {', '.join(map(str, DTYPES))}")
    options = {"backend": backend, "dtype": dtype, "device": _device(device), "cache_rounding": cache_rounding}
    if not _is_folder(source):
        for name, given in (("offload", offload), ("experts", experts is not None)):
            if given:
                raise CheckpointError(f"{source!r} has random weights; {name} is for checkpoint folders")
        return random_model(source, seed=seed, packed=packed, activation_rounding=activation_rounding, **options)
    options |= {"packed": packed, "offload": offload, "rounding": activation_rounding, "experts": experts}
    return _load_folder(Path(source), **options)


def random_model(
    source: str | os.PathLike | Mapping[str, Any] | Config,
    *,
    seed: int = 0,
    backend: str = "reference",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    cache_rounding: bool = True,
    packed: bool = False,
    activation_rounding: bool = False,
) -> nn.Module:
    """A model with random weights: the same for the same seed and config, whatever the order they are made in.

    With `packed` they are packed once made, as a quantised checkpoint of them would be.
    Its tokenizer is one of bytes (`model.tokenizer.byte_tokenizer`), where the vocabulary has room for them.
    """
    config = load_config(source)
    if packed:
        _check_packable(config, config.name)
    table = {name: spec for name, spec in tensors(config).items() if spec.part == "text"}
    device = torch.device(device)
    if device.type != "meta":
        weights = sum(math.prod(spec.shape) for spec in table.values()) * dtype.itemsize
        require(f"{config.name} with its weights", weights, device)
    model = MODELS[type(config)](config, backend, dtype, device, cache_rounding)
    if device.type != "meta":
        randomise(model, seed)
        if packed:
            _pack(model, activation_rounding)
    model.tokenizer, model.config_json, model.other_tensors = byte_tokenizer(config.vocab_size), None, ()
    if _has_engram(config):
        size, ids = config.engram_compressed_vocab_size, range(config.vocab_size)
        if model.tokenizer is not None:
            ids = compressed_ids(model.tokenizer, config.vocab_size)
        model.set_token_map([i % size for i in ids])
    return model.eval()


# --- folders ----------------------------------------------------------------------------------------------------------


def _device(device: torch.device | str) -> torch.device:
    try:
        device = torch.device(device)
    except RuntimeError:
        raise CheckpointError(f"device is {device!r}; accepted: cpu, cuda, cuda:N or meta") from None
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise CheckpointError(f"device is {device}, and PyTorch finds {torch.cuda.device_count()} GPUs; accepted: cpu")
    return device


def _load_folder(folder: Path, *, packed, offload, rounding, experts, dtype, device, **options) -> nn.Module:
    checkpoint = Checkpoint(folder)
    config = checkpoint.config
    if device.type == "meta":
        raise CheckpointError("device is meta, where nothing can be loaded; accepted: a device with memory")
    if packed or offload:
        _check_packable(config, folder.name)
    engram, tokenizer, token_map = _has_engram(config), None, None
    mapped = engram and (folder / TOKEN_MAP_FILE).exists()
    if (folder / TOKENIZER_FILE).exists() or (engram and not mapped):
        tokenizer = load_tokenizer(checkpoint.inside(TOKENIZER_FILE))
    if engram:
        sizes = config.vocab_size, config.engram_compressed_vocab_size
        if mapped:
            token_map = read_token_map(checkpoint.inside(TOKEN_MAP_FILE), *sizes)
        else:
            token_map = engram_table(tokenizer, *sizes)
    model = MODELS[type(config)](config, dtype=dtype, device="meta", **options)
    if token_map is not None:
        model.set_token_map(token_map)
    model.backend.check(config, dtype, device, model.cache_rounding)

    names = checkpoint.names("text")
    parameters = dict(model.named_parameters())
    if wrong := sorted(set(names) ^ set(parameters)):
        raise CheckpointError(f"parameters of the model and of model.tensor_table differ: {', '.join(wrong[:8])}")
    modules = dict(model.named_modules())
    if experts is not None:
        names = _without_others(names, modules, config, experts)
    kept = {name for name in names if _stays_stored(checkpoint, modules, name, packed, offload)}
    expanded = sum(math.prod(checkpoint.table[n].shape) * parameters[n].dtype.itemsize for n in set(names) - kept)
    held = 0 if offload else sum(_stored_bytes(checkpoint, name) for name in kept)
    hint = "" if offload else "; packed=True keeps packed weights packed, offload=True leaves matrices in the files"
    require(f"{folder.name} with its weights", expanded + held, device, hint)

    places = {} if offload else _stack_experts(modules, kept, device, rounding, experts)
    for name in names:
        if name in kept:
            weight = StoredWeight.read(checkpoint, name, dtype, mapped=offload, device=device, place=places.get(name))
            put_stored(model, modules, weight, device, rounding)
        else:
            put_parameter(model, name, checkpoint.weight(name, parameters[name].dtype).to(device))
    if experts is not None:
        for layer in modules.values():
            if isinstance(layer, MoE):
                hold(layer, [layer.experts[i] for i in experts], experts)
    model.tokenizer, model.config_json = tokenizer, checkpoint.root
    others = [name for name in checkpoint.headers if name not in parameters]
    model.other_tensors = tuple(name for name in others if name in checkpoint.table or is_draft(config, name))
    return model.eval()


def _without_others(names: list[str], modules: Mapping[str, nn.Module], config: Config, experts: range) -> list[str]:
    """The names less those of routed experts that this process does not hold."""
    if not isinstance(config, V41Config):
        raise CheckpointError(f"experts is {experts}; accepted: None, as model_type is {config.model_type}")
    total = config.n_routed_experts
    good = isinstance(experts, range) and experts.step == 1
    if not good or not 0 <= experts.start < experts.stop <= total:
        raise CheckpointError(f"experts is {experts}; accepted: a range of the {total} routed experts of a V4.1 model")
    layers = [path for path, layer in modules.items() if isinstance(layer, MoE)]
    others = [f"{path}.experts.{i}." for path in layers for i in range(total) if i not in experts]
    found = {name for name in names if ".experts." in name and name.startswith(tuple(others))}
    return [name for name in names if name not in found]


def put_stored(
    model: nn.Module, modules: Mapping[str, nn.Module], weight: StoredWeight, device, rounding: bool
) -> None:
    """Puts a layer over the stored weight in the place of the one that has this parameter."""
    path = weight.name.removesuffix(".weight")
    parent, _, attribute = path.rpartition(".")
    setattr(modules[parent], attribute, store(modules[path], weight, device, model.backend, rounding))


def _pack(model: nn.Module, rounding: bool) -> None:
    """Packs the weights of a model that the release packs, in place."""
    modules, device = dict(model.named_modules()), model.device
    kinds = {name: s.kind for name, s in tensors(model.config).items() if s.part == "text" and s.quantised}
    places = _stack_experts(modules, kinds.keys(), device, rounding)
    for name, kind in kinds.items():
        values = modules[name.removesuffix(".weight")].weight
        weight = StoredWeight.pack(name, values, kind, model.dtype, place=places.get(name))
        put_stored(model, modules, weight, device, rounding)


def _stack_experts(modules: Mapping[str, nn.Module], kept: Set[str], device, rounding: bool, experts=None):
    """Gives each layer whose routed experts all stay packed a stack; where each of their matrices goes, by name."""
    places = {}
    for path, layer in modules.items():
        if not isinstance(layer, MoE):
            continue
        mine = range(len(layer.experts)) if experts is None else experts
        names = {
            f"{path}.experts.{i}.{matrix}.weight": (place, matrix)
            for place, i in enumerate(mine)
            for matrix in ExpertStack.MATRICES
        }
        if names.keys() <= kept:
            inner, hidden = layer.experts[0].w1.weight.shape
            layer.stack = ExpertStack(len(mine), hidden, inner, activation_rounding=rounding, device=device)
            places |= {name: layer.stack.place(*key) for name, key in names.items()}
    return places


def _stays_stored(checkpoint: Checkpoint, modules, name: str, packed: bool, offload: bool) -> bool:
    path = name.removesuffix(".weight")
    if path == name or not isinstance(modules.get(path), STORABLE):
        return False
    if offload:
        expert = checkpoint.table[name].kind == "fp4"
        return expert or checkpoint.table[name].kind == "table" or _stored_bytes(checkpoint, name) >= OFFLOAD_BYTES
    return packed and name in checkpoint.packed


def _stored_bytes(checkpoint: Checkpoint, name: str) -> int:
    weight = checkpoint.headers[name].nbytes
    if name in checkpoint.packed:
        weight += sum(t.nbytes for t in checkpoint.packed_rows(name)[1:])
    return weight


def _check_packable(config: Config, name: str) -> None:
    if not isinstance(config, V41Config):
        raise CheckpointError(f"{name} is of {config.model_type}; packed and offload are for deepseek_v41")


def _has_engram(config: Config) -> bool:
    return isinstance(config, V41Config) and bool(config.engram_layer_ids)


def _is_folder(source: Any) -> bool:
    if not isinstance(source, str | os.PathLike):
        return False
    if isinstance(source, str) and preset_name(source) is not None:
        return False
    path = Path(source)
    if path.suffix == ".json" and path.is_file():
        return False
    return path.is_dir() or isinstance(source, os.PathLike) or os.sep in str(source)


def put_parameter(model: nn.Module, name: str, values: torch.Tensor) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, nn.Parameter(values, requires_grad=False))
