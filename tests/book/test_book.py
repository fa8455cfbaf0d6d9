"""The book builds without a warning, holds every lesson and every claim, and its pages ask nothing of a network."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashsim.claims import check_claims

pytest.importorskip("myst_nb")
pytest.importorskip("sphinx_book_theme")
ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("generated", ROOT / "book" / "generated.py")
generated = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generated)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built book."""
    target = tmp_path_factory.mktemp("book") / "html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", ROOT / "book", target]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr[-3000:]
    return target


@pytest.mark.slow
def test_every_lesson_and_page_is_there(site):
    for lesson in generated.lessons().values():
        assert (site / "_generated" / "lessons" / f"{lesson.stem}.html").is_file()
    for chapter in generated.chapters().values():
        built = (site / "chapters" / f"{chapter.stem}.html").is_file()
        assert built == (f"chapters/{chapter.name}" not in generated.waiting())
    assert "indexer" in (site / "glossary.html").read_text(encoding="utf-8")
    claims = (site / "_generated" / "claims.html").read_text(encoding="utf-8")
    assert all(f">{claim.id}<" in re.sub(r"</?span[^>]*>", "", claims) for claim in check_claims())


@pytest.mark.slow
def test_pages_name_nothing_outside(site):
    """No script, style, font or picture from elsewhere; links that a reader follows may lead out."""
    outside = r"""["'](?:https?:)?//"""
    loads = re.compile(rf"<(?:script|img|iframe|source)[^>]*\bsrc={outside}|<link(?![^>]*canonical)[^>]*href={outside}")
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text(encoding="utf-8")), page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?https?:", style.read_text(encoding="utf-8")), style.name


@pytest.mark.slow
def test_pages_in_a_browser(site, open_page):
    """In Chromium: no request leaves the folder, no page is wider than its window, math and pictures are drawn."""
    pages = [site / "index.html", site / "_generated" / "claims.html"]
    pages += [site / "_generated" / "lessons" / f"{lesson.stem}.html" for lesson in generated.lessons().values()]
    for path in pages:
        page, requests = open_page(path.as_uri())
        page.wait_for_function("[...document.images].every(i => i.complete)")
        if page.locator(".math").count():
            page.wait_for_selector("mjx-container")
        assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == [], path.name
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path.name
        # every picture is drawn and has words; an empty alt text is for ornaments inside a table, never for a file
        assert page.evaluate("[...document.images].every(i => i.naturalWidth > 0 && i.hasAttribute('alt'))"), path.name
        shown = page.evaluate("[...document.images].filter(i => i.src.startsWith('file:')).map(i => i.alt)")
        assert all(alt and not alt.endswith(".svg") for alt in shown), (path.name, shown)
        assert page.locator("mjx-merror").count() == 0, path.name
        page.close()


def test_every_lesson_has_a_chapter():
    assert generated.lessons().keys() <= generated.chapters().keys()


def test_chapters_point_at_their_lesson():
    for number, chapter in generated.chapters().items():
        text = chapter.read_text(encoding="utf-8")
        assert text.startswith(f"# {int(number)}. ") and f"../_generated/lessons/{number}_*" in text
        assert re.search(r"^\*\*.*\?\*\*$", text, re.MULTILINE), f"{chapter.name} asks no question"


def test_a_cell_of_a_table_stays_itself():
    assert generated._cell("a|b_c*d <e>") == r"a\|b\_c\*d \<e\>"
