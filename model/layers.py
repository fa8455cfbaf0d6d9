"""The parts that every mechanism is made of: embedding, linear layers, RMS norm.

Weights are [out, in] and nothing has a bias. `wide` is the precision of steps that run in float32 from bfloat16 inputs.

A float32 model on a CPU does its arithmetic in float64. Cached values are rounded to FP4 and FP8, and a value beside
the boundary of two codes falls to one side or the other by its last float32 bit, which depends on the processor and on
how many rows were multiplied together; everything after it then differs in the third digit. In float64, decode, chunks
and prefill stay on one path, and it is the path of exact arithmetic.

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


def arithmetic_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of the activations of a model with weights of `dtype`."""
    return torch.float64 if dtype == torch.float32 and device.type == "cpu" else dtype


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


class Weighted(nn.Module):
    """A module with a `weight`, which is converted where the activations are wider.

    With `keeps_copy` the converted weight is kept until the weight changes: for weights that are small.
    """

    keeps_copy = False

    def __init__(self, *shape: int, dtype=torch.float32, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self._copy, self._copy_of = None, None

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """The weight in this type."""
        weight = self.weight
        if weight.dtype == dtype:
            return weight
        if not self.keeps_copy:
            return weight.to(dtype)
        stamp = (weight.data_ptr(), weight._version, dtype)
        if self._copy_of != stamp:
            self._copy, self._copy_of = weight.to(dtype), stamp
        return self._copy

    def wide_product(self, x: Tensor) -> Tensor:
        """x W^T with operands and sums as wide as `wide`. A GPU sums products of bfloat16 in float32 as they are."""
        if x.is_cuda and x.dtype == self.weight.dtype == torch.bfloat16:
            out = torch.mm(x.flatten(0, -2), self.weight.t(), out_dtype=torch.float32)
            return out.unflatten(0, x.shape[:-1])
        x = wide(x)
        return F.linear(x, self.weight_as(x.dtype))


class Linear(Weighted):
    """x W^T with `weight` [out, in]. With `widened` the product runs in float32 whatever the storage."""

    def __init__(self, inputs: int, outputs: int, *, widened: bool = False, dtype=torch.float32, device=None):
        super().__init__(outputs, inputs, dtype=dtype, device=device)
        self.widened = widened

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self.wide_product(x) if self.widened else F.linear(x, self.weight_as(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}" + (", widened" if self.widened else "")


class GroupedLinear(Weighted):
    """G independent products: `weight` [G * out, in] is G blocks [out, in] (V4.1 architecture 3.6)."""

    def __init__(self, groups: int, inputs: int, outputs: int, *, dtype=torch.float32, device=None):
        super().__init__(groups * outputs, inputs, dtype=dtype, device=device)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """[..., G * in] to [..., G * out], group after group."""
        weight = self.weight_as(x.dtype).view(self.groups, -1, self.weight.shape[1])
        rows = x.reshape(-1, self.groups, weight.shape[2]).transpose(0, 1)  # [G, rows, in]
        out = torch.bmm(rows, weight.transpose(1, 2))
        return out.transpose(0, 1).reshape(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"{self.groups} groups, {self.weight.shape[1]} -> {self.weight.shape[0] // self.groups}"


def rms_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """[..., width] rows x over their root mean square, times the weight of `norm`."""
    wider = wide(x)
    scale = wider.square().sum(-1, keepdim=True).div_(wider.shape[-1]).add_(norm.eps).rsqrt_()
    return (wider * scale * norm.weight_as(wider.dtype)).to(x.dtype)


class RMSNorm(Weighted):
    """w x / sqrt(mean(x^2) + eps) in float32, rounded once (V4.1 architecture 2.2)."""

    def __init__(self, width: int, eps: float, *, dtype=torch.float32, device=None):
        super().__init__(width, dtype=dtype, device=device)
        self.eps, self.run = eps, rms_norm  # a backend may put its own there

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps:g}"


SMALL = 2**16
"""Numbers of a weight that is also kept in the type of the activations; larger ones are widened as fast as read."""


def keep_small_copies(model: nn.Module) -> None:
    """Let every small weight of a model keep its converted copy."""
    for module in model.modules():
        if isinstance(module, Weighted):
            module.keeps_copy = module.weight.numel() <= SMALL
