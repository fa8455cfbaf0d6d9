"""Bounded replay: continuing from a prompt of which only the global cache was kept.

A service keeps the compressed entries, the index keys and the ids of a prompt's tokens, not the windows. When the next
prompt begins with the same P tokens, the windows have to be made again: some rows before P run once more, with windows
that begin at the first of them, and read the stored entries instead of writing them.

| mode | rows before P that run again | result |
| --- | --- | --- |
| `cold` | all P, nothing stored is used | the reference |
| `exact` | W - 1 for every layer, and `rollback`: what the first rows lack is out of sight | equal to cold |
| `bounded` | the last `sliding_window` | what the trained model was made for, and not equal |

The rows of the decoder half are those of the prompt's tail, exact or `sliding_window` many (`Transformer.prefill`).
Source: V4.1 architecture 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashsim.persistent import REPLAY_MODES, replay_rows
from model.cache import Cache, CacheError

if TYPE_CHECKING:
    from model.transformer import Transformer


class ReplayError(ValueError):
    """A replay that does not exist, or of another prompt than the stored one."""


@dataclass(frozen=True)
class Replay:
    """What a replay did. `logits` [1, vocab] of the last token; `cache` can be continued.

    `prefix_tokens` were stored, the first `skipped_rows` of them were not run again; `encoder_rows` of them were, and
    `decoder_rows` rows of the whole prompt went through the decoder half. `difference` is the largest difference of the
    logits from a cold run, where one was made.
    """

    mode: str
    logits: Tensor
    cache: Cache
    prompt_tokens: int
    prefix_tokens: int
    skipped_rows: int
    encoder_rows: int
    decoder_rows: int
    difference: float | None = None

    def __str__(self) -> str:
        text = (
            f"{self.mode}: {self.encoder_rows} of {self.prefix_tokens} prefix rows recomputed, "
            f"{self.decoder_rows} of {self.prompt_tokens} rows in the decoder half"
        )
        return text if self.difference is None else f"{text}, logits differ by {self.difference:.3g}"


def replay(
    model: Transformer, ids: Tensor, stored: Cache, mode: str = "bounded", *, chunk: int | None = None
) -> Replay:
    """Run the prompt ids [1, N], whose first tokens `stored` holds (`cache.prefix(P)`).

    Raises:
        ReplayError: another mode, or a prompt that does not begin with the stored tokens.
    """
    prompt, prefix = ids.shape[1], stored.lengths[0]
    if stored.batch_size != 1 or len(ids) != 1:
        raise ReplayError(f"{len(ids)} prompts and {stored.batch_size} stored sequences; accepted: one of each")
    if prefix > prompt:
        raise ReplayError(f"the stored prefix has {prefix} tokens; accepted: at most the prompt's {prompt}")
    same = stored.tokens[0, :prefix] == ids[0, :prefix].to(stored.tokens.device)
    if not bool(same.all()):
        raise ReplayError(f"the prompt differs from the stored tokens at position {int(same.long().argmin())}")
    if mode not in REPLAY_MODES:
        raise ReplayError(f"mode is {mode!r}; accepted: {', '.join(REPLAY_MODES)}")
    rows = replay_rows(model.config, prompt, prefix, mode, rollback=stored.rollback)
    if mode == "cold":
        cache = model.new_cache(1, capacity=prompt, rollback=stored.rollback)
    else:
        cache = stored.fork()
        cache.rewind(rows.encoder_start)
    tail = model.config.sliding_window if mode == "bounded" else "exact"
    logits = model.prefill(ids[:, rows.encoder_start :], cache, tail=tail, chunk=chunk)
    return Replay(
        mode=mode,
        logits=logits,
        cache=cache,
        prompt_tokens=prompt,
        prefix_tokens=prefix,
        skipped_rows=rows.encoder_start,
        encoder_rows=rows.replayed,
        decoder_rows=rows.decoder_rows,
    )


def keep(model: Transformer, ids: Tensor, prefix: int, *, chunk: int | None = None) -> Cache:
    """What a service keeps of the first `prefix` tokens of a prompt ids [1, N]: entries, index keys, token ids.

    Raises:
        CacheError: `prefix` is not 1 to N.
    """
    if not 1 <= prefix <= ids.shape[1]:
        raise CacheError(f"prefix of {prefix} tokens; accepted: 1 to {ids.shape[1]}")
    before = model.new_cache(1)
    model.prefill(ids[:, :prefix], before, tail="exact", chunk=chunk)
    return before.prefix(prefix)


def compare(model: Transformer, ids: Tensor, prefix: int, *, chunk: int | None = None) -> list[Replay]:
    """All three modes for a prompt ids [1, N] whose first `prefix` tokens were run before, each with its difference.

    Raises:
        CacheError: `prefix` is not 1 to N.
    """
    stored = keep(model, ids, prefix, chunk=chunk)
    results = [replay(model, ids, stored, mode, chunk=chunk) for mode in REPLAY_MODES]
    cold = results[0].logits
    return [Replay(**{**vars(result), "difference": float((result.logits - cold).abs().max())}) for result in results]


def row_differences(model: Transformer, ids: Tensor, stored: Cache, mode: str = "bounded") -> Tensor:
    """[layers, N] largest difference of each row's feed-forward output from a full forward; NaN where no row ran.

    Raises:
        ReplayError: as `replay`.
    """
    outputs: list[list[Tensor]] = [[] for _ in model.layers]
    hooks = [
        layer.ffn.register_forward_hook(lambda module, args, output, made=made: made.append(output[0].clone()))
        for layer, made in zip(model.layers, outputs, strict=True)
    ]
    try:
        model(ids)
        replay(model, ids, stored, mode)
    finally:
        for hook in hooks:
            hook.remove()
    result = torch.full((len(outputs), ids.shape[1]), torch.nan, dtype=outputs[0][0].dtype)
    for row, (full, made) in zip(result, outputs, strict=True):
        row[len(row) - len(made) :] = (full[len(full) - len(made) :] - made).abs().amax(dim=-1)
    return result
