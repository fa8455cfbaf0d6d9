"""Pictures for people to look at: `make screenshots`.

Pages of the book whole, the first lesson and the explorer in JupyterLab, the explorer in Voila; some of them as on a
phone too.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import serve

LAPTOP, PHONE = (1280, 800), (390, 844)


def whole(page, path: Path, size: tuple[int, int] = LAPTOP) -> None:
    """A picture of all of a page, whatever scrolls inside it; at most 20,000 pixels high."""
    width, height = size
    page.set_viewport_size({"width": width, "height": height})
    page.wait_for_timeout(1500)  # fonts, math, widgets
    tallest = "Math.max(...[document.documentElement, ...document.querySelectorAll('*')].map(e => e.scrollHeight))"
    page.set_viewport_size({"width": width, "height": max(height, min(page.evaluate(tallest) + 80, 20_000))})
    page.wait_for_timeout(500)
    page.screenshot(path=path)


def book(browser, out: Path, site: Path) -> None:
    """Every page of the book built at `site`, two of them on a phone too."""
    page = browser.new_page()
    for source in sorted(site.rglob("*.html")):
        name = source.relative_to(site).as_posix().removesuffix(".html").replace("/", "-").removeprefix("_generated-")
        if name not in ("genindex", "search") and "_static" not in source.parts:
            page.goto(source.resolve().as_uri())
            whole(page, out / f"book-{name}.png")
            if name in ("index", "lessons-00_tour"):
                whole(page, out / f"book-{name}-phone.png", PHONE)
    page.close()


def course(browser, out: Path) -> None:
    """JupyterLab with the first lesson as it opens, and with the explorer after it ran."""
    for name in ("00_tour", "explorer"):
        with tempfile.TemporaryDirectory() as folder, serve.lab(Path(folder)) as address:
            page = browser.new_page(viewport={"width": LAPTOP[0], "height": LAPTOP[1]})
            page.goto(f"{address}/tree/notebooks/{name}.ipynb")
            serve.run_all_cells(page)
            if name == "explorer":
                page.wait_for_selector(".widget-slider", timeout=60_000)
            page.wait_for_timeout(4000)
            page.screenshot(path=out / f"lab-{name}.png")
            page.close()


def app(browser, out: Path) -> None:
    """The explorer in Voila, on a laptop and on a phone, and after a slider was moved."""
    with tempfile.TemporaryDirectory() as folder, serve.voila(Path(folder)) as address:
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector(".widget-slider .noUi-handle", timeout=90_000)
        whole(page, out / "app.png")
        serve.turn(page, "encoder caches", "ArrowLeft")
        whole(page, out / "app-turned.png")
        whole(page, out / "app-phone.png", PHONE)
        page.close()


def main(out: Path, site: Path) -> None:
    """Writes them all."""
    out.mkdir(parents=True, exist_ok=True)
    with serve.chromium() as browser:
        book(browser, out, site)
        course(browser, out)
        app(browser, out)
    print(f"{out}: {len(list(out.glob('*.png')))} pictures")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
