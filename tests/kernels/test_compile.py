"""Every kernel compiles for sm_80, sm_90 and sm_100, fits in shared memory, and uses the matrix unit it claims."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from kernels.aot import SHARED_LIMIT, module_names


@pytest.mark.parametrize("module", module_names())
def test_compiles_ahead_of_time(module):
    # Seen to fail: a name misspelt in a kernel ("error"), "wgmma" asked of a kernel without a product ("missing").
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "kernels.aot", module]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    reports = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert reports, run.stderr[-2000:]
    for report in reports:
        assert "error" not in report, report
        assert not report["missing"], report
        if report["arch"] == 90:
            assert report["shared"] <= SHARED_LIMIT, report
    assert run.returncode == 0, run.stderr[-2000:]
