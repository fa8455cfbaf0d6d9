"""Pictures of mechanisms: their numbers against another way to get them; words and rows that stand in for a picture."""

import math
import random
import subprocess
import sys

import pytest

from flashsim import kv_cache, load_config
from flashsim.drawing import FigureError
from flashsim.formats import FP4, MXFP4, MXFP8, Record
from flashsim.pictures.formats import (
    E2M1,
    E4M3,
    KINDS,
    UE8M0,
    block_bits,
    encode_block,
    f32,
    power_of_two_above,
    value_grid,
)
from flashsim.pictures.schedule import cache_spans, describe, layer_map, layer_picture, selection_spans
from flashsim.pictures.selection import best, select, selection_picture

PRESETS = ("v1", "v3", "v3.2", "v4-flash", "v4.1-flash", "tiny", "mini")


def test_the_numbers_need_no_drawing_library():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = sys.modules['matplotlib'] = None\n"
        "from flashsim import load_config\n"
        "from flashsim.pictures.formats import encode_block\n"
        "from flashsim.pictures.schedule import layer_map\n"
        "from flashsim.pictures.selection import select\n"
        "encode_block([1.0]).decoded, layer_map(load_config('v4.1')), select([1.0], 1, position=0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- formats ----------------------------------------------------------------------------------------------------------


