"""Attention of every head over window records and selected records in one softmax with a sink, read packed.

    s_j = (q . k_j) * D^-0.5        over the <= W window records and <= K selected records of this query
    o   = sum_j exp(s_j) k_j / (sum_j exp(s_j) + exp(sink))        a record is key and value at once

One program serves HEADS heads of one query, so a record is read and decoded once for all of them: exactly, to bfloat16,
in registers, and from there into one tile of shared memory that is key and value, the B operand of both products. The
scores of 64 heads by 128 records and the output of 64 heads by D channels lie across eight warps.

Few queries are split over records to fill the GPU; `_combine_kernel` then joins the partial softmaxes. With enough
queries (decode of a large batch, prefill) one program sees all records of its query.

Shapes: Q queries, H heads, D channels; window records D E4M3 codes + D/32 UE8M0 scales, selected records D/2 bytes of
E2M1 codes + D/16 E4M3 scales (unsigned: their sign bit is ignored). A float32 query goes through the bfloat16 unit as
three exact terms.
Reads Q*(W*(D + D/32) + K*(D/2 + D/16) + H*D*2) bytes, writes Q*H*D*2; 4*Q*H*(W+K)*D FLOPs. Beyond some 16 queries the
floor is the matrix unit, before that latency. Such a program fills an SM, and its loads, decoding, softmax and products
follow one another: at D = 512 a tile of 128 records takes 9 us on an H200, of which the products are 2.5.
Reference: kernels/reference/sparse_attention.py. Test: tests/kernels/test_sparse_attention.py.
Bench: `sparse_attention`.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from kernels.numerics import e2m1_code_to_f32, e4m3_bits_to_f32, settled, ue8m0_to_f32

LOWEST = tl.constexpr(-1e30)  # running maximum before the first record; finite, so that differences never are NaN
LOG2E = tl.constexpr(1.4426950408889634)

# Decoded records are held times 2^-8, which leaves room for the one product in FP4_PTX; scores and output undo it.
SHIFT = tl.constexpr(2.0**-8)

# Four packed FP4 bytes and a pair of bfloat16 scales * 2^118 -> the eight channels times 2^-8, in pairs, the even one
# in the low half. A code s|ee|m at the bits 15 and 8..6 of a bfloat16 reads as its value times 2^-126, subnormals too.
FP4_PTX = tl.constexpr("""{
    .reg .b32 even, x, y, nil;
    mov.b32 nil, 0x80008000;
    shl.b32 even, $4, 4;
    prmt.b32 x, even, $4, 0x4000;
    shr.u32 y, x, 6;
    and.b32 y, y, 0x01C001C0;
    lop3.b32 y, x, nil, y, 0xEA;
    fma.rn.bf16x2 $0, y, $5, nil;
    prmt.b32 x, even, $4, 0x5010;
    shr.u32 y, x, 6;
    and.b32 y, y, 0x01C001C0;
    lop3.b32 y, x, nil, y, 0xEA;
    fma.rn.bf16x2 $1, y, $5, nil;
    prmt.b32 x, even, $4, 0x6020;
    shr.u32 y, x, 6;
    and.b32 y, y, 0x01C001C0;
    lop3.b32 y, x, nil, y, 0xEA;
    fma.rn.bf16x2 $2, y, $5, nil;
    prmt.b32 x, even, $4, 0x7030;
    shr.u32 y, x, 6;
    and.b32 y, y, 0x01C001C0;
    lop3.b32 y, x, nil, y, 0xEA;
    fma.rn.bf16x2 $3, y, $5, nil;
}""")

# Four E4M3 bytes and a float32 scale -> the four channels times the scale, in pairs of bfloat16.
FP8_PTX = tl.constexpr("""{
    .reg .b16 low, high, a, b;
    .reg .b32 pair;
    .reg .f32 x, y;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 pair, low;
    mov.b32 {a, b}, pair;
    cvt.f32.f16 x, a;
    cvt.f32.f16 y, b;
    mul.f32 x, x, $3;
    mul.f32 y, y, $3;
    cvt.rn.bf16x2.f32 $0, y, x;
    cvt.rn.f16x2.e4m3x2 pair, high;
    mov.b32 {a, b}, pair;
    cvt.f32.f16 x, a;
    cvt.f32.f16 y, b;
    mul.f32 x, x, $3;
    mul.f32 y, y, $3;
    cvt.rn.bf16x2.f32 $1, y, x;
}""")


@triton.jit
def _rows(table_ptr, tile, count, ROWS: tl.constexpr):
    """The records of a tile of a query, -1 where there is none."""
    j = tile * ROWS + tl.arange(0, ROWS)
    return tl.load(table_ptr + j, mask=j < count, other=-1)


@triton.jit
def _load(codes_ptr, scales_ptr, row, codes_stride, scales_stride, BYTES: tl.constexpr, PADDED: tl.constexpr,
          GROUP: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """Records as they lie: codes, four bytes to an int32 [ROWS, PADDED / 4], and scales, one for GROUP bytes.

    Absent rows (< 0) and what lies past BYTES are zeros. Every record stands at a multiple of ALIGN bytes.
    """
    present = (row >= 0)[:, None]
    at = row.to(tl.int64)
    column = tl.arange(0, PADDED // GROUP)[None, :]
    inside = present if BYTES == PADDED else present & (column < BYTES // GROUP)
    scale = tl.load(scales_ptr + (at * scales_stride)[:, None] + column, mask=inside, other=0)
    column = tl.arange(0, PADDED // 4)[None, :]
    inside = present if BYTES == PADDED else present & (column < BYTES // 4)
    if ALIGN % 4 == 0:
        start = tl.multiple_of(at * (codes_stride // 4), [ALIGN // 4])[:, None]
        code = tl.load(codes_ptr.to(tl.pointer_type(tl.int32)) + start + column, mask=inside, other=0)
    else:
        code = tl.zeros([row.shape[0], PADDED // 4], tl.int32)
        for b in tl.static_range(4):
            byte = tl.load(codes_ptr + (at * codes_stride)[:, None] + column * 4 + b, mask=inside, other=0)
            code |= byte.to(tl.int32) << (8 * b)
    return code, scale


@triton.jit
def _dealt(value, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] of values in any shape, the channels dealt: see `_dealt_channels`."""
    value = tl.permute(tl.reshape(value, [ROWS, WIDTH // 32, 4, 8]), [0, 2, 1, 3])
    return settled(tl.reshape(value, [ROWS, WIDTH]))


@triton.jit
def _dealt_channels(WIDTH: tl.constexpr):
    """The channels as tiles hold them: eights 0, 4, 8, ... of the record, then 1, 5, 9, ...

    A thread loads 16 bytes, 32 channels of FP4, and stores them to shared memory eight at a time, 16 bytes; dealt like
    this, neighbouring threads store to neighbouring banks. Queries and outputs are dealt alike.
    """
    place = tl.arange(0, WIDTH)
    eight = place // 8 % (WIDTH // 32) * 4 + place // 8 // (WIDTH // 32)
    return tl.max_contiguous(tl.multiple_of(eight * 8 + place % 8, 8), 8)


@triton.jit
def _fp4_values(code, scale, DTYPE: tl.constexpr):
    """FP4 records times 2^-8, [ROWS, WIDTH]: codes int32 [ROWS, WIDTH / 8], E4M3 scales [ROWS, WIDTH / 16]."""
    ROWS: tl.constexpr = code.shape[0]
    WIDTH: tl.constexpr = code.shape[1] * 8
    code = tl.reshape(code, [ROWS, WIDTH // 16, 2])
    if DTYPE.is_bf16():
        # An E4M3 code moved to the exponent of a float32 reads as its value times 2^-120, subnormals included.
        mag = scale.to(tl.int32) & 0x7F
        bits = (mag << 20).to(tl.float32, bitcast=True) * 6.646139978924579e35 * 6.646139978924579e35  # 2^119 each
        bits = tl.where(mag == 0x7F, float("nan"), bits).to(tl.int32, bitcast=True)
        twice = ((bits & -65536) | (bits >> 16))[:, :, None]  # exact in bfloat16, as a pair
        a, b, c, d = tl.inline_asm_elementwise(
            FP4_PTX, "=&r,=&r,=&r,=&r,r,r", [code, twice], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
        # join puts the newest dimension last: (a c), (b d) interleave to a b c d
        pair = tl.join(tl.join(a, c), tl.join(b, d))
        value = tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    else:
        code = code[:, :, :, None] >> (4 * tl.arange(0, 8))[None, None, None, :]
        value = e2m1_code_to_f32(code & 0xF) * (e4m3_bits_to_f32(scale & 0x7F) * SHIFT)[:, :, None, None]
    return _dealt(value, ROWS, WIDTH)


@triton.jit
def _fp8_values(code, scale, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """FP8 records times 2^-8, [ROWS, WIDTH]: codes int32 [ROWS, WIDTH / 4], UE8M0 scales [ROWS, WIDTH / 32]."""
    ROWS: tl.constexpr = code.shape[0]
    WIDTH: tl.constexpr = code.shape[1] * 4
    code = tl.reshape(code, [ROWS, WIDTH // 32, 8])
    scale = (ue8m0_to_f32(scale) * SHIFT)[:, :, None]
    if NATIVE:
        a, b = tl.inline_asm_elementwise(
            FP8_PTX, "=&r,=&r,r,r", [code, scale], dtype=(tl.int32,) * 2, is_pure=True, pack=1
        )
        pair = tl.join(a, b)
        value = tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    else:
        code = (code[:, :, :, None] >> (8 * tl.arange(0, 4))[None, None, None, :]) & 0xFF
        value = (e4m3_bits_to_f32(code) * scale[:, :, :, None]).to(DTYPE)
    return _dealt(value, ROWS, WIDTH)


@triton.jit
def _product(a, b, acc, TERMS: tl.constexpr):
    """acc + a . b with a rounded to the type of b, or split into three bfloat16 terms that add up to it."""
    if TERMS == 1:
        acc = tl.dot(a.to(b.dtype), b, acc, input_precision="ieee")
    else:
        for _ in tl.static_range(TERMS):
            term = a.to(tl.bfloat16)
            acc = tl.dot(term, b, acc)
            a -= term.to(tl.float32)
    return acc


@triton.jit
def _attend(k, present, q, acc, m, l, to_log2, once, TERMS: tl.constexpr):
    """One tile of the running softmax: outputs acc [HEADS, WIDTH], maxima m and sums l [HEADS] after it."""
    s = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    # Once, in a loop that hides from the compiler how one product feeds the other: seeing that, it would lay all eight
    # warps along the 64 rows of the scores, which is to compute them twice.
    for _ in range(once):
        s = _product(q, tl.trans(k), s, TERMS)
    s *= to_log2  # [HEADS, ROWS]
    s = tl.where(tl.abs(s) < float("inf"), s, float("nan"))  # an infinite score must not pass for an absent record
    s = tl.where(present[None, :], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, axis=1))
    p = tl.exp2(s - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    l = l * alpha + tl.sum(p, axis=1)
    acc = _product(p, k, acc * alpha[:, None], TERMS)
    return acc, m_new, l


@triton.jit(do_not_specialize_on_alignment=["w_codes_stride", "codes_stride"])
def _sparse_attention_kernel(
    q_ptr,  # [Q, H, D]
    w_codes_ptr,  # [*, D] uint8
    w_scales_ptr,  # [*, D / 32] uint8
    slots_ptr,  # [Q, W] int32
    codes_ptr,  # [*, D / 2] uint8
    scales_ptr,  # [*, D / 16] uint8
    indices_ptr,  # [Q, K] int32
    sink_ptr,  # [H] fp32
    out_ptr,  # [Q, H, D], or float32 [Q, splits, H, D]
    stats_ptr,  # [Q, splits, 2, H] fp32: maximum (base 2) and sum of each part
    H,
    W,
    K,
    tiles_per_split,
    to_log2,
    q_stride,
    q_head_stride,
    w_codes_stride,
    w_scales_stride,
    slots_stride,
    codes_stride,
    scales_stride,
    indices_stride,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    DTYPE: tl.constexpr,
    TERMS: tl.constexpr,
    NATIVE: tl.constexpr,
    W_ALIGN: tl.constexpr,
    ALIGN: tl.constexpr,
):
    # one program per (HEADS heads, split, query)
    query = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    channel = _dealt_channels(WIDTH)
    here = (head < H)[:, None] & (channel < D)[None, :]
    at = head[:, None] * q_head_stride + channel[None, :]
    q = tl.load(q_ptr + query * q_stride + at, mask=here, other=0.0)  # [HEADS, WIDTH]

    # The sink is a record without a value; the first split counts it.
    sink = tl.load(sink_ptr + head, mask=head < H, other=0.0) * LOG2E
    sink = tl.clamp(sink, LOWEST, -LOWEST, propagate_nan=tl.PropagateNan.ALL)
    m = tl.full([HEADS], LOWEST, tl.float32)
    l = tl.zeros([HEADS], tl.float32)
    for _ in range(split, 1):
        m = sink
        l += 1.0
    acc = tl.zeros([HEADS, WIDTH], tl.float32)

    # Tiles 0 .. window_tiles - 1 are window records, the rest selected ones; a split takes a contiguous run of them.
    window_tiles = tl.cdiv(W, ROWS)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, window_tiles + tl.cdiv(K, ROWS))
    once = tl.minimum(last - first, 1)
    slots_ptr += query * slots_stride
    indices_ptr += query * indices_stride
    for tile in range(first, tl.minimum(last, window_tiles)):
        row = _rows(slots_ptr, tile, W, ROWS)
        code, scale = _load(w_codes_ptr, w_scales_ptr, row, w_codes_stride, w_scales_stride, D, WIDTH, 32, W_ALIGN)
        k = _fp8_values(code, scale, DTYPE, NATIVE)
        acc, m, l = _attend(k, row >= 0, q, acc, m, l, to_log2, once, TERMS)
    for tile in range(tl.maximum(first, window_tiles) - window_tiles, last - window_tiles):
        row = _rows(indices_ptr, tile, K, ROWS)
        code, scale = _load(codes_ptr, scales_ptr, row, codes_stride, scales_stride, D // 2, WIDTH // 2, 8, ALIGN)
        k = _fp4_values(code, scale, DTYPE)
        acc, m, l = _attend(k, row >= 0, q, acc, m, l, to_log2, once, TERMS)

    if SPLIT:
        part = query * tl.num_programs(1) + split
        tl.store(stats_ptr + part * 2 * H + head, m, mask=head < H)
        tl.store(stats_ptr + part * 2 * H + H + head, l, mask=head < H)
    else:
        part = query
        acc *= (1.0 / (l * SHIFT))[:, None]
    out = out_ptr + (part * H + head)[:, None] * D + channel[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _combine_kernel(
    parts_ptr,  # [Q, splits, H, D] fp32
    stats_ptr,  # [Q, splits, 2, H] fp32
    out_ptr,  # [Q, H, D]
    H,
    splits,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    # one program per (head, query)
    head = tl.program_id(0)
    query = tl.program_id(1).to(tl.int64)
    part = tl.arange(0, SPLITS)
    stats = stats_ptr + (query * splits + part) * 2 * H + head
    m = tl.load(stats, mask=part < splits, other=LOWEST)
    l = tl.load(stats + H, mask=part < splits, other=0.0)
    channel = tl.arange(0, WIDTH)
    at = ((query * splits + part) * H + head)[:, None] * D + channel[None, :]
    acc = tl.load(parts_ptr + at, mask=(part < splits)[:, None] & (channel < D)[None, :], other=0.0)
    m_all = tl.max(m, axis=0)
    weight = tl.exp2(m - m_all)
    norm = 1.0 / (tl.sum(weight * l, axis=0) * SHIFT)
    out = tl.sum(acc * weight[:, None], axis=0) * norm
    tl.store(out_ptr + (query * H + head) * D + channel, out.to(out_ptr.dtype.element_ty), mask=channel < D)


def sparse_attention(q, window_codes, window_scales, slots, codes, scales, indices, sink, splits=None):
    """Attention output [Q, H, D] in the type of q, float32 or bfloat16 [Q, H, D].

    window_codes uint8 [*, D], window_scales uint8 [*, D / 32]: FP8 records, a ring or a contiguous run.
    slots int32 [Q, W]: their rows for each query, -1 absent.
    codes uint8 [*, D / 2], scales uint8 [*, D / 16]: packed FP4 records; indices int32 [Q, K]: rows, -1 absent.
    sink float32 [H]: not scaled. A query without any record gets zeros. splits: parts a query's records are cut into,
    by default as many as fill the GPU. Rows are not checked against the number of records.
    """
    queries, heads, width = _check(q, window_codes, window_scales, slots, codes, scales, indices, sink)
    out = torch.empty(queries, heads, width, dtype=q.dtype, device=q.device)
    if not queries:
        return out
    interpreted = q.device.type == "cpu"
    aligned = _alignment(window_codes), _alignment(codes)
    rows, head_tile, splits = _plan(queries, heads, slots.shape[1], indices.shape[1], q, min(aligned), splits)
    tiles = -(-slots.shape[1] // rows) + -(-indices.shape[1] // rows)
    per_split = max(1, -(-tiles // splits))
    splits = max(1, -(-tiles // per_split))
    parts, stats = out, None
    if splits > 1:
        parts = torch.empty(queries, splits, heads, width, dtype=torch.float32, device=q.device)
        stats = torch.empty(queries, splits, 2, heads, dtype=torch.float32, device=q.device)
    padded = triton.next_power_of_2(width)
    _sparse_attention_kernel[(-(-heads // head_tile), splits, queries)](
        q, window_codes, window_scales, slots, codes, scales, indices, sink, parts, stats,
        heads, slots.shape[1], indices.shape[1], per_split, math.log2(math.e) / math.sqrt(width) / SHIFT.value,
        q.stride(0), q.stride(1), window_codes.stride(0), window_scales.stride(0), slots.stride(0),
        codes.stride(0), scales.stride(0), indices.stride(0),
        D=width, WIDTH=padded, HEADS=head_tile, ROWS=rows, SPLIT=splits > 1,
        DTYPE=tl.float32 if interpreted else tl.bfloat16,
        TERMS=3 if q.dtype == torch.float32 and not interpreted else 1,
        NATIVE=not interpreted and torch.cuda.get_device_capability(q.device) >= (8, 9),
        W_ALIGN=aligned[0], ALIGN=aligned[1],
        num_warps=8, num_stages=1,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(heads, queries)](
            parts, stats, out, heads, splits,
            D=width, WIDTH=padded, SPLITS=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out


@functools.cache
def _processors(device):
    return 132 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def _plan(queries, heads, window, selected, q, alignment, splits):
    """(records a tile, heads a program, splits); a program fills an SM, by its registers and, wide, its shared memory.

    Wide programs decode a record once for 64 heads, 128 records at a time. Small ones of 16 heads and 64 records finish
    sooner where there are too few queries to fill the GPU; float32, with its three terms, needs them.
    """
    processors = _processors(q.device)
    few = queries * -(-heads // 16) * -(-(window + selected) // 64) <= processors
    head_tile = 16 if few or q.dtype == torch.float32 else min(64, max(16, triton.next_power_of_2(heads)))
    # Records at odd addresses take 64: with 128, Triton 3.6 compiles their bytes to wrong numbers (seen on an H200).
    rows = 128 if head_tile == 64 and alignment % 4 == 0 else 64
    if splits is None:
        splits = min(16, max(1, processors // (queries * -(-heads // head_tile))))
    return rows, head_tile, splits


def _alignment(codes):
    """Every record stands at a multiple of so many bytes, 16 at most."""
    return math.gcd(codes.stride(0), codes.data_ptr(), 16)


def _describe(t):
    return f"{t.dtype} {tuple(t.shape)} with strides {t.stride()} on {t.device}"


def _check(q, window_codes, window_scales, slots, codes, scales, indices, sink):
    if q.ndim != 3 or q.dtype not in (torch.float32, torch.bfloat16) or q.stride(2) != 1:
        raise TypeError(
            f"q must be float32 or bfloat16 [queries, heads, width] with unit last stride, got {_describe(q)}"
        )
    queries, heads, width = q.shape
    if width % 32 or not 64 <= width <= 512:
        raise ValueError(f"the width of q must be a multiple of 32 from 64 to 512, got {width}")
    if not 1 <= heads <= 128:
        raise ValueError(f"q must have 1 to 128 heads, got {heads}")
    planes = ("window_codes", window_codes, width), ("window_scales", window_scales, width // 32)
    planes += ("codes", codes, width // 2), ("scales", scales, width // 16)
    for name, t, columns in planes:
        if t.dtype != torch.uint8 or t.ndim != 2 or t.shape[1] != columns or t.stride(1) != 1 or t.device != q.device:
            raise ValueError(
                f"{name} must be uint8 [records, {columns}] with unit last stride on {q.device}, got {_describe(t)}"
            )
    for name, codes_plane, scales_plane in (("window", window_codes, window_scales), ("selected", codes, scales)):
        if codes_plane.shape[0] != scales_plane.shape[0]:
            raise ValueError(f"{codes_plane.shape[0]} {name} codes stand beside {scales_plane.shape[0]} scales")
    for name, t in (("slots", slots), ("indices", indices)):
        if t.dtype != torch.int32 or t.ndim != 2 or t.shape[0] != queries or t.device != q.device:
            raise ValueError(f"{name} must be int32 [{queries}, *] on {q.device}, got {_describe(t)}")
        if t.shape[1] > 1 and t.stride(1) != 1:
            raise ValueError(f"{name} must have unit last stride, got {_describe(t)}")
    if sink.dtype != torch.float32 or sink.shape != (heads,) or sink.device != q.device or not sink.is_contiguous():
        raise ValueError(f"sink must be contiguous float32 [{heads}] on {q.device}, got {_describe(sink)}")
    return queries, heads, width


def aot_cases():
    """A large decode batch or prefill on the matrix unit, and a split of a single query."""
    types = {
        "q_ptr": "*bf16", "w_codes_ptr": "*u8", "w_scales_ptr": "*u8", "slots_ptr": "*i32", "codes_ptr": "*u8",
        "scales_ptr": "*u8", "indices_ptr": "*i32", "sink_ptr": "*fp32", "out_ptr": "*bf16", "stats_ptr": "*fp32",
        "H": "i32:16", "W": "i32:16", "K": "i32:16", "tiles_per_split": "i32", "to_log2": "fp32", "q_stride": "i32:16",
        "q_head_stride": "i32:16", "w_codes_stride": "i32", "w_scales_stride": "i32:16", "slots_stride": "i32:16",
        "codes_stride": "i32", "scales_stride": "i32:16", "indices_stride": "i32:16",
    }  # fmt: skip
    shared = {"D": 512, "WIDTH": 512, "DTYPE": tl.bfloat16, "TERMS": 1, "W_ALIGN": 16, "ALIGN": 16}
    wide = shared | {"HEADS": 64, "ROWS": 128, "SPLIT": False}
    small = shared | {"HEADS": 16, "ROWS": 64, "SPLIT": True}
    kernel = _sparse_attention_kernel
    partial = types | {"out_ptr": "*fp32"}
    exact = types | {"q_ptr": "*fp32", "out_ptr": "*fp32"}
    narrow = small | {"D": 128, "WIDTH": 128}
    combine = {"parts_ptr": "*fp32", "stats_ptr": "*fp32", "out_ptr": "*bf16", "H": "i32:16"}
    warps = {"num_warps": 8, "num_stages": 1}
    return [
        ("wide", kernel, types, wide | {"NATIVE": True}, warps, {90: ("wgmma.mma_async",), 100: ("tcgen05.mma",)}),
        ("split", kernel, partial, small | {"NATIVE": True}, warps, {90: ("mma.sync",), 100: ("mma.sync",)}),
        ("narrow", kernel, partial, narrow | {"NATIVE": False}, warps, {80: ("mma.sync",)}),
        ("float32", kernel, exact, narrow | {"SPLIT": False, "TERMS": 3, "NATIVE": True}, warps, {90: ("mma.sync",)}),
        ("combine", _combine_kernel, combine | {"splits": "i32"}, {"D": 512, "WIDTH": 512, "SPLITS": 4},
         {"num_warps": 4}, None),
    ]  # fmt: skip
