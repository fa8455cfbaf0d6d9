"""How models are called: what they ask of their input; and, for V1 to V4, prompts in chunks.

V4.1's prefill stops half-way for most of a prompt (`model.transformer`). Before it every layer runs for every token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model.cache import CacheError

EXACT = "exact"


class InputError(ValueError):
    """Token ids, lengths or a cache that the model cannot take."""


def begin(model: nn.Module, ids, cache, lengths: Sequence[int] | None):
    """(cache, count, ids [B, S]): a cache for the call, an empty one where none is given, and `count[b]` real tokens.

    The model has `config`, `dtype`, `device`, `cache_rounding` and `new_cache`.

    Raises:
        InputError: ids of another shape, type or range; lengths that do not fit; too many tokens.
        CacheError: a cache of another model.
    """
    config, ids = model.config, torch.as_tensor(ids)
    if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError(f"ids are {ids.dtype} of shape {tuple(ids.shape)}; accepted: whole numbers [batch, sequence]")
    batch, rows = ids.shape
    if batch == 0 or rows == 0:
        raise InputError(f"ids have shape {tuple(ids.shape)}; accepted: at least one sequence of one token")
    count = [rows] * batch if lengths is None else [int(n) for n in lengths]
    if len(count) != batch or not all(1 <= n <= rows for n in count):
        raise InputError(f"lengths are {count}; accepted: {batch} whole numbers from 1 to {rows}")
    ids = ids[:, : max(count)].to(model.device, torch.int64)
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= config.vocab_size:
        raise InputError(f"token id {low if low < 0 else high}; accepted: 0 to {config.vocab_size - 1}")
    if cache is None:
        cache = model.new_cache(batch, capacity=max(count))
    if cache.batch_size != batch:
        raise InputError(f"ids have {batch} sequences; accepted: {cache.batch_size}, as the cache")
    if cache.config != config or cache.cache_rounding != model.cache_rounding or cache.dtype != model.dtype:
        raise CacheError(f"{cache!r} was made for another model; accepted: a cache of new_cache()")
    longest = max(s + c for s, c in zip(cache.lengths, count, strict=True))
    if longest > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise InputError(f"{longest} tokens in a sequence; accepted: max_position_embeddings, {limit}")
    return cache, count, ids


class LanguageModel(nn.Module):
    """What is shown of a model: its `config`, `backend`, `dtype`, `device` and `cache_rounding`."""

    def extra_repr(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        name, rounding = self.config.name, self.cache_rounding
        return f"{name}, {self.backend!r}, dtype={dtype}, device={self.device}, cache_rounding={rounding}"


class WholePrompt(LanguageModel):
    """`prefill` as V4.1 has it, for models without an encoder-decoder."""

    def tail_rows(self, rollback: int = 0) -> None:
        """Rows of a prompt that go through all layers: all of them."""

    def prefill(
        self,
        ids: Tensor,
        cache=None,
        *,
        tail: str | None = EXACT,
        chunk: int | None = None,
        lengths: Sequence[int] | None = None,
        progress=None,
    ) -> Tensor:
        """Logits [B, vocab] of the last token of each prompt.

        Args:
            tail: `exact` or None, which are the same here.
            chunk: tokens of a prompt that run at a time; all by default.
            lengths: how many of the tokens are real, for each sequence; not with a chunk.
            progress: called with (tokens done, tokens in all) after each chunk.

        Raises:
            InputError: as a forward, and another tail or chunk.
        """
        if tail not in (EXACT, None):
            raise InputError(
                f"tail is {tail!r}; accepted: {EXACT!r} or None, as {self.config.name} has no decoder half"
            )
        if chunk is None or lengths is not None:
            if chunk is not None:
                raise InputError(f"chunk is {chunk!r}, and lengths are given; accepted: one of the two")
            return self(ids, cache, lengths=lengths, last=True)
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise InputError(f"chunk is {chunk!r}; accepted: a whole number from 1 or None")
        cache, (rows, *_), ids = begin(self, ids, cache, None)
        for low in range(0, rows, chunk):
            logits = self(ids[:, low : low + chunk], cache, last=True)
            if progress is not None:
                progress(min(low + chunk, rows), rows)
        return logits
