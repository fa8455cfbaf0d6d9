"""Where the time of a step goes on a GPU: every kernel by its name, and by the part of the model that asked for it.

PyTorch's profiler says when the host launched a kernel and how long the device ran it. While a step is profiled each
module is inside a named range; a kernel belongs to the innermost range in which it was launched. Times between kernels
belong to nobody: a captured step, `step_us` of `model.fullsize`, has nearly none.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

MARK = "part of the model: "
OUTSIDE = "hyper_connection"
"""What runs between the modules of a layer."""

_PARTS = (
    (r"(lm_)?head", "lm_head"),
    (r"(model\.)?embed(_tokens)?", "embedding"),
    (r"engram(\..*)?", "engram"),
    (r"(self_)?attn\.indexer(\..*)?", "indexer"),
    (r"(self_)?attn\.compressor(\..*)?", "compressor"),
    (r"(self_)?attn\..+", "attention_projections"),
    (r"(self_)?attn", "attention"),
    (r"(ffn|mlp)\.gate(\..*)?", "router"),
    (r"(ffn|mlp)(\..*)?", "experts"),
    (r".*norm", "norms"),
)
"""Names of modules inside a layer, and the part that they are."""


class Kernel(NamedTuple):
    """One kernel of one step: its part, its name, when it was launched and how long it ran, in microseconds."""

    part: str
    name: str
    launched_us: float
    us: float


def part_of(module: str) -> str | None:
    """The part of a module by its name, such as `layers.3.attn.indexer.wq_b`; None where it is no part of its own."""
    name = re.sub(r"^(model\.)?layers\.\d+\.", "", module)
    return next((part for pattern, part in _PARTS if re.fullmatch(pattern, name)), None)


class _Ranges:
    """While entered, every module with a part runs inside a range of the profiler."""

    def __init__(self, model: nn.Module):
        self._parts = {module: part_of(name) for name, module in model.named_modules()}
        self._open: list[torch.profiler.record_function | None] = []

    def __enter__(self):
        self._hooks = (
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        )

    def __exit__(self, *error):
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, args) -> None:
        part = self._parts.get(module)
        self._open.append(torch.profiler.record_function(MARK + part) if part else None)
        if part:
            self._open[-1].__enter__()

    def _end(self, module: nn.Module, args, result) -> None:
        entered = self._open.pop()
        if entered:
            entered.__exit__(None, None, None)


class Event(NamedTuple):
    """What is read of a profiler's event; times in nanoseconds."""

    name: str
    on_device: bool
    start: int
    duration: int
    correlation: int


def attribute(events: Iterable[Event]) -> list[Kernel]:
    """Every kernel with its part, in the order of the launches.

    >>> attribute([Event(MARK + "router", False, 0, 90, 0), Event("cudaLaunchKernel", False, 10, 5, 7),
    ...            Event("gemm", True, 50, 2000, 7)])
    [Kernel(part='router', name='gemm', launched_us=0.01, us=2.0)]
    """
    events = list(events)
    launched = {e.correlation: e.start for e in events if not e.on_device and re.match(r"cu(da)?[A-Z]", e.name)}
    edges = _edges((e.start, e.start + e.duration, e.name[len(MARK) :]) for e in events if e.name.startswith(MARK))
    times = [time for time, _ in edges]
    kernels = []
    for e in events:
        if not e.on_device or e.name.startswith(MARK):
            continue
        start = launched.get(e.correlation)
        place = -1 if start is None else bisect_right(times, start) - 1
        part = "unknown" if start is None else edges[place][1] if place >= 0 else OUTSIDE
        kernels.append(Kernel(part, e.name, (start or e.start) / 1e3, e.duration / 1e3))
    return sorted(kernels, key=lambda kernel: kernel.launched_us)


def _edges(ranges: Iterable[tuple[int, int, str]]) -> list[tuple[int, str]]:
    """(time, part from then on) of nested ranges."""
    edges, inside = [], []
    for start, end, part in sorted(ranges, key=lambda r: (r[0], -r[1])):
        while inside and inside[-1][0] <= start:
            edges.append((inside.pop()[0], inside[-1][1] if inside else OUTSIDE))
        edges.append((start, part))
        inside.append((end, part))
    while inside:
        edges.append((inside.pop()[0], inside[-1][1] if inside else OUTSIDE))
    return edges


def kernels_of(model: nn.Module, step: Callable[[], Tensor], steps: int = 3) -> list[Kernel]:
    """Every kernel of so many steps on a GPU, launched one by one; the times are those of `steps` steps together."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as taken, _Ranges(model):
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return attribute(
        Event(e.name(), e.device_type() == device, e.start_ns(), e.duration_ns(), e.correlation_id())
        for e in taken.profiler.kineto_results.events()
    )


def by(field: str, kernels: Iterable[Kernel], steps: int = 3) -> dict[str, tuple[float, float]]:
    """(microseconds, launches) of one step by `part` or `name`, the longest first."""
    totals: dict[str, list[float]] = {}
    for kernel in kernels:
        sums = totals.setdefault(getattr(kernel, field), [0.0, 0.0])
        sums[0] += kernel.us / steps
        sums[1] += 1 / steps
    return {key: (us, launches) for key, (us, launches) in sorted(totals.items(), key=lambda item: -item[1][0])}
