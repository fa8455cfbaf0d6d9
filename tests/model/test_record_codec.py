"""Records of V1 to V4: byte layouts, rounding (earlier generations, 9.2), and what a wider model keeps beside them."""

import pytest
import torch

from flashsim.config import load_config
from flashsim.formats import BF16, FP8, FP8_UE8M0_64, MXFP4, Record
from flashsim.kv_cache import index_record, main_record, window_record
from model.hadamard import hadamard
from model.record_codec import RecordCodec

VECTOR = [0.30078125, -1.703125, 2.25, 0.01171875]  # 9.2; padded with zeros
BYTES = [
    ("v1", main_record, 4096),
    ("v3", main_record, 1152),
    ("v3.2", main_record, 656),
    ("v3.2", index_record, 132),
    ("v4", main_record, 584),
    ("v4", window_record, 584),
    ("v4", index_record, 68),
]


def codec(record, rounding=True, dtype=torch.bfloat16):
    return RecordCodec(record, rounding=rounding, dtype=dtype)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("model, record, nbytes", BYTES)
def test_bytes_of_the_release(model, record, nbytes):
    made = codec(record(load_config(model)))
    assert made.nbytes == made.row_bytes == nbytes
    rows = made.pack(noise(2, 3, made.width))
    assert rows.shape == (2, 3, nbytes) and rows.dtype == torch.uint8
    values = made.unpack(rows)
    assert torch.equal(made.unpack(made.pack(values)), values)  # what was rounded once stays


@pytest.mark.parametrize(
    "form, expected",
    [
        (FP8_UE8M0_64, [0.3125, -1.75, 2.25, 0.01171875]),
        (FP8, [0.3125, -1.75, 2.25, 0.01171875]),
        (MXFP4, [0.25, -1.5, 2.0, 0.0]),
    ],
)
def test_rounding(form, expected):
    """Seen red with a scale of amax / 448 that is no power of two: 0.3013393."""
    made = codec(Record(((form.block_size, form),)))
    x = torch.zeros(form.block_size)
    x[:4] = torch.tensor(VECTOR)
    values = made.unpack(made.pack(x))
    assert values[:4].tolist() == expected
    assert not values[4:].any()


def test_v4_record_byte_by_byte():
    """448 codes, 64 BF16, 7 scales, a pad byte: data first, scales last, as in a page."""
    made = codec(window_record(load_config("v4")))
    x = torch.zeros(512)
    x[0], x[64], x[447], x[448] = 1.0, 448.0, -2.0, 1.5
    row = made.pack(x)
    assert row[0] == 0x78 and row[64] == 0x7E and row[447] == 0xF8  # E4M3 of 256, 448, -256
    assert row[448:450].view(torch.bfloat16) == 1.5 and not row[450:576].any()
    zero = 127 - 22  # P2(1e-4 / 448) = 2^-22
    assert row[576:].tolist() == [127 - 8, 127, zero, zero, zero, zero, 127 - 7, 0]


def test_v32_record_byte_by_byte():
    """512 codes, 4 float32 scales, 64 BF16."""
    made = codec(main_record(load_config("v3.2")))
    x = torch.zeros(576)
    x[0], x[128], x[512] = 1.0, 448.0, 1.5
    row = made.pack(x)
    assert row[512:528].view(torch.float32).tolist() == [2.0**-8, 1.0, 2.0**-22, 2.0**-22]
    assert row[528:530].view(torch.bfloat16) == 1.5


def test_rotary_channels_are_not_rounded_to_fp8():
    """Mistake 7: the last channels of V3.2 and V4 records keep BF16."""
    for model in ("v3.2", "v4"):
        made = codec(main_record(load_config(model)))
        x = noise(5, made.width).bfloat16().float()
        error = (made.unpack(made.pack(x)) - x).abs()
        assert error[:, :-64].max() > 0.01 and error[:, -64:].max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wider_model_loses_nothing_to_bf16(dtype):
    """Beside the record, whose bytes stay those of the release, it keeps what BF16 leaves out."""
    for model in ("v1", "v3", "v4"):
        made = codec(main_record(load_config(model)), dtype=dtype)
        x = noise(5, made.width, seed=1).to(dtype)
        rows = made.pack(x)
        plain = made.record.parts[-1][0] if model == "v4" else made.width
        assert made.nbytes == main_record(load_config(model)).nbytes
        assert made.row_bytes == rows.shape[-1] == made.nbytes + plain * dtype.itemsize
        assert torch.equal(made.unpack(rows)[:, -plain:], x[:, -plain:])
        narrow = codec(main_record(load_config(model)))
        assert torch.equal(rows[:, : made.nbytes], narrow.pack(x))  # the record itself is that of a BF16 model


def test_without_rounding_numbers_stay():
    made = codec(main_record(load_config("v4")), rounding=False, dtype=torch.float32)
    x = noise(3, 512)
    assert torch.equal(made.unpack(made.pack(x)), x) and made.nbytes == 2048


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("model, record", [row[:2] for row in BYTES])
def test_what_is_not_finite_stays_so(model, record, bad):
    for dtype in (torch.bfloat16, torch.float32):
        made = codec(record(load_config(model)), dtype=dtype)
        for at in (0, made.width - 1):
            x = torch.ones(made.width)
            x[at] = bad
            assert not made.unpack(made.pack(x))[at].isfinite()


def test_small_widths_are_one_block():
    made = codec(Record(((24, FP8_UE8M0_64), (8, BF16))))
    assert made.nbytes == 24 + 16 + 8
    all_rotary = codec(Record(((0, FP8_UE8M0_64), (8, BF16))))
    x = noise(2, 8).bfloat16().float()
    assert all_rotary.nbytes == 16 and torch.equal(all_rotary.unpack(all_rotary.pack(x)), x)


def test_hadamard():
    assert hadamard(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [5.0, -1.0, -2.0, 0.0]
    q, k = noise(2, 128).double().unbind()
    assert torch.allclose(hadamard(q) @ hadamard(k), q @ k)
    assert torch.allclose(hadamard(hadamard(q)), q)
    with pytest.raises(ValueError, match="24 channels; accepted: a power of two"):
        hadamard(torch.ones(24))
