"""V1 to V4 on a GPU: goldens in float32, decode in bfloat16, and the memory that the allocator gives for a cache."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import model
from flashsim import kv_bytes_per_token, kv_cache, load_config
from model.token_cache import TokenCache
from model.v4_cache import V4Cache

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
LENGTHS = [
    8192,
    16384,
    24576,
    32768,
]  # whole groups of 128 tokens; records of every layout fill whole pages of 512 bytes
PAGE = 512  # bytes to which the allocator rounds


def allocated(make):
    """(bytes that the tensors asked for, bytes that the allocator gave) while the result of `make` lives."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    keys = ("requested_bytes.all.current", "allocated_bytes.all.current")
    before = [torch.cuda.memory_stats().get(key, 0) for key in keys]
    held = make()
    after = [torch.cuda.memory_stats()[key] for key in keys]
    del held
    return [a - b for a, b in zip(after, before, strict=True)]


@pytest.mark.parametrize("name", ["v1", "v2", "v3", "v3.2", "v4-flash", "v4-pro"])
def test_memory_grows_by_the_formula(name):
    """At released size: fixed + slope * N over four lengths, with the slope of Figure 1(b)."""
    config = load_config(name)
    kind = V4Cache if name.startswith("v4") else TokenCache
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    sizes = {n: allocated(lambda n=n: kind(config, capacity=n, **options)) for n in LENGTHS}
    per_token = kv_bytes_per_token(config)
    low = LENGTHS[0]
    fixed = sizes[low][0] - per_token * low
    tensors = len(kind(config, **options).stores)
    for n, (requested, given) in sizes.items():
        assert requested == fixed + per_token * n, (name, n, requested, fixed)
        assert 0 <= given - requested <= (tensors + len(config.layers()) * 4) * 2**20, (name, n, given, requested)
    assert (fixed == 0) == (kind is TokenCache), (name, fixed)


@pytest.mark.parametrize(("name", "rounding"), [("v1", True), ("v3", True), ("v32", False), ("v4", False)])
def test_golden_logits_in_float32(name, rounding):
    """A GPU computes in float32, not in float64; without cache rounding nothing sits on a boundary."""
    lm = model.load(GOLDEN / name, device="cuda", cache_rounding=rounding)
    golden = load_file(GOLDEN / name / "golden.safetensors")
    error = (lm(golden["input_ids"]).cpu() - golden["logits"]).abs().max().item()
    assert error < 1e-4, (name, error)


@pytest.mark.parametrize("name", ["v1", "v3", "v32", "v4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_then_decode(name, dtype):
    """Bytes equal the prediction, and in float32 without rounding decode equals one forward."""
    rounding = dtype == torch.bfloat16
    lm = model.load(GOLDEN / name, device="cuda", dtype=dtype, cache_rounding=rounding)
    ids = load_file(GOLDEN / name / "golden.safetensors")["input_ids"][:, :41].cuda()
    cache = lm.new_cache(len(ids))
    parts = [lm(part, cache=cache) for part in ids.split([33, *[1] * 8], dim=1)]
    logits = torch.cat(parts, dim=1)
    assert torch.isfinite(logits).all()
    if rounding:
        assert cache.nbytes(by="component", sequence=0) == kv_cache(lm.config, 41).by("component")
    else:
        error = (logits - lm(ids)).abs().max().item()
        assert error < 1e-4, (name, error)
