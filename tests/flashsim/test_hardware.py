"""Devices: every number has a source, and a broken table is named."""

import pytest

from flashsim.hardware import _device, device, devices
from flashsim.reading import ConfigError

GOOD = {"name": "X", "memory_bytes": 10, "hbm_bytes_per_s": 5, "peak_flops_per_s": {"bf16": 2.0}, "source": "sheet"}


def test_every_device_is_whole_and_plausible():
    for key, it in devices().items():
        assert it.key == key and it.rates.source and "bf16" in it.rates.peak_flops_per_s
        assert 10 * 10**9 < it.memory_bytes < 10**12
        assert 10**11 < it.rates.hbm_bytes_per_s < 10**13
        peaks = list(it.rates.peak_flops_per_s.values())
        assert peaks == sorted(peaks), "narrower numbers are not slower"
        if it.measured:
            assert it.measured.hbm_bytes_per_s < it.rates.hbm_bytes_per_s
            for name, peak in it.measured.peak_flops_per_s.items():
                assert peak < it.rates.peak_flops_per_s[name]


def test_measured_rates_are_those_of_the_benchmarks():
    bench = pytest.importorskip("kernels.bench")
    measured = device("h200-sxm").measured
    assert measured.hbm_bytes_per_s == bench.COPY_BYTES_PER_S
    assert dict(measured.peak_flops_per_s) == {name: bench.FLOPS_PER_S[name] for name in ("bf16", "fp8")}


def test_a_device_stands_for_itself():
    assert device(device("b200")) is device("b200")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"memory_bytes": 0}, "x.memory_bytes"),
        ({"memory_bytes": True}, "x.memory_bytes"),
        ({"hbm_bytes_per_s": "fast"}, "x.hbm_bytes_per_s"),
        ({"peak_flops_per_s": {"int3": 1.0}}, "x.peak_flops_per_s"),
        ({"peak_flops_per_s": {"bf16": float("nan")}}, "x.peak_flops_per_s.bf16"),
        ({"source": None}, "x.source"),
        ({"measured": {}}, "x.measured.peak_flops_per_s"),
    ],
)
def test_a_broken_table_names_its_field(change, field):
    with pytest.raises(ConfigError) as error:
        _device("x", GOOD | change)
    assert error.value.field == field


def test_an_unknown_device():
    with pytest.raises(ConfigError, match=r"device is 'gtx'; accepted: a100-80gb, .*b200"):
        device("gtx")
