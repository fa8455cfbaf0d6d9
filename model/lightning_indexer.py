"""The lightning indexer of V3.2: which earlier tokens a query attends to.

    key_t    = FP8(H(rotate(LayerNorm(x wk^T), t)))                            one a token, cached
    query_a  = FP8(H(rotate(qr wq_b^T, p)))                                    index heads a = 0 .. A - 1
    weight_a = (x weights_proj^T)_a / sqrt(A I)                                may be negative
    score_t  = sum_a relu(query_a . key_t) weight_a                            t <= p
    selected = the index_topk best, by score, then the earlier token

The rotation takes the FIRST `qk_rope_head_dim` channels, channels i and i + r / 2 as a pair, unlike that of the
latent attention beside it. H is the Hadamard rotation, which changes nothing but the rounding: without cache rounding
both are left out. A query is rounded like a key. The key has a true LayerNorm: mean subtracted, bias added.
Source: earlier generations, 4.1, 4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashsim.config import DSAConfig
from flashsim.schedule import LayerPlan
from model.attention.gqa import rotate_halves
from model.flop_counter import label
from model.hadamard import hadamard
from model.indexer import SCORES_AT_ONCE, top_k
from model.layers import Linear, Weighted, wide
from model.token_cache import TokenCache, TokenStep

EPS = 1e-6


class LayerNorm(Weighted):
    """w (x - mean) / sqrt(variance + eps) + b in float32, rounded once: `weight` and `bias` [width]."""

    def __init__(self, width: int, eps: float = EPS, *, dtype=torch.float32, device=None):
        super().__init__(width, dtype=dtype, device=device)
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wider = wide(x)
        weight, bias = self.weight_as(wider.dtype), self.bias.to(wider.dtype)
        return F.layer_norm(wider, self.bias.shape, weight, bias, self.eps).to(x.dtype)


class LightningIndexer(nn.Module):
    """`wq_b` [A I, q_lora_rank], `wk` [I, D], `k_norm`, `weights_proj` [A, D]; I is `index_head_dim`."""

    def __init__(self, config: DSAConfig, plan: LayerPlan, *, dtype, device):
        super().__init__()
        self.config, self.layer = config, plan.layer
        heads, width, options = config.index_n_heads, config.index_head_dim, {"dtype": dtype, "device": device}
        self.wq_b = Linear(config.q_lora_rank, heads * width, **options)
        self.wk = Linear(config.hidden_size, width, **options)
        self.k_norm = LayerNorm(width, **options)
        self.weights_proj = Linear(config.hidden_size, heads, widened=True, **options)
        self.scale = (heads * width) ** -0.5

    def turn(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x [..., I] with its first r channels rotated in halves."""
        channels = self.config.qk_rope_head_dim
        return torch.cat((rotate_halves(x[..., :channels], rotation), x[..., channels:]), dim=-1)

    def remember(self, x: Tensor, step: TokenStep, cache: TokenCache) -> None:
        """Cache the keys of the rows x [B, S, D]."""
        keys = self.turn(self.k_norm(self.wk(x)), step.rotation(self.config.qk_rope_head_dim))
        cache.write(self.layer, "index_key", step, hadamard(keys) if cache.cache_rounding else keys)

    def forward(self, x: Tensor, qr: Tensor, step: TokenStep, cache: TokenCache) -> Tensor:
        """The selection of every row: [B, S, k] positions in ascending order, -1 absent; k <= index_topk.

        x [B, S, D] is the attention's input, qr [B, S, q_lora_rank] its normed low-rank query.
        """
        heads, codec = self.config.index_n_heads, cache.codecs["index_key"]
        rotation = step.rotation(self.config.qk_rope_head_dim).unsqueeze(2)
        query = self.turn(self.wq_b(qr).unflatten(-1, (heads, -1)), rotation)
        weights = self.weights_proj(x) * self.scale
        if cache.cache_rounding:
            query = codec.unpack(codec.pack(hadamard(query)))
        query = query.to(weights.dtype)
        keys = cache.read(self.layer, "index_key", max(step.end)).to(query.dtype).transpose(1, 2)  # [B, I, N]
        visible = step.visible()
        size = max(SCORES_AT_ONCE // (step.batch * heads * keys.shape[2]), 1)
        selected = []
        for low in range(0, step.rows, size):
            part = slice(low, low + size)
            with label("indexer_scores"):
                products = query[:, part].flatten(1, 2) @ keys  # [B, rows * A, N]
            products = products.unflatten(1, query[:, part].shape[1:3]).relu_()
            scores = (products * weights[:, part].unsqueeze(-1)).sum(dim=2)
            selected.append(top_k(scores.masked_fill_(~visible[:, part], -torch.inf), self.config.index_topk))
        return torch.cat(selected, dim=1)
