"""In Chromium: the explorer runs in JupyterLab and in Voila, a slider moves by keyboard, and the bytes are right."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("ipywidgets")
budget = pytest.importorskip("flashsim.explorer")
spec = importlib.util.spec_from_file_location("serve", Path(__file__).with_name("serve.py"))
serve = importlib.util.module_from_spec(spec)
spec.loader.exec_module(serve)


def try_it(page, requests, address):
    """The headline as released, then with one encoder cache fewer, then at the next longer context."""
    page.wait_for_selector(".widget-slider .noUi-handle", timeout=90_000)
    released = budget.explore(budget.Settings())
    owners = budget.mechanisms(budget.model_of("v4.1-flash"))["encoder_owners"][2]
    fewer = budget.explore(budget.Settings(encoder_owners=owners - 1))
    assert fewer.per_token_bytes != released.per_token_bytes
    see(page, released)
    serve.turn(page, "encoder caches", "ArrowLeft")
    see(page, fewer)
    longer = budget.Settings(encoder_owners=owners - 1, context="256Ki")
    serve.turn(page, "context, tokens", "ArrowRight")
    see(page, budget.explore(longer))
    server = address.split("/")[2]
    ours = (f"http://{server}/", f"ws://{server}/", "data:", "blob:")
    assert [url for url in requests if not url.startswith(ours)] == []


def see(page, view):
    """The page shows these bytes a token and this number of sequences."""
    words = [budget.number(view.per_token_bytes), "bytes a token", f"{view.capacity.sequences:,}", "sequences fit"]
    page.wait_for_function(
        "words => [...document.querySelectorAll('[aria-live=polite]')].some("
        "    it => words.every(word => it.innerText.split('\\n').map(t => t.trim()).includes(word)))",
        arg=words,
        timeout=20_000,
    )


@pytest.mark.slow
def test_jupyterlab(open_page, tmp_path):
    with serve.lab(tmp_path) as address:
        page, requests = open_page(f"{address}/tree/notebooks/explorer.ipynb")
        serve.run_all_cells(page)
        try_it(page, requests, address)
        page.close()


@pytest.mark.slow
def test_voila(open_page, tmp_path):
    with serve.voila(tmp_path) as address:
        page, requests = open_page(address)
        try_it(page, requests, address)
        page.close()
