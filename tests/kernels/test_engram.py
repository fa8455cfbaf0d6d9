"""Engram hash, lookup and gate against their twins and the released hash vectors."""

import math

import pytest
import torch

pytest.importorskip("triton")

from kernels.engram import engram_gather, engram_rows, engram_update
from kernels.reference.engram import engram_gather_reference, engram_rows_reference, engram_update_reference
from kernels.testing import poisoned_empty, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 1e-6  # three sums of D products, and exp: 1e-7 seen
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy, under the interpreter

# The released hash: multipliers by layer, moduli the consecutive primes from 16,000,000 on, over both layers.
MULTIPLIERS = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}
ROWS = {
    1: [
        *(10250667, 16051853, 42761335, 48437066, 64953759, 91793642, 97213675, 124972355),
        *(130904169, 147647512, 174479789, 176217609, 193213014, 209711443, 226459680, 248375762),
        *(266647502, 284737834, 292200621, 319934002, 327756510, 339491046, 365830131, 381142068),
    ],
    14: [
        *(13402985, 31185432, 33324312, 50751051, 67464774, 94528317, 100959033, 120176944),
        *(128818944, 152218109, 160998468, 191796781, 195587060, 214176773, 229162919, 250160180),
        *(260141385, 283855289, 300526134, 319101158, 333879786, 349356468, 360884307, 370522085),
    ],
}


def consecutive_primes(count, start=16_000_000):
    primes, n = [], start
    while len(primes) < count:
        n += 1
        if n % 2 and all(n % d for d in range(3, math.isqrt(n) + 1, 2)):
            primes.append(n)
    return primes


def released(layer):
    primes = torch.tensor(consecutive_primes(48)).reshape(2, 3, 8)[0 if layer == 1 else 1]
    offsets = (primes.flatten().cumsum(0) - primes.flatten()).reshape(3, 8)
    return [t.to(DEVICE) for t in (torch.tensor(MULTIPLIERS[layer]), primes, offsets)]


@pytest.mark.parametrize("layer", [1, 14])
def test_released_vectors(layer):
    # Ids 10, 20, 30, 40 newest first. Mutations seen to fail: ids in the other order, int32 products, + for xor.
    hashing = released(layer)
    assert int(hashing[1].sum()) == {1: 384006168, 14: 384016682}[layer]
    ids = torch.tensor([[40, 30, 20, 10]], dtype=torch.int32, device=DEVICE)
    rows = engram_rows(ids, *hashing, pad=2, new=1)
    assert rows[0, 0].tolist() == ROWS[layer]
    assert engram_rows_reference(ids, *hashing, pad=2, new=1)[0, 0].tolist() == ROWS[layer]


def hashing_of(slots, heads):
    g = torch.Generator().manual_seed(slots)
    multipliers = torch.randint(0, 46539438283891, (slots,), generator=g) * 2 + 1  # as released
    moduli = torch.randint(50, 10**7, (slots - 1, heads), generator=g)
    return [t.to(DEVICE) for t in (multipliers, moduli, torch.arange(moduli.numel()).reshape(moduli.shape) * 10**7)]


# Mutations: blocking not sticky, slot 0 never blocked, history of the neighbouring sequence read at its start.
@pytest.mark.parametrize("slots, heads, length", [(2, 1, 1), (4, 8, 70), (3, 5, 130), (5, 2, 3)])
@pytest.mark.parametrize("images", [False, True])
def test_rows(slots, heads, length, images):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 99092, (2, length), generator=g).to(DEVICE)
    image = (torch.rand(2, length, generator=g) < 0.3).to(DEVICE) if images else None
    hashing = hashing_of(slots, heads)
    with poisoned_empty():
        rows = engram_rows(ids, *hashing, pad=7, image=image)
    expected = engram_rows_reference(ids, *hashing, pad=7, image=image)
    assert torch.equal(rows, expected)
    for new in {0, 1, length - 1}:  # a decode step and a chunk find the same rows as the whole
        part = engram_rows(ids.int(), *hashing, pad=7, image=image, new=new)
        assert torch.equal(part, expected[:, length - new :])


