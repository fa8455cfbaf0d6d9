"""Hyper-connections against their twins, one part at a time and in a single pass."""

import math

import pytest
import torch

pytest.importorskip("triton")

from kernels.hyper_connection import _run, hyper_coefficients, hyper_collapse, hyper_connection, hyper_expand
from kernels.reference.hyper_connection import (
    hyper_coefficients_reference,
    hyper_collapse_reference,
    hyper_connection_reference,
    hyper_expand_reference,
)
from kernels.testing import poisoned_empty, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 2e-6  # the order of sums over N * D values: 3e-7 seen
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy, under the interpreter
COMB = 1e-5  # Sinkhorn of logits of a few units: the same, multiplied by the exponential


def inputs(tokens, n, width, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=g).to(DEVICE)  # noqa: E731
    c = (2 + n) * n
    h, y = normal(tokens, n, width).to(dtype), normal(tokens, width).to(dtype)
    fn, base, scale = normal(c, n * width) / math.sqrt(n * width), normal(c), 1 + 0.1 * normal(3)
    return h, y, normal(tokens, n), normal(tokens, n, n), normal(tokens, n), fn, base, scale


def check(kernel, reference, *arguments, tolerances, **options):
    before = [t.clone() for t in arguments]
    with poisoned_empty():
        out = kernel(*arguments, **options)
    expected = reference(*arguments, **options)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(arguments, before, strict=True))
    out, expected = (out, expected) if isinstance(out, tuple) else ((out,), (expected,))
    for got, want, tolerance in zip(out, expected, tolerances, strict=True):
        assert got.dtype == want.dtype and relative_error(got, want) < tolerance
    return out


SIZES = [(1, 1, 32), (3, 2, 64), (17, 4, 96), (33, 4, 320), (5, 3, 33), (2, 5, 100), (2, 8, 72)]


# Mutations seen to fail here: comb[k, j] for comb[j, k], pre of the wrong stream, y left out, the last step of channels
# dropped, fn's rows 2N on taken column-major.
@pytest.mark.parametrize("tokens, n, width", SIZES)
def test_single_pass(tokens, n, width):
    tolerances = FP32, FP32, FP32, FP32, COMB
    check(hyper_connection, hyper_connection_reference, *inputs(tokens, n, width), tolerances=tolerances)


# Mutations: splits summed without the last one, mean taken over D in place of N * D, post without its factor 2.
@pytest.mark.parametrize("tokens, n, width", SIZES)
def test_parts(tokens, n, width):
    h, y, post, comb, pre, fn, base, scale = inputs(tokens, n, width, seed=1)
    check(hyper_expand, hyper_expand_reference, h, y, post, comb, tolerances=[FP32])
    check(hyper_collapse, hyper_collapse_reference, h, pre, tolerances=[FP32])
    tolerances = FP32, FP32, COMB
    check(hyper_coefficients, hyper_coefficients_reference, h, fn, base, scale, tolerances=tolerances)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_iterations(iterations):
    # Mutation: range(iterations). 20 iterations end with columns that sum to 1.
    h, _, _, _, _, fn, base, scale = inputs(4, 4, 64)
    arguments = h, 5 * fn, base, scale
    comb = check(
        hyper_coefficients, hyper_coefficients_reference, *arguments,
        tolerances=(FP32, FP32, COMB), iterations=iterations,
    )[2]  # fmt: skip
    assert (comb.sum(dim=1) - 1).abs().max() < 3e-5  # short by eps over the sum


def test_one_split_equals_many(monkeypatch):
    # A GPU with one processor takes all channels in one program.
    arguments = inputs(6, 4, 320)
    many = hyper_connection(*arguments)
    monkeypatch.setattr("kernels.hyper_connection._processors", lambda device: 1)
    check(hyper_connection, hyper_connection_reference, *arguments, tolerances=(FP32, FP32, FP32, FP32, COMB))
    assert torch.equal(hyper_connection(*arguments)[0], many[0])


def test_zero_projection():
    # fn = 0, base = 0: pre 0.500001, post 1, comb 0.25 up to 1e-6; the expansion is y plus the mean of the streams.
    h, y, _, _, pre, fn, base, scale = inputs(3, 4, 64)
    pre, post, comb = hyper_coefficients(h, torch.zeros_like(fn), torch.zeros_like(base), scale)
    assert (pre - 0.500001).abs().max() < 1e-7 and torch.equal(post, torch.ones_like(post))
    assert (comb - 0.25).abs().max() < 1e-6
    assert (
        relative_error(hyper_expand(h, y, post, comb), (y[:, None] + h.mean(dim=1, keepdim=True)).expand_as(h)) < 2e-6
    )


def test_one_hot_collapse_is_a_stream():
    h, _, _, _, pre, _, _, _ = inputs(5, 4, 96)
    pre.zero_()[:, 0] = 1
    assert torch.equal(hyper_collapse(h, pre), h[:, 0])


