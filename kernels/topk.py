"""Exact, deterministic top-k of long score rows: by score, then by lower position.

    out[r] = the positions of the k best scores of row r in ascending order, -1 where fewer than k may be picked

Scores of -inf are never picked and -0 equals +0. A row that holds a NaN has no order: all its k positions are -2.

A select kernel holds a whole row of up to LIMIT keys in the registers of one program: it searches the k-th largest key
bit by bit, counts the ties that still fit, and writes positions by a prefix sum, so nothing depends on timing. Longer
rows are cut into chunks and reduced to their maxima first, because

    the k best scores lie inside the k best chunks (ranked by maximum, ties to the lower chunk):

each of those chunks holds an element, its maximum, that beats everything outside of them. So select k chunks among the
maxima, then k scores among k * fan candidates, and nothing else of the row is read a second time.

Shapes: scores [R, N] floating point, N to 2^20 and beyond, k to 2048; positions [R, k] int32.
Reads R*N*4 bytes once, plus R*k*fan*4 for the candidates (fan 8..32), writes R*k*4: bound by memory bandwidth.
Reference: kernels/reference/topk.py. Test: tests/kernels/test_topk.py. Bench: `topk`.
"""

import torch
import triton
import triton.language as tl

LIMIT = 16384  # keys one select program holds: 32 for each thread of 16 warps
MAX_K = 2048
ABSENT = tl.constexpr(-(2**31))  # below every score: masked, out of range or -inf
FORCED = tl.constexpr(2**31 - 2)  # above +inf: the block that has to be kept
INVALID = tl.constexpr(2**31 - 1)  # NaN, above all, so that it reaches the last level


