"""Time the kernels: python -m kernels.bench [--op NAME] [--out FILE.csv] [--check]

A case is registered once, in kernels/bench_cases.py:

    @register("kv_dequant", sizes={"131,072 x 512": dict(rows=131072, width=512)}, small=dict(rows=5, width=256))
    def kv_dequant_case(rows, width, device):
        q, scale = make_inputs(rows, width, device)
        return Case(
            run=kv_dequant, reference=kv_dequant_reference, inputs=(q, scale),
            bytes_moved=rows * width * 3, flops=0, dtype="bf16", tolerance=1e-6, goal="1.4x",
        )

`run(*inputs)` and `reference(*inputs)` return a tensor or a tuple of tensors. The small size is run against the
reference first and a case that fails it gets no row; on a machine without a GPU, or with --check, that is all.

Timing: the inputs are copied until they no longer fit in the L2 cache, and calls over the copies in turn are captured
in one CUDA graph, so launches cost nothing; an op that cannot be captured is timed by events around each call. Beside
the kernel stand the reference and torch.compile of the reference, unless the case names fewer baselines.

One CSV row per implementation, raw values only (FIELDS). The floor and the ratio are computed where a row is printed:
the larger of bytes / copy rate and flops / product rate.
"""

import argparse
import csv
import dataclasses
import datetime
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

COPY_BYTES_PER_S = 4.27e12  # measured on one H200, as are the product rates
FLOPS_PER_S = {"bf16": 684e12, "fp8": 1258e12, "fp32": 60e12}
FIELDS = (
    *("op", "implementation", "shape", "dtype", "median_us", "p20_us", "p80_us", "bytes_moved", "flops"),
    *("method", "device", "torch", "triton", "commit", "date"),
)


@dataclasses.dataclass
class Case:
    run: Callable
    reference: Callable
    inputs: tuple
    bytes_moved: int  # what has to cross the memory bus once, inputs and outputs
    flops: int  # two per multiply-accumulate
    dtype: str
    tolerance: float = 0.0  # relative error of the small size; 0 asks for equality
    unit: str = "bf16"  # which product rate bounds the flops
    goal: str = ""  # "1.6x" of the floor or "0.045 ms", only printed
    baselines: tuple = ("reference", "compiled")  # leave out what does not fit in memory or runs for minutes
    rotate: bool = True  # False for inputs of many GB, which cannot be copied


REGISTRY = []


def register(op, sizes, small):
    """Decorator for a function (**size, device) -> Case. sizes: label -> size; small: the size that is checked."""

    def add(make):
        REGISTRY.append((op, make, sizes, small))
        return make

    return add


def floor_us(bytes_moved, flops, unit="bf16"):
    return 1e6 * max(bytes_moved / COPY_BYTES_PER_S, flops / FLOPS_PER_S[unit])


def check(make, small, device):
    """Relative error of the small size against the reference; raises when it is above the case's tolerance."""
    import torch

    from kernels.testing import relative_error

    case = make(**small, device=device)
    own = [t.clone() if torch.is_tensor(t) else t for t in case.inputs]  # an op may work in place
    out, expected = case.run(*own), case.reference(*case.inputs)
    if torch.is_tensor(out):
        out, expected = (out,), (expected,)
    worst = 0.0
    for got, want in zip(out, expected, strict=True):
        if got.is_floating_point():
            worst = max(worst, relative_error(got, want))
        elif not torch.equal(got, want.to(got.dtype)):
            worst = float("inf")
    if not worst <= case.tolerance:
        raise AssertionError(f"relative error {worst:.3g} above {case.tolerance:.3g}")
    return worst


