"""Lightning indexer: a ReLU-weighted sum over heads, straight from packed MXFP4 queries and keys.

    I[r, q, e] = sum_h relu(qI[r, q, h] . k[r, e]) * w[r, q, h]     where (e + 1) * ratio <= positions[r, q] + 1
                 -inf                                              elsewhere

One program holds BLOCK_Q queries and walks over tiles of entries. Entries are the rows of the matrix product and
(query, head) pairs its columns, so the sum over heads stays inside a row of the accumulator, and decode (one query,
N = H) and prefill (four queries of 32 heads, N = 128) are the same code. MXFP4 values are exact in bfloat16; a key
tile is unpacked once and used by all N columns. The even channels (low nibbles) and the odd ones are two products over
D/2: nothing has to be interleaved.

Shapes: R requests, Q queries each, H heads, E entries, D channels, C candidate blocks.
Decode reads R*E*(D/2 + D/32) bytes and writes R*Q*E*4: bound by memory bandwidth. Prefill does 2*R*Q*E*H*D FLOPs: bound
by the bfloat16 matrix unit.
Reference: kernels/reference/indexer.py. Test: tests/kernels/test_indexer.py. Bench: `indexer`.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.numerics import e2m1_code_to_f32, ue8m0_to_f32

BLOCK_E = 64  # entries of a tile: the rows of the matrix product; the largest candidate block
MAX_COLUMNS = 128  # (query, head) pairs of a program: its columns

# Four packed bytes and their block scale -> four even and four odd channels in bfloat16. A code s|ee|m moved to bits 15
# and 8..6 reads as the value times 2^-126 (subnormals included), so a product by 2^126 and one by the scale finish it.
# Eight channels take 24 instructions; tl code handles one channel at a time.
UNPACK_PTX = tl.constexpr("""{
    .reg .b32 lo, hi, e, o, s, big, nil;
    mov.b32 big, 0x7E807E80;
    mov.b32 nil, 0x80008000;
    prmt.b32 lo, $4, 0, 0x1404;
    prmt.b32 hi, $4, 0, 0x3424;
    shr.u32 e, lo, 2;
    and.b32 e, e, 0x01C001C0;
    shl.b32 s, lo, 4;
    and.b32 s, s, nil;
    or.b32 e, e, s;
    fma.rn.bf16x2 e, e, big, nil;
    fma.rn.bf16x2 $0, e, $5, nil;
    shr.u32 e, hi, 2;
    and.b32 e, e, 0x01C001C0;
    shl.b32 s, hi, 4;
    and.b32 s, s, nil;
    or.b32 e, e, s;
    fma.rn.bf16x2 e, e, big, nil;
    fma.rn.bf16x2 $1, e, $6, nil;
    shr.u32 o, lo, 6;
    and.b32 o, o, 0x01C001C0;
    and.b32 s, lo, nil;
    or.b32 o, o, s;
    fma.rn.bf16x2 o, o, big, nil;
    fma.rn.bf16x2 $2, o, $5, nil;
    shr.u32 o, hi, 6;
    and.b32 o, o, 0x01C001C0;
    and.b32 s, hi, nil;
    or.b32 o, o, s;
    fma.rn.bf16x2 o, o, big, nil;
    fma.rn.bf16x2 $3, o, $6, nil;
}""")


@triton.jit
def _unpack(codes, word, ROWS: tl.constexpr, GROUPS: tl.constexpr, OPERAND: tl.constexpr, USE_PTX: tl.constexpr):
    """Even and odd channels, [ROWS, GROUPS * 16] each, of codes [ROWS, GROUPS, 16] and one word of scales per row.

    Channels come out in the order (byte pair, group, byte of the pair): then the sixteen bytes that a thread loads are
    the ones it feeds to the matrix unit. Queries and keys pass through here alike, so the order does not matter.
    """
    codes = tl.reshape(codes, [ROWS, GROUPS, 16])
    byte = ((word[:, None] >> (tl.arange(0, GROUPS) * 8)[None, :]) & 255).to(tl.int32)
    if USE_PTX:
        bits = tl.where(byte == 255, 0x7FC0, tl.where(byte == 0, 0x0040, byte << 7))
        scale = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        even, odd = tl.inline_asm_elementwise(
            UNPACK_PTX, "=&r,=&r,=&r,=&r,r,r,r", [codes, tl.broadcast_to(scale[:, :, None], codes.shape)],
            (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        scale = ue8m0_to_f32(byte)[:, :, None]
        even = (e2m1_code_to_f32(codes & 15) * scale).to(OPERAND)
        odd = (e2m1_code_to_f32(codes >> 4) * scale).to(OPERAND)
    even = tl.permute(tl.reshape(even, [ROWS, GROUPS, 8, 2]), [0, 2, 1, 3])
    odd = tl.permute(tl.reshape(odd, [ROWS, GROUPS, 8, 2]), [0, 2, 1, 3])
    return tl.reshape(even, [ROWS, GROUPS * 16]), tl.reshape(odd, [ROWS, GROUPS * 16])


@triton.jit
def _swap_rows(x, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row (i, a, b, j) of [ROWS, COLUMNS] becomes row (i, b, a, j), j < 8.

    A warp loads eight rows with consecutive lanes, the next warp the next eight; the matrix unit wants sixteen rows in
    each warp. Renaming the rows instead of moving them keeps the keys in the registers they were unpacked in.
    """
    x = tl.permute(tl.reshape(x, [ROWS // (8 * A * B), A, B, 8, COLUMNS]), [0, 2, 1, 3, 4])
    return tl.reshape(x, [ROWS, COLUMNS])


@triton.jit
def _store(
    scores_ptr, maxima_ptr, score, start, row, inside, width,
    BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr, HAS_MAXIMA: tl.constexpr,
):  # fmt: skip
    """A tile of scores [BLOCK_E, BLOCK_Q] and the maxima of its blocks."""
    column = start + tl.arange(0, BLOCK_E)[:, None]
    tl.store(scores_ptr + row[None, :] * width + column, score, mask=inside[None, :] & (column < width))
    if HAS_MAXIMA:
        blocks = tl.cdiv(width, BLOCK)
        grouped = tl.reshape(score, [BLOCK_E // BLOCK, BLOCK, BLOCK_Q])
        broken = tl.max((grouped != grouped).to(tl.int32), axis=1) > 0  # tl.max passes over NaN
        best = tl.where(broken, float("nan"), tl.max(grouped, axis=1))
        block = start // BLOCK + tl.arange(0, BLOCK_E // BLOCK)[:, None]
        tl.store(maxima_ptr + row[None, :] * blocks + block, best, mask=inside[None, :] & (block < blocks))


@triton.jit
def _indexer_kernel(
    q_codes_ptr,  # [R, Q, H, D / 2] uint8
    q_scales_ptr,  # [R, Q, H] words of D / 32 bytes
    weights_ptr,  # [R, Q, H]
    k_codes_ptr,  # [R, E, D / 2] uint8
    k_scales_ptr,  # [R, E] words of D / 32 bytes
    positions_ptr,  # [R, Q]
    lengths_ptr,  # [R]
    candidates_ptr,  # [R, Q, C] int32
    scores_ptr,  # [R, Q, width] fp32
    maxima_ptr,  # [R, Q, blocks] fp32
    Q, H, E, ratio, width, tiles,
    kc_request, kc_entry, ks_request, ks_entry,  # strides in elements
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_CANDIDATES: tl.constexpr, HAS_MAXIMA: tl.constexpr,
    OPERAND: tl.constexpr, USE_PTX: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    # one program per (`tiles` tiles of entries, BLOCK_Q queries, request); int64 because R * Q * E passes 2**31
    GROUPS: tl.constexpr = HALF // 16
    N: tl.constexpr = BLOCK_Q * HEADS
    request = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * tiles * BLOCK_E
    last = tl.minimum(first + tiles * BLOCK_E, width)
    byte = tl.arange(0, HALF)
    k_codes_ptr += request * (kc_request // ALIGN) * ALIGN
    k_scales_ptr += request * ks_request

    query = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row = request * Q + query  # [BLOCK_Q]
    length = tl.minimum(tl.load(lengths_ptr + request).to(tl.int32), E) if HAS_LENGTHS else E
    position = tl.load(positions_ptr + row, mask=query < Q, other=-1).to(tl.int32)
    limit = tl.minimum((position + 1) // ratio, length)  # entries this query may see
    seen = last if HAS_CANDIDATES else tl.minimum(last, tl.max(limit, axis=0))

    # Queries and head weights, once: columns n = query * HEADS + head.
    column = tl.arange(0, N)
    head = column % HEADS
    column_query = tl.program_id(1) * BLOCK_Q + column // HEADS
    live = (head < H) & (column_query < Q)
    q_row = (request * Q + column_query) * H + head
    q_codes = tl.load(q_codes_ptr + q_row[:, None] * HALF + byte[None, :], mask=live[:, None], other=0)
    q_scales = tl.load(q_scales_ptr + q_row, mask=live, other=0)
    q_even, q_odd = _unpack(q_codes, q_scales, N, GROUPS, OPERAND, USE_PTX)
    q_even, q_odd = tl.trans(q_even), tl.trans(q_odd)  # [HALF, N]
    weight = tl.load(weights_ptr + q_row, mask=live, other=0.0).to(tl.float32)

    offset = tl.arange(0, BLOCK_E)
    for start in range(first, seen, BLOCK_E):
        if HAS_CANDIDATES:  # BLOCK_Q is 1: every query has its own list
            slot = start + offset
            block = tl.load(
                candidates_ptr + tl.max(row, axis=0) * (width // BLOCK) + slot // BLOCK,
                mask=slot < width, other=-1,
            )  # fmt: skip
            entry = tl.where((block >= 0) & (block < tl.cdiv(E, BLOCK)), block * BLOCK + slot % BLOCK, E)
            k_row = entry.to(tl.int64)
            base = 0
        else:
            entry = start + offset
            k_row = offset  # the tile's base in 64 bits, its rows in 32
            base = request * 0 + start
        stored = entry < length
        # A record stands at a multiple of ALIGN bytes, no more. Said here, since Triton takes an entry that comes out
        # of `tl.where` for a multiple of BLOCK, and would read the codes of an odd one across its alignment.
        at = tl.multiple_of(k_row * kc_entry, [ALIGN])[:, None]
        k_codes = tl.load(
            k_codes_ptr + base * (kc_entry // ALIGN) * ALIGN + at + byte[None, :], mask=stored[:, None], other=0
        )
        k_scales = tl.load(k_scales_ptr + base * ks_entry + k_row * ks_entry, mask=stored, other=0)
        k_even, k_odd = _unpack(k_codes, k_scales, BLOCK_E, GROUPS, OPERAND, USE_PTX)
        k_even = _swap_rows(k_even, 2, 4, BLOCK_E, HALF)
        k_odd = _swap_rows(k_odd, 2, 4, BLOCK_E, HALF)
        dot = tl.dot(k_even, q_even, input_precision="ieee")
        dot = tl.dot(k_odd, q_odd, dot, input_precision="ieee")  # [BLOCK_E, N]
        share = tl.maximum(dot, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
        score = tl.sum(tl.reshape(share, [BLOCK_E, BLOCK_Q, HEADS]), axis=2)  # [BLOCK_E, BLOCK_Q]
        score = _swap_rows(score, 4, 2, BLOCK_E, BLOCK_Q)
        score = tl.where(entry[:, None] < limit[None, :], score, float("-inf"))
        _store(
            scores_ptr, maxima_ptr, score, start, row, query < Q, width,
            BLOCK_E, BLOCK_Q, BLOCK, HAS_MAXIMA,
        )  # fmt: skip

    # Tiles that none of these queries may see cost no product.
    nothing = tl.full([BLOCK_E, BLOCK_Q], float("-inf"), tl.float32)
    for start in range(first + tl.cdiv(tl.maximum(seen - first, 0), BLOCK_E) * BLOCK_E, last, BLOCK_E):
        _store(
            scores_ptr, maxima_ptr, nothing, start, row, query < Q, width,
            BLOCK_E, BLOCK_Q, BLOCK, HAS_MAXIMA,
        )  # fmt: skip


def indexer(
    q_codes, q_scales, weights, k_codes, k_scales, positions, ratio,
    lengths=None, candidates=None, block_size=None, block_maxima=False,
):  # fmt: skip
    """Scores of every query against the entries of its request: float32 [R, Q, E], -inf where not visible.

    q_codes [R, Q, H, D/2], q_scales [R, Q, H, D/32]: packed queries, contiguous uint8.
    weights [R, Q, H]: the head weights, contiguous floating point.
    k_codes [R, E, D/2], k_scales [R, E, D/32]: packed keys, uint8; two planes or slices of one record tensor.
    positions [R, Q]: absolute position of each query, contiguous int32 or int64; -1 sees nothing.
    ratio: tokens per entry.
    lengths [R]: entries that request r really has; the rest of its row is not read.
    candidates [R, Q, C] int32 with block_size w: score only these blocks of w entries (-1: none). The result is then
        [R, Q, C * w], column c * w + i for entry candidates[c] * w + i.
    block_maxima: also return the maximum of every block of block_size columns, [R, Q, ceil(width / w)].

    A NaN among the operands of a score, such as a scale byte 255, gives NaN there and in its block.
    """
    R, Q, H, HALF, E = _check(q_codes, q_scales, weights, k_codes, k_scales, positions, ratio, lengths)
    _check_blocks(candidates, block_size, block_maxima, (R, Q), q_codes.device)
    width = E if candidates is None else candidates.shape[2] * block_size
    scores = torch.empty(R, Q, width, device=q_codes.device)
    maxima = torch.empty(R, Q, triton.cdiv(width, block_size), device=q_codes.device) if block_maxima else None
    if R and Q and width:
        heads = triton.next_power_of_2(H)
        if candidates is None:
            columns = MAX_COLUMNS if HALF > 16 else 64  # Triton 3.6 does not compile 128 columns of 16 bytes
            block_q = min(triton.next_power_of_2(Q), max(1, columns // heads))
            block_q = max(block_q, 16 // heads)  # a matrix product has at least 16 columns
        else:
            block_q, heads = 1, max(16, heads)
        query_blocks, all_tiles = triton.cdiv(Q, block_q), triton.cdiv(width, BLOCK_E)
        tiles = max(1, min(32, R * query_blocks * all_tiles // 4096))  # enough programs to fill the chip several times
        q_words, k_words = _words(q_scales, "q_scales"), _words(k_scales, "k_scales")
        compiled = isinstance(_indexer_kernel, triton.JITFunction)  # else Triton's interpreter: float32 operands
        _indexer_kernel[(triton.cdiv(all_tiles, tiles), query_blocks, R)](
            q_codes, q_words, weights, k_codes, k_words, positions, lengths, candidates, scores, maxima,
            Q, H, E, ratio, width, tiles, k_codes.stride(0), k_codes.stride(1), k_words.stride(0), k_words.stride(1),
            HEADS=heads, HALF=HALF, BLOCK_Q=block_q, BLOCK_E=BLOCK_E, BLOCK=block_size or 1,
            HAS_LENGTHS=lengths is not None, HAS_CANDIDATES=candidates is not None, HAS_MAXIMA=block_maxima,
            OPERAND=tl.bfloat16 if compiled else tl.float32, USE_PTX=compiled and torch.version.hip is None,
            ALIGN=math.gcd(16, k_codes.data_ptr(), k_codes.stride(0) if R > 1 else 16, k_codes.stride(1)),
            num_warps=4, num_stages=4,
        )  # fmt: skip
    return (scores, maxima) if block_maxima else scores


def _words(scales, name):
    """The D/32 scale bytes of a row as one integer, so that a row's scales are one load."""
    width = scales.shape[-1]
    if any(s % width for s in scales.stride()[:-1]) or scales.storage_offset() % width or scales.data_ptr() % width:
        raise ValueError(f"{name} must have rows aligned to their {width} bytes, got {_describe(scales)}")
    return scales.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]).squeeze(-1)


def _describe(t):
    return f"{t.dtype} {tuple(t.shape)} with strides {t.stride()} on {t.device}"


def _expect(t, name, shape, dtypes, device, contiguous=True):
    if t.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {_describe(t)}")
    if tuple(t.shape) != tuple(shape) or t.device != device:
        raise ValueError(f"{name} must have shape {tuple(shape)} on {device}, got {_describe(t)}")
    if t.numel() and not (t.is_contiguous() if contiguous else t.stride(-1) == 1):
        raise ValueError(
            f"{name} must {'be contiguous' if contiguous else 'have unit last stride'}, got {_describe(t)}"
        )


def _check(q_codes, q_scales, weights, k_codes, k_scales, positions, ratio, lengths):
    if q_codes.ndim != 4 or k_codes.ndim != 3:
        raise ValueError(
            f"q_codes must be [R, Q, H, D/2] and k_codes [R, E, D/2], got {_describe(q_codes)} and {_describe(k_codes)}"
        )
    R, Q, H, half = q_codes.shape
    E, device = k_codes.shape[1], q_codes.device
    if not 1 <= H <= MAX_COLUMNS or half not in (16, 32, 64, 128):
        raise ValueError(f"H must be 1..{MAX_COLUMNS} and D 32, 64, 128 or 256, got H={H}, D={2 * half}")
    if ratio < 1:
        raise ValueError(f"ratio must be at least 1, got {ratio}")
    byte, integer = (torch.uint8,), (torch.int32, torch.int64)
    _expect(q_codes, "q_codes", (R, Q, H, half), byte, device)
    _expect(q_scales, "q_scales", (R, Q, H, half // 16), byte, device)
    _expect(weights, "weights", (R, Q, H), (torch.float32, torch.bfloat16, torch.float16), device)
    _expect(k_codes, "k_codes", (R, E, half), byte, device, contiguous=False)
    _expect(k_scales, "k_scales", (R, E, half // 16), byte, device, contiguous=False)
    _expect(positions, "positions", (R, Q), integer, device)
    if lengths is not None:
        _expect(lengths, "lengths", (R,), integer, device)
    return R, Q, H, half, E


def _check_blocks(candidates, block_size, block_maxima, rows, device):
    if candidates is None and not block_maxima:
        return
    if block_size is None or not 1 <= block_size <= BLOCK_E or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two up to {BLOCK_E}, got {block_size}")
    if candidates is not None:
        if candidates.ndim != 3:
            raise ValueError(f"candidates must be [R, Q, C], got {_describe(candidates)}")
        _expect(candidates, "candidates", (*rows, candidates.shape[2]), (torch.int32,), device)


def aot_cases():
    types = {
        **dict.fromkeys(("q_codes_ptr", "k_codes_ptr"), "*u8"),
        **dict.fromkeys(("q_scales_ptr", "k_scales_ptr", "positions_ptr", "lengths_ptr", "candidates_ptr"), "*i32"),
        **dict.fromkeys(("weights_ptr", "scores_ptr", "maxima_ptr"), "*fp32"),
        **dict.fromkeys(("H", "E", "width", "kc_entry"), "i32:16"),
        **dict.fromkeys(("kc_request", "ks_request"), "i64:16"),
        **dict.fromkeys(("Q", "ratio", "tiles", "ks_entry"), "i32"),
    }

    def case(name, queries, columns, candidates=False, maxima=False, ptx=True):
        values = {
            "HEADS": 32, "HALF": 64, "BLOCK_Q": queries, "BLOCK_E": BLOCK_E, "BLOCK": 8, "HAS_LENGTHS": True,
            "HAS_CANDIDATES": candidates, "HAS_MAXIMA": maxima, "OPERAND": tl.bfloat16, "USE_PTX": ptx, "ALIGN": 16,
        }  # fmt: skip
        if not candidates:
            values["candidates_ptr"] = None
        if not maxima:
            values["maxima_ptr"] = None
        expected = {
            80: ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16"],
            90: [f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16", "cp.async"],
            100: ["tcgen05.mma"],
        }
        return name, _indexer_kernel, types, values, {"num_warps": 4, "num_stages": 4}, expected

    def records(name, half, align, block, forbidden):
        """Keys as slices of whole records, which stand at multiples of `align` bytes: no wider access than that."""
        _, kernel, _, values, options, _ = case(name, 1, 32, candidates=True)
        values |= {"HALF": half, "ALIGN": align, "BLOCK": block}
        scales = {16: "*u8", 32: "*i16", 64: "*i32"}[half]
        kinds = types | dict.fromkeys(("q_scales_ptr", "k_scales_ptr"), scales)
        kinds |= {"kc_entry": "i32", "width": "i32", "positions_ptr": "*i64"}
        return name, kernel, kinds, values, options, {80: forbidden, 90: forbidden}

    wide = ["!cp.async.cg.shared.global"]
    return [
        records("records of 68 bytes", 64, 4, 8, wide),
        records("records of 34 bytes", 32, 2, 4, [*wide, "!cp.async.ca.shared.global"]),
        records("records of 17 bytes", 16, 1, 2, [*wide, "!cp.async.ca.shared.global", "!ld.global.b16"]),
        case("decode", 1, 32),
        case("prefill", 4, 128, maxima=True),
        case("candidates", 1, 32, candidates=True),
        case("unpacked without PTX", 1, 32, ptx=False),
    ]
