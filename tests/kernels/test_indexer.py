"""Indexer scores against one float32 matrix product per head.

Mutations tried, each turned at least one test red: `entry < limit` to `<=`, ratio left out of the limit, the length
left out, low and high nibbles exchanged in the keys alone, rows swapped before the product but not after it, the ReLU
removed, `propagate_nan` removed, `broken` removed from the maxima, the -inf tiles not written, `candidates` read
without the query's row, padding heads not masked, the word of scales shifted by 4 instead of 8. In the PTX: masks,
shifts, selectors and constants.
"""

import re

import pytest
import torch

from kernels import indexer as op
from kernels.indexer import indexer
from kernels.reference.indexer import E2M1, indexer_reference
from kernels.testing import poisoned_empty, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Products are exact and sums run in float32 on both sides; the matrix unit of a GPU adds with a few bits less.
TOLERANCE = 2e-5 if DEVICE == "cuda" else 1e-6


def _inputs(R, Q, H, E, D=128, seed=0, ratio=1):
    g = torch.Generator().manual_seed(seed)
    byte = lambda *shape, low=0, high=256: torch.randint(low, high, shape, generator=g, dtype=torch.uint8)  # noqa: E731
    q_codes, q_scales = byte(R, Q, H, D // 2), byte(R, Q, H, D // 32, low=120, high=130)
    k_codes, k_scales = byte(R, E, D // 2), byte(R, E, D // 32, low=120, high=130)
    weights = torch.randn(R, Q, H, generator=g)
    positions = torch.randint(-1, max(1, E * ratio), (R, Q), generator=g, dtype=torch.int32)
    positions[0, 0] = E * ratio - 1  # one query sees everything
    return [t.to(DEVICE) for t in (q_codes, q_scales, weights, k_codes, k_scales, positions)] + [ratio]


def _check(inputs, **options):
    before = [t.clone() for t in inputs[:-1]]
    with poisoned_empty():
        out = indexer(*inputs, **options)
    expected = indexer_reference(*inputs, **options)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs[:-1], strict=True))
    for got, want in zip(*((out, expected) if options.get("block_maxima") else ([out], [expected])), strict=True):
        assert got.dtype == torch.float32 and got.shape == want.shape
        assert torch.equal(got.isneginf(), want.isneginf())
        assert relative_error(got, want) < TOLERANCE
    return out


@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
@pytest.mark.parametrize(
    ("R", "Q", "H", "E", "D"),
    [(1, 1, 32, 1, 128), (3, 1, 32, 150, 128), (1, 9, 32, 70, 128), (2, 5, 4, 65, 64), (1, 3, 64, 64, 128),
     (2, 2, 6, 40, 32), (1, 3, 1, 130, 256), (1, 2, 100, 20, 64)],
)  # fmt: skip
def test_full_scan(R, Q, H, E, D, ratio):
    _check(_inputs(R, Q, H, E, D, ratio=ratio))