def _copies(inputs, rotate):
    """Copies of the inputs, enough to leave the L2 cache between two uses of the same one."""
    import torch

    tensors = [t for t in inputs if torch.is_tensor(t)]
    size = sum(t.numel() * t.element_size() for t in tensors)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    count = max(1, min(32, -(-4 * l2 // max(size, 1)))) if rotate else 1
    clone = lambda t: t.clone() if torch.is_tensor(t) else t  # noqa: E731
    return [inputs] + [tuple(clone(t) for t in inputs) for _ in range(count - 1)]


def _quantiles(samples):
    samples = sorted(samples)
    return [samples[min(len(samples) - 1, int(q * len(samples)))] for q in (0.5, 0.2, 0.8)]


def time_us(fn, inputs, rotate=True, budget_s=0.4):
    """((median, p20, p80) in microseconds, method) of fn over rotated inputs."""
    import torch

    sets = _copies(inputs, rotate)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm: compiles, fills caches
        for values in (*sets[:2], sets[0]):
            fn(*values)
    torch.cuda.synchronize()

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once(call):
        start.record()
        call()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    single = once(lambda: fn(*sets[0]))
    calls = len(sets) * max(1, int(2000 / max(single * len(sets), 1)))  # about 2 ms a graph
    calls = min(calls, 512)
    method = "graph"
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                fn(*sets[i % len(sets)])
        play = graph.replay
        play()
    except Exception as error:
        torch.cuda.synchronize()
        print(f"    no graph ({type(error).__name__}: {str(error).splitlines()[0][:90]}), timed by events", flush=True)
        method, calls = "events", 1
        turn = iter(range(10**9))
        play = lambda: fn(*sets[next(turn) % len(sets)])  # noqa: E731
    torch.cuda.synchronize()
    repeats = max(5, min(200, int(1e6 * budget_s / max(once(play), 1))))
    return _quantiles([once(play) / calls for _ in range(repeats)]), method


def _commit():
    """The commit of the code that runs: $COMMIT, for a copy without history, or git's, marked where files differ."""
    if commit := os.environ.get("COMMIT"):
        return commit
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _write(path, row):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def bench_case(op, make, label, size, out, device="cuda"):
    """Time the kernel and its baselines at one size; print each line and append its row."""
    import torch
    import triton

    case = make(**size, device=device)
    bound = floor_us(case.bytes_moved, case.flops, case.unit)
    implementations = {"kernel": case.run}
    if "reference" in case.baselines:
        implementations["reference"] = case.reference
    if "compiled" in case.baselines:
        torch._dynamo.reset()
        implementations["compiled"] = torch.compile(case.reference)
    for name, fn in implementations.items():
        try:
            (median, p20, p80), method = time_us(fn, case.inputs, case.rotate)
        except Exception as error:  # a baseline that runs out of memory is no reason to lose the kernel's row
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            print(f"  {op} {label} {name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
            if name == "kernel":
                raise
            continue
        goal = f"  goal {case.goal}" if case.goal and name == "kernel" else ""
        print(
            f"  {op:18} {label:34} {name:9} {median:10.1f} us  floor {bound:8.1f} us  {median / bound:6.2f}x{goal}",
            flush=True,
        )
        if out:
            _write(
                out,
                {
                    "op": op,
                    "implementation": name,
                    "shape": label,
                    "dtype": case.dtype,
                    "median_us": f"{median:.2f}",
                    "p20_us": f"{p20:.2f}",
                    "p80_us": f"{p80:.2f}",
                    "bytes_moved": case.bytes_moved,
                    "flops": case.flops,
                    "method": method,
                    "device": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "triton": triton.__version__,
                    "commit": _commit(),
                    "date": datetime.date.today().isoformat(),
                },
            )


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description="time the kernels on one GPU")
    parser.add_argument("--op", action="append", help="only this op (may be repeated)")
    parser.add_argument("--out", help="CSV file to append rows to")
    parser.add_argument("--check", action="store_true", help="run the small sizes against the reference, time nothing")
    options = parser.parse_args(arguments)

    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated, below
    import kernels.bench_cases  # noqa: F401
    from kernels.bench import REGISTRY  # the module that bench_cases registers in, also when this one is __main__

    known = sorted({entry[0] for entry in REGISTRY})
    if unknown := set(options.op or ()) - set(known):
        parser.error(f"unknown op {', '.join(sorted(unknown))}; registered are {', '.join(known)}")
    device = "cuda" if on_gpu else "cpu"
    failures = 0
    for op, make, sizes, small in REGISTRY:
        if options.op and op not in options.op:
            continue
        try:
            print(f"{op}: relative error {check(make, small, device):.2g} at {small}", flush=True)
            if on_gpu and not options.check:
                for label, size in sizes.items():
                    bench_case(op, make, label, size, options.out)
                    torch.cuda.empty_cache()
        except Exception as error:
            failures += 1
            print(f"{op}: no row, {type(error).__name__}: {error}", flush=True)
    if not on_gpu and not options.check:
        print("no CUDA device: checked the small sizes, timed nothing")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