def test_values_and_ties_of_e2m1():
    assert E2M1.magnitudes == (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert [value for _, value in E2M1.ties()] == [0, 1, 1, 2, 2, 4, 4]
    assert [tie for tie, _ in E2M1.ties()] == [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    assert [E2M1.decode(code) for code in range(8, 16)] == [-v for v in E2M1.magnitudes]


def test_e4m3_and_ue8m0_at_their_ends():
    assert E4M3.largest == 448 and E4M3.magnitudes[1] == 2.0**-9 and math.isnan(E4M3.decode(0xFF))
    assert len(E4M3.magnitudes) == 127 and len(UE8M0.magnitudes) == 255
    assert (UE8M0.decode(0), UE8M0.decode(254)) == (2.0**-127, 2.0**127) and math.isnan(UE8M0.decode(255))
    assert power_of_two_above(math.inf) == power_of_two_above(math.nan) == 255
    for number in (E2M1, E4M3):
        assert all(number.decode(number.encode(v)) == v for v in number.magnitudes)
    with pytest.raises(FigureError, match=r"code is 16; accepted: 0 to 15 in E2M1"):
        E2M1.decode(16)


@pytest.mark.parametrize(
    ("kind", "scale", "decoded"),
    [
        ("mxfp8", 2.0**-7, [0.3125, -1.75, 2.25, 0.01171875]),
        ("fp4", 0.375, [0.375, -1.5, 2.25, 0]),
        ("mxfp4", 0.5, [0.25, -1.5, 2.0, 0]),
    ],
)
def test_the_worked_block(kind, scale, decoded):
    block = encode_block([0.30078125, -1.703125, 2.25, 0.01171875] + [0.0] * 12, kind)
    assert block.scale == scale and list(block.decoded) == decoded + [0.0] * 12


@pytest.mark.parametrize(("kind", "scale"), [("mxfp8", 2.0**-22), ("fp4", 2.0**-9), ("mxfp4", 2.0**-126)])
def test_a_block_of_zeros_has_a_finite_scale_and_decodes_to_zeros(kind, scale):
    block = encode_block([0.0] * 16, kind)
    assert block.scale == scale and set(block.decoded) == {0.0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_what_is_not_finite_never_comes_back_as_a_number(kind, bad):
    assert all(math.isnan(v) for v in encode_block([1.0, bad, 2.0], kind).decoded)


@pytest.mark.parametrize(("kind", "form"), [("fp4", FP4), ("mxfp4", MXFP4), ("mxfp8", MXFP8)])
def test_a_block_is_the_bytes_that_the_model_packs(kind, form):
    torch = pytest.importorskip("torch")
    quant = pytest.importorskip("model.quant")
    generator = torch.Generator().manual_seed(0)
    for size in (0.0, 1e-38, 1e-3, 1.0, 300.0, 1e9):
        x = torch.randn(40, form.block_size, generator=generator) * size
        x[::2] = (x[::2] * 4).round() / 4  # halfway points
        for row, record in zip(x, quant.pack(x, form), strict=True):
            block = encode_block(row, kind)
            assert block.packed() == bytes(record.tolist())
            assert list(block.decoded) == quant.unpack_record(record, form, form.block_size, torch.float32).tolist()


def test_a_record_is_its_blocks():
    for kind, width in (("fp4", 512), ("mxfp4", 128), ("mxfp8", 512)):
        form = KINDS[kind].form
        block = encode_block([1.0] * form.block_size, kind)
        assert len(block.packed()) == block.nbytes
        assert width // form.block_size * block.nbytes == Record(((width, form),)).nbytes


def test_bad_blocks_are_refused_in_a_sentence():
    for values, kind, words in (
        ([], "fp4", "0 numbers; accepted: 1 to 16"),
        ([0.0] * 17, "fp4", "17 numbers; accepted: 1 to 16"),
        (["a"], "fp4", "'a'"),
        ([True], "fp4", "True"),
        ([1.0], "fp5", "kind is 'fp5'; accepted: fp4, mxfp4, mxfp8"),
    ):
        with pytest.raises(FigureError, match=words):
            encode_block(values, kind)


def test_block_pictures_say_what_they_show():
    pytest.importorskip("matplotlib")
    for values in ([1.3, -2.7, 0.0], [math.nan, 1.0], [0.0] * 16):
        block = encode_block(values)
        drawing = block_bits(block)
        assert len(drawing.rows) == len(values) and drawing.svg() == block_bits(block).svg()
        assert all(E2M1.bits(code) in drawing.alt for code in block.codes)
    assert "2.5 is rounded to 2." in value_grid().alt and len(value_grid(E4M3).rows) == 127
    assert f32(1 / 3) == 0.3333333432674408


# --- the layer map ----------------------------------------------------------------------------------------------------


def test_four_caches_and_eight_selections():
    config = load_config("v4.1-flash")
    assert [tuple(span) for span in cache_spans(config)] == [(2, 2, 7), (8, 8, 13), (14, 14, 19), (20, 20, 39)]
    sources = [2, 8, 14, 20, 24, 28, 32, 36]
    assert [span.source for span in selection_spans(config)] == sources
    assert [span.last for span in selection_spans(config)] == [*(s - 1 for s in sources[1:]), 39]


@pytest.mark.parametrize("name", PRESETS)
def test_the_map_adds_up_to_what_is_stored(name):
    config = load_config(name)
    rows = layer_map(config)
    assert sum(row["stored_bytes_per_token"] for row in rows) == kv_cache(config).per_token_bytes()
    assert sum(row["window_bytes"] for row in rows) == kv_cache(config, 10**6).by("tier").get("window", 0)
    assert len(rows) == config.num_hidden_layers
    assert all(describe(config, layer).startswith(f"Layer {layer},") for layer in range(len(rows)))


def test_layer_pictures():
    pytest.importorskip("matplotlib")
    config = load_config("v4.1-flash")
    drawing = layer_picture(config, 21)
    assert "Layers 20 to 39 read the entries of layer 20." in drawing.alt and describe(config, 21) in drawing.alt
    for name in PRESETS:
        layer_picture(load_config(name)).png()
    for layer in (-1, 40, True, "2", None):
        with pytest.raises(FigureError, match="accepted: 0 to 39 of"):
            describe(config, layer)


# --- selection --------------------------------------------------------------------------------------------------------


def test_ties_go_to_the_lower_entry_and_nothing_invisible_is_chosen():
    chosen = select([0.0] * 5 + [2.0, 9.0], 3, position=11, ratio=2)
    assert chosen.entries == [0, 1, 5] and chosen.ties == [2, 3, 4]  # entry 6 needs token 13
    assert best([-math.inf, 1.0], 2) == [1]
    assert select([], 3, position=0, ratio=2).entries == []


def test_the_pool_keeps_the_newest_block_and_limits_another_layer():
    scores = [9.0, 0.0, 8.0, 0.0, 7.0, 0.0, -1.0]
    first = select(scores, 2, position=6, block_size=2, keep_blocks=2)
    assert first.pool == [0, 3] and first.entries == [0, 2]  # its own selection is among all
    later = select([0.0, 1.0, 5.0, 5.0, 5.0, 5.0, 2.0], 2, position=6, block_size=2, pool=first.pool)
    assert later.entries == [1, 6] and not later.in_pool(2)


def test_selection_is_that_of_the_model():
    torch = pytest.importorskip("torch")
    indexer = pytest.importorskip("model.indexer")
    draw = random.Random(3)
    for _ in range(60):
        count, k, size, keep = (draw.randint(1, 40), draw.randint(1, 12), draw.randint(1, 6), draw.randint(1, 5))
        scores = [draw.choice([0.0, 0.0, draw.gauss(0, 1)]) for _ in range(count)]
        other = [draw.choice([0.0, draw.gauss(0, 1)]) for _ in range(count)]
        chosen = select(scores, k, position=count - 1, block_size=size, keep_blocks=keep)
        tensor = torch.tensor(scores)
        assert chosen.entries == [t for t in indexer.top_k(tensor, k).tolist() if t >= 0]
        maxima = indexer.block_maxima(tensor, size)
        blocks = indexer.top_blocks(maxima, keep, torch.tensor((count - 1) // size))
        assert chosen.pool == [b for b in blocks.tolist() if b >= 0]
        limited = select(other, k, position=count - 1, block_size=size, pool=blocks.tolist())
        entry = indexer.entries_of(blocks, size)
        held = (entry >= 0) & (entry < count)
        pooled = torch.full((count,), -torch.inf)
        pooled[entry[held]] = torch.tensor(other)[entry[held]]
        assert limited.entries == [t for t in indexer.top_k(pooled, k).tolist() if t >= 0]


def test_bad_selections_are_refused_in_a_sentence():
    for options, words in (
        ({"k": 0, "position": 3}, "k is 0"),
        ({"k": 2, "position": -1}, "position is -1"),
        ({"k": 2, "position": 3, "ratio": 0}, "ratio is 0"),
        ({"k": 2, "position": 3, "pool": [0]}, "block_size is 0"),
    ):
        with pytest.raises(FigureError, match=words):
            select([1.0, 2.0], **options)
    with pytest.raises(FigureError, match="NaN"):
        select([math.nan], 1, position=0)


def test_selection_pictures():
    pytest.importorskip("matplotlib")
    chosen = select([0.0, 0.0, 3.0, -1.0], 2, position=3, window=2, block_size=2, keep_blocks=1)
    drawing = selection_picture(chosen)
    assert [row["chosen"] for row in drawing.rows] == [True, False, True, False]
    assert "Chosen: 0, 2" in drawing.alt and "tokens 2 to 3" in drawing.alt and "Lost a tie" in drawing.alt
    selection_picture(select([], 1, position=0, ratio=2)).csv()
