"""Top-k against a stable sort of every row. Positions are integers and compared exactly.

Mutations tried, each turned at least one test red: `key >= trial` to `>`, `before <= ties` to `<`, the rank without
`minimum(before, ties)`, the -0 line removed, -inf mapped to its own key, INVALID lowered to ABSENT, FORCED lowered to
ABSENT in either kernel, the length mask removed in either kernel, maxima of fan - 1 elements, `chunk * FAN` without
`position % FAN`, the padding store left out, `src_stride` replaced by n.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import topk as op
from kernels.reference.topk import topk_blocks_reference, topk_reference
from kernels.testing import poisoned_empty
from kernels.topk import topk, topk_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")


def _scores(rows, n, kind, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=g)
    if kind == "few values":
        x = (2 * x).round()
    elif kind == "signed zeros":  # what ReLU sums look like: mostly zeros of either sign
        x = torch.where(torch.rand(rows, n, generator=g) < 0.7, torch.copysign(torch.zeros(()), x), x.round())
    elif kind == "constant":
        x = torch.full((rows, n), -3.5)
    elif kind == "masked":
        x[torch.rand(rows, n, generator=g) < 0.9] = -INF
    elif kind == "steps":  # the best of a row all sit in few chunks
        x = (torch.arange(n).float() // 100).repeat(rows, 1)
    return x.to(DEVICE)


def _check(scores, k, **options):
    before = scores.clone()
    with poisoned_empty():
        out = topk(scores, k, **options)
    assert torch.equal(before.nan_to_num(nan=7.0), scores.nan_to_num(nan=7.0))
    assert out.dtype == torch.int32
    assert torch.equal(out, topk_reference(scores, k, **options))
    return out


@pytest.mark.parametrize("kind", ["random", "few values", "signed zeros", "constant", "masked", "steps"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 8), (16, 16), (100, 7), (1000, 512), (2500, 2048)])
def test_one_level(n, k, kind):
    _check(_scores(3, n, kind), k)


@pytest.mark.parametrize("kind", ["random", "few values", "signed zeros", "constant", "masked", "steps"])
@pytest.mark.parametrize(("n", "k"), [(op.LIMIT + 1, 512), (50001, 2048), (40000, 1)])
def test_two_levels(n, k, kind):
    _check(_scores(2, n, kind), k)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "few values"])
def test_three_levels(kind):
    _check(_scores(1, 2**20, kind), 512)


def test_ties_go_to_the_lower_position():
    out = _check(torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0]], device=DEVICE), 2)
    assert out.tolist() == [[1, 2]]
    out = _check(torch.tensor([[-0.0, 0.0, -0.0, 0.0]], device=DEVICE), 3)
    assert out.tolist() == [[0, 1, 2]]


def test_fewer_than_k_are_padded():
    scores = torch.tensor([[-INF, 3.0, -INF, INF], [-INF] * 4], device=DEVICE)
    assert _check(scores, 3).tolist() == [[1, 3, -1], [-1, -1, -1]]


@pytest.mark.parametrize("n", [40, 20000])
@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
def test_a_nan_makes_its_row_minus_two(n, nan):
    scores = _scores(3, n, "random")
    scores[1, n - 3] = nan
    scores[0, 2] = INF
    out = _check(scores, 9)
    assert (out[1] == -2).all() and (out[::2] >= 0).all()
    # outside of the row's length it does not count
    assert (_check(scores, 9, lengths=torch.tensor([n, n - 3, n], dtype=torch.int32, device=DEVICE)) >= 0).all()


@pytest.mark.parametrize("n", [70, 20000])
def test_lengths(n):
    scores = _scores(6, n, "few values")
    lengths = torch.tensor([0, 1, n // 3, n - 1, n, n + 50], dtype=torch.int32, device=DEVICE)
    _check(scores, 33, lengths=lengths)


def test_strided_rows_and_half_precision():
    wide = torch.full((4, 20100), INF, device=DEVICE)
    wide[:, :20050] = _scores(4, 20050, "few values")
    _check(wide[::2, :20050], 300)
    _check(_scores(3, 777, "random").half(), 50)


@pytest.mark.parametrize(("rows", "n"), [(0, 5), (2, 0), (0, 0)])
def test_empty(rows, n):
    out = _check(torch.zeros(rows, n, device=DEVICE), 4)
    assert out.shape == (rows, 4) and (out == -1).all()


def test_positions_within_candidate_blocks_become_entries():
    blocks = torch.tensor([[0, 3, 7, -1], [2, 5, 9, 11]], dtype=torch.int32, device=DEVICE)
    scores = _scores(2, 16, "few values")
    scores[0, 12:] = -INF
    out = _check(scores, 6, blocks=blocks, block_size=4)
    assert set((out[1] // 4).tolist()) <= {2, 5, 9, 11}


@pytest.mark.parametrize(("n", "k"), [(1, 1), (9, 4), (300, 16), (20000, 64), (20000, 2048)])
@pytest.mark.parametrize("kind", ["random", "few values", "masked"])
def test_newest_block_is_kept(n, k, kind):
    scores = _scores(5, n, kind)
    newest = torch.tensor([n - 1, 0, n // 2, -1, n - 1], dtype=torch.int32, device=DEVICE)
    scores[0, n - 1] = -100.0
    scores[2, n // 2] = -INF
    scores[4, : n - 1] = INF  # not even infinities displace it
    with poisoned_empty():
        out = topk_blocks(scores, k, newest)
    assert torch.equal(out, topk_blocks_reference(scores, k, newest))
    for row, kept in enumerate(newest.tolist()):
        assert kept < 0 or kept in out[row].tolist()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([-INF, -2.0, -0.0, 0.0, 1e-45, -1e-45, 1.0, 3e38, INF]), min_size=1, max_size=64),
    st.integers(1, 70),
)
def test_property_special_values(row, k):
    _check(torch.tensor([row], device=DEVICE), k)


def test_refuses():
    x = torch.zeros(2, 8, device=DEVICE)
    lengths = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="k must be between 1 and 2048, got 0"):
        topk(x, 0)
    with pytest.raises(ValueError, match="got 4000"):
        topk(x, 4000)
    with pytest.raises(TypeError, match="float32, float16 or bfloat16 matrix"):
        topk(x.double(), 2)
    with pytest.raises(TypeError, match="matrix"):
        topk(x[0], 2)
    with pytest.raises(ValueError, match="unit stride"):
        topk(x.T, 2)
    with pytest.raises(ValueError, match="lengths must be int32"):
        topk(x, 2, lengths=lengths.long())
    with pytest.raises(ValueError, match="newest must be int32 of shape"):
        topk_blocks(x, 2, lengths[:1])
    with pytest.raises(ValueError, match="come together"):
        topk(x, 2, blocks=torch.zeros(2, 2, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="expected"):
        topk(x, 2, blocks=torch.zeros(2, 2, dtype=torch.int32, device=DEVICE), block_size=3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "few values", "signed zeros", "constant", "masked"])
@pytest.mark.parametrize("k", [1, 512, 2048])
def test_released_sizes(kind, k):
    scores = _scores(8, 2**20, kind)
    first = _check(scores, k)
    assert all(torch.equal(first, topk(scores, k)) for _ in range(5))  # the same bits on every run


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_released_prefill_rows(dtype):
    scores = _scores(256, 131072, "random").to(dtype)  # bfloat16 ties everywhere
    lengths = torch.arange(256, dtype=torch.int32, device=DEVICE) * 512
    _check(scores, 512, lengths=lengths)
    newest = torch.full((256,), 131071, dtype=torch.int32, device=DEVICE)
    assert torch.equal(topk_blocks(scores, 2048, newest), topk_blocks_reference(scores, 2048, newest))