@pytest.mark.parametrize("block_size", [1, 4, 8, 64])
def test_block_maxima(block_size):
    inputs = _inputs(2, 3, 8, 139, ratio=2)
    scores, maxima = _check(inputs, block_size=block_size, block_maxima=True)
    assert maxima.shape == (2, 3, -(-139 // block_size))
    assert torch.equal(maxima.amax(dim=2), scores.amax(dim=2))  # bit for bit


@pytest.mark.parametrize(("Q", "H", "block_size"), [(1, 32, 8), (5, 4, 4), (2, 64, 1)])
def test_candidates_only(Q, H, block_size):
    inputs = _inputs(2, Q, H, 150)
    g = torch.Generator().manual_seed(1)
    blocks = -(-150 // block_size)
    candidates = torch.randint(0, blocks, (2, Q, 21), generator=g, dtype=torch.int32)
    candidates[..., 17:] = -1
    candidates[0, 0, :3] = torch.tensor([blocks - 1, blocks, 2**31 - 1])  # the ragged last block, and none at all
    candidates = candidates.to(DEVICE)
    scores = _check(inputs, candidates=candidates, block_size=block_size)
    _check(inputs, candidates=candidates, block_size=block_size, block_maxima=True)
    full = indexer(*inputs)
    entry = int(candidates[0, 0, 5]) * block_size
    torch.testing.assert_close(scores[0, 0, 5 * block_size], full[0, 0, entry], rtol=1e-4, atol=1e-4)


def test_lengths_and_records():
    """Requests of different lengths, keys as slices of one record tensor with other bytes after them."""
    R, E = 4, 90
    inputs = _inputs(R, 2, 32, E)
    records = torch.randint(0, 256, (R, E + 3, 80), dtype=torch.uint8, device=DEVICE)
    records[:, :E, :64], records[:, :E, 64:68] = inputs[3], inputs[4]
    inputs[3], inputs[4] = records[:, :E, :64], records[:, :E, 64:68]
    inputs[5] = torch.full((R, 2), E - 1, device=DEVICE)  # int64 positions
    lengths = torch.tensor([0, 1, 64, 200], dtype=torch.int32, device=DEVICE)
    scores = _check(inputs, lengths=lengths)
    assert scores[0].isneginf().all() and scores[2, 0].isfinite().sum() == 64


def test_nothing_visible():
    inputs = _inputs(2, 3, 32, 100, ratio=4)
    inputs[5] = torch.tensor([[-1, 0, 2], [1, 2, -1]], dtype=torch.int32, device=DEVICE)
    scores, maxima = _check(inputs, block_size=8, block_maxima=True)
    assert scores.isneginf().all() and maxima.isneginf().all()


def test_exact_zeros_and_bfloat16_weights():
    inputs = _inputs(1, 4, 32, 80)
    inputs[3] = torch.full_like(inputs[3], 0x80)  # plus and minus zero
    inputs[5][:] = 79
    assert (_check(inputs) == 0).all()
    inputs = _inputs(1, 4, 32, 80)
    inputs[2] = inputs[2].bfloat16()
    _check(inputs)


@pytest.mark.parametrize(("q_byte", "k_byte"), [(0, 254), (254, 0), (0, 127), (127, 1), (200, 54), (1, 253)])
def test_extreme_scales(q_byte, k_byte):
    """Scales from 2^-127 to 2^127 decode exactly. Values are limited to one code so that no product overflows."""
    inputs = _inputs(1, 1, 16, 33)
    inputs[0].fill_(0x21)  # 0.5 and 1
    inputs[3].fill_(0x12)
    inputs[1].fill_(q_byte)
    inputs[4].fill_(k_byte)
    scores = _check(inputs)
    assert scores.isfinite().all()


def test_nan_scale_is_seen():
    inputs = _inputs(1, 2, 32, 50)
    inputs[5][:] = 49
    inputs[4][0, 11, 2] = 255
    scores, maxima = _check(inputs, block_size=8, block_maxima=True)
    assert scores[0, :, 11].isnan().all() and scores.isnan().sum() == 2
    assert maxima[0, :, 1].isnan().all() and maxima.isnan().sum() == 2


@pytest.mark.parametrize(("R", "Q", "E"), [(0, 1, 5), (1, 0, 5), (2, 3, 0)])
def test_empty(R, Q, E):
    inputs = [
        torch.zeros(R, Q, 4, 32, dtype=torch.uint8), torch.zeros(R, Q, 4, 2, dtype=torch.uint8), torch.zeros(R, Q, 4),
        torch.zeros(R, E, 32, dtype=torch.uint8), torch.zeros(R, E, 2, dtype=torch.uint8),
        torch.zeros(R, Q, dtype=torch.int32),
    ]  # fmt: skip
    scores, maxima = indexer(*(t.to(DEVICE) for t in inputs), 2, block_size=8, block_maxima=True)
    assert scores.shape == (R, Q, E) and maxima.shape == (R, Q, -(-E // 8))


def test_refuses():
    good = _inputs(1, 2, 4, 16)

    def call(index, value, **options):
        return indexer(*good[:index], value, *good[index + 1 :], **options)

    with pytest.raises(TypeError, match=r"q_codes must be torch.uint8, got torch.int8"):
        call(0, good[0].view(torch.int8))
    with pytest.raises(ValueError, match=r"q_scales must have shape \(1, 2, 4, 4\)"):
        call(1, good[1][..., :2])
    with pytest.raises(ValueError, match="weights must have shape"):
        call(2, good[2][:, :1])
    with pytest.raises(ValueError, match="k_codes must have unit last stride"):
        call(3, good[3].mT.contiguous().mT)
    with pytest.raises(ValueError, match="rows aligned to their 4 bytes"):
        call(4, torch.zeros(1, 16, 5, dtype=torch.uint8, device=DEVICE)[..., :4])
    with pytest.raises(TypeError, match=r"positions must be torch.int32 or torch.int64"):
        call(5, good[5].float())
    with pytest.raises(ValueError, match="ratio must be at least 1, got 0"):
        call(6, 0)
    with pytest.raises(ValueError, match="power of two up to 64, got 6"):
        indexer(*good, block_size=6, block_maxima=True)
    with pytest.raises(ValueError, match=r"candidates must have shape \(1, 2, 3\)"):
        indexer(*good, block_size=8, candidates=torch.zeros(2, 2, 3, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match=r"H must be 1\.\.128"):
        indexer(
            torch.zeros(1, 1, 200, 32, dtype=torch.uint8), torch.zeros(1, 1, 200, 2, dtype=torch.uint8), *good[2:]
        )  # fmt: skip


def _run_ptx(text, inputs):
    """The four result registers of straight-line PTX on 32-bit integers: the subset that UNPACK_PTX uses."""
    registers = dict(inputs)

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    def halves(x):
        return torch.tensor([x & 0xFFFF, x >> 16], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)

    for line in text.strip("{}").split(";"):
        opcode, _, rest = line.strip().partition(" ")
        if not opcode or opcode.startswith(".reg"):
            continue
        target, *sources = (s.strip() for s in rest.split(","))
        a, b, c = ([value(s) for s in sources] + [0, 0, 0])[:3]
        if opcode == "mov.b32":
            result = a
        elif opcode == "prmt.b32":
            octets = a.to_bytes(4, "little") + b.to_bytes(4, "little")
            result = int.from_bytes(bytes(octets[c >> 4 * i & 7] for i in range(4)), "little")
        elif opcode == "shr.u32":
            result = a >> b
        elif opcode == "shl.b32":
            result = a << b & 0xFFFFFFFF
        elif opcode == "and.b32":
            result = a & b
        elif opcode == "or.b32":
            result = a | b
        elif opcode == "fma.rn.bf16x2":
            exact = halves(a).double() * halves(b).double() + halves(c).double()
            low, high = exact.bfloat16().view(torch.int16).tolist()
            result = (low & 0xFFFF) | (high & 0xFFFF) << 16
        else:
            raise NotImplementedError(opcode)
        registers[target] = result
    return [registers[f"${i}"] for i in range(4)]


@pytest.mark.parametrize("exponent", [-127, -126, -3, 0, 5, 124])
def test_ptx_unpacks_every_byte(exponent):
    """The inline PTX runs on no CPU: here its dozen instructions are carried out one by one."""
    text = getattr(op.UNPACK_PTX, "value", op.UNPACK_PTX)
    assert re.fullmatch(r"\{.*\}", text, re.S)
    scale = torch.tensor(2.0, dtype=torch.float64) ** exponent
    half = int(scale.bfloat16().view(torch.int16)) & 0xFFFF
    for start in range(0, 256, 4):
        octets = bytes(range(start, start + 4))
        word = int.from_bytes(octets, "little")
        out = _run_ptx(text, {"$4": word, "$5": half | half << 16, "$6": half | half << 16})
        values = torch.tensor([r >> s & 0xFFFF for r in out for s in (0, 16)], dtype=torch.int32)
        values = values.to(torch.int16).view(torch.bfloat16).double()
        codes = [b & 15 for b in octets] + [b >> 4 for b in octets]
        expected = E2M1[codes].double() * scale
        assert torch.equal(values, expected) and torch.equal(values.signbit(), expected.signbit())


@pytest.mark.gpu
@pytest.mark.parametrize("block_maxima", [False, True])
def test_released_decode(block_maxima):
    inputs = _inputs(8, 1, 32, 131072)
    lengths = torch.randint(1, 131073, (8,), dtype=torch.int32, device=DEVICE)
    inputs[5][:] = 131071
    _check(inputs, lengths=lengths, block_size=8, block_maxima=block_maxima)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 96])
@pytest.mark.parametrize("H, D", [(24, 32), (24, 64), (64, 32), (32, 128)])
def test_released_records(H, D, queries):
    inputs = _inputs(2, queries, H, 48, D, ratio=2)
    records = torch.cat(inputs[3:5], dim=2)  # codes and scales side by side, as a cache has them
    if D == 64:
        records = torch.cat((records, records[..., :2]), dim=2)
    inputs[3:5] = records[..., : D // 2], records[..., D // 2 : D // 2 + D // 32]
    _check(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("H, D", [(32, 128), (64, 128), (24, 32), (64, 32), (5, 64), (24, 256)])
def test_released_prefill(H, D, ratio):
    _check(_inputs(1, 300, H, 16384, D, ratio=ratio), block_size=8, block_maxima=True)


@pytest.mark.gpu
def test_released_candidates():
    inputs = _inputs(4, 3, 32, 100000)
    inputs[5][:] = 99999
    candidates = torch.randint(-1, 12500, (4, 3, 2048), dtype=torch.int32, device=DEVICE)
    _check(inputs, candidates=candidates, block_size=8)


@pytest.mark.parametrize("R", [1, 2])
@pytest.mark.parametrize(("D", "block"), [(32, 2), (64, 4), (128, 8)])
def test_candidates_among_records(D, block, R):
    """Keys as slices of records of 17, 34 and 68 bytes, odd entries among the candidates.

    On a GPU this ended in a misaligned address while Triton took an entry for a multiple of the block.
    """
    inputs = _inputs(R, 2, 5, 96, D)
    records = torch.cat(inputs[3:5], dim=2)
    inputs[3:5] = records[..., : D // 2], records[..., D // 2 :]
    candidates = torch.tensor([[0, 3, -1, 7, 1], [5, 2, 11, 4, -1]], dtype=torch.int32, device=DEVICE)
    _check(inputs, candidates=candidates.expand(R, 2, 5).contiguous(), block_size=block)