def test_every_position_blocked_or_before_the_start():
    ids = torch.full((1, 3), 5, device=DEVICE)
    hashing = hashing_of(4, 2)
    blocked = engram_rows(ids, *hashing, pad=9, image=torch.ones(1, 3, dtype=torch.bool, device=DEVICE))
    assert torch.equal(blocked, engram_rows(torch.full_like(ids, 9), *hashing, pad=9))


def table_of(rows, width, seed=0):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, width), generator=g, dtype=torch.uint8)
    scales = torch.randint(100, 150, (rows, width // 32), generator=g, dtype=torch.uint8)
    return codes.to(DEVICE), scales.to(DEVICE)


# Mutations: the scale of the next group, row taken modulo 2^31, NaN codes read as 480.
@pytest.mark.parametrize("tokens, columns, width", [(1, 1, 32), (5, 24, 256), (3, 7, 96)])
def test_gather_is_exact(tokens, columns, width):
    codes, scales = table_of(50, width)
    scales[3, 0] = 255
    rows = torch.randint(0, 50, (tokens, columns), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows[0, 0] = 3
    with poisoned_empty():
        out = engram_gather(codes, scales, rows, dtype=torch.float32)
    expected = engram_gather_reference(codes, scales, rows, dtype=torch.float32)
    assert out.shape == (tokens, columns * width) and relative_error(out, expected) == 0
    assert out[0, :32].isnan().all()  # a NaN scale
    records = torch.cat([codes, scales], dim=1)  # and as slices of one record
    again = engram_gather(records[:, :width], records[:, width:], rows, dtype=torch.float32)
    assert torch.equal(again.nan_to_num(7.0), out.nan_to_num(7.0))


def test_gather_beyond_31_bits():
    # 2^31 bytes and a few rows, of which only the touched pages take memory. Mutation: row * stride in int32.
    rows, width = 2**26 + 8, 32
    codes = torch.empty(rows, width, dtype=torch.uint8, device=DEVICE)
    scales = torch.empty(rows, 1, dtype=torch.uint8, device=DEVICE)
    wanted = torch.tensor([[0, 2**26 + 7, 2**25]], device=DEVICE)
    few_codes, few_scales = table_of(3, width)
    for i, row in enumerate(wanted[0].tolist()):
        codes[row], scales[row] = few_codes[i], few_scales[i]
    out = engram_gather(codes, scales, wanted, dtype=torch.float32)
    expected = engram_gather_reference(few_codes, few_scales, torch.arange(3, device=DEVICE)[None], dtype=torch.float32)
    assert relative_error(out, expected) == 0


def update_inputs(tokens, n, width, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=g).to(DEVICE)  # noqa: E731
    h, kv = normal(tokens, n, width).to(dtype), normal(tokens, (n + 1) * width).to(dtype)
    return h, kv, normal(n, width).to(dtype), normal(n, width).to(dtype)


# Mutations: the value taken from key 0, the square root left out, D^-1 for D^-0.5, image read as its opposite.
@pytest.mark.parametrize("tokens, n, width", [(1, 1, 32), (3, 4, 320), (4, 3, 33), (2, 8, 64)])
def test_update(tokens, n, width):
    arguments = update_inputs(tokens, n, width)
    before = [t.clone() for t in arguments]
    image = torch.arange(tokens, device=DEVICE) % 3 == 1
    for options in ({}, {"image": image}):
        with poisoned_empty():
            out = engram_update(*arguments, **options)
        assert relative_error(out, engram_update_reference(*arguments, **options)) < FP32
        assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))
    assert torch.equal(out[image], arguments[0][image])


def test_gate_of_a_zero_keeps_its_sign():
    # mean(h^2) overflows, its rsqrt is 0 and t = +0 or -0: gates sigmoid(0.001) and sigmoid(-0.001). Mutation: a
    # sign by comparison.
    h, kv, q_weight, k_weight = update_inputs(1, 1, 32)
    h.fill_(1e20), k_weight.fill_(1.0)
    kv[:, :32], kv[:, 32:] = 1.0, 1e20
    for sign in (1.0, -1.0):
        q_weight.fill_(sign * 1e-20)
        out = engram_update(h, kv, q_weight, k_weight)
        assert relative_error(out, engram_update_reference(h, kv, q_weight, k_weight)) < FP32
        assert ((out / 1e20 - 1.5) * sign > 2e-4).all()


def test_nan_and_infinity_stay():
    # Mutation: a t that is NaN taken for 0. (On a GPU the maximum of |t| and 1e-6 alone would do that.)
    for place, value in (("h", math.nan), ("key", math.inf), ("value", math.inf), ("weight", math.nan)):
        h, kv, q_weight, k_weight = update_inputs(3, 2, 64)
        if place == "h":
            h[1, 0, 3] = value
        elif place == "weight":
            q_weight[0, 3] = value
        else:
            kv[1, 3 if place == "key" else 131] = value
        image = torch.tensor([False, False, True], device=DEVICE)
        out = engram_update(h, kv, q_weight, k_weight, image)
        assert relative_error(out, engram_update_reference(h, kv, q_weight, k_weight, image)) < FP32
        assert not out[1].isfinite().all() and torch.equal(out[2], h[2])


def test_zero_streams_and_keys():
    # 0 * rsqrt(1e-20) is 0, not NaN: the gate is sigmoid(0.001). Mutations: eps left out of one mean or the other.
    h, kv, q_weight, k_weight = update_inputs(3, 2, 33)
    h[0, 1], kv[1, :33] = 0, 0
    out = engram_update(h, kv, q_weight, k_weight)
    assert out.isfinite().all()
    assert relative_error(out, engram_update_reference(h, kv, q_weight, k_weight)) < FP32


def test_strided_and_empty_inputs():
    h, kv, q_weight, k_weight = update_inputs(3, 2, 64)
    wide, long = torch.full((3, 4, 80), math.nan, device=DEVICE), torch.full((3, 200), math.nan, device=DEVICE)
    wide[:, 1:3, 8:72], long[:, :192] = h, kv
    assert torch.equal(
        engram_update(wide[:, 1:3, 8:72], long[:, :192], q_weight, k_weight), engram_update(h, kv, q_weight, k_weight)
    )
    assert engram_update(h[:0], kv[:0], q_weight, k_weight).shape == (0, 2, 64)
    codes, scales = table_of(4, 64)
    assert engram_gather(codes, scales, torch.empty(0, 3, dtype=torch.int64, device=DEVICE)).shape == (0, 192)
    ids = torch.empty(2, 0, dtype=torch.int32, device=DEVICE)
    assert engram_rows(ids, *hashing_of(3, 2), pad=0).shape == (2, 0, 4)


def test_refuses_what_it_cannot_read():
    h, kv, q_weight, k_weight = update_inputs(3, 2, 64)
    codes, scales = table_of(4, 64)
    rows = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    ids = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="kv must be"):
        engram_update(h, kv[:, :128], q_weight, k_weight)
    with pytest.raises(ValueError, match="k_weight must be contiguous"):
        engram_update(h, kv, q_weight, k_weight[:1])
    with pytest.raises(ValueError, match="rows must be contiguous int64"):
        engram_gather(codes, scales, rows.int())
    with pytest.raises(ValueError, match="scales must have shape"):
        engram_gather(codes, scales[:, :1], rows)
    with pytest.raises(TypeError, match="ids must be int32 or int64"):
        engram_rows(ids.float(), *hashing_of(3, 2), pad=0)
    with pytest.raises(ValueError, match="offsets must be contiguous"):
        multipliers, moduli, offsets = hashing_of(3, 2)
        engram_rows(ids, multipliers, moduli, offsets[:1], pad=0)
    with pytest.raises(ValueError, match="new must be between 0 and the 4"):
        engram_rows(ids, *hashing_of(3, 2), pad=0, new=5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 3e-4)], ids=["fp32", "bf16"])
def test_released_sizes(dtype, tolerance):
    # bf16: both sides round the same fp32 value but for its last bits, so a few values differ by a bf16 step.
    arguments = update_inputs(1000, 4, 5120, dtype)
    assert relative_error(engram_update(*arguments), engram_update_reference(*arguments)) < tolerance
    ids = torch.randint(0, 99092, (4, 500), device=DEVICE, dtype=torch.int32)
    rows = engram_rows(ids, *released(1), pad=2)
    assert torch.equal(rows, engram_rows_reference(ids, *released(1), pad=2))
    codes, scales = table_of(10**6, 256)
    out = engram_gather(codes, scales, rows % 10**6, dtype)
    assert relative_error(out, engram_gather_reference(codes, scales, rows % 10**6, dtype)) == 0
