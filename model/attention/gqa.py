"""Grouped-query attention, V1 (DeepSeek-LLM 67B): full keys and values, each pair of them shared by a group of heads.

    q = rotate(x Wq^T, p)    k = rotate(x Wk^T, p)    v = x Wv^T              H query heads, U KV heads of width W
    s[a, t] = q_a . k_(a // (H / U)), t / sqrt(W)                             heads of a group are neighbours
    o = softmax(s) v,   y = o Wo^T                                            softmax over t <= p, in float32

Keys are rotated before they are cached, so a cached row is never touched again. The rotation takes channels i and
i + W / 2 as a pair, over the whole head. `attend` is also the attention of MLA, in either form: with as many KV heads
as heads, or with one. Source: earlier generations, 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashsim.config import GQAConfig
from flashsim.schedule import LayerPlan
from model.flop_counter import label
from model.layers import Linear, wide
from model.token_cache import TokenCache, TokenStep

SCORES_AT_ONCE = 2**24  # numbers [B, H, rows, N] that exist at a time


def rotate_halves(x: Tensor, turn: Tensor) -> Tensor:
    """x [..., 2 * pairs] with channels (i, i + pairs) turned by `turn` [..., pairs], which broadcasts.

    >>> rotate_halves(torch.tensor([1.0, 2.0, 0.0, 0.0]), torch.tensor([1j, 1.0 + 0j]))
    tensor([0., 2., 1., 0.])
    """
    real, imaginary = wide(x).chunk(2, dim=-1)
    cosine, sine = turn.real.to(real.dtype), turn.imag.to(real.dtype)
    return torch.cat((real * cosine - imaginary * sine, imaginary * cosine + real * sine), dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """[B, S, H, V] outputs of queries q [B, S, H, W] over keys k [B, N, U, W] and values v [B, N, U, V].

    Head a reads KV head a // (H / U). visible [B, S, N] bool has at least one key for each query.
    """
    heads, groups = q.shape[2], k.shape[2]
    query = (wide(q) * scale).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)  # [B, U, H / U, S, W]
    keys, values = (t.transpose(1, 2).to(query.dtype) for t in (k, v))  # [B, U, N, ...]
    size = max(SCORES_AT_ONCE // (q.shape[0] * heads * k.shape[1]), 1)
    out = []
    for low in range(0, q.shape[1], size):
        part = query[:, :, :, low : low + size]
        with label("attention"):
            scores = part.flatten(2, 3) @ keys.transpose(2, 3)  # [B, U, H / U * rows, N]
        seen = visible[:, None, None, low : low + size]
        weights = scores.unflatten(2, part.shape[2:4]).masked_fill_(~seen, -torch.inf).softmax(dim=-1)
        with label("attention"):
            made = weights.flatten(2, 3) @ values
        out.append(made.unflatten(2, part.shape[2:4]))
    return torch.cat(out, dim=3).permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)


class Attention(nn.Module):
    """`q_proj` [H W, D], `k_proj` and `v_proj` [U W, D], `o_proj` [D, H W]."""

    def __init__(self, config: GQAConfig, plan: LayerPlan, *, dtype, device):
        super().__init__()
        self.config, self.layer = config, plan.layer
        hidden, width, options = config.hidden_size, config.head_dim, {"dtype": dtype, "device": device}
        self.q_proj = Linear(hidden, config.num_attention_heads * width, **options)
        self.k_proj = Linear(hidden, config.num_key_value_heads * width, **options)
        self.v_proj = Linear(hidden, config.num_key_value_heads * width, **options)
        self.o_proj = Linear(config.num_attention_heads * width, hidden, **options)

    def forward(self, x: Tensor, step: TokenStep, cache: TokenCache) -> Tensor:
        """[B, S, D] of the normed rows x [B, S, D]; their keys and values go to the cache first."""
        width = self.config.head_dim
        turn = step.rotation(width).unsqueeze(2)
        q = rotate_halves(self.q_proj(x).unflatten(-1, (-1, width)), turn)
        k = rotate_halves(self.k_proj(x).unflatten(-1, (-1, width)), turn)
        cache.write(self.layer, "main_kv", step, torch.cat((k.flatten(-2), self.v_proj(x)), dim=-1))
        kept = cache.read(self.layer, "main_kv", max(step.end)).unflatten(-1, (2, -1, width))  # [B, N, 2, U, W]
        o = attend(q, kept[:, :, 0], kept[:, :, 1], step.visible(), width**-0.5)
        return self.o_proj(o.flatten(-2))
