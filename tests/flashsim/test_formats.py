"""Record sizes: computed from their parts, for every width that fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim.formats import (
    BF16,
    ENCODINGS,
    FP4,
    FP8,
    FP8_UE8M0_64,
    MXFP4,
    MXFP8,
    BlockFormat,
    Layout,
    LayoutError,
    Record,
    encode,
)


@pytest.mark.parametrize(
    ("encoding", "width", "rope", "nbytes", "parts"),
    [
        ("bf16", 576, 64, 1152, (512 + 64) * 2),
        ("fp8+bf16rope", 576, 64, 656, 512 + 4 * 4 + 64 * 2),
        ("v4", 512, 64, 584, 448 + 7 + 1 + 64 * 2),
        ("mxfp8", 512, 64, 528, 512 + 512 // 32),
        ("fp4", 512, 64, 288, 512 // 2 + 512 // 16),
        ("fp8", 128, 0, 132, 128 + 4),
        ("mxfp4", 128, 0, 68, 128 // 2 + 128 // 32),
        ("6bit", 576, 0, 432, 576 * 6 // 8),
        ("fp8-plain", 1024, 0, 1024, 1024),
    ],
)
def test_released_records(encoding, width, rope, nbytes, parts):
    assert encode(encoding, width, rope).nbytes == nbytes == parts


@pytest.mark.parametrize(
    ("encoding", "width", "rope", "text"),
    [
        ("v4", 512, 64, "448 FP8 (448) + 7 UE8M0 scales and 1 pad byte (8) + 64 BF16 (128)"),
        ("fp8+bf16rope", 576, 64, "512 FP8 (512) + 4 FP32 scales (16) + 64 BF16 (128)"),
        ("fp4", 512, 64, "512 FP4 (256) + 32 E4M3 scales (32)"),
        ("mxfp8", 512, 64, "512 FP8 (512) + 16 UE8M0 scales (16)"),
        ("fp8", 128, 0, "128 FP8 (128) + 1 FP32 scale (4)"),
        ("mxfp4", 128, 0, "128 FP4 (64) + 4 UE8M0 scales (4)"),
    ],
)
def test_a_record_describes_its_parts(encoding, width, rope, text):
    record = encode(encoding, width, rope)
    assert record.describe() == text
    in_brackets = [int(part.split(")")[0]) for part in text.split("(")[1:]]
    assert sum(in_brackets) == record.nbytes


@given(blocks=st.integers(1, 64))
def test_bytes_are_elements_plus_scales(blocks):
    assert FP8.nbytes(128 * blocks) == 128 * blocks + 4 * blocks
    assert MXFP8.nbytes(32 * blocks) == 33 * blocks
    assert MXFP4.nbytes(32 * blocks) == 17 * blocks
    assert FP4.nbytes(16 * blocks) == 9 * blocks
    assert BF16.nbytes(blocks) == 2 * blocks
    padded = next(size for size in range(blocks, blocks + 8) if size % 8 == 0)
    assert FP8_UE8M0_64.nbytes(64 * blocks) == 64 * blocks + padded


@pytest.mark.parametrize(
    ("form", "width", "nbytes"), [(FP8, 32, 36), (MXFP4, 2, 2), (FP4, 8, 5), (MXFP8, 16, 17), (MXFP8, 0, 0)]
)
def test_a_vector_shorter_than_a_block_is_one_block(form, width, nbytes):
    assert form.nbytes(width) == nbytes


@pytest.mark.parametrize(("form", "width"), [(FP8, 200), (FP8, 129), (MXFP8, 33), (FP4, 24), (FP8_UE8M0_64, 100)])
def test_a_width_that_is_no_multiple_of_the_block(form, width):
    with pytest.raises(LayoutError, match=rf"{width}.* accept.*multiples of its block of {form.block_size}"):
        form.nbytes(width)


@pytest.mark.parametrize(("form", "width"), [(MXFP4, 31), (FP4, 1), (BlockFormat("6-bit", 6), 2)])
def test_elements_that_do_not_fill_bytes(form, width):
    with pytest.raises(LayoutError, match="whole bytes"):
        form.nbytes(width)


def test_scales_cost_something_in_every_scaled_format():
    """Scale bytes ignored is how 890 becomes 800 (pitfalls.md)."""
    for form in (FP8, MXFP8, MXFP4, FP4, FP8_UE8M0_64):
        assert form.nbytes(512) > 512 * form.element_bits // 8


def test_precision_names_the_elements():
    assert encode("v4", 512, 64).precision == encode("fp8+bf16rope", 576, 64).precision == "fp8+bf16"
    assert encode("fp4", 512, 64).precision == "fp4"
    assert encode("v4", 448, 0).precision == "fp8"
    assert Record(((64, BF16), (64, BF16))).precision == "bf16"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_holds_a_576_wide_vector(encoding):
    if ENCODINGS[encoding] == (FP8, None):  # 576 is no multiple of 128 where RoPE is not apart
        with pytest.raises(LayoutError):
            encode(encoding, 576, 64).nbytes  # noqa: B018
    else:
        assert 576 // 2 < encode(encoding, 576, 64).nbytes <= 1152


def test_rope_is_left_alone_only_where_the_encoding_says_so():
    """A 512-wide FP4 record used on a 448 + 64 layout corrupts entries (pitfalls.md): they are two encodings."""
    assert encode("v4", 512, 64).parts[1] == (64, BF16)
    assert len(encode("fp4", 512, 64).parts) == len(encode("mxfp8", 512, 64).parts) == 1


# --- layouts by name --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        (None, Layout()),
        ("released", Layout()),
        ("bf16", Layout("bf16", "bf16", "bf16")),
        ("mxfp8", Layout("mxfp8", None, "mxfp8")),
        ("V4", Layout("v4", None, "v4")),
        ("fp8-indexer", Layout(index="fp8")),
        ("fp4-indexer", Layout(index="mxfp4")),
        ("mxfp8,index=fp8", Layout("mxfp8", "fp8", "mxfp8")),
        ("mxfp8; index=fp8", Layout("mxfp8", "fp8", "mxfp8")),
        ("main = fp4 , window = v4", Layout("fp4", None, "v4")),
        ("bf16,index=released", Layout("bf16", None, "bf16")),
        ({"main": "fp4", "index": "released"}, Layout(main="fp4")),
        (Layout(window="v4"), Layout(window="v4")),
    ],
)
def test_layouts_from_text(text, layout):
    assert Layout.of(text) == layout


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_is_a_layout(name):
    assert Layout.of(name).main == name
    assert Layout.of(f"main={name}") == Layout(main=name)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("nvfp4", "'nvfp4'"),
        ("main=nvfp4", "'nvfp4'"),
        ("key=fp8", "'key'"),
        ("", "''"),
        ("fp4,", "''"),
        ("index", "'index'"),
        (3.5, "'3.5'"),
        ({"main": None}, "'none'"),
        ({"main": 4}, "'4'"),
    ],
)
def test_layouts_that_do_not_exist(text, names):
    with pytest.raises(LayoutError) as error:
        Layout.of(text)
    message = str(error.value)
    assert "accepted" in message and "\n" not in message
    assert names in message.lower() or text == {"main": None}


@pytest.mark.parametrize("field", ["main", "index", "window"])
def test_a_layout_checks_its_names(field):
    with pytest.raises(LayoutError, match=f"layout {field} is 'int8'; accepted: bf16"):
        Layout(**{field: "int8"})
