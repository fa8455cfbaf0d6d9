"""The figures: what is drawn equals what the library computes, and nothing half-done is left in a folder."""

import csv
import io
import os
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flashsim import decode_flops, kv_bytes_per_token, load_config, persistent_cache
from flashsim.config import PRESETS
from flashsim.drawing import PAGE
from flashsim.figures import FIGURES, GROUPS, LONG, SHORT, FigureError, draw, figure_1b, figure_2
from flashsim.flops import crossing
from flashsim.ladder import ladder
from flashsim.paths import OutputError

matplotlib = pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'flashsim-kv[figures]'")
SVG = "{http://www.w3.org/2000/svg}"
KINDS = ("svg", "png", "csv", "txt")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("figures") / "new" / "out"
    assert draw(out=folder) == [folder / f"{name}.{kind}" for name in FIGURES for kind in KINDS]
    return folder


def table(folder: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / f"{name}.csv").read_text())))


def exact(text: str) -> Fraction:
    return Fraction(float(text))


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- what is written --------------------------------------------------------------------------------------------------


def test_every_figure_has_four_files_and_nothing_else(drawn):
    assert sorted(path.name for path in drawn.iterdir()) == sorted(f"{n}.{k}" for n in FIGURES for k in KINDS)
    for name in FIGURES:
        assert (drawn / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("name", FIGURES)
def test_svg_carries_title_and_alt_text_and_no_date(drawn, name):
    text = (drawn / f"{name}.svg").read_text()
    root = ElementTree.fromstring(text)
    alt = (drawn / f"{name}.txt").read_text().rstrip("\n")
    assert root.find(f"{SVG}desc").text == alt
    assert root.find(f"{SVG}title").text
    assert root.get("role") == "img"
    assert root.get("aria-labelledby").split() == [root.find(f"{SVG}{tag}").get("id") for tag in ("title", "desc")]
    assert "dc:date" not in text


def test_two_runs_give_identical_bytes_whatever_the_readers_style(drawn, tmp_path):
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.fonttype": "none"}):
        again = draw(out=tmp_path)
        assert matplotlib.rcParams["font.size"] == 20  # and the reader's style is as it was
    for path in again:
        assert path.read_bytes() == (drawn / path.name).read_bytes(), path.name


def test_names_choose_figures_once_and_in_order(tmp_path):
    written = draw(["ladder", "figure-1b", "ladder"], tmp_path)
    assert [path.name for path in written[::4]] == ["ladder.svg", "figure-1b.svg"]
    assert draw("ladder", str(tmp_path)) == written[:4]
    assert len(list(tmp_path.iterdir())) == 8


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_figure_1b_numbers(drawn):
    rows = table(drawn, "figure-1b")
    assert [row["generation"] for row in rows] == ["V1", "V3.2", "V4-Flash", "V4.1-Flash"]
    values = [kv_bytes_per_token(load_config(row["model"])) for row in rows]
    assert [exact(row["kv_bytes_per_token"]) for row in rows] == values == [389120, 48068, Fraction(14057, 4), 890]
    assert [row["published_kv_bytes_per_token"] for row in rows] == ["389120", "48068", "3514", "890"]
    steps = [float(row["smaller_than_previous_factor"]) for row in rows[1:]]
    assert steps == [float(Fraction(a) / b) for a, b in pairwise(values)]
    assert [row["published_smaller_than_previous_factor"] for row in rows] == ["", "8.1", "13.7", "3.9"]
    assert [f"{step:.1f}" for step in steps] == ["8.1", "13.7", "3.9"]
    assert round(float(rows[-1]["smaller_than_V1_factor"])) == 437
    assert rows[-1]["published_smaller_than_V1_factor"] == "437"


def test_figure_1b_with_derived_generations():
    drawing = figure_1b(derived=True)
    assert [row["model"] for row in drawing.rows] == list(PRESETS)
    derived = {row["generation"]: row for row in drawing.rows if row["published_kv_bytes_per_token"] is None}
    assert {name: row["kv_bytes_per_token"] for name, row in derived.items()} == {
        "V2": 69120,
        "V3": 70272,
        "V4-Pro": Fraction(80503, 16),
    }
    assert not any(row["smaller_than_previous_factor"] for row in derived.values())
    assert drawing.rows[3]["smaller_than_previous_factor"] == Fraction(389120, 48068)  # V3.2 against V1, not V3
    assert "V2 69,120 bytes per token (derived)" in drawing.alt
    assert drawing._repr_svg_().startswith("<?xml")
    assert "\n" not in drawing._repr_svg_()
    shown, written = (ElementTree.fromstring(text) for text in (drawing._repr_svg_(), drawing.svg()))
    assert [e.tag for e in shown.iter()] == [e.tag for e in written.iter()]
    assert shown.find(f"{SVG}desc").text == drawing.alt


def test_a_notebook_shows_a_wide_figure_whole():
    wide, narrow = figure_2(), figure_1b()
    shown = ElementTree.fromstring(wide._repr_svg_())
    width, height = (float(shown.get(side).removesuffix("pt")) for side in ("width", "height"))
    _, _, across, down = map(float, shown.get("viewBox").split())
    assert width == PAGE < across and height / width == pytest.approx(down / across, rel=1e-5)
    same = ElementTree.fromstring(narrow.svg())
    assert float(same.get("width").removesuffix("pt")) <= PAGE
    assert ElementTree.fromstring(narrow._repr_svg_()).attrib == same.attrib


def test_figure_2_numbers(drawn):
    rows = table(drawn, "figure-2")
    assert {row["model"] for row in rows} == set(PRESETS)
    for preset in PRESETS:
        config = load_config(preset)
        points = [row for row in rows if row["model"] == preset and row["kind"] != "chart reading"]
        contexts = [int(row["context_tokens"]) for row in points]
        assert contexts == sorted(set(contexts)) and (contexts[0], contexts[-1]) == (SHORT, LONG)
        assert [exact(row["weighted_flops_per_token"]) for row in points] == decode_flops(
            config, contexts
        ).weighted_total()
        beyond = [int(row["context_tokens"]) for row in points if row["kind"].startswith("computed beyond")]
        assert beyond == [n for n in contexts if n > config.max_position_embeddings]
        assert min(config.max_position_embeddings, LONG) in contexts  # where the curve turns dashed
    met = crossing(load_config("v4.1-flash"), load_config("v4-flash"), SHORT, LONG)
    crossed = [(row["model"], int(row["context_tokens"])) for row in rows if row["kind"] == "crossing"]
    assert crossed == [("v4-flash", met), ("v4.1-flash", met)]
    readings = {(r["model"], r["context_tokens"]): r for r in rows if r["kind"] == "chart reading"}
    assert len(readings) == 4
    assert exact(readings["v4-flash", str(LONG)]["weighted_flops_per_token"]) == 60 * 10**9


def test_the_crossing_is_where_the_lower_curve_changes():
    ours, theirs = load_config("v4.1-flash"), load_config("v4-flash")
    met = crossing(ours, theirs, SHORT, LONG)
    before, at = ([decode_flops(config, n).weighted_total() for config in (ours, theirs)] for n in (met - 1, met))
    assert before[0] > before[1] and at[0] <= at[1]


def test_ladder_numbers(drawn):
    rows, rungs = table(drawn, "ladder"), ladder()
    assert [row["change"] for row in rows] == [rung.change for rung in rungs]
    assert [exact(row["after_bytes_per_token"]) for row in rows] == [rung.per_token_bytes for rung in rungs]
    assert [exact(row["change_bytes_per_token"]) for row in rows] == [rung.change_bytes for rung in rungs]
    assert [row["released_model"] or None for row in rows] == [rung.released for rung in rungs]
    for above, row in pairwise(rows):
        assert row["before_bytes_per_token"] == above["after_bytes_per_token"]
    assert (rows[0]["after_bytes_per_token"], rows[-1]["after_bytes_per_token"]) == ("389120", "890")


def test_component_groups_add_up_to_the_totals(drawn):
    rows = table(drawn, "components")
    for preset in ("v3.2", "v4-flash", "v4.1-flash"):
        for context in (SHORT, LONG):
            column = f"weighted_flops_per_token_at_{context}_tokens"
            values = {row["group"]: exact(row[column]) for row in rows if row["model"] == preset}
            report = decode_flops(load_config(preset), context)
            assert values.pop("total") == report.weighted_total() == sum(values.values())
            parts = report.weighted_by("component")
            assert values["indexer scores"] == sum(parts.get(name, 0) for name in GROUPS["indexer scores"])


def test_component_groups_know_every_component_once():
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {name for preset in PRESETS for name in decode_flops(load_config(preset), 1).by("component")}


def test_persistent_numbers(drawn):
    rows = table(drawn, "persistent")
    turns = [int(row["turn_new_tokens"]) for row in rows]
    old, new = (persistent_cache(load_config(preset), turns) for preset in ("v4-flash", "v4.1-flash"))
    assert [exact(row["v4_flash_global_bytes"]) for row in rows] == old.by("tier")["global"]
    assert [exact(row["v4_flash_window_bytes"]) for row in rows] == old.by("tier")["window"]
    assert [exact(row["v4_flash_total_bytes"]) for row in rows] == old.total()
    assert [exact(row["v4.1_flash_total_bytes"]) for row in rows] == new.total()
    half = rows[turns.index(1829)]
    assert float(half["v4_flash_window_share"]) == pytest.approx(0.5, abs=1e-3)
    assert float(half["v4.1_flash_to_v4_flash_ratio"]) == pytest.approx(1 / 8, abs=2e-3)


@pytest.mark.parametrize(
    "name, words",
    {
        "figure-1b": ("389,120", "48,068", "3,514.25", "(published 3,514;", "8.1", "13.7", "3.9", "437"),
        "figure-2": ("107,648 tokens", "V4.1-Flash 20.2 and 25.7", "V3 108 and 17,854, dashed beyond its 163,840"),
        "ladder": ("from 389,120 to 890", "V3: 61 layers (released): +1,152", "\N{MINUS SIGN}6,764, leaving 890"),
        "components": ("Indexer scores: V3.2 2.05 to 524", "Total: V3.2 76.4 to 598"),
        "persistent": ("1,829", "6,428,672 bytes of windows", "890 bytes a token", "1/7.9", "about 1/8"),
    }.items(),
)
def test_alt_text_states_the_numbers(drawn, name, words):
    alt = (drawn / f"{name}.txt").read_text()
    for word in words:
        assert word in alt


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_is_clipped_or_smaller_than_nine_points(name):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    figure = FIGURES[name]().figure
    FigureCanvasAgg(figure).draw()
    boxes = []
    for text in figure.findobj(Text):
        box = text.get_window_extent()
        if not text.get_visible() or not text.get_text().strip():
            continue
        assert text.get_fontsize() >= 9, text
        assert box.x0 >= 0 and box.y0 >= 0, text
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
        boxes.append((text, box.padded(-1)))
    assert len(boxes) > 10
    for i, (text, box) in enumerate(boxes):
        for other, another in boxes[:i]:
            assert not box.overlaps(another), (text, other)


# --- what fails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["figure-3", "", "Ladder"])
def test_unknown_name_lists_the_accepted_ones_and_writes_nothing(tmp_path, name):
    with pytest.raises(FigureError, match=r"^figure is '.*'; accepted: figure-1b, figure-2, ladder, components, pers"):
        draw(["ladder", name], tmp_path / "out")
    assert everything_in(tmp_path) == []


def test_no_names_at_all_is_an_error(tmp_path):
    with pytest.raises(FigureError, match="an empty list; accepted: figure-1b"):
        draw([], tmp_path / "out")
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError("half-way"), OSError("half-way"), KeyboardInterrupt()])
def test_a_run_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setitem(FIGURES, "ladder", fail)
    with pytest.raises(type(error)):
        draw(["figure-1b", "ladder"], tmp_path / "new" / "out")
    assert everything_in(tmp_path) == []


