"""What importing costs, what it pulls in, and that the three packages are ours."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "numpy", "matplotlib", "pandas", "triton", "model", "kernels")


def python(code):
    """Output of a fresh interpreter that sees the checkout."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_flashsim_loads_the_standard_library_alone():
    loaded = python(
        "import sys; before = set(sys.modules); import flashsim;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    ).split()
    assert not set(loaded) & set(HEAVY)
    foreign = {name for name in loaded if name not in sys.stdlib_module_names and name != "flashsim"}
    assert not foreign


def test_computing_loads_no_more():
    python(
        "import sys, flashsim as f; c = f.load_config('v4.1-flash');"
        "str(f.kv_cache(c, '1M')); str(f.decode_flops(c, '1M')); f.parameters(c).to_json(); f.ladder();"
        f"assert not set(sys.modules) & {set(HEAVY)!r}"
    )


def test_flashsim_is_imported_in_half_a_second():
    code = "import time; t = time.perf_counter(); import flashsim; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.5


@pytest.mark.parametrize("name", ["flashsim", "model", "kernels"])
def test_packages_are_those_of_this_checkout(name):
    module = importlib.import_module(name)
    where = Path(module.__file__).resolve()
    assert where.is_relative_to(ROOT), (
        f"import {name} gives {where}, outside {ROOT}: another distribution provides a package of that name "
        f"(PyPI has one called 'kernels'). Uninstall it, or run pytest from the repository root."
    )


def test_the_kernels_package_is_empty():
    """Transformers probes for a package `kernels` and looks into it; nothing may happen when it does."""
    assert (ROOT / "kernels" / "__init__.py").read_bytes() == b""


def test_tests_are_no_package():
    """An __init__.py here makes pytest put tests/ first on the path, and `import kernels` then finds the tests."""
    assert [str(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_import_contracts_hold():
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.is_file():
        pytest.skip("import-linter is not installed beside this Python")
    done = subprocess.run([str(tool), "--no-cache"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_names_are_there():
    import flashsim

    assert sorted(flashsim.__all__) == list(dict.fromkeys(sorted(flashsim.__all__)))
    assert all(hasattr(flashsim, name) for name in flashsim.__all__)
