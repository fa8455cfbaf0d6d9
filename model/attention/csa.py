"""CSA, compressed sparse attention of V4: a window, and the best of the entries of a cache with one for 4 tokens.

    key_t    = MXFP4(H(entry of the indexer's own compressor))         the same groups, at the indexer's width
    query    = MXFP4(H(rotate(qr wq_b^T, p)))                          index heads a = 0 .. A - 1; H: Hadamard
    weight_a = (x weights_proj^T)_a / sqrt(A I)                        may be negative
    score_t  = sum_a relu(query_a . key_t) weight_a                    only t < floor((p + 1) / 4)
    selected = the index_topk best, by score, then by lower entry

Without cache rounding there is no Hadamard rotation either: it changes nothing but the rounding. Source: earlier
generations, 5.3, 5.4.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashsim.config import V4Config
from flashsim.schedule import LayerPlan
from model.attention.window import WindowAttention
from model.flop_counter import label
from model.hadamard import hadamard
from model.indexer import SCORES_AT_ONCE, index_scores, top_k
from model.layers import Linear
from model.record_cache import Store
from model.rope import rotate
from model.step import Step
from model.v4_cache import V4Cache
from model.v4_compressor import V4Compressor


class CompressedSparseAttention(WindowAttention):
    """The window attention with a `compressor` of overlapping groups and an `indexer`."""

    component = "attention_selected"

    def __init__(self, config: V4Config, plan: LayerPlan, *, dtype, device):
        super().__init__(config, plan, dtype=dtype, device=device)
        ratio, width = plan.compress_ratio, config.head_dim
        self.compressor = V4Compressor(config, ratio, width, overlap=True, dtype=dtype, device=device)
        self.indexer = V4Indexer(config, plan, dtype=dtype, device=device)

    def entries(self, x: Tensor, qr: Tensor, step: Step, cache: V4Cache) -> tuple[Store, Tensor]:
        store = cache.stores[self.plan.layer, "main_kv"]
        self.compressor(x, step, cache.rings[self.plan.layer, "compressor_state"], store)
        return store, self.indexer(x, qr, step, cache)


class V4Indexer(nn.Module):
    """Queries `wq_b` and head weights `weights_proj`; keys by a `compressor` of its own."""

    def __init__(self, config: V4Config, plan: LayerPlan, *, dtype, device):
        super().__init__()
        self.config, self.layer, self.ratio = config, plan.layer, plan.compress_ratio
        heads, width = config.index_n_heads, config.index_head_dim
        options = {"dtype": dtype, "device": device}
        self.compressor = V4Compressor(config, self.ratio, width, overlap=True, **options)
        self.wq_b = Linear(config.q_lora_rank, heads * width, **options)
        self.weights_proj = Linear(config.hidden_size, heads, **options)
        self.scale = (heads * width) ** -0.5

    def forward(self, x: Tensor, qr: Tensor, step: Step, cache: V4Cache) -> Tensor:
        """The selection of every row: [B, S, k] entries in ascending order, -1 absent; k <= index_topk.

        x [B, S, D] is the attention's input, qr [B, S, q_lora_rank] its normed low-rank query.
        """
        turned = hadamard if cache.cache_rounding else lambda v: v
        store = cache.stores[self.layer, "index_key"]
        self.compressor(x, step, cache.rings[self.layer, "indexer_compressor_state"], store, turned)

        heads, entries = self.config.index_n_heads, max(step.end) // self.ratio
        queries = rotate(self.wq_b(qr).unflatten(-1, (heads, -1)), step.turn(True).unsqueeze(2))
        queries, weights = store.codec.pack(turned(queries)), self.weights_proj(x) * self.scale
        keys = store.rows[:, :entries]
        rows = max(SCORES_AT_ONCE // max(step.batch * entries * heads, 1), 1)
        selected = []
        for low in range(0, step.rows, rows):
            part = slice(low, low + rows)
            with label("indexer_scores"):
                seen = step.positions[:, part]
                scores = index_scores(queries[:, part], weights[:, part], keys, seen, self.ratio, store.codec)
            selected.append(top_k(scores, self.config.index_topk))
        return torch.cat(selected, dim=1)