def test_a_run_that_fails_leaves_older_files_alone(tmp_path, monkeypatch):
    (tmp_path / "figure-1b.svg").write_text("older")
    monkeypatch.setitem(FIGURES, "ladder", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        draw(["figure-1b", "ladder"], tmp_path)
    assert everything_in(tmp_path) == ["figure-1b.svg"]
    assert (tmp_path / "figure-1b.svg").read_text() == "older"


@pytest.mark.parametrize("out", ["file", "file/out", "file/deeper/out"])
def test_out_that_is_a_file_or_under_one(tmp_path, out):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match=r"^out is .*file.* \(.+\); accepted: a folder") as caught:
        draw("figure-1b", tmp_path / out)
    assert "\n" not in str(caught.value)
    assert everything_in(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("out", ["", "a\0b", None, 3, b"out", "x" * 5000])
def test_out_that_is_no_path(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match=r"^out is .*; accepted: a folder"):
        draw("figure-1b", out)
    assert everything_in(tmp_path) == []


def test_out_that_cannot_be_written_to(tmp_path, monkeypatch):
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):  # root writes anywhere: let the file system refuse by itself
            monkeypatch.setattr("tempfile.mkdtemp", _refuse)
        with pytest.raises(OutputError, match=r"\(Permission denied\); accepted: a folder"):
            draw("figure-1b", tmp_path / "new" / "out")
    finally:
        tmp_path.chmod(0o700)
    assert everything_in(tmp_path) == []


def _refuse(*args, **options):
    raise PermissionError(13, "Permission denied")


def test_a_directory_in_the_way_is_named_before_anything_moves(tmp_path):
    (tmp_path / "figure-1b.txt").mkdir()
    with pytest.raises(OutputError, match=r"folder figure-1b\.txt"):
        draw("figure-1b", tmp_path)
    assert everything_in(tmp_path) == ["figure-1b.txt"]


def test_without_matplotlib_one_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for call in (figure_1b, lambda: draw(out=tmp_path / "out")):
        with pytest.raises(FigureError, match=r"pip install 'flashsim-kv\[figures\]'"):
            call()
    assert everything_in(tmp_path) == []


def test_importing_figures_loads_no_matplotlib():
    code = "import sys, flashsim.figures; print([m for m in ('matplotlib', 'numpy', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_drawing_leaves_pyplot_alone(tmp_path):
    code = "import sys, flashsim.figures as f; f.draw('ladder', sys.argv[1]); print('matplotlib.pyplot' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n" and ran.stderr == ""
