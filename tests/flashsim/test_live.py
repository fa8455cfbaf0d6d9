"""Light pictures say what the library says, are well-formed, fast, and answer nonsense with a sentence."""

import base64
import re
import time
from xml.etree import ElementTree

import pytest

from flashsim.config import LADDER_PRESETS, PRESETS, load_config
from flashsim.live import (
    STATE_COLOURS,
    as_images,
    block_html,
    drawn_scores,
    layer_html,
    numbers_of,
    replay_html,
    selection_html,
)
from flashsim.persistent import replay_rows
from flashsim.pictures.formats import encode_block
from flashsim.pictures.replay import STATES, is_exact
from flashsim.pictures.selection import select
from flashsim.schedule import layer_plan

V41 = load_config("v4.1-flash")


def drawing(text: str) -> ElementTree.Element:
    """The first SVG of a piece of HTML, parsed: bad escaping fails here."""
    return ElementTree.fromstring(re.search(r"<svg.*?</svg>", text, re.DOTALL)[0])


def inside(root: ElementTree.Element) -> bool:
    """Whether every rectangle lies within the picture."""
    width, height = float(root.get("width")), float(root.get("height"))
    boxes = [[float(it.get(key)) for key in ("x", "y", "width", "height")] for it in root.iter() if "rect" in it.tag]
    return bool(boxes) and all(
        x > -0.2 and y > -0.2 and x + w < width + 0.2 and y + h < height + 0.2 for x, y, w, h in boxes
    )


@pytest.mark.parametrize("name", [*PRESETS, *LADDER_PRESETS, "tiny"])
def test_the_layer_map_of_every_model(name):
    config = load_config(name)
    for plan in layer_plan(config):
        text = layer_html(config, plan.layer)
        assert inside(drawing(text)) and f"Layer {plan.layer}" in text and plan.role in text
        if plan.kv_source not in (None, plan.layer):
            assert f"reads the entries of layer {plan.kv_source}" in text


def test_an_owner_stores_and_a_reader_does_not():
    assert "Stores 178 bytes a token, window 67,584 bytes" in layer_html(V41, 2)
    assert "Stores 356 bytes a token" in layer_html(V41, 20)
    assert "Stores 0 bytes a token" in layer_html(V41, 21)


def test_a_block_shows_what_is_stored():
    text = block_html("0.25, 1.25\n-2.5;5")
    block = encode_block([0.25, 1.25, -2.5, 5.0])
    shown = re.findall(r"<b>(.*?)</b>", text)
    assert shown == [f"{value:.5g}" for value in block.decoded]
    bits = re.findall(r"monospace[^>]*>([01])<", text)
    assert "".join(bits) == "".join(block.kind.element.bits(code).replace("|", "") for code in block.codes)
    assert block.packed().hex(" ") in text


def test_ties_go_to_the_even_code_and_a_zero_block_is_zeros():
    assert re.findall(r"<b>(.*?)</b>", block_html("6 0.25 0.75 1.25 1.75 2.5 3.5 5", "mxfp4"))[1:] == [
        "0", "1", "1", "2", "2", "4", "4",
    ]  # fmt: skip
    assert re.findall(r"<b>(.*?)</b>", block_html("0 0 0")) == ["0"] * 3
    assert "nan" in block_html("1 inf") and re.findall(r"<b>(.*?)</b>", block_html("1 inf")) == ["nan"] * 2


def test_numbers_are_read_strictly():
    assert numbers_of(" 1,2 ;3\n4e-1 ") == [1.0, 2.0, 3.0, 0.4] and numbers_of("  ") == []
    for words in ("1 two", "__import__('os')", "1_000", "0x10", "1+1"):
        assert "accepted: numbers such as" in block_html(words)
    assert "&lt;b&gt;" in block_html("<b>") and "<b>" not in block_html("<b>")


def test_a_selection_is_select_s():
    scores = drawn_scores(48)
    chosen = select(scores, 6, position=47, window=8)
    text = selection_html()
    root = drawing(text)
    assert len([it for it in root.iter() if "circle" in it.tag]) == len(chosen.entries) == 6
    assert f"6 of 48 visible entries chosen: {', '.join(map(str, chosen.entries))}." in text


