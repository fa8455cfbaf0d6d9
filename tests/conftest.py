"""Shared switches: Triton's interpreter where there is no GPU, one torch thread a worker, visible skips."""

import importlib.util
import os

import pytest


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


if not _has_gpu():
    # Read when a kernel is decorated, so it has to be set before any kernel module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    if _has_gpu():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and there is none here")
    for item in items:
        if item.get_closest_marker("gpu"):  # keywords also have the names of folders
            item.add_marker(skip)
