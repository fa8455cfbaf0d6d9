"""Mixture of experts: a few of many feed-forwards for each token, and shared ones for all.

    s      = sqrt(softplus(x W^T))                          float32
    picked = the num_experts_per_tok best of s + bias       ties: the lower expert; image tokens use bias_vl
    p_e    = s_e / (sum of picked s + 1e-20) * routed_scaling_factor        the bias chooses, it does not weigh
    y      = sum_e w2_e(p_e silu(gate_e) up_e) + shared     gate = min(w1 x, limit), up = clamp(w3 x, +-limit)

p_e stands before w2, where the trained model rounded. Experts add up in ascending order. Packed experts of a layer are
one stack (`model.stored_weights`), which a kernel reads whole. Source: V4.1 architecture 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashsim.config import V41Config
from model.indexer import top_k
from model.layers import Linear, Weighted, wide, wide_dtype

if TYPE_CHECKING:
    from model.backend import Backend


def route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """(experts, weights), both [T, k], experts ascending, of logits [T, experts]; bias [experts] or [T, experts]."""
    s = F.softplus(logits).sqrt()
    experts = top_k(s + bias, k)
    picked = s.gather(-1, experts)
    return experts, picked / (picked.sum(dim=-1, keepdim=True) + 1e-20) * scale


class Gate(Weighted):
    """The router: `weight` [experts, D], `bias` and `bias_vl` [experts]."""

    def __init__(self, config: V41Config, backend: Backend, *, dtype, device):
        super().__init__(config.n_routed_experts, config.hidden_size, dtype=dtype, device=device)
        self.backend = backend
        self.k, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        experts, floats = config.n_routed_experts, {"dtype": wide_dtype(dtype), "device": device}
        self.bias = nn.Parameter(torch.empty(experts, **floats), requires_grad=False)
        self.bias_vl = nn.Parameter(torch.empty(experts, **floats), requires_grad=False)

    def forward(self, x: Tensor, images: Tensor | None) -> tuple[Tensor, Tensor]:
        """(experts, weights) of tokens x [T, D]; images [T] says which stand inside an image span."""
        bias = self.bias if images is None else torch.where(images.unsqueeze(-1), self.bias_vl, self.bias)
        return self.backend.route(self.wide_product(x), bias, self.k, self.scale)


class Expert(nn.Module):
    """One feed-forward: `w1` gate and `w3` up [I, D], `w2` down [D, I]."""

    def __init__(self, hidden: int, inner: int, limit: float | None, *, dtype, device):
        super().__init__()
        self.limit = limit
        self.w1 = Linear(hidden, inner, dtype=dtype, device=device)
        self.w3 = Linear(hidden, inner, dtype=dtype, device=device)
        self.w2 = Linear(inner, hidden, dtype=dtype, device=device)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """[T, D] to [T, D]; weight [T, 1] multiplies the inner activation."""
        x = x.contiguous()
        gate, up = wide(self.w1(x)), wide(self.w3(x))
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        inner = F.silu(gate) * up
        return self.w2((inner if weight is None else inner * weight).to(x.dtype))


def routed(x: Tensor, experts: Tensor, weights: Tensor, modules: nn.ModuleList) -> Tensor:
    """[T, D] sum of the picked experts' outputs, float32; experts, weights [T, k]."""
    if len(x) == 1:
        picked = zip(experts[0].tolist(), weights.view(-1, 1, 1), strict=True)
        return sum(wide(modules[expert](x, weight)) for expert, weight in picked)
    out = torch.zeros(x.shape, dtype=wide_dtype(x.dtype), device=x.device)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    tokens, weights = order // experts.shape[1], weights.flatten()[order].unsqueeze(-1)
    counts = torch.bincount(flat, minlength=len(modules)).tolist()
    low = 0
    for expert, count in enumerate(counts):
        if count:
            rows = tokens[low : low + count]
            out.index_add_(0, rows, wide(modules[expert](x[rows], weights[low : low + count])))
            low += count
    return out


def feed_forward(x: Tensor, experts: Tensor, weights: Tensor, layer: MoE) -> Tensor:
    """[T, D] of tokens x [T, D]: the picked experts [T, k] with their weights [T, k], and the shared ones; wide."""
    out = routed(x, experts, weights, layer.experts)
    return out if layer.shared_experts is None else out + wide(layer.shared_experts(x))


class MoE(nn.Module):
    """`gate`, `experts.0` .. and, where there are any, `shared_experts`. `stack` holds packed routed experts."""

    def __init__(self, config: V41Config, backend: Backend, *, dtype, device):
        super().__init__()
        self.backend = backend
        hidden, inner, limit = config.hidden_size, config.moe_intermediate_size, config.swiglu_limit
        options = {"dtype": dtype, "device": device}
        self.gate = Gate(config, backend, **options)
        self.experts = nn.ModuleList(Expert(hidden, inner, limit, **options) for _ in range(config.n_routed_experts))
        shared = config.n_shared_experts
        self.shared_experts = Expert(hidden, inner * shared, limit, **options) if shared else None
        self.limit, self.stack = limit, None

    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        tokens = x.flatten(0, -2)
        experts, weights = self.gate(tokens, None if images is None else images.flatten())
        return self.backend.feed_forward(tokens, experts, weights, self).to(x.dtype).view(x.shape)

    def extra_repr(self) -> str:
        return f"experts run by {self.backend.expert_runner(self)}"
