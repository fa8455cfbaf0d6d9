"""The experts of V2 to V3.2: a few groups of experts are chosen first, then the best experts within them.

| | V2, `group_limited_greedy` | V2-Lite, `greedy` | V3, V3.2, `noaux_tc` |
| --- | --- | --- | --- |
| score s | softmax(x W^T) | softmax | sigmoid(x W^T) |
| chosen by | s | s | s + bias |
| a group counts as | its best expert | no groups | the sum of its two best |
| weight of an expert | s | s | s / (sum of picked s + 1e-20) |

Weights are multiplied by `routed_scaling_factor`. The bias chooses, it does not weigh. In V2 an expert outside the
chosen groups counts 0. An expert's output is weighted after its down projection. Shared experts are one feed-forward of
their summed width. Ties: the lower expert or group. Source: earlier generations, 3.6.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashsim.config import MLAConfig
from flashsim.reading import ConfigError
from model.indexer import top_k
from model.layers import Linear, Weighted, wide, wide_dtype
from model.moe import routed


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x): `gate_proj` and `up_proj` [I, D], `down_proj` [D, I]."""

    def __init__(self, hidden: int, inner: int, *, dtype, device):
        super().__init__()
        self.gate_proj = Linear(hidden, inner, dtype=dtype, device=device)
        self.up_proj = Linear(hidden, inner, dtype=dtype, device=device)
        self.down_proj = Linear(inner, hidden, dtype=dtype, device=device)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """[..., D] to [..., D]; weight [T, 1] multiplies the output."""
        out = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out if weight is None else out * weight


def best_groups(choice: Tensor, groups: int, keep: int, best: int) -> Tensor:
    """[T, E] bool: the experts of the `keep` groups whose `best` best choice scores [T, E] sum highest."""
    grouped = choice.unflatten(-1, (groups, -1))
    score = grouped.topk(min(best, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    mask = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, top_k(score, keep), True)
    return mask.unsqueeze(-1).expand_as(grouped).flatten(-2)


class Gate(Weighted):
    """The router: `weight` [experts, D] and, in V3, `e_score_correction_bias` [experts]."""

    def __init__(self, config: MLAConfig, *, dtype, device):
        super().__init__(config.n_routed_experts, config.hidden_size, dtype=dtype, device=device)
        check_router(config)
        self.config, self.method = config, topk_method(config)
        if self.method == "noaux_tc":
            bias = torch.empty(config.n_routed_experts, dtype=wide_dtype(dtype), device=device)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(experts, weights), both [T, k], experts ascending, of tokens x [T, D]."""
        config, x = self.config, wide(x)
        logits = F.linear(x, self.weight_as(x.dtype))
        if self.method == "noaux_tc":
            s = logits.sigmoid()
            choice = s + self.e_score_correction_bias
            allowed = best_groups(choice, config.n_group, config.topk_group, best=2)
            experts = top_k(choice.masked_fill(~allowed, -torch.inf), config.num_experts_per_tok)
        else:
            s = logits.softmax(dim=-1)
            if self.method == "group_limited_greedy":
                s = s.masked_fill(~best_groups(s, config.n_group, config.topk_group, best=1), 0.0)
            experts = top_k(s, config.num_experts_per_tok)
        weights = s.gather(-1, experts)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return experts, weights * config.routed_scaling_factor

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}, {self.method}"


class MoE(nn.Module):
    """`gate`, `experts.0` .. and, where there are any, `shared_experts`."""

    def __init__(self, config: MLAConfig, *, dtype, device):
        super().__init__()
        hidden, inner, options = config.hidden_size, config.moe_intermediate_size, {"dtype": dtype, "device": device}
        self.gate = Gate(config, **options)
        self.experts = nn.ModuleList(SwiGLU(hidden, inner, **options) for _ in range(config.n_routed_experts))
        if config.n_shared_experts:
            self.shared_experts = SwiGLU(hidden, inner * config.n_shared_experts, **options)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        tokens = x.flatten(0, -2)
        out = routed(tokens, *self.gate(tokens), self.experts)
        if hasattr(self, "shared_experts"):
            out = out + wide(self.shared_experts(tokens))
        return out.to(x.dtype).view(x.shape)


# --- what a config may say --------------------------------------------------------------------------------------------

METHODS = {"deepseek_v2": ("greedy", "group_limited_greedy"), "deepseek_v3": ("noaux_tc",)}
METHODS["deepseek_v32"] = METHODS["deepseek_v3"]


def topk_method(config: MLAConfig) -> str:
    """`topk_method`, or that of the family where the config has none."""
    return config.topk_method or METHODS[config.model_type][0]


def check_router(config: MLAConfig) -> None:
    """Whether the router is one of the three.

    Raises:
        ConfigError: naming the field.
    """
    config.needs("routed_scaling_factor", "norm_topk_prob")
    method, accepted = topk_method(config), METHODS[config.model_type]
    if method not in accepted:
        raise ConfigError("topk_method", method, " or ".join(accepted))
    scoring = "sigmoid" if method == "noaux_tc" else "softmax"
    if config.scoring_func not in (None, scoring):
        raise ConfigError("scoring_func", config.scoring_func, f"{scoring}, with topk_method {method}")
    if config.norm_topk_prob and method != "noaux_tc":
        raise ConfigError("norm_topk_prob", True, f"false, with topk_method {method}")
    if method == "greedy":
        return
    experts, groups, keep = config.n_routed_experts, config.n_group, config.topk_group
    if groups is None or groups < 1 or experts % groups:
        raise ConfigError("n_group", groups, f"a divisor of n_routed_experts, {experts}")
    if keep is None or not 1 <= keep <= groups:
        raise ConfigError("topk_group", keep, f"a whole number from 1 to n_group, {groups}")
    if keep * (experts // groups) < config.num_experts_per_tok:
        held = keep * (experts // groups)
        raise ConfigError(
            "num_experts_per_tok", config.num_experts_per_tok, f"at most {held}, as topk_group groups hold"
        )
