"""The router in plain PyTorch, token by token: what `kernels.router` computes."""

import torch
from torch.nn import functional as F


def router_reference(logits, bias, k, scale):
    """(experts, weights) [T, k] of logits [T, E]; see `kernels.router.router`."""
    experts, weights = [], []
    for t in range(len(logits)):
        s = F.softplus(logits[t]).sqrt()
        score = s + (bias[t] if bias.ndim == 2 else bias)
        order = score.sort(descending=True, stable=True).indices[:k].sort().values
        experts.append(order)
        weights.append(s[order] / (s[order].sum() + 1e-20) * scale)
    empty = logits.new_empty(0, k)
    return (torch.stack(experts), torch.stack(weights)) if experts else (empty.long(), empty)
