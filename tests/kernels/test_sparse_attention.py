"""Sparse attention from packed records against its twin."""

import math

import pytest
import torch

pytest.importorskip("triton")

from kernels.reference.sparse_attention import decode_fp4, decode_fp8, sparse_attention_reference
from kernels.sparse_attention import sparse_attention
from kernels.testing import poisoned_empty, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The kernel in fp32 differs from the twin by the order of sums and by exp2 for exp: 4e-7 seen. On a GPU it multiplies
# three bf16 terms in the matrix unit, whose sums truncate: 4e-6 seen.
FP32 = 2e-6 if DEVICE == "cpu" else 1e-5
# bf16 queries: probabilities and the output are rounded to bf16, each about 2^-9 / sqrt(3).
BF16 = 4e-3
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy, under the interpreter


def records(rows, width, seed):
    """Random window and selected records as planes, E4M3 codes without NaN, scales around 2^-6."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=g, dtype=torch.uint8)  # noqa: E731
    w_codes = draw(0, 0x70, rows, width) | draw(0, 2, rows, width) << 7
    return w_codes, draw(115, 121, rows, width // 32), draw(0, 256, rows, width // 2), draw(0, 0x38, rows, width // 16)


def inputs(queries, heads, width, window, selected, rows=40, dtype=torch.float32, seed=0, device=DEVICE):
    g = torch.Generator().manual_seed(seed + 1)
    q = torch.randn(queries, heads, width, generator=g)
    slots = torch.randint(-1, rows, (queries, window), generator=g, dtype=torch.int32)
    indices = torch.randint(-1, rows, (queries, selected), generator=g, dtype=torch.int32)
    sink = torch.randn(heads, generator=g)
    w_codes, w_scales, codes, scales = records(rows, width, seed)
    made = q.to(dtype), w_codes, w_scales, slots, codes, scales, indices, sink
    return [t.to(device) for t in made]


def check(arguments, tolerance=FP32, **options):
    before = [t.clone() for t in arguments]
    with poisoned_empty():
        out = sparse_attention(*arguments, **options)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(arguments, before, strict=True))
    expected = sparse_attention_reference(*[t.float() if t.is_floating_point() else t for t in arguments])
    assert out.dtype == arguments[0].dtype and out.shape == expected.shape
    assert relative_error(out, expected) < tolerance
    return out


# Mutations seen to fail here: odd and even nibble exchanged, a scale for 32 channels, alpha left out of l or of the
# output, sink scaled by D^-0.5, the last tile of a split dropped, j < W taken for j <= W.
@pytest.mark.parametrize("splits", [1, 2, 5, None])
@pytest.mark.parametrize(
    "queries, heads, width, window, selected",
    [
        (1, 1, 64, 1, 1),  # smallest
        (3, 5, 96, 7, 70),  # width no power of two, ragged heads, a tile and a bit
        (2, 17, 128, 65, 130),
        (1, 33, 512, 128, 100),
    ],
)
def test_matches_the_reference(queries, heads, width, window, selected, splits):
    check(inputs(queries, heads, width, window, selected), splits=splits)


def test_wide_programs(monkeypatch):
    # The plan of a large batch: 64 heads and 128 records a program. Mutation: heads from 32 on not stored.
    monkeypatch.setattr("kernels.sparse_attention._plan", lambda *arguments: (128, 64, arguments[-1]))
    check(inputs(2, 40, 64, 100, 300), splits=1)
    check(inputs(2, 70, 64, 10, 150), splits=2)


# Mutations: row >= 0 turned into row > 0, absent scores not masked, the guards of an empty sum left out.
def test_absent_everywhere_and_nowhere():
    arguments = inputs(4, 3, 64, 10, 20)
    slots, indices = arguments[3], arguments[6]
    slots[0] = -1  # only selected
    indices[1] = -1  # only window
    slots[2], indices[2] = -1, -1  # nothing: zeros
    slots[3], indices[3] = slots[3].clamp(min=0), indices[3].clamp(min=0)
    for splits in (1, 3):
        out = check(arguments, splits=splits)
        assert (out[2] == 0).all() and (out[[0, 1, 3]] != 0).all()
        arguments[7][1] = -math.inf  # nothing at all to divide by
        assert (check(arguments, splits=splits)[2] == 0).all()


def test_one_list_may_be_empty():
    check(inputs(2, 3, 64, 0, 20))
    check(inputs(2, 3, 64, 20, 0))
    assert (sparse_attention(*inputs(2, 3, 64, 0, 0)) == 0).all()


def test_no_queries():
    assert sparse_attention(*inputs(0, 3, 64, 4, 4)).shape == (0, 3, 64)


def test_a_single_record_is_returned_as_it_is():
    # With one record and no sink the output is the record: decoding is exact. Mutation: SHIFT undone twice.
    arguments = inputs(1, 2, 64, 1, 1)
    arguments[7].fill_(-math.inf)
    w_codes, w_scales, slots, codes, scales, indices = arguments[1:7]
    slots[0, 0], indices[0, 0] = 5, -1
    assert torch.equal(check(arguments)[0, 1], decode_fp8(w_codes[5:6], w_scales[5:6])[0])
    slots[0, 0], indices[0, 0] = -1, 0
    assert torch.equal(check(arguments)[0, 1], decode_fp4(codes[:1], scales[:1])[0])


def test_every_code_decodes():
    # All 256 bytes under all E4M3 scales up to 448, and all E4M3 codes; subnormal codes and scales among them.
    arguments = inputs(1, 1, 512, 1, 1, rows=127)
    arguments[0].fill_(0.0)
    arguments[7].fill_(-math.inf)
    w_codes, w_scales, slots, codes, scales, indices = arguments[1:7]
    codes.copy_(torch.arange(256, dtype=torch.uint8).expand(127, 256))
    scales.copy_(torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32))
    w_codes.copy_(torch.arange(512).remainder(127).to(torch.uint8).expand(127, 512))
    w_scales.copy_(torch.arange(64, 191, dtype=torch.uint8)[:, None].expand(127, 16))
    for row in (0, 1, 7, 8, 63, 126):
        slots[0, 0], indices[0, 0] = -1, row
        assert torch.equal(
            sparse_attention(*arguments)[0, 0], decode_fp4(codes[row : row + 1], scales[row : row + 1])[0]
        )
        slots[0, 0], indices[0, 0] = row, -1
        out = sparse_attention(*arguments)[0, 0]
        assert torch.equal(out, decode_fp8(w_codes[row : row + 1], w_scales[row : row + 1])[0])


def test_ties_and_repeats():
    # No de-duplication: a record named twice counts twice. Mutation: parts joined with equal weights.
    arguments = inputs(2, 4, 64, 6, 70)
    arguments[3].fill_(3)
    arguments[6].fill_(2)
    check(arguments)


def test_large_scores_and_sinks():
    # Scores in the thousands and sinks on both sides: nothing overflows. Mutation: p without subtracting the maximum.
    arguments = inputs(2, 4, 64, 20, 40)
    arguments[0] *= 300
    arguments[7].copy_(torch.tensor([-1e4, 50.0, 1e4, 0.0]))
    for splits in (1, 3):
        check(
            arguments, tolerance=1e-5, splits=splits
        )  # exp of differences of numbers near 1e3: their rounding is seen
    arguments[7].copy_(torch.tensor([math.inf, -math.inf, 0.0, 0.0]))
    check(arguments, tolerance=1e-5)


@pytest.mark.parametrize("where", ["query", "sink", "code", "window scale", "selected scale"])
def test_nan_is_not_lost(where):
    # Mutations: the largest scale in place of NaN, for both formats; an infinite score dropped like an absent record.
    for splits in (1, 2):
        arguments = inputs(2, 2, 64, 8, 100, rows=4)
        q, w_codes, w_scales, slots, codes, scales, indices, sink = arguments
        slots.clamp_(min=0), indices.clamp_(min=0)
        if where == "query":
            # Against a channel that is 1 everywhere: each score is -inf, and may not pass for an absent record.
            q[0, 1, 3], w_codes[:, 3], w_scales[:], codes[:, 1], scales[:] = -math.inf, 0x38, 127, 0x22, 0x38
        elif where == "sink":
            sink[1] = math.nan
        elif where == "code":
            w_codes[slots[0, 0].long(), 3] = 0x7F
        elif where == "window scale":
            w_scales[slots[0, 0].long()], w_codes[slots[0, 0].long()] = 255, 0  # as packed from NaN
        else:
            scales[indices[0, 0].long()], codes[indices[0, 0].long()] = 0x7F, 0
        out = check(arguments, splits=splits)
        assert not out[0, 1].isfinite().any() if where != "code" else out[0].isnan().any()


def test_one_record_tensor_and_strided_inputs():
    # Codes and scales as slices of one 528- or 288-byte record, the query and the lists with longer rows. Mutations:
    # the stride of each replaced by its width.
    arguments = inputs(3, 5, 512, 9, 33)
    q, w_codes, w_scales, slots, codes, scales, indices, sink = arguments
    window, selected = torch.cat([w_codes, w_scales], 1), torch.cat([codes, scales], 1)
    assert window.shape[1] == 528 and selected.shape[1] == 288
    wide = torch.full((3, 7, 600), math.nan, device=DEVICE)
    wide[:, 1:6, :512] = q
    longer = torch.full((3, 50), 10**6, dtype=torch.int32, device=DEVICE)
    longer[:, :33], longer[:, 40:49] = indices, slots
    plain = sparse_attention(*arguments)
    views = wide[:, 1:6, :512], window[:, :512], window[:, 512:], longer[:, 40:49], selected[:, :256], selected[:, 256:]
    assert torch.equal(sparse_attention(*views, longer[:, :33], sink), plain)


def test_refuses_what_it_cannot_read():
    arguments = inputs(2, 3, 64, 4, 4)
    for position, value, error, text in [
        (0, arguments[0].double(), TypeError, "float32 or bfloat16"),
        (0, arguments[0][:, :, :48], ValueError, "multiple of 32 from 64"),
        (1, arguments[1][:, :32], ValueError, "window_codes must be uint8"),
        (2, arguments[2].int(), ValueError, "window_scales must be uint8"),
        (3, arguments[3].long(), ValueError, "slots must be int32"),
        (4, arguments[4][:-1], ValueError, "39 selected codes stand beside 40 scales"),
        (6, arguments[6][:1], ValueError, "indices must be int32"),
        (7, arguments[7][:2], ValueError, "sink must be contiguous float32"),
    ]:
        broken = list(arguments)
        broken[position] = value
        with pytest.raises(error, match=text):
            sparse_attention(*broken)


def in_records(arguments, padding):
    """The arguments with codes and scales side by side in records, as a cache has them, some NaN bytes after each."""
    made = list(arguments)
    for first in (1, 4):
        codes, scales = arguments[first : first + 2]
        rows, width = codes.shape
        after = torch.full((rows, padding), 255, dtype=torch.uint8, device=codes.device)
        records = torch.cat((codes, scales, after), dim=1)
        made[first : first + 2] = records[:, :width], records[:, width : width + scales.shape[1]]
    return made


@pytest.mark.parametrize("padding", [0, 1, 2, 3, 16])
@pytest.mark.parametrize("width", [64, 96])
def test_records_at_any_address(width, padding):
    # Mutations: bytes of a word 4 bits apart; scales past the width read. Both fail here alone.
    check(in_records(inputs(3, 5, width, 9, 20), padding))


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [0, 4, 2, 1])
def test_released_records_at_any_address(padding):
    arguments = inputs(140, 64, 512, 128, 512, rows=300, dtype=torch.bfloat16)
    out = check(in_records(arguments, padding), BF16)
    if padding % 4 == 0:  # tiles of other records are rounded in another order
        assert torch.equal(out, sparse_attention(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, BF16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "queries, heads, width",
    [
        (1, 64, 512),
        (5, 128, 512),
        (40, 16, 512),
        (150, 64, 512),
        (33, 64, 192),
        (7, 3, 64),
        (140, 64, 96),
        (140, 33, 320),
    ],
)
def test_released_sizes(queries, heads, width, dtype, tolerance):
    arguments = inputs(queries, heads, width, 128, 512, rows=3000, dtype=dtype)
    for splits in (None, 1, 4):
        check(arguments, tolerance, splits=splits)


@pytest.mark.gpu
def test_every_code_decodes_in_bf16():
    arguments = inputs(1, 64, 512, 1, 1, rows=127, dtype=torch.bfloat16)
    arguments[7].fill_(-math.inf)
    slots, codes, scales, indices = arguments[3:7]
    codes.copy_(torch.arange(256, dtype=torch.uint8).expand(127, 256))
    scales.copy_(torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32))
    slots[0, 0] = -1
    for splits in (1, 2):
        for row in range(127):
            indices[0, 0] = row
            expected = decode_fp4(codes[row : row + 1], scales[row : row + 1])[0]
            assert torch.equal(sparse_attention(*arguments, splits=splits)[0, 63].float(), expected)
