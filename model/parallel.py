"""Experts over several devices: each rank holds some routed experts of every layer, and all of everything else.

    torchrun --nproc-per-node 2 -m model.fullsize --contexts 4Ki

Attention, caches, router and shared experts run on every rank alike, so every rank has all tokens. It runs the picked
experts that it holds; the sum over ranks is the layer's output. Rank r of R holds experts r E / R to (r + 1) E / R - 1.
"""

from __future__ import annotations

import atexit
import os
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.backend import Backend
from model.layers import wide
from model.moe import MoE
from model.stored_weights import StoredLinear


class Ranks(NamedTuple):
    """Which of how many ranks this process is; one of one where nothing was started."""

    rank: int = 0
    number: int = 1

    def experts(self, total: int) -> range:
        """The routed experts that this rank holds.

        Raises:
            ValueError: they cannot be shared out evenly.
        """
        if total % self.number:
            raise ValueError(f"ranks is {self.number}; accepted: a divisor of n_routed_experts, {total}")
        each = total // self.number
        return range(self.rank * each, (self.rank + 1) * each)

    def agree(self, value):
        """What rank 0 says, on every rank."""
        if self.number == 1:
            return value
        said = [value]
        dist.broadcast_object_list(said, src=0)
        return said[0]


def start(device: torch.device) -> tuple[Ranks, torch.device]:
    """Join the other processes that torchrun started, if it did; and the device of this one."""
    number = int(os.environ.get("WORLD_SIZE", 1))
    if number == 1:
        return Ranks(), device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)  # before the interpreter goes, and its threads with it
    return Ranks(dist.get_rank(), number), device


class _Nothing(nn.Module):
    """The expert that stands for those of other ranks."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Shared:
    """A backend whose experts are spread over ranks; everything else is the backend's own."""

    def __init__(self, backend: Backend, mine: range):
        self.backend, self.mine = backend, mine

    def __getattr__(self, name: str):
        return getattr(self.backend, name)

    def feed_forward(self, x: Tensor, experts: Tensor, weights: Tensor, layer: MoE) -> Tensor:
        """[T, D] of tokens x [T, D], summed over ranks; as `model.moe.feed_forward`."""
        here = (experts >= self.mine.start) & (experts < self.mine.stop)
        part = SimpleNamespace(experts=layer.experts, stack=layer.stack, limit=layer.limit, shared_experts=None)
        absent = len(layer.experts) - 1 if self.backend.expert_runner(part) == "PyTorch" else -1  # the kernel skips -1
        local = (experts - self.mine.start).where(here, absent)
        out = wide(self.backend.feed_forward(x, local, weights.where(here, 0), part))
        dist.all_reduce(out)
        return out if layer.shared_experts is None else out + wide(layer.shared_experts(x))


def share_experts(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Let a model that has all routed experts keep those of its rank; returns it.

    Raises:
        ValueError: they cannot be shared out evenly.
    """
    for layer in model.modules():
        if not isinstance(layer, MoE) or ranks.number == 1:
            continue
        mine = ranks.experts(len(layer.experts))
        kept = list(layer.experts)[mine.start : mine.stop]
        if layer.stack is not None:
            layer.stack = layer.stack.part(mine)
            for i, expert in enumerate(kept):
                for matrix in layer.stack.MATRICES:
                    linear: StoredLinear = getattr(expert, matrix)
                    linear.stored.weight, linear.stored.scale = layer.stack.place(i, matrix)
        hold(layer, kept, mine)
    return model


def hold(layer: MoE, experts: list[nn.Module], mine: range) -> None:
    """Make these the experts of a layer, the range `mine` of all."""
    layer.experts = nn.ModuleList([*experts, _Nothing()])
    layer.backend = Shared(layer.backend, mine)
