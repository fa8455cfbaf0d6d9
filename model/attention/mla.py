"""Multi-head latent attention, V2 and V3: one latent and one RoPE key a token, from which every head makes its own.

    q = RMS(x Wqa^T) Wqb^T                  per head [q_n, q_r]; without a low rank (V2-Lite) q = x Wq^T
    [l, k_r] = x Wkva^T                     cached: RMS(l) and rotate(k_r, p), shared by all heads
    Wkvb = [UK_h; UV_h] of each head        key rows, then value rows, head after head

| form | key of head h | query | value | FLOPs a head and key |
| --- | --- | --- | --- | --- |
| naive | [UK_h l, k_r] | [q_n, q_r] | UV_h l | 2 (p + r + v), and the expansion of every token |
| absorbed | [l, k_r], one for all heads | [UK_h^T q_n, q_r] | l, then UV_h on the sum | 2 (c + r + c) |

Both give the same numbers: q_n . (UK l) = (UK^T q_n) . l, and UV sum(w l) = sum(w UV l). Naive is the cheaper for a
prompt, absorbed for a decode step: it reads c + r numbers a token whatever the number of heads.
p, r, v: `qk_nope_head_dim`, `qk_rope_head_dim`, `v_head_dim`; c: `kv_lora_rank`. Source: earlier generations, 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashsim.config import MLAConfig
from flashsim.schedule import LayerPlan
from model.attention.gqa import attend, rotate_halves
from model.flop_counter import label
from model.layers import Linear, RMSNorm
from model.rope import rotate
from model.token_cache import TokenCache, TokenStep
from model.yarn import softmax_scale

LATENT_EPS = 1e-6
"""Of the norms of the query's low rank and of the latent, whatever `rms_norm_eps` says (earlier generations, 3.1)."""


def naive(q_n: Tensor, q_r: Tensor, rows: Tensor, expanded: Tensor, visible: Tensor, scale: float) -> Tensor:
    """[B, S, H, v] of queries q_n [B, S, H, p], q_r [B, S, H, r] over every head's own keys and values.

    rows [B, N, c + r]: what is cached; expanded [B, N, H, p + v]: its latents times Wkvb; visible [B, S, N].
    """
    heads, plain = q_n.shape[2:]
    shared = rows[..., -q_r.shape[-1] :].unsqueeze(2).expand(-1, -1, heads, -1)
    keys = torch.cat((expanded[..., :plain], shared.to(expanded.dtype)), dim=-1)
    return attend(torch.cat((q_n, q_r), dim=-1), keys, expanded[..., plain:], visible, scale)


def absorbed(q_n: Tensor, q_r: Tensor, rows: Tensor, up: Tensor, visible: Tensor, scale: float) -> Tensor:
    """The same over the cached rows [B, N, c + r] themselves, one key for all heads; up [H, p + v, c] is Wkvb."""
    plain, latent = q_n.shape[-1], up.shape[-1]
    query = _each_head(q_n, up[:, :plain])  # [B, S, H, c]
    keys = rows.unsqueeze(2)
    mixed = attend(torch.cat((query, q_r), dim=-1), keys, keys[..., :latent], visible, scale)  # [B, S, H, c]
    return _each_head(mixed, up[:, plain:].transpose(1, 2))


def _each_head(x: Tensor, weights: Tensor) -> Tensor:
    """[B, S, H, b] of x [B, S, H, a], each head times a matrix of its own; weights [H, a, b]."""
    with label("up_projection"):
        out = x.flatten(0, 1).transpose(0, 1) @ weights  # [H, B S, b]
    return out.transpose(0, 1).unflatten(0, x.shape[:2])


class Attention(nn.Module):
    """`q_a_proj`, `q_a_layernorm`, `q_b_proj`, or `q_proj`; `kv_a_proj_with_mqa`, `kv_a_layernorm`, `kv_b_proj`
    [H (p + v), c], which is Wkvb; `o_proj` [D, H v].
    """

    def __init__(self, config: MLAConfig, plan: LayerPlan, *, dtype, device):
        super().__init__()
        self.config, self.layer = config, plan.layer
        hidden, heads, options = config.hidden_size, config.num_attention_heads, {"dtype": dtype, "device": device}
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.scale = softmax_scale(config, width)
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden, heads * width, **options)
        else:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, **options)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS, **options)
            self.q_b_proj = Linear(config.q_lora_rank, heads * width, **options)
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim, **options)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_EPS, **options)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), **options)
        self.o_proj = Linear(heads * config.v_head_dim, hidden, **options)

    def low_rank(self, x: Tensor) -> Tensor:
        """[B, S, q_lora_rank] that the query (and an indexer) is made of; x itself where there is no low rank."""
        return x if self.config.q_lora_rank is None else self.q_a_layernorm(self.q_a_proj(x))

    def query(self, qr: Tensor, step: TokenStep) -> tuple[Tensor, Tensor]:
        """(q_n [B, S, H, p], q_r [B, S, H, r] rotated) of `low_rank`."""
        config = self.config
        made = (self.q_proj if config.q_lora_rank is None else self.q_b_proj)(qr)
        made = made.unflatten(-1, (config.num_attention_heads, -1))
        q_n, q_r = made.split_with_sizes((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        return q_n, self.turn(q_r, step.rotation(config.qk_rope_head_dim).unsqueeze(2))

    def turn(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x [..., r] rotated: adjacent pairs in the released models, halves where `rope_interleave` is false."""
        return rotate(x, rotation) if self.config.rope_interleave else rotate_halves(x, rotation)

    def remember(self, x: Tensor, step: TokenStep, cache: TokenCache) -> None:
        """Cache the normed latents and rotated RoPE keys of the rows x [B, S, D]."""
        config = self.config
        latent, k_r = self.kv_a_proj_with_mqa(x).split_with_sizes((config.kv_lora_rank, config.qk_rope_head_dim), -1)
        k_r = self.turn(k_r, step.rotation(config.qk_rope_head_dim))
        cache.write(self.layer, "main_kv", step, torch.cat((self.kv_a_layernorm(latent), k_r), dim=-1))

    def attend(self, q_n: Tensor, q_r: Tensor, rows: Tensor, visible: Tensor, form: str) -> Tensor:
        """[B, S, H, v] over cached rows [B, N, c + r], in the form `naive` or `absorbed`."""
        heads, rows = self.config.num_attention_heads, rows.to(q_n.dtype)
        if form == "naive":
            expanded = self.kv_b_proj(rows[..., : self.config.kv_lora_rank]).unflatten(-1, (heads, -1))
            return naive(q_n, q_r, rows, expanded, visible, self.scale)
        up = self.kv_b_proj.weight_as(q_n.dtype).unflatten(0, (heads, -1))
        return absorbed(q_n, q_r, rows, up, visible, self.scale)

    def forward(self, x: Tensor, step: TokenStep, cache: TokenCache) -> Tensor:
        """[B, S, D] of the normed rows x [B, S, D]; their latents go to the cache first."""
        q_n, q_r = self.query(self.low_rank(x), step)
        self.remember(x, step, cache)
        rows = cache.read(self.layer, "main_kv", max(step.end))
        return self.o_proj(self.attend(q_n, q_r, rows, step.visible(), step.form).flatten(-2))
