"""How Sphinx builds the book: `make book`, or `sphinx-build -W book out/book/html`. Nothing is fetched.

Lessons are shown with the outputs that are committed: `notebooks/execute.py` runs them all and compares, so building
the book runs none of them. What the library computes is written as pages when a build begins (`generated.py`).
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import generated  # noqa: E402

project = "flashsim"
author = "The flashsim authors"
copyright = "The flashsim authors, MIT licence"
language = "en"

extensions = ["myst_nb", "sphinx_design", "sphinx-mathjax-offline"]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # a widget is dead without a kernel: its page shows the picture and the table beside it
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
exclude_patterns = ["README.md", *generated.waiting()]

html_theme = "sphinx_book_theme"
html_title = "flashsim: 437 times smaller"
html_theme_options = {"show_navbar_depth": 1, "use_download_button": False, "use_fullscreen_button": False}
html_theme_options["navbar_persistent"] = []  # one search field is enough, in the side bar
html_theme_options["secondary_sidebar_items"] = []  # room for code and tables
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["book.css"]
templates_path = []


def setup(app):
    """Write the generated pages before Sphinx looks for its sources; let an example end where its output does."""
    app.connect("builder-inited", lambda app: generated.write())
    app.connect("source-read", _tighten)


def _tighten(app, name, source):
    source[0] = source[0].replace("\n\n```\n", "\n```\n")
