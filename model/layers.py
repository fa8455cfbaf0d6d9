"""The parts that every mechanism is made of: embedding, linear layers, RMS norm.

Weights are [out, in] and nothing has a bias. `wide` is the precision of steps that run in float32 from bfloat16 inputs;
a float64 model stays in float64, so that two ways of computing can be compared to the last digits.

Shape letters of this package: B sequences, S tokens of a call, K streams (`hc_mult`), D hidden width, H heads, W width
of one head or record, E compressed entries.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is that already."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else: the type of sinks, router biases, hyper-connections."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Embedding(nn.Module):
    """Row lookup, `weight` [rows, width]. Source: V4.1 architecture 2.1 and 8.6."""

    def __init__(self, rows: int, width: int, *, dtype=torch.float32, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=dtype, device=device), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] ids to [..., width]."""
        return F.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} x {self.weight.shape[1]}"


class Linear(nn.Module):
    """x W^T with `weight` [out, in]. With `widened` the product runs in float32 whatever the storage."""

    def __init__(self, inputs: int, outputs: int, *, widened: bool = False, dtype=torch.float32, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device), requires_grad=False)
        self.widened = widened

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if self.widened:
            return F.linear(wide(x), wide(self.weight))
        return F.linear(x, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}" + (", widened" if self.widened else "")


class GroupedLinear(nn.Module):
    """G independent products: `weight` [G * out, in] is G blocks [out, in] (V4.1 architecture 3.6)."""

    def __init__(self, groups: int, inputs: int, outputs: int, *, dtype=torch.float32, device=None):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(
            torch.empty(groups * outputs, inputs, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., G * in] to [..., G * out], group after group."""
        weight = self.weight.view(self.groups, -1, self.weight.shape[1])
        rows = x.reshape(-1, self.groups, weight.shape[2]).transpose(0, 1)  # [G, rows, in]
        out = torch.bmm(rows, weight.transpose(1, 2))
        return out.transpose(0, 1).reshape(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"{self.groups} groups, {self.weight.shape[1]} -> {self.weight.shape[0] // self.groups}"


class RMSNorm(nn.Module):
    """w x / sqrt(mean(x^2) + eps) in float32, rounded once (V4.1 architecture 2.2)."""

    def __init__(self, width: int, eps: float, *, dtype=torch.float32, device=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(wide(x), self.weight.shape, wide(self.weight), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps:g}"
