"""Compressor against the same steps in plain PyTorch.

The latent is compared by relative error: it is rounded to bfloat16 twice, and the two softmaxes differ by an ulp of
float32 now and then. Packed bytes are compared exactly, with the reference's packing of the kernel's own latent; among
the rotated channels a sine that differs by an ulp may move a value across a tie, so one byte in 200 may differ there.

Mutations tried, each turned at least one test red: softmax weights exchanged, the running weight not rescaled, the
running maximum not kept, `g == top` guard removed, `(top - top)` removed, pending rows offset wrongly or not at all,
left-over rows counted without the pending ones, eps 1e-6, mean over WIDTH in place of W, norm weight left out, sine
negated, halves rotated in place of adjacent pairs, position of the group's last token, the channels before the rotation
rotated too, entry_offset ignored, nibbles exchanged, floors of both scales, NaN scale of FP4, codes kept under a NaN
scale, last block not stored, tail stored one block early, `_round` removed before the norm or after the rotation. The
NaN scale of FP8 follows from the arithmetic in the interpreter, whose maximum keeps a NaN; a GPU's does not.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.compressor import compressor
from kernels.reference.compressor import compressor_reference, pack_fp4, pack_fp8, rotate
from kernels.testing import poisoned_empty, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARTS = {"fp4": (2, 16), "fp8": (1, 32)}  # channels in a byte, channels a scale
# A bfloat16 rounding decided the other way is 2^-8 of one value; here at most one value in 500 of a latent may differ.
LATENT = {torch.bfloat16: 2e-4, torch.float32: 1e-6}


def _inputs(T, W, R, ratio, start, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    rows = lambda n: torch.randn(n, W, generator=g)  # noqa: E731
    pending = start % ratio
    u, gate = rows(T).to(dtype), (3 * rows(T)).to(dtype) if ratio > 1 else None
    weight = torch.rand(W, generator=g) + 0.5
    inv_freq = 160000.0 ** (-torch.arange(0, R, 2) / max(R, 1))
    kept = (rows(pending), 3 * rows(pending)) if pending else (None, None)
    return [t if t is None else t.to(DEVICE) for t in (u, gate, weight, inv_freq, *kept)]


def _cache(entries, W, format):
    """Two slices of a record tensor with a few bytes of something else behind them."""
    per_byte, block = PARTS[format]
    codes, scales = W // per_byte, W // block
    record = torch.full((entries, codes + scales + 5), 0xA5, dtype=torch.uint8, device=DEVICE)
    return record, record[:, :codes], record[:, codes : codes + scales]


def _check(inputs, ratio, start, *, offset=None, format="fp4", latent_dtype=torch.bfloat16, exact=False):
    u, gate, weight, inv_freq, pending_u, pending_gate = inputs
    options = dict(pending_u=pending_u, pending_gate=pending_gate, format=format, latent_dtype=latent_dtype)
    W, R = u.shape[1], 2 * len(inv_freq)
    first, groups = start // ratio, (start % ratio + len(u)) // ratio
    entry = first if offset is None else offset
    record, codes, scales = _cache(entry + groups + 2, W, format)
    before = [t if t is None else t.clone() for t in inputs]
    with poisoned_empty():
        latent, *left = compressor(u, gate, weight, inv_freq, codes, scales, ratio, start, offset, **options)
    assert all(a is b is None or torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, inputs))  # noqa: B905

    expected, ref_codes, ref_scales = _cache(entry + groups + 2, W, format)
    ref_latent, *ref_left = compressor_reference(
        u, gate, weight, inv_freq, ref_codes, ref_scales, ratio, start, offset, **options
    )
    assert latent.dtype == latent_dtype and relative_error(latent, ref_latent) < LATENT[latent_dtype]
    for a, b in zip(left, ref_left, strict=True):
        assert a is b is None or (a.dtype == torch.float32 and torch.equal(a, b))

    if not exact:  # the reference's packing of this latent
        x = rotate(latent, inv_freq, (first + torch.arange(groups, device=DEVICE)) * ratio)
        rows = slice(entry, entry + groups)
        ref_codes[rows], ref_scales[rows] = (pack_fp4 if format == "fp4" else pack_fp8)(x)
    per_byte, block = PARTS[format]
    plain = (W - R) // block * block  # channels of the blocks that hold no rotated one
    same = record == expected
    same[:, plain // per_byte : W // per_byte] |= same[:, plain // per_byte : W // per_byte].float().mean() > 0.995
    assert same.all()
    return latent, codes[entry : entry + groups], scales[entry : entry + groups], left


@pytest.mark.parametrize("format", ["fp4", "fp8"])
@pytest.mark.parametrize(
    ("T", "W", "R", "ratio", "start"),
    [(1, 32, 0, 1, 0), (5, 512, 64, 1, 1000000), (2, 512, 64, 2, 0), (9, 512, 64, 2, 3), (7, 64, 16, 2, 12345),
     (11, 64, 16, 4, 6), (3, 96, 32, 4, 1), (20, 160, 32, 3, 7), (140, 64, 64, 128, 250), (1, 64, 16, 2, 1)],
)  # fmt: skip
def test_groups(T, W, R, ratio, start, format):
    _check(_inputs(T, W, R, ratio, start), ratio, start, format=format)


@pytest.mark.parametrize(("ratio", "start"), [(1, 5), (2, 5), (4, 6), (20, 33)])
def test_without_rounding(ratio, start):
    _check(_inputs(23, 64, 16, ratio, start), ratio, start, offset=1, latent_dtype=torch.float32)


def test_strided_rows_and_offset():
    u, gate, *rest = _inputs(9, 128, 64, 2, 1)
    both = torch.cat([u, gate], dim=1)  # the two projections as one product would leave them
    _check([both[:, :128], both[:, 128:], *rest], 2, 1, offset=4)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([2, 4, 7]), st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_property_chunks_make_no_difference(ratio, chunks):
    T = sum(chunks)
    u, gate, weight, inv_freq, *_ = _inputs(T, 64, 16, ratio, 0)
    whole, codes, scales = _cache(T // ratio, 64, "fp4")
    one, *left = compressor(u, gate, weight, inv_freq, codes, scales, ratio, 0)
    pieces, codes, scales = _cache(T // ratio, 64, "fp4")
    at, pending, latents = 0, (None, None), []
    for n in chunks:
        part = slice(at, at + n)
        latent, *pending = compressor(
            u[part], gate[part], weight, inv_freq, codes, scales, ratio, at, None,
            *(p if at % ratio else None for p in pending),
        )  # fmt: skip
        latents.append(latent)
        at += n
    assert torch.equal(whole, pieces) and torch.equal(one, torch.cat(latents))
    assert all(torch.equal(a, b) for a, b in zip(left, pending, strict=True))


def _pack_weights(values, format):
    """Rows of ones have RMS 1: the record of one token holds the norm weights themselves, unrotated."""
    weight = torch.tensor(values, dtype=torch.float32, device=DEVICE)
    u = torch.ones(1, len(weight), device=DEVICE)
    inputs = [u, None, weight, torch.empty(0, device=DEVICE), None, None]
    _, codes, scales, _ = _check(inputs, 1, 0, format=format, exact=True)
    return codes[0].tolist(), scales[0].tolist()


def test_worked_block():
    group = [0.30078125, -1.703125, 2.25, 0.01171875] + [0.0] * 28
    codes, scales = _pack_weights(group, "fp4")  # [0.375, -1.5, 2.25, 0] with scale 0.375
    assert codes[:3] == [0xE2, 0x07, 0x00] and scales[0] == 0x2C
    codes, scales = _pack_weights(group, "fp8")  # [0.3125, -1.75, 2.25, 0.01171875] with scale 2^-7
    assert scales == [120]
    values = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / 128
    assert values[:4].tolist() == [0.3125, -1.75, 2.25, 0.01171875]


@pytest.mark.parametrize("scale", [2.0**-9, 0.375, 1.0, 104.0, 448.0])
def test_fp4_ties_go_to_the_even_code(scale):
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    codes, scales = _pack_weights([s * t * scale for s in (1, -1) for t in ties], "fp4")
    even = [0, 2, 2, 4, 4, 6, 6, 7]
    expected = even + [c | 8 for c in even]
    assert codes == [expected[i] | expected[i + 1] << 4 for i in range(0, 16, 2)]
    assert torch.tensor(scales, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist() == [scale]


@pytest.mark.parametrize("format", ["fp4", "fp8"])
def test_zeros_and_saturation(format):
    inputs = _inputs(4, 64, 16, 2, 0)
    inputs[0][:] = 0
    _, codes, scales, _ = _check(inputs, 2, 0, format=format)
    assert (codes & 0x77 == 0).all() and (scales == (1 if format == "fp4" else 105)).all()  # 2^-9, 2^-22
    _, scales = _pack_weights([1e5, -2e4, 1.0, 3e38] + [-1e30] * 28, format)
    assert 0x7F not in scales and 255 not in scales


@pytest.mark.parametrize("format", ["fp4", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_block_nan(bad, format):
    inputs = _inputs(6, 64, 16, 2, 0)
    inputs[0][2, 5] = bad
    latent, _, scales, _ = _check(inputs, 2, 0, format=format)
    nan = 0x7F if format == "fp4" else 255
    assert scales[1, 0] == nan and not (scales[::2] == nan).any()
    assert latent[1, 5].isnan() and latent[::2].isfinite().all()


@pytest.mark.parametrize("format", ["fp4", "fp8"])
def test_an_infinite_latent_is_not_saturated(format):
    codes, scales = _pack_weights([1.0, float("inf")] + [2.0] * 62, format)
    assert scales[0] == (0x7F if format == "fp4" else 255) and codes[:8] == [0] * 8
    assert scales[-1] not in (0x7F, 255)


def test_gates_closed_and_extreme():
    inputs = _inputs(12, 64, 16, 3, 0)
    gate = inputs[1]
    gate[0:2] = -torch.inf  # the third row alone
    gate[4:6] = -torch.inf  # the first row alone
    gate[6], gate[7], gate[8] = 3e38, -3e38, 3e38
    gate[9:12] = -torch.inf  # nothing: NaN
    latent, *_ = _check(inputs, 3, 0)
    assert latent[:3].isfinite().all() and latent[3].isnan().all()
    gate[9:12] = 0
    gate[10, 7] = torch.inf
    latent, *_ = _check(inputs, 3, 0)
    assert latent[3, 7].isnan()


def test_nothing_completed_and_empty():
    inputs = _inputs(2, 64, 16, 4, 1)
    latent, _, _, left = _check(inputs, 4, 1)
    assert latent.shape == (0, 64) and left[0].shape == (3, 64)
    assert torch.equal(left[0], torch.cat([inputs[4], inputs[0]]))
    left[0].fill_(0)
    assert inputs[0].abs().sum() > 0  # a copy
    latent, _, _, left = _check(_inputs(0, 64, 16, 2, 4), 2, 4)
    assert latent.shape == (0, 64) and left[0].shape == (0, 64)


def test_refuses():
    inputs = _inputs(4, 64, 16, 2, 1)
    u, gate, weight, inv_freq, pending_u, pending_gate = inputs
    _, codes, scales = _cache(4, 64, "fp4")

    def call(u=u, gate=gate, weight=weight, inv_freq=inv_freq, codes=codes, scales=scales, ratio=2, start=1, **options):
        options = dict(pending_u=pending_u, pending_gate=pending_gate) | options
        return compressor(u, gate, weight, inv_freq, codes, scales, ratio, start, **options)

    call()
    with pytest.raises(TypeError, match="u must be a float32 or bfloat16 matrix"):
        call(u=u.double())
    with pytest.raises(ValueError, match=r"gate must be \(4, 64\)"):
        call(gate=gate[:3])
    with pytest.raises(ValueError, match="gate must be None at ratio 1"):
        call(gate=None)
    with pytest.raises(ValueError, match="norm_weight must be contiguous"):
        call(weight=weight[:32])
    with pytest.raises(ValueError, match="inv_freq must be float32"):
        call(inv_freq=inv_freq[:3])
    with pytest.raises(ValueError, match=r"codes must be uint8 \[entries, 32\]"):
        call(codes=codes[:, :16])
    with pytest.raises(ValueError, match="do not fit"):
        call(entry_offset=3)
    with pytest.raises(ValueError, match="pending_u must be contiguous float32"):
        call(pending_u=None)
    with pytest.raises(ValueError, match="pending_gate must be contiguous float32"):
        call(pending_gate=pending_gate.double())
    with pytest.raises(ValueError, match="ratio must be at least 1"):
        call(ratio=0)
    with pytest.raises(ValueError, match="format must be one of"):
        call(format="int8")
    with pytest.raises(ValueError, match="not a multiple of the 32 channels"):
        call(u=u[:, :48], gate=gate[:, :48], format="fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", ["fp4", "fp8"])
@pytest.mark.parametrize(("ratio", "start"), [(1, 500000), (2, 1000001), (4, 3), (128, 130)])
def test_released_width(dtype, format, ratio, start):
    T = 130 * ratio + 1 if ratio < 128 else 1500
    _check(_inputs(T, 512, 64, ratio, start, dtype=dtype), ratio, start, offset=1, format=format)
