"""Shared switches: Triton's interpreter where there is no GPU, one torch thread a worker, visible skips."""

import importlib.util
import os
from pathlib import Path

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


@pytest.fixture(scope="session")
def browser():
    """Chromium; the test is skipped where there is none."""
    spec = importlib.util.spec_from_file_location("serve", Path(__file__).parent / "browser" / "serve.py")
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    try:
        with serve.chromium() as chromium:
            yield chromium
    except serve.NoBrowser as missing:
        pytest.skip(str(missing))


@pytest.fixture
def open_page(browser):
    """A function that opens an address: the page, and the list of addresses that it asks for, which grows."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})

    def start(address):
        page, requests = context.new_page(), []
        page.on("request", lambda request: requests.append(request.url))
        page.on("websocket", lambda socket: requests.append(socket.url))
        page.goto(address)
        return page, requests

    yield start
    context.close()
