"""What one call of a V4.1 model did, layer by layer: scores, candidate blocks, selected entries, window. Read-only.

    with Trace(model) as trace:
        model(ids, cache=cache)
    trace[24].selected          # [B, S, k] entries, -1 absent
    trace[24].scores            # [B, S, E] index scores, -inf where not visible or not in the candidate pool

A layer's rows are the tokens that its attention ran for; in a prefill the decoder half has the prompt's tail alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashsim.schedule import LayerPlan
from model.indexer import entries_of
from model.step import Step
from model.transformer import Transformer

OPS = ("index_scores", "sparse_attention")  # of the backend, that a trace looks at


@dataclass
class LayerTrace:
    """The newest call of one layer's attention, of B sequences with S rows.

    positions [B, S], -1 for padding. window [B, S]: tokens seen in the window, the query's own included.
    selected [B, S, k]: entries attended to, ascending, -1 absent; None for a layer without compressed entries.
    scores [B, S, E]: index scores of a layer that selects, -inf where an entry was not visible or scored; else None.
    candidates [B, S, C]: blocks that the layer put into the pool, or scored from it, -1 absent; None where the layer
    does neither, or the pool holds every block.
    """

    plan: LayerPlan
    positions: Tensor
    window: Tensor
    selected: Tensor | None = None
    scores: Tensor | None = None
    candidates: Tensor | None = None

    @property
    def rows(self) -> int:
        """How many tokens the attention ran for, all sequences together."""
        return int((self.positions >= 0).sum())


class Trace:
    """Records while it is entered; `trace[layer]` is the newest `LayerTrace`, `rows` the rows of all calls by layer.

    Raises:
        TypeError: a model of another generation.
    """

    def __init__(self, model: Transformer):
        if not isinstance(model, Transformer):
            raise TypeError(f"model is {type(model).__name__}; accepted: a Transformer, the model of V4.1")
        self.model = model
        self.rows: dict[int, int] = {}
        self._layers: dict[int, LayerTrace] = {}

    def __getitem__(self, layer: int) -> LayerTrace:
        if layer not in self._layers:
            ran = ", ".join(map(str, self._layers)) or "none yet"
            raise KeyError(f"layer {layer} has no trace; layers whose attention ran: {ran}")
        return self._layers[layer]

    def __len__(self) -> int:
        return len(self._layers)

    def __enter__(self) -> Trace:
        self._hooks = []
        for block in self.model.layers:
            self._hooks.append(block.attn.register_forward_pre_hook(self._enter))
            self._hooks.append(block.attn.register_forward_hook(self._leave))
        backend = self.model.backend
        self._scores, self._attention = backend.index_scores, backend.sparse_attention
        # on the instance: they hide the methods of its class, or those of a trace around this one
        self._hidden = {name: vars(backend)[name] for name in OPS if name in vars(backend)}
        backend.index_scores, backend.sparse_attention = self._scored, self._attended
        return self

    def __exit__(self, *error) -> None:
        for hook in self._hooks:
            hook.remove()
        for name in OPS:
            delattr(self.model.backend, name)
        vars(self.model.backend).update(self._hidden)

    def _enter(self, attention, args) -> None:
        self._parts: list[Tensor] = []
        self._seen: list[Tensor] = []

    def _scored(self, queries, weights, keys, positions, ratio, codec, candidates=None, block_size=1) -> Tensor:
        scores = self._scores(queries, weights, keys, positions, ratio, codec, candidates, block_size)
        whole = scores.clone()
        if candidates is not None:
            entry = entries_of(candidates, block_size)
            held = (entry >= 0) & (entry < keys.shape[1])
            whole = scores.new_full((*scores.shape[:2], keys.shape[1] + 1), -torch.inf)
            whole = whole.scatter(-1, entry.where(held, keys.shape[1]), scores)[..., :-1]
        self._parts.append(whole)
        return scores

    def _attended(self, q, window, slots, *rest) -> Tensor:
        self._seen.append((slots >= 0).sum(dim=-1))
        return self._attention(q, window, slots, *rest)

    def _leave(self, attention, args, result) -> None:
        step: Step = args[1]
        plan = attention.plan
        pooled = plan.builds_candidates or plan.scores_candidates
        self._layers[plan.layer] = LayerTrace(
            plan,
            step.positions.clone(),
            torch.cat(self._seen).view(step.positions.shape),
            None if plan.kv_source is None else step.selected.clone(),
            torch.cat(self._parts, dim=1) if self._parts else None,
            step.candidates.clone() if pooled and step.candidates is not None else None,
        )
        self.rows[plan.layer] = self.rows.get(plan.layer, 0) + self._layers[plan.layer].rows
