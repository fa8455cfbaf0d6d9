"""A real browser, and the servers that students use: JupyterLab and Voila, each on a copy of what it shows."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
HERE = "127.0.0.1"


class NoBrowser(RuntimeError):
    """There is no Chromium here, or nothing to drive it with."""


@contextlib.contextmanager
def chromium() -> Iterator:
    """Chromium driven by Playwright: the system's own, or the one that Playwright installed.

    Raises:
        NoBrowser: there is none.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        raise NoBrowser("needs Playwright (the extra `dev`)") from None
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        path = path or playwright.chromium.executable_path
        if not os.path.exists(path):
            raise NoBrowser("needs Chromium, and there is none here (Debian: apt-get install chromium)")
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@contextlib.contextmanager
def lab(folder: Path) -> Iterator[str]:
    """JupyterLab as `make lab` starts it, on a copy of the lessons in `folder`; yields its address."""
    shutil.copytree(NOTEBOOKS, folder / "notebooks", ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    config = f"--config={NOTEBOOKS / 'lab' / 'jupyter_lab_config.py'}"
    command = ["jupyterlab", config, f"--ServerApp.root_dir={folder}", "--IdentityProvider.token="]
    with _server(folder, *command, "--allow-root", "--ServerApp.port={port}") as address:
        yield f"{address}/lab"


@contextlib.contextmanager
def voila(folder: Path) -> Iterator[str]:
    """The explorer alone as `make app` serves it; yields its address."""
    command = ["voila", str(NOTEBOOKS / "explorer.ipynb"), "--template=flashsim", "--port={port}"]
    with _server(folder, *command, JUPYTER_PATH=str(NOTEBOOKS / "app")) as address:
        yield f"{address}/"


@contextlib.contextmanager
def _server(folder: Path, module: str, *options: str, **extra: str) -> Iterator[str]:
    """A Jupyter server with settings of its own in `folder`, stopped at the end with all its kernels."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", module, "--no-browser", *(o.replace("{port}", str(port)) for o in options)]
    places = ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    environment = os.environ | {name: str(folder / name.lower()) for name in places} | extra
    environment["PYTHONPATH"] = str(ROOT)
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
        try:
            _wait(process, port, folder / "server.log")
            yield f"http://{HERE}:{port}"
        finally:
            process.send_signal(signal.SIGTERM)  # the server ends its kernels
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen, port: int, log: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((HERE, port), timeout=1):
            return
        time.sleep(0.2)
    raise RuntimeError(f"{' '.join(map(str, process.args))} does not answer: {log.read_text()[-2000:]}")


def run_all_cells(page) -> None:
    """In JupyterLab: wait until the kernel is there, then Run, Run All Cells."""
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def turn(page, knob: str, key: str) -> None:
    """Focus the slider of that name and press a key."""
    handle = page.locator(".widget-slider", has_text=knob).locator(".noUi-handle")
    handle.focus()
    page.keyboard.press(key)