@triton.jit
def _order_key(x):
    """float32 as an int32 of the same order."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 ties with +0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats: larger magnitude, lower key
    return tl.where(x != x, INVALID, tl.where(x == float("-inf"), ABSENT, key))


@triton.jit
def _chunk_max_kernel(
    src_ptr,  # [R, n] scores, or int32 keys
    dst_ptr,  # [R, n_out] int32 keys
    lengths_ptr,  # [R] int32
    forced_ptr,  # [R] int32
    n,
    n_out,
    src_stride,
    FAN: tl.constexpr,
    CHUNKS: tl.constexpr,
    IS_KEY: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_FORCED: tl.constexpr,
):
    # one program per (row, CHUNKS chunks); int64 because R * n passes 2**31
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    position = chunk[:, None] * FAN + tl.arange(0, FAN)[None, :]  # [CHUNKS, FAN]
    length = tl.minimum(tl.load(lengths_ptr + row), n) if HAS_LENGTHS else n
    forced = tl.load(forced_ptr + row) if HAS_FORCED else -1
    # The load mask compares with n alone, whose divisibility is known, so that 16 bytes move at a time; a tile past the
    # row's length is not read at all, and the length itself masks values.
    inside = (position < n) & (tl.program_id(1) * CHUNKS * FAN < length)
    if IS_KEY:
        key = tl.max(tl.load(src_ptr + row * src_stride + position, mask=inside, other=ABSENT), axis=1)
    else:
        x = tl.load(src_ptr + row * src_stride + position, mask=inside, other=float("-inf")).to(tl.float32)
        x = tl.where(position < length, x, float("-inf"))
        magnitude = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        key = tl.where(magnitude > 0x7F800000, INVALID, _order_key(tl.max(x, axis=1)))  # tl.max passes over NaN
    if HAS_FORCED:
        key = tl.where((chunk == forced // FAN) & (forced >= 0) & (key != INVALID), FORCED, key)
    tl.store(dst_ptr + row * n_out + chunk, key, mask=chunk < n_out)


@triton.jit
def _select_kernel(
    src_ptr,  # [R, n] scores, or int32 keys
    chunks_ptr,  # [R, k] int32, ascending, -1 padded: the chunks to look at
    out_ptr,  # [R, k] int32
    lengths_ptr,  # [R] int32
    forced_ptr,  # [R] int32
    blocks_ptr,  # [R, *] int32: the block whose scores stand at columns b * block_size ...
    n,
    k,
    src_stride,
    blocks_stride,
    block_size,
    FAN: tl.constexpr,
    N: tl.constexpr,
    K_PAD: tl.constexpr,
    IS_KEY: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_FORCED: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
):
    # one program per row
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, N)
    length = tl.minimum(tl.load(lengths_ptr + row), n) if HAS_LENGTHS else n
    forced = tl.load(forced_ptr + row) if HAS_FORCED else -1
    if HAS_CHUNKS:  # ascending chunks keep the candidates in order of position
        slot = position // FAN
        chunk = tl.load(chunks_ptr + row * k + slot, mask=slot < k, other=-1)
        position = chunk * FAN + position % FAN
        inside = (chunk >= 0) & (position < n)
    else:
        inside = position < n
    if IS_KEY:
        key = tl.load(src_ptr + row * src_stride + position, mask=inside, other=ABSENT)
    else:
        key = _order_key(
            tl.load(src_ptr + row * src_stride + position, mask=inside, other=float("-inf")).to(tl.float32)
        )
        key = tl.where(position < length, key, ABSENT)
    if HAS_FORCED:
        key = tl.where(inside & (position == forced) & (key != INVALID), FORCED, key)

    # The largest threshold with at least `wanted` keys at or above it, from the sign bit down.
    present = tl.sum((key > ABSENT).to(tl.int32), axis=0)
    wanted = tl.minimum(k, present)
    threshold = tl.where(present > wanted, ABSENT, ABSENT + 1)
    reached = tl.where(present > wanted, N + 1, wanted)
    bit = 31
    while (bit >= 0) & (reached != wanted):  # an exact count needs no further bits
        trial = threshold ^ (tl.full([], 1, tl.int32) << bit)
        count = tl.sum((key >= trial).to(tl.int32), axis=0)
        threshold = tl.where(count >= wanted, trial, threshold)
        reached = tl.where(count >= wanted, count, reached)
        bit -= 1

    # One scan counts the keys above and at the threshold; both counts fit in 16 bits.
    above = (key > threshold).to(tl.int32)
    level = (key == threshold).to(tl.int32)
    ties = wanted - tl.sum(above, axis=0)
    scan = tl.cumsum(above * 65536 + level, axis=0)
    before = scan & 65535
    rank = (scan >> 16) + tl.minimum(before, ties) - 1
    picked = (above > 0) | ((level > 0) & (before <= ties))

    invalid = False if IS_KEY else tl.max(key, axis=0) == INVALID
    if HAS_BLOCKS:
        block = tl.load(blocks_ptr + row * blocks_stride + position // block_size, mask=picked, other=0)
        position = block * block_size + position % block_size
    tl.store(out_ptr + row * k + rank, tl.where(invalid, -2, position), mask=picked)
    slots = tl.arange(0, K_PAD)
    padding = tl.where(invalid, -2, tl.full([K_PAD], -1, tl.int32))
    tl.store(out_ptr + row * k + slots, padding, mask=(slots >= wanted) & (slots < k))


def topk(scores, k, lengths=None, blocks=None, block_size=None):
    """Positions of the k best scores of each row, ascending, -1 padded: int32 [R, k].

    lengths: int32 [R], only the first lengths[r] scores of row r count (the rest is not read).
    blocks, block_size: int32 [R, B] and the width w of a block, when scores [R, B * w] are those of the indexer's
        candidates-only form. The result then names entries: blocks[r, p // w] * w + p % w in place of p.
    """
    _check(scores, k, "scores")
    _check_rows(lengths, "lengths", scores)
    if (blocks is None) != (block_size is None):
        raise ValueError("blocks and block_size come together: give both or neither")
    if blocks is not None:
        if blocks.dtype != torch.int32 or blocks.device != scores.device or blocks.stride(-1) != 1:
            raise ValueError(f"blocks must be int32 with unit last stride on {scores.device}, got {_describe(blocks)}")
        if scores.shape != (blocks.shape[0], blocks.shape[1] * block_size):
            raise ValueError(
                f"scores has shape {tuple(scores.shape)}, expected {(blocks.shape[0], blocks.shape[1] * block_size)} "
                f"for blocks {tuple(blocks.shape)} of {block_size}"
            )
    return _topk(scores, k, lengths=lengths, blocks=blocks, block_size=block_size)


def topk_blocks(block_scores, k, newest):
    """The k best candidate blocks of each row, ascending, -1 padded: int32 [R, k].

    newest: int32 [R], the block that holds the newest visible entry. It is kept whatever its score; -1 keeps none.
    """
    _check(block_scores, k, "block_scores")
    _check_rows(newest, "newest", block_scores)
    return _topk(block_scores, k, forced=newest)


def _topk(scores, k, lengths=None, forced=None, blocks=None, block_size=None):
    rows = scores.shape[0]
    new = lambda width: torch.empty(rows, width, dtype=torch.int32, device=scores.device)  # noqa: E731
    if not rows:
        return new(k)

    # Up: maxima of chunks until one program can hold a row. Candidates of the first level are k * fan <= LIMIT.
    levels, fans = [scores], []
    while levels[-1].shape[1] > LIMIT:
        source = levels[-1]
        fan = 8 if fans else max(8, min(32, LIMIT // triton.next_power_of_2(k)))
        maxima = new(triton.cdiv(source.shape[1], fan))
        chunks = 4096 // fan
        _chunk_max_kernel[(rows, triton.cdiv(maxima.shape[1], chunks))](
            source, maxima, lengths, forced, source.shape[1], maxima.shape[1], source.stride(0),
            FAN=fan, CHUNKS=chunks, IS_KEY=bool(fans), HAS_LENGTHS=lengths is not None and not fans,
            HAS_FORCED=forced is not None and not fans, num_warps=4,
        )  # fmt: skip
        levels.append(maxima)
        fans.append(fan)

    # Down: the best k of the top level are chunks of the level below.
    picked = None
    for level in range(len(levels) - 1, -1, -1):
        source, out = levels[level], new(k)
        fan = fans[level] if picked is not None else 1
        width = max(16, triton.next_power_of_2(k * fan if picked is not None else source.shape[1]))
        _select_kernel[(rows,)](
            source, picked, out, lengths, forced, None if level else blocks, source.shape[1], k, source.stride(0),
            blocks.stride(0) if blocks is not None else 0, block_size or 1,
            FAN=fan, N=width, K_PAD=triton.next_power_of_2(k), IS_KEY=level > 0, HAS_CHUNKS=picked is not None,
            HAS_LENGTHS=lengths is not None and level == 0, HAS_FORCED=forced is not None and level == 0,
            HAS_BLOCKS=blocks is not None and level == 0, num_warps=4 if width <= 2048 else 8 if width <= 8192 else 16,
        )  # fmt: skip
        picked = out
    return picked


def _describe(t):
    return f"{t.dtype} {tuple(t.shape)} with strides {t.stride()} on {t.device}"


def _check(scores, k, name):
    if scores.ndim != 2 or not scores.is_floating_point() or scores.element_size() > 4:
        raise TypeError(f"{name} must be a float32, float16 or bfloat16 matrix [rows, n], got {_describe(scores)}")
    if scores.shape[1] > 1 and scores.stride(1) != 1:
        raise ValueError(f"{name} must have unit stride along a row, got strides {scores.stride()}")
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k must be between 1 and {MAX_K}, got {k}")


def _check_rows(t, name, scores):
    if t is not None and (t.dtype != torch.int32 or t.shape != scores.shape[:1] or t.device != scores.device):
        raise ValueError(f"{name} must be int32 of shape {(scores.shape[0],)} on {scores.device}, got {_describe(t)}")
    if t is not None and not t.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {t.stride()}")


def aot_cases():
    def select(name, width, warps, top):
        types = {
            **dict.fromkeys(("chunks_ptr", "out_ptr", "lengths_ptr"), "*i32"), "src_ptr": "*i32" if top else "*fp32",
            "n": "i32:16", "k": "i32:16", "src_stride": "i32:16", "blocks_stride": "i32",
        }  # fmt: skip
        values = {
            "forced_ptr": None, "blocks_ptr": None, "block_size": 1, "FAN": 1 if top else 32, "N": width, "K_PAD": 512,
            "IS_KEY": top, "HAS_CHUNKS": not top, "HAS_LENGTHS": not top, "HAS_FORCED": False, "HAS_BLOCKS": False,
        }  # fmt: skip
        if top:
            values |= {"chunks_ptr": None, "lengths_ptr": None}
        return name, _select_kernel, types, values, {"num_warps": warps}, None

    types = {"src_ptr": "*fp32", "dst_ptr": "*i32", "forced_ptr": "*i32"}
    types |= dict.fromkeys(("n", "n_out", "src_stride"), "i32:16")
    values = {
        "lengths_ptr": None, "FAN": 32, "CHUNKS": 128, "IS_KEY": False, "HAS_LENGTHS": False, "HAS_FORCED": True,
    }  # fmt: skip
    vector = {arch: ["ld.global.v4.b32"] for arch in (80, 90, 100)}  # 16 bytes at a time
    return [
        ("chunk maxima", _chunk_max_kernel, types, values, {"num_warps": 4}, vector),
        select("candidates of a long row", 16384, 16, top=False),
        select("top level", 4096, 8, top=True),
    ]
