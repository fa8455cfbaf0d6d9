"""The lightning indexer: which compressed entries a query attends to.

    key_t     = MXFP4(rotate(RMS(latent_t wk^T), ratio * t))             layers that compress (Full)
    query     = MXFP4(rotate(qr wq_b^T, p))                              index heads a = 0 .. A - 1
    weight_a  = (x weights_proj^T)_a / sqrt(A I)                         may be negative
    score_t   = sum_a relu(query_a . key_t) weight_a                     only t with (t + 1) ratio <= p + 1
    selection = the index_topk best, by score, then by lower entry

One layer also fills the candidate pool: it ranks blocks of `candidate_block_size` entries by their best score, keeps
`candidate_topk_blocks`, and always the block with the newest visible entry. Reindex layers after it score the pool
alone. The layer that fills the pool selects among all entries. Source: V4.1 architecture 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flashsim.config import V41Config
from flashsim.schedule import LayerPlan
from model.cache import Cache, Source
from model.compressor import Groups
from model.flop_counter import label
from model.layers import Linear, RMSNorm, wide, wide_dtype
from model.quant import Codec
from model.rope import frequencies, turns
from model.step import Step

if TYPE_CHECKING:
    from model.backend import Backend

SCORES_AT_ONCE = 2**24  # numbers [rows, heads, entries] that exist at a time


def score_rows(scores: int, heads: int) -> int:
    """How many rows to score at a time, when each has so many scores, of so many heads."""
    return SCORES_AT_ONCE // (scores * heads)


def index_scores(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    positions: Tensor,
    ratio: int,
    codec: Codec,
    candidates: Tensor | None = None,
    block_size: int = 1,
) -> Tensor:
    """Scores [B, S, E], -inf where an entry is not visible.

    queries [B, S, A, bytes], keys [B, E, bytes]: packed; weights [B, S, A]; positions [B, S], -1 sees nothing.
    candidates [B, S, C]: score these blocks alone, -1 for none; the result is [B, S, C * block_size] and column
    c * block_size + i stands for entry candidates[c] * block_size + i.
    """
    query, key = (codec.unpack(packed).to(wide_dtype(weights.dtype)) for packed in (queries, keys))
    visible = ((positions + 1) // ratio).unsqueeze(-1)  # [B, S, 1]
    if candidates is None:
        entry = torch.arange(keys.shape[1], device=keys.device)
        products = query.flatten(1, 2) @ key.transpose(1, 2)  # [B, S * A, E]
        products = products.unflatten(1, queries.shape[1:3])
        seen = entry < visible
    else:
        entry = entries_of(candidates, block_size)  # [B, S, C * block_size]
        sequence = torch.arange(keys.shape[0], device=keys.device).view(-1, 1, 1)
        pool = key[sequence, entry.clamp(0, keys.shape[1] - 1)]
        products = query @ pool.transpose(2, 3)  # [B, S, A, E]
        seen = (entry >= 0) & (entry < visible)
    scores = (products.relu_() * wide(weights).unsqueeze(-1)).sum(dim=2)
    return scores.masked_fill_(~seen, -torch.inf)


def entries_of(blocks: Tensor, block_size: int) -> Tensor:
    """[..., C] block numbers to [..., C * block_size] entry numbers, -1 where the block is."""
    entries = blocks.unsqueeze(-1) * block_size + torch.arange(block_size, device=blocks.device)
    return entries.where(blocks.unsqueeze(-1) >= 0, -1).flatten(-2)


def top_k(scores: Tensor, k: int) -> Tensor:
    """[..., k] columns of the best scores in ascending order, -1 where fewer are above -inf. Ties: the lower column."""
    k = min(k, scores.shape[-1])
    best, column = scores.sort(dim=-1, descending=True, stable=True)
    last = scores.shape[-1]
    column = column[..., :k].masked_fill(best[..., :k] == -torch.inf, last).sort(dim=-1).values
    return column.masked_fill_(column == last, -1)


def block_maxima(scores: Tensor, block_size: int) -> Tensor:
    """[..., E] scores to the best of each block, [..., ceil(E / block_size)]."""
    short = -scores.shape[-1] % block_size
    padded = torch.nn.functional.pad(scores, (0, short), value=-torch.inf)
    return padded.unflatten(-1, (-1, block_size)).amax(dim=-1)


def top_blocks(maxima: Tensor, k: int, newest: Tensor) -> Tensor:
    """[..., k] blocks with the best maxima, ascending, -1 for none; block newest[...] is kept whatever its score."""
    forced = torch.arange(maxima.shape[-1], device=maxima.device) == newest.unsqueeze(-1)
    return top_k(maxima.masked_fill(forced, torch.inf), k)


class Indexer(nn.Module):
    """Query side `wq_b`, `weights_proj` of every layer that selects; key side `wk`, `k_norm` where it compresses."""

    def __init__(self, config: V41Config, plan: LayerPlan, backend: Backend, *, dtype, device):
        super().__init__()
        self.config, self.plan, self.backend = config, plan, backend
        heads, width = config.index_n_heads, config.index_head_dim
        options = {"dtype": dtype, "device": device}
        if plan.owns_kv:
            self.wk = Linear(config.head_dim, width, **options)
            self.k_norm = RMSNorm(width, config.rms_norm_eps, **options)
        self.wq_b = Linear(config.q_lora_rank, heads * width, **options)
        self.weights_proj = Linear(config.hidden_size, heads, **options)
        self.scale = (heads * width) ** -0.5

    def add_keys(self, latent: Tensor, groups: Groups, step: Step, cache: Cache, source: Source) -> None:
        """Append the keys of latents [B, G, W], which are neither rotated nor rounded."""
        frequency = frequencies(self.config, True, step.device)
        position = (groups.first.unsqueeze(1) + torch.arange(groups.number, device=step.device)) * source.ratio
        turn = step.once(("group turn", source.ratio), lambda: turns(position, frequency))
        keys = self.backend.rotate(self.k_norm(self.wk(latent)), turn)
        groups.write(source.keys, self.backend.pack(keys, cache.key_codec))

    def forward(self, x: Tensor, qr: Tensor, step: Step, cache: Cache, source: Source) -> Tensor:
        """The selection of every row: [B, S, k] entries in ascending order, -1 absent; k <= index_topk.

        x [B, S, D] is the attention's input, qr [B, S, q_lora_rank] its normed low-rank query.
        """
        config, plan = self.config, self.plan
        heads, entries = config.index_n_heads, max(step.end) // source.ratio
        queries = self.backend.rotate(self.wq_b(qr).unflatten(-1, (heads, -1)), step.turn(True).unsqueeze(2))
        queries = self.backend.pack(queries, cache.key_codec)
        weights = self.weights_proj(x) * self.scale
        keys = source.keys[:, :entries]
        candidates = step.candidates if plan.scores_candidates else None
        scored = entries if candidates is None else candidates.shape[2] * config.candidate_block_size
        rows = max(self.backend.score_rows(max(step.batch * scored, 1), heads), 1)
        selected, pool = [], []
        for low in range(0, step.rows, rows):
            part = slice(low, low + rows)
            chosen = None if candidates is None else candidates[:, part]
            with label("indexer_scores_candidates" if plan.scores_candidates else "indexer_scores"):
                scores = self.backend.index_scores(
                    queries[:, part],
                    weights[:, part],
                    keys,
                    step.positions[:, part],
                    source.ratio,
                    cache.key_codec,
                    chosen,
                    config.candidate_block_size,
                )
            columns = self.backend.top_k(scores, config.index_topk)
            if chosen is not None:
                entry = entries_of(chosen, config.candidate_block_size)
                columns = entry.gather(-1, columns.clamp(min=0)).where(columns >= 0, -1)
            selected.append(columns)
            if plan.builds_candidates:
                pool.append(self._candidates(scores, step.positions[:, part], source.ratio))
        if plan.builds_candidates:
            blocks = torch.cat(pool, dim=1)
            # While the pool holds every block it changes nothing, and is not looked up.
            everything = -(-entries // config.candidate_block_size) <= config.candidate_topk_blocks
            step.candidates = None if everything else blocks
        return torch.cat(selected, dim=1)

    def _candidates(self, scores: Tensor, positions: Tensor, ratio: int) -> Tensor:
        size = self.config.candidate_block_size
        newest = ((positions + 1) // ratio - 1).div(size, rounding_mode="floor")
        return self.backend.top_blocks(block_maxima(scores, size), self.config.candidate_topk_blocks, newest)