def test_zero_streams_and_large_values():
    # An all-zero token: 0 * rsqrt(1e-20), not NaN. Streams of 1e12 and logits of 1e3: still the reference's numbers.
    h, y, post, comb, pre, fn, base, scale = inputs(4, 4, 64)
    h[1], y[1] = 0, 0
    h[2] *= 1e12
    base[9] = 1e3
    tolerances = FP32, FP32, FP32, FP32, COMB
    out = check(
        hyper_connection, hyper_connection_reference, h, y, post, comb, pre, fn, base, scale, tolerances=tolerances
    )
    assert all(t.isfinite().all() for t in out)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_stay_in_their_token(value):
    # Mutation: values beyond 1e30 and NaN read as 0.
    arguments = inputs(3, 4, 64)
    arguments[0][1, 2, 5] = value
    new, collapsed, pre, post, comb = hyper_connection(*arguments)
    assert not new[1, :, 5].isfinite().any() and not collapsed[1, 5].isfinite()
    assert all(t[1].isnan().all() for t in (pre, post, comb))
    assert all(t[[0, 2]].isfinite().all() for t in (new, collapsed, pre, post, comb))


def test_strided_inputs():
    h, y, *rest = inputs(5, 4, 64)
    wide = torch.full((5, 6, 100), math.nan, device=DEVICE)
    wide[:, 1:5, 3:67] = h
    twice = torch.stack([y, y * math.nan], 1).flatten(1)
    for got, want in zip(
        hyper_connection(wide[:, 1:5, 3:67], twice[:, :64], *rest), hyper_connection(h, y, *rest), strict=True
    ):
        assert torch.equal(got, want)


def test_no_tokens():
    shapes = [tuple(t.shape) for t in hyper_connection(*inputs(0, 4, 64))]
    assert shapes == [(0, 4, 64), (0, 64), (0, 4), (0, 4), (0, 4, 4)]


def test_refuses_what_it_cannot_read():
    h, y, post, comb, pre, fn, base, scale = inputs(3, 4, 64)
    with pytest.raises(TypeError, match="h must be float32 or bfloat16"):
        hyper_collapse(h.double(), pre)
    with pytest.raises(ValueError, match="1 to 8 streams, got 9"):
        hyper_collapse(h.repeat(1, 3, 1)[:, :9], pre)
    with pytest.raises(ValueError, match="between 32 and 8192"):
        hyper_collapse(h[:, :, :16], pre)
    with pytest.raises(ValueError, match="pre must be"):
        hyper_collapse(h, pre[:2])
    with pytest.raises(ValueError, match="comb must be"):
        hyper_expand(h, y, post, comb[:, :3])
    with pytest.raises(ValueError, match="fn must be"):
        hyper_coefficients(h, fn.bfloat16(), base, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "tokens, n, width", [(1, 4, 5120), (64, 4, 5120), (1000, 4, 5120), (100, 8, 8192), (77, 7, 1000)]
)
def test_released_sizes(tokens, n, width, dtype):
    # h' is rounded to bf16 on both sides: a sum in another order may round the other way, 2^-8 of a few values. The
    # coefficients come from sums over N * D of products that are exact, so they are as near as in fp32; where h'
    # differs in such a value, by 1e-5.
    h, y, post, comb, pre, fn, base, scale = inputs(tokens, n, width, dtype)
    streams = 1e-6 if dtype == torch.float32 else 3e-4
    tolerances = streams, max(streams, 2e-6), 3e-5, 3e-5, 1e-4
    check(hyper_connection, hyper_connection_reference, h, y, post, comb, pre, fn, base, scale, tolerances=tolerances)
    check(hyper_coefficients, hyper_coefficients_reference, h, fn, base, scale, tolerances=(1e-5, 1e-5, 5e-5))
    check(hyper_collapse, hyper_collapse_reference, h, pre, tolerances=[max(streams, 2e-6)])
    check(hyper_expand, hyper_expand_reference, h, y, post, comb, tolerances=[streams])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, processors", [(200, 1), (200, 8), (10, 132)])
def test_projections_keep_fp32_accuracy(tokens, processors, monkeypatch):
    # f . fn^T against float64. A simulation of the matrix unit's rounding gives 1e-6; with one accumulator for the
    # three terms of all 20,480 channels it gives 9e-5, and one bfloat16 term of fn alone is 2e-3 away.
    monkeypatch.setattr("kernels.hyper_connection._processors", lambda device: processors)
    h, _, _, _, _, fn, _, _ = inputs(tokens, 4, 5120, torch.bfloat16)
    sums = _run(h, fn=fn)[2].double().sum(dim=1)
    f = h.double().flatten(1)
    assert relative_error(sums[:, :-1], f @ fn.double().T) < 1e-5
    assert relative_error(sums[:, -1], f.square().sum(dim=1)) < 3e-6