def test_with_a_pool_only_its_entries_are_chosen():
    text = selection_html(95, 8, ratio=2, keep_blocks=4, block_size=4)
    scores = drawn_scores(48)
    pool = select(scores, 8, position=95, ratio=2, block_size=4, keep_blocks=4).pool
    entries = select(scores, 8, position=95, ratio=2, block_size=4, pool=pool).entries
    assert f"chosen: {', '.join(map(str, entries))}." in text and "16 were in the pool" in text
    assert inside(drawing(text)) and all(entry // 4 in pool for entry in entries)


def test_typed_scores_and_too_few_of_them():
    assert "2 of 4 visible entries chosen: 1, 3." in selection_html(9, 2, scores="0 3 1 2")
    assert "0 of 0 visible entries chosen: none." in selection_html(0, 3, ratio=4)
    assert "2 lost a tie" in selection_html(3, 2, scores="0 0 0 0")


@pytest.mark.parametrize("mode", ["cold", "exact", "bounded"])
@pytest.mark.parametrize(("prompt", "prefix"), [(60, 40), (60, 60), (60, 0), (1, 1), (9, 8)])
def test_a_replay_says_what_runs(mode, prompt, prefix):
    config = load_config("tiny")
    rows, text = replay_rows(config, prompt, prefix, mode), replay_html(config, prompt, prefix, mode)
    assert inside(drawing(text)) and f"{rows.decoder_rows} rows in the decoder half" in text
    assert f"{rows.replayed} stored tokens run again" in text
    assert (STATES["exact"] in text.rpartition("last layer")[2]) == is_exact(config, rows)


def test_every_state_has_a_colour():
    assert set(STATE_COLOURS) == set(STATES)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: layer_html(V41, 99), "layer is 99; accepted: 0 to 39"),
        (lambda: layer_html(V41, True), "layer is True"),
        (lambda: block_html(""), "values is 0 numbers; accepted: 1 to 16"),
        (lambda: block_html("1 " * 17), "values is 17 numbers"),
        (lambda: block_html("1", "fp3"), "kind is &#x27;fp3&#x27;"),
        (lambda: selection_html(-1), "position is -1; accepted: a whole number from 0 to 1,023"),
        (lambda: selection_html(10**9), "position is 1000000000"),
        (lambda: selection_html(5, 0), "k is 0; accepted: a whole number from 1"),
        (lambda: selection_html(5, ratio=0), "ratio is 0"),
        (lambda: selection_html(5, block_size=0, keep_blocks=2), "block_size is 0"),
        (lambda: selection_html(scores="1 nan"), "scores is a list with NaN"),
        (lambda: replay_html(V41, 0, 0), "prompt is 0"),
        (lambda: replay_html(V41, 9, 10), "prefix is 10; accepted: at most"),
        (lambda: replay_html(V41, 9, 1, "warm"), "mode is &#x27;warm&#x27;"),
        (lambda: replay_html(load_config("v3"), 9, 1), "accepted: deepseek_v41"),
    ],
)
def test_nonsense_is_one_sentence(made, words):
    text = made()
    assert text.startswith("<p role='alert'") and words in text and "<svg" not in text


@pytest.mark.parametrize("made", [lambda: layer_html(V41, 24), lambda: block_html("1 -2 0.3"), selection_html])
def test_pictures_as_images_are_the_same_pictures(made):
    page = as_images(made())
    sources = re.findall(r"src='data:image/svg\+xml;base64,([^']*)'", page)
    assert "<svg" not in page and page.count("<img ") == len(sources) > 0
    before = re.findall(r"<svg.*?</svg>", made(), re.DOTALL)
    assert [base64.b64decode(source).decode() for source in sources] == before
    for drawn in before:  # an image is read as XML, with its own namespace
        assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(
    "made",
    [
        lambda: layer_html(load_config("v1"), 94),
        lambda: block_html("1 " * 32, "mxfp8"),
        lambda: selection_html(255, 64, keep_blocks=32, window=64),
        lambda: replay_html(V41, 10**6, 999_000, "exact"),
        lambda: replay_html(V41, 10**9, 10**8),
    ],
)
def test_every_picture_takes_less_than_a_tenth_of_a_second(made):
    made()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert "alert" not in made()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1
