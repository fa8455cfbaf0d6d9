"""Kernels go to the part that launched them: nested ranges, kernels between them, launches that nobody saw."""

import pytest
import torch

import model
from model.step_profile import MARK, Event, Kernel, attribute, by, kernels_of, part_of


def test_a_kernel_belongs_to_the_innermost_range():
    ranges = [Event(MARK + "attention", False, 100, 100, 0), Event(MARK + "indexer", False, 120, 30, 0)]
    ranges += [Event(MARK + "experts", False, 200, 50, 0), Event(MARK + "indexer", False, 200, 10, 0)]
    launches = {1: 50, 2: 110, 3: 130, 4: 160, 5: 205, 6: 220, 7: 300}
    host = [Event("cuLaunchKernelEx" if i % 2 else "cudaLaunchKernel", False, t, 1, i) for i, t in launches.items()]
    host.append(Event("aten::add", False, 131, 1, 3))  # an op with the same number is no launch
    device = [Event(f"k{i}", True, 10**6 + i, 1000 * i, i) for i in (*launches, 99)]
    kernels = attribute([*ranges, *device, *host, Event(MARK + "experts", True, 10**6, 5, 0)])
    parts = {k.name: k.part for k in kernels}
    assert parts == {
        "k1": "hyper_connection", "k2": "attention", "k3": "indexer", "k4": "attention", "k5": "indexer",
        "k6": "experts", "k7": "hyper_connection", "k99": "unknown",
    }  # fmt: skip
    assert [k.name for k in kernels[:-1]] == [f"k{i}" for i in launches]
    assert by("part", kernels, steps=2)["attention"] == ((2 + 4) / 2, 1.0)
    assert sum(us for us, _ in by("name", kernels, steps=1).values()) == 1 + 2 + 3 + 4 + 5 + 6 + 7 + 99


@pytest.mark.parametrize("name", ["tiny", "ladder-v1", "ladder-v3.2", "ladder-v4-flash"])
def test_every_module_with_weights_has_a_part(name):
    lm = model.load(name)
    for path, module in lm.named_modules():
        own = [n for n, _ in module.named_parameters(recurse=False) if not n.startswith("hc_")]
        assert not own or part_of(path) or part_of(path.rpartition(".")[0]), path


@pytest.mark.gpu
def test_kernels_of_a_step_have_known_parts():
    lm = model.load("tiny", device="cuda", backend="triton", dtype=torch.bfloat16)
    ids = torch.zeros(1, 12, dtype=torch.int64)
    kernels = kernels_of(lm, lambda: lm(ids), steps=1)
    parts = by("part", kernels, steps=1)
    assert {"attention", "attention_projections", "experts", "indexer", "lm_head"} <= set(parts)
    assert "unknown" not in parts and all(isinstance(k, Kernel) and k.us > 0 for k in kernels)
