"""What the models of V1 to V4 check of a call: token ids, lengths, and the cache that they continue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model.backend import Backend, BackendError, make_backend
from model.cache import CacheError
from model.step import Step
from model.transformer import InputError


def begin(model: nn.Module, ids: Tensor, cache, lengths: Sequence[int] | None):
    """(cache, step, ids) of a call: ids int64 [B, S] on the model's device, a new cache where none is given.

    The model has `config`, `dtype`, `device`, `cache_rounding` and `new_cache`.

    Raises:
        InputError: ids of another shape, type or range; lengths that do not fit; more tokens than the model takes.
        CacheError: a cache of another model.
    """
    config, ids = model.config, torch.as_tensor(ids)
    if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError(f"ids are {ids.dtype} of shape {tuple(ids.shape)}; accepted: whole numbers [batch, sequence]")
    batch, rows = ids.shape
    if batch == 0 or rows == 0:
        raise InputError(f"ids have shape {tuple(ids.shape)}; accepted: at least one sequence of one token")
    ids = ids.to(model.device, torch.int64)
    count = [rows] * batch if lengths is None else [int(n) for n in lengths]
    if len(count) != batch or not all(1 <= n <= rows for n in count):
        raise InputError(f"lengths are {count}; accepted: {batch} whole numbers from 1 to {rows}")
    ids = ids[:, : max(count)]
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= config.vocab_size:
        raise InputError(f"token id {low if low < 0 else high}; accepted: 0 to {config.vocab_size - 1}")
    if cache is None:
        cache = model.new_cache(batch, capacity=max(count))
    if cache.batch_size != batch:
        raise InputError(f"ids have {batch} sequences; accepted: {cache.batch_size}, as the cache")
    if cache.config != config or cache.cache_rounding != model.cache_rounding or cache.dtype != model.dtype:
        raise CacheError(f"{cache!r} was made for another model; accepted: a cache of new_cache()")
    longest, limit = max(s + c for s, c in zip(cache.lengths, count, strict=True)), config.max_position_embeddings
    if longest > limit:
        raise InputError(f"{longest} tokens in a sequence; accepted: max_position_embeddings, {limit}")
    return cache, Step(config, list(cache.lengths), count, model.device), ids


def last_rows(x: Tensor, step: Step) -> Tensor:
    """[B, ...]: each sequence's last real row of x [B, S, ...]."""
    row = torch.tensor([count - 1 for count in step.count], device=x.device)
    return x[torch.arange(step.batch, device=x.device), row]


def reference_only(backend: str, config) -> Backend:
    """The `reference` backend, the only one of V1 to V4: the kernels are those of V4.1.

    Raises:
        BackendError: another name.
    """
    if backend != "reference":
        raise BackendError(f"backend is {backend!r} with model_type {config.model_type}; accepted: reference")
    return make_backend(backend)
