"""How fast the analytic library has to be, measured: `make bench`. Each benchmark asserts the limit it stands for."""

import subprocess
import sys

import pytest

from flashsim import PRESETS, decode_flops, kv_cache, load_config


def _python(*arguments):
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True)


def test_bare_python(benchmark):
    """What a process costs before it imports anything: to subtract from the two below."""
    benchmark(_python, "-c", "pass")


def test_import(benchmark):
    """`import flashsim` in a new process: under 0.3 s."""
    benchmark(_python, "-c", "import flashsim")
    assert benchmark.stats.stats.median < 0.3


def test_kv_command(benchmark):
    """`flashsim kv v4.1-flash --json` as a process: under 0.5 s."""
    benchmark(_python, "-m", "flashsim", "kv", "v4.1-flash", "--json")
    assert benchmark.stats.stats.median < 0.5


def test_decode_flops_of_all_presets_at_1000_contexts(benchmark):
    """Decode FLOPs by component of all seven presets at 1,000 contexts: under 0.5 s."""
    configs = [load_config(name) for name in PRESETS]
    contexts = [4096 + 1044 * i for i in range(1000)]
    benchmark(lambda: [decode_flops(config, contexts).by("component") for config in configs])
    assert benchmark.stats.stats.median < 0.5


@pytest.mark.parametrize("model", ["v3.2", "v4-pro"])
def test_kv_report_of_61_layers(benchmark, model):
    """One KV report of a model with 61 layers: under 2 ms."""
    config = load_config(model)
    benchmark(kv_cache, config, 1_000_000)
    assert benchmark.stats.stats.median < 0.002
