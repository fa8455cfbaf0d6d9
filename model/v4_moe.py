"""The experts of V4: as V4.1's, but for the first layers, where the token id alone chooses them.

    s      = sqrt(softplus(x W^T))                                    float32
    picked = tid2eid[id] in hash-routed layers, else the num_experts_per_tok best of s + bias
    p_e    = s_e / (sum of picked s + 1e-20) * routed_scaling_factor  learned in both, never biased

Source: earlier generations, 5.7.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashsim.config import V4Config
from flashsim.schedule import LayerPlan
from model.layers import Weighted, wide, wide_dtype
from model.moe import Expert, route, routed


def weigh(logits: Tensor, experts: Tensor, scale: float) -> Tensor:
    """Weights [T, k] of experts [T, k] that are chosen already."""
    picked = F.softplus(logits).sqrt().gather(-1, experts)
    return picked / (picked.sum(dim=-1, keepdim=True) + 1e-20) * scale


class V4Gate(Weighted):
    """The router: `weight` [experts, D]; `bias` [experts], or `tid2eid` int64 [vocab, k] in a hash-routed layer."""

    def __init__(self, config: V4Config, hashed: bool, *, dtype, device):
        super().__init__(config.n_routed_experts, config.hidden_size, dtype=dtype, device=device)
        self.k, self.scale, experts = config.num_experts_per_tok, config.routed_scaling_factor, config.n_routed_experts
        if hashed:
            table = torch.zeros(config.vocab_size, self.k, dtype=torch.int64, device=device)
            self.tid2eid = nn.Parameter(table, requires_grad=False)
        else:
            bias = torch.empty(experts, dtype=wide_dtype(dtype), device=device)
            self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(experts ascending, weights), both [T, k], of tokens x [T, D] with ids [T]."""
        x = wide(x)
        logits = F.linear(x, self.weight_as(x.dtype))
        if not hasattr(self, "tid2eid"):
            return route(logits, self.bias, self.k, self.scale)
        experts = self.tid2eid[ids].sort(dim=-1).values
        return experts, weigh(logits, experts, self.scale)


class V4MoE(nn.Module):
    """`gate`, `experts.0` .. and, where there are any, `shared_experts`."""

    def __init__(self, config: V4Config, plan: LayerPlan, *, dtype, device):
        super().__init__()
        hidden, inner, limit = config.hidden_size, config.moe_intermediate_size, config.swiglu_limit
        options = {"dtype": dtype, "device": device}
        self.gate = V4Gate(config, plan.feed_forward == "moe_hash", **options)
        self.experts = nn.ModuleList(Expert(hidden, inner, limit, **options) for _ in range(config.n_routed_experts))
        if config.n_shared_experts:
            self.shared_experts = Expert(hidden, inner * config.n_shared_experts, limit, **options)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]; ids [B, S] of the same tokens."""
        tokens = x.flatten(0, -2)
        out = routed(tokens, *self.gate(tokens, ids.flatten()), self.experts)
        if hasattr(self, "shared_experts"):
            out = out + wide(self.shared_experts(tokens))
        return out.to(x.dtype).view(x.shape)
