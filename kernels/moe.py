"""Mixture of experts: routed experts on packed FP4 weights, one shared expert on FP8 weights.

    gate, up = w1_e x, w3_e x;   a = silu(min(gate, L)) * clamp(up, -L, L) * p_e;   y_e = w2_e a
    y = ( sum of y_e over the picked experts, in ascending order of e ) + y_shared,  where p_shared = 1

Every product takes its activation rounded to the fp8 format, as in kernels/linear.py, and multiplies in bfloat16,
where both operands are exact. Routed weights are E2M1 codes with one UE8M0 scale per row and 32 inputs (the mxfp4
format), the shared expert's are E4M3 with one per 32 x 32 tile. gate, up, a and y_e are rounded to x's dtype.

    1. prepare   quantise x; sort the (token, pick) pairs by expert with a counting sort that needs no atomics: program
                 e counts the pairs below e, which gives its offset, and writes its own pairs in order
    2. up        a tile is up to BM pairs of one expert times BN inner channels: both products, SwiGLU, p_e, quantise
    3. down      the same tiles times w2, one output row a pair
    4. combine   sum the rows of a token

Up to 16 tokens each pair is a tile of its own, and there is nothing to sort. A single token takes kernels of its own,
in which every pair is a matrix-vector product as in kernels/linear.py and steps 1 and 2 are one. The weights are the
left operand, so the matrix unit is filled by their rows. At full bandwidth there are some four instructions for each
FP4 weight. So four codes are read as one word, two words are decoded at once in a register, and the channels 0, 1, 2
and 3 modulo 4, which fall apart this way, are multiplied apart: the activations are stored in that order.

Shapes: x [T, D], ids and p [T, k], w1 and w3 [E, I, D], w2 [E, D, I]; D and I multiples of 32.
Reads the used experts' 3*D*I*(1/2 + 1/32) bytes once, 6*T*(k + 1)*D*I FLOPs. Bound by memory bandwidth until every
expert has some 100 tokens, then by the matrix unit.
Reference: kernels/reference/moe.py. Test: tests/kernels/test_moe.py. Bench: `moe`.
"""

import torch
import triton
import triton.language as tl

from kernels.block_quant import has_e4m3
from kernels.linear import (
    block_columns,
    check_activation,
    check_fp8_weight,
    fp8_operand,
    fp8_vector_dot,
    quantised_values,
    round_like,
    vector_blocks,
)
from kernels.numerics import e2m1_code_to_f32, ue8m0_to_f32

PAIRS = 1024  # pairs a sorting program looks at in one step
ACT_BLOCKS = 64
VECTOR_TOKENS = 1  # up to here every pair is a matrix-vector product of its own
VECTOR_UP = dict(BN=64, BK=256, num_warps=4, num_stages=2)
VECTOR_DOWN = dict(BN=128, BK=256, num_warps=4, num_stages=3)

# Two words of four codes to four pairs of bf16 values: pair j holds code j of both words. A code's bits placed at the
# bottom of a bf16 exponent (sign to bit 15, the rest to bits 8..6) are its value times 2^-126, the subnormal 0.5
# included, and one multiplication brings them to their size. The fused add of -0 keeps the sign of a zero.
FP4_TO_BF16 = tl.constexpr("""{
    .reg .b32 w, s, t, u, zero;
    mov.b32 w, $4;
    mov.b32 zero, 0x80008000;
    prmt.b32 s, $5, $6, 0x5410;
    shl.b32 t, w, 6;
    and.b32 t, t, 0x01C001C0;
    shl.b32 u, w, 12;
    lop3.b32 t, u, 0x80008000, t, 0xEA;
    fma.rn.bf16x2 $0, t, s, zero;
    shl.b32 t, w, 2;
    and.b32 t, t, 0x01C001C0;
    shl.b32 u, w, 8;
    lop3.b32 t, u, 0x80008000, t, 0xEA;
    fma.rn.bf16x2 $1, t, s, zero;
    shr.b32 t, w, 2;
    and.b32 t, t, 0x01C001C0;
    shl.b32 u, w, 4;
    lop3.b32 t, u, 0x80008000, t, 0xEA;
    fma.rn.bf16x2 $2, t, s, zero;
    shr.b32 t, w, 6;
    and.b32 t, t, 0x01C001C0;
    lop3.b32 t, w, 0x80008000, t, 0xEA;
    fma.rn.bf16x2 $3, t, s, zero;
}""")


@triton.jit
def fp4_operands(q, scale_byte, DTYPE: tl.constexpr):
    """Four [BN, BK / 4] operands, of channels 0, 1, 2 and 3 modulo 4, from words [BN, BK / 4] and scales [BN, BK / 32].

    In bfloat16 they come times 2^-32, see _rescale: a power of two that brings codes to size has to fit a bfloat16.
    """
    BN: tl.constexpr = q.shape[0]
    WORDS: tl.constexpr = q.shape[1]
    if tl.bfloat16 == DTYPE:
        b = scale_byte.to(tl.int32)
        bits = tl.where(b > 160, 0x7FC0, (b + 94) << 7)  # 2^(b - 127) * 2^126 * 2^-32; NaN from 2^34 on, and for NaN
        bits = tl.reshape(tl.broadcast_to(bits[:, :, None], [BN, WORDS // 8, 8]), [BN, WORDS])
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            FP4_TO_BF16, "=&r,=&r,=&r,=&r,r,r,r", [q, bits], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
        )
    else:
        scale = tl.broadcast_to(ue8m0_to_f32(scale_byte)[:, :, None], [BN, WORDS // 8, 8])
        scale = tl.reshape(scale, [BN, WORDS])
        w0, w1 = e2m1_code_to_f32(q) * scale, e2m1_code_to_f32(q >> 4) * scale
        w2, w3 = e2m1_code_to_f32(q >> 8) * scale, e2m1_code_to_f32(q >> 12) * scale
    return w0, w1, w2, w3


@triton.jit
def _rescale(acc, DTYPE: tl.constexpr):
    return acc * 4294967296.0 if tl.bfloat16 == DTYPE else acc


@triton.jit
def _load(pointer, inside, column, limit, EVEN: tl.constexpr):
    """A tile whose columns (or rows) end at `limit`; EVEN says that they never pass it."""
    if EVEN:
        return tl.load(pointer, mask=inside, other=0)
    return tl.load(pointer, mask=inside & (column < limit), other=0)


@triton.jit
def _fp4_dot(
    acc, word_row, scales, n_ok, k0, x0, x1, x2, x3, K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):
    """acc += w[:, k0 : k0 + BK] x, with x as four [BK / 4, BM] of channels 0, 1, 2 and 3 modulo 4."""
    word = (k0 // 4 + tl.arange(0, BK // 4))[None, :]
    q = _load(word_row + word, n_ok, word, K // 4, K % BK == 0)
    w0, w1, w2, w3 = fp4_operands(q, scales, x0.dtype)
    acc = tl.dot(w0, x0, acc, input_precision=PRECISION)
    acc = tl.dot(w1, x1, acc, input_precision=PRECISION)
    acc = tl.dot(w2, x2, acc, input_precision=PRECISION)
    return tl.dot(w3, x3, acc, input_precision=PRECISION)


@triton.jit
def _load_split(x_row, row_ok, k0, K: tl.constexpr, BK: tl.constexpr):
    """Activations stored by channel modulo 4: four [BK / 4, BM]."""
    i = (k0 // 4 + tl.arange(0, BK // 4))[:, None]
    x0 = _load(x_row + i, row_ok, i, K // 4, K % BK == 0)
    x1 = _load(x_row + i + K // 4, row_ok, i, K // 4, K % BK == 0)
    x2 = _load(x_row + i + K // 2, row_ok, i, K // 4, K % BK == 0)
    x3 = _load(x_row + i + 3 * (K // 4), row_ok, i, K // 4, K % BK == 0)
    return x0, x1, x2, x3


@triton.jit
def _fp8_dot(
    acc, code_row, scales, n_ok, k0, x, K: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr
):
    k = (k0 + tl.arange(0, BK))[None, :]
    q = _load(code_row + k, n_ok, k, K, K % BK == 0)
    return tl.dot(fp8_operand(q, scales, x.dtype, NATIVE), x, acc, input_precision=PRECISION)


@triton.jit
def _scales(scale_row, n_ok, k0, K: tl.constexpr, BK: tl.constexpr):
    """[BN, BK / 32] scale bytes of the inputs from k0 on; fetched a step ahead, being too narrow for an async copy."""
    block = (k0 // 32 + tl.arange(0, BK // 32))[None, :]
    return tl.load(scale_row + block, mask=n_ok & (block < K // 32), other=0)


@triton.jit
def _order(program, all_tiles, N: tl.constexpr, BN: tl.constexpr, SORTED: tl.constexpr):
    """(row tile, its BN channels) of a program. Sorted tiles run one after the other, with all channels of a tile side
    by side, so that its activations are read from memory once; the shared expert, whose tiles are longest, comes first.
    Unsorted ones run side by side: those of one expert share its weights."""
    if SORTED:
        t, n = all_tiles - 1 - program // tl.cdiv(N, BN), program % tl.cdiv(N, BN)
    else:
        t, n = program % all_tiles, program // all_tiles
    return t, n * BN + tl.arange(0, BN)


@triton.jit
def _tile_of(t, ids_ptr, tiles_ptr, SORTED: tl.constexpr):
    """(expert or -1, first position, end position) of tile t; of shared tiles any, they are not used."""
    if SORTED:
        return tl.load(tiles_ptr + 3 * t), tl.load(tiles_ptr + 3 * t + 1), tl.load(tiles_ptr + 3 * t + 2)
    return tl.load(ids_ptr + t), t, t + 1


@triton.jit
def _sort_pairs(e, ids_ptr, pairs_ptr, tiles_ptr, n_pairs, E, BM: tl.constexpr, PAIRS: tl.constexpr):
    """Writes the pairs of expert e at its offset, in ascending order, and the tiles that they fill."""
    step = tl.arange(0, PAIRS)
    below = tl.zeros([PAIRS], tl.int32)
    equal = tl.zeros([PAIRS], tl.int32)
    for start in range(0, n_pairs, PAIRS):
        expert = tl.load(ids_ptr + start + step, mask=start + step < n_pairs, other=-1)
        below += ((expert >= 0) & (expert < e)).to(tl.int32)
        equal += (expert == e).to(tl.int32)
    first = tl.sum(below, axis=0)
    end = first + tl.sum(equal, axis=0)
    position = first
    for start in range(0, n_pairs, PAIRS):
        expert = tl.load(ids_ptr + start + step, mask=start + step < n_pairs, other=-1)
        mine = (expert == e).to(tl.int32)
        tl.store(pairs_ptr + position + tl.cumsum(mine, axis=0) - 1, start + step, mask=mine > 0)
        position += tl.sum(mine, axis=0)
    # Expert e owns the slots from first // BM + e on: never fewer than its tiles, and known without the other experts.
    slot = first // BM + e
    last = tl.where(e == E - 1, n_pairs // BM + E, end // BM + e + 1)
    while slot < last:
        tl.store(tiles_ptr + 3 * slot, tl.where(first < end, e, -1))
        tl.store(tiles_ptr + 3 * slot + 1, first)
        tl.store(tiles_ptr + 3 * slot + 2, tl.minimum(first + BM, end))
        first += BM
        slot += 1


@triton.jit
def _prepare_kernel(
    x_ptr,  # [T, D]
    ids_ptr,  # [T, k] int32
    split_ptr,  # [T, D] x quantised, by channel modulo 4
    plain_ptr,  # [T, D] x quantised
    pairs_ptr,  # [T * k] int32
    tiles_ptr,  # [n_pairs // BM + E, 3] int32
    n_blocks,
    n_pairs,
    sorters,
    x_stride,
    D: tl.constexpr,
    BM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # the first `sorters` programs (one an expert, or none) sort, the others quantise BLOCKS blocks of 32 channels each
    if tl.program_id(0) < sorters:
        _sort_pairs(tl.program_id(0), ids_ptr, pairs_ptr, tiles_ptr, n_pairs, sorters, BM, PAIRS)
    else:
        block = (tl.program_id(0) - sorters).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        inside = (block < n_blocks)[:, None]
        row, channel = (block // (D // 32))[:, None], (block % (D // 32) * 32)[:, None]
        lane = tl.arange(0, 32)[None, :]
        x = tl.load(x_ptr + row * x_stride + channel + lane, mask=inside, other=0.0).to(tl.float32)
        value = quantised_values(x, 1, NATIVE).to(plain_ptr.dtype.element_ty)  # exact
        tl.store(plain_ptr + row * D + channel + lane, value, mask=inside)
        at = lane % 4 * (D // 4) + channel // 4 + lane // 4
        tl.store(split_ptr + row * D + at, value, mask=inside)


@triton.jit
def _swiglu(gate, up, p, limit, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    gate = round_like(gate, DTYPE, NATIVE).to(tl.float32)
    up = round_like(up, DTYPE, NATIVE).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)  # a NaN compares false and stays
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return round_like(gate / (1.0 + tl.exp(-gate)) * up * p, DTYPE, NATIVE)


@triton.jit
def _up_kernel(
    split_ptr, plain_ptr,  # [T, D] both
    ids_ptr, p_ptr,  # [T * k]
    pairs_ptr, tiles_ptr,
    w1_ptr, s1_ptr, w3_ptr, s3_ptr,  # [E, I, D / 4] int16, [E, I, D / 32] uint8
    v1_ptr, t1_ptr, v3_ptr, t3_ptr,  # shared: [I, D], [I / 32, D / 32]
    h_ptr,  # [T * k, I] of routed pairs by position, by channel modulo 4, then [T, I] of the shared expert
    T, n_pairs, routed_tiles, all_tiles, limit,
    TOP_K: tl.constexpr, D: tl.constexpr, I: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BK8: tl.constexpr, DTYPE: tl.constexpr, SORTED: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # one program per (tile of rows, BN inner channels)
    t, n = _order(tl.program_id(0), all_tiles, I, BN, SORTED)
    n_ok = (n < I)[:, None]
    row = tl.arange(0, BM)
    gate = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    expert, first, end = _tile_of(tl.minimum(t, routed_tiles - 1), ids_ptr, tiles_ptr, SORTED)
    if (t < routed_tiles) & (expert < 0):
        return
    if t < routed_tiles:
        position = first + row
        row_ok = position < end
        pair = tl.load(pairs_ptr + position, mask=row_ok, other=0) if SORTED else position
        p = tl.load(p_ptr + pair, mask=row_ok, other=0.0)
        line = expert.to(tl.int64) * I + n[:, None]
        w1_row, w3_row = w1_ptr + line * (D // 4), w3_ptr + line * (D // 4)
        s1_row, s3_row = s1_ptr + line * (D // 32), s3_ptr + line * (D // 32)
        x_row = split_ptr + (pair // TOP_K)[None, :].to(tl.int64) * D
        s1, s3 = _scales(s1_row, n_ok, 0, D, BK), _scales(s3_row, n_ok, 0, D, BK)
        for k0 in range(0, D, BK):
            x0, x1, x2, x3 = _load_split(x_row, row_ok[None, :], k0, D, BK)
            s1_next, s3_next = _scales(s1_row, n_ok, k0 + BK, D, BK), _scales(s3_row, n_ok, k0 + BK, D, BK)
            gate = _fp4_dot(gate, w1_row, s1, n_ok, k0, x0, x1, x2, x3, D, BK, PRECISION)
            up = _fp4_dot(up, w3_row, s3, n_ok, k0, x0, x1, x2, x3, D, BK, PRECISION)
            s1, s3 = s1_next, s3_next
        gate, up = _rescale(gate, split_ptr.dtype.element_ty), _rescale(up, split_ptr.dtype.element_ty)
        out_row = position.to(tl.int64)
        out_channel = n % 4 * (I // 4) + n // 4
    else:
        token = (t - routed_tiles) * BM + row
        row_ok = token < T
        p = tl.full([BM], 1.0, tl.float32)
        line = n[:, None].to(tl.int64)
        v1_row, v3_row = v1_ptr + line * D, v3_ptr + line * D
        t1_row, t3_row = t1_ptr + line // 32 * (D // 32), t3_ptr + line // 32 * (D // 32)
        x_row = plain_ptr + token[None, :].to(tl.int64) * D
        u1, u3 = _scales(t1_row, n_ok, 0, D, BK8), _scales(t3_row, n_ok, 0, D, BK8)
        for k0 in range(0, D, BK8):
            k = (k0 + tl.arange(0, BK8))[:, None]
            x = _load(x_row + k, row_ok[None, :], k, D, D % BK8 == 0)
            u1_next, u3_next = _scales(t1_row, n_ok, k0 + BK8, D, BK8), _scales(t3_row, n_ok, k0 + BK8, D, BK8)
            gate = _fp8_dot(gate, v1_row, u1, n_ok, k0, x, D, BK8, NATIVE, PRECISION)
            up = _fp8_dot(up, v3_row, u3, n_ok, k0, x, D, BK8, NATIVE, PRECISION)
            u1, u3 = u1_next, u3_next
        out_row = token.to(tl.int64) + n_pairs
        out_channel = n

    a = _swiglu(gate, up, p[None, :], limit, DTYPE, NATIVE).to(tl.float32)
    value = quantised_values(tl.reshape(a, [BN // 32, 32, BM]), 1, NATIVE)
    value = tl.reshape(value, [BN, BM]).to(h_ptr.dtype.element_ty)  # exact
    tl.store(h_ptr + out_row[None, :] * I + out_channel[:, None], value, mask=n_ok & row_ok[None, :])


@triton.jit
def _down_kernel(
    h_ptr,  # [T * k, I], then [T, I]
    ids_ptr, pairs_ptr, tiles_ptr,
    w2_ptr, s2_ptr,  # [E, D, I / 4] int16, [E, D, I / 32] uint8
    v2_ptr, t2_ptr,  # shared: [D, I], [D / 32, I / 32]
    y_ptr,  # [T * k, D] of routed pairs in their own order, then [T, D] of the shared expert
    T, n_pairs, routed_tiles, all_tiles,
    D: tl.constexpr, I: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BK8: tl.constexpr,
    SORTED: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # one program per (tile of rows, BN output channels)
    t, n = _order(tl.program_id(0), all_tiles, D, BN, SORTED)
    n_ok = (n < D)[:, None]
    row = tl.arange(0, BM)
    acc = tl.zeros([BN, BM], tl.float32)
    expert, first, end = _tile_of(tl.minimum(t, routed_tiles - 1), ids_ptr, tiles_ptr, SORTED)
    if (t < routed_tiles) & (expert < 0):
        return
    if t < routed_tiles:
        position = first + row
        row_ok = position < end
        line = expert.to(tl.int64) * D + n[:, None]
        w2_row, s2_row = w2_ptr + line * (I // 4), s2_ptr + line * (I // 32)
        h_row = h_ptr + position[None, :].to(tl.int64) * I
        s2 = _scales(s2_row, n_ok, 0, I, BK)
        for k0 in range(0, I, BK):
            h0, h1, h2, h3 = _load_split(h_row, row_ok[None, :], k0, I, BK)
            s2_next = _scales(s2_row, n_ok, k0 + BK, I, BK)
            acc = _fp4_dot(acc, w2_row, s2, n_ok, k0, h0, h1, h2, h3, I, BK, PRECISION)
            s2 = s2_next
        acc = _rescale(acc, h_ptr.dtype.element_ty)
        out_row = (tl.load(pairs_ptr + position, mask=row_ok, other=0) if SORTED else position).to(tl.int64)
    else:
        token = (t - routed_tiles) * BM + row
        row_ok = token < T
        out_row = token.to(tl.int64) + n_pairs
        line = n[:, None].to(tl.int64)
        v2_row, t2_row = v2_ptr + line * I, t2_ptr + line // 32 * (I // 32)
        h_row = h_ptr + out_row[None, :] * I
        u2 = _scales(t2_row, n_ok, 0, I, BK8)
        for k0 in range(0, I, BK8):
            k = (k0 + tl.arange(0, BK8))[:, None]
            h = _load(h_row + k, row_ok[None, :], k, I, I % BK8 == 0)
            u2_next = _scales(t2_row, n_ok, k0 + BK8, I, BK8)
            acc = _fp8_dot(acc, v2_row, u2, n_ok, k0, h, I, BK8, NATIVE, PRECISION)
            u2 = u2_next
    y = y_ptr + out_row[None, :] * D + n[:, None]
    tl.store(y, round_like(acc, y_ptr.dtype.element_ty, NATIVE), mask=n_ok & row_ok[None, :])


# Four bytes of two codes to the even channels in two registers, the odd ones in two. A code's bits become those of an
# E4M3 number (sign to bit 7, the rest to bits 4..2), 2^-6 of its value, and the hardware widens that to float16.
FP4_TO_F16 = tl.constexpr("""{
    .reg .b32 t, u;
    .reg .b16 a, b;
    shl.b32 t, $4, 2;
    and.b32 t, t, 0x1C1C1C1C;
    shl.b32 u, $4, 4;
    lop3.b32 t, u, 0x80808080, t, 0xEA;
    mov.b32 {a, b}, t;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
    shr.u32 t, $4, 2;
    and.b32 t, t, 0x1C1C1C1C;
    lop3.b32 t, $4, 0x80808080, t, 0xEA;
    mov.b32 {a, b}, t;
    cvt.rn.f16x2.e4m3x2 $2, a;
    cvt.rn.f16x2.e4m3x2 $3, b;
}""")


@triton.jit
def _vector_columns(x_ptr, k0, K: tl.constexpr, BK: tl.constexpr, OPERAND: tl.constexpr, NATIVE: tl.constexpr):
    """(even columns, odd columns, scales) of x[k0 : k0 + BK]: what fp4_vector_dot multiplies with."""
    codes, scale = vector_blocks(x_ptr, k0, K, BK, NATIVE)
    if tl.float16 == OPERAND:
        codes = codes * 64.0  # for the 2^-6 of FP4_TO_F16; at most 28,672
    even, odd = tl.split(tl.reshape(codes, [BK // 32, 16, 2]))
    return block_columns(even, OPERAND), block_columns(odd, OPERAND), scale


@triton.jit
def fp4_vector_dot(acc, byte_row, scale_row, n_ok, k0, even, odd, x_scale, K: tl.constexpr, BK: tl.constexpr):
    """acc [BN, BK / 32] += the sums of w[:, k0 : k0 + BK] x over each block of 32 inputs."""
    byte = (k0 // 2 + tl.arange(0, BK // 2))[None, :]
    q = _load(byte_row + byte, n_ok, byte, K // 2, K % BK == 0)
    s = _scales(scale_row, n_ok, k0, K, BK)
    if even.dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            FP4_TO_F16, "=&r,=&r,=&r,=&r,r", [q], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low, high = e2m1_code_to_f32(q), e2m1_code_to_f32(q >> 4)
    sums = tl.dot(low, even, input_precision="ieee")
    sums = tl.dot(high, odd, sums, input_precision="ieee")
    return acc + sums * x_scale[None, :] * ue8m0_to_f32(s)


@triton.jit
def _vector_up_kernel(
    x_ptr,  # [T, D]
    ids_ptr, p_ptr,  # [T * k]
    w1_ptr, s1_ptr, w3_ptr, s3_ptr,  # [E, I, D / 2], [E, I, D / 32] uint8
    v1_ptr, t1_ptr, v3_ptr, t3_ptr,  # shared: [I, D], [I / 32, D / 32]
    h_ptr,  # [T * k, I] of routed pairs, then [T, I] of the shared expert, in x's dtype
    n_pairs, rows, limit, x_stride,
    TOP_K: tl.constexpr, D: tl.constexpr, I: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    OPERAND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    # one program per (pair or token of the shared expert, BN inner channels)
    t = rows - 1 - tl.program_id(0) % rows  # the shared expert first: its weights are twice as many bytes
    n = tl.program_id(0) // rows * BN + tl.arange(0, BN)
    n_ok = (n < I)[:, None]
    gate = tl.zeros([BN, BK // 32], tl.float32)
    up = tl.zeros([BN, BK // 32], tl.float32)
    if t < n_pairs:
        expert = tl.load(ids_ptr + t)
        if expert < 0:
            return
        p = tl.load(p_ptr + t)
        x = x_ptr + (t // TOP_K).to(tl.int64) * x_stride
        line = expert.to(tl.int64) * I + n[:, None]
        w1, w3, s1, s3 = (
            w1_ptr + line * (D // 2),
            w3_ptr + line * (D // 2),
            s1_ptr + line * (D // 32),
            s3_ptr + line * (D // 32),
        )
        for k0 in range(0, D, BK):
            even, odd, scale = _vector_columns(x, k0, D, BK, OPERAND, NATIVE)
            gate = fp4_vector_dot(gate, w1, s1, n_ok, k0, even, odd, scale, D, BK)
            up = fp4_vector_dot(up, w3, s3, n_ok, k0, even, odd, scale, D, BK)
    else:
        p = 1.0
        x = x_ptr + (t - n_pairs).to(tl.int64) * x_stride
        line = n[:, None].to(tl.int64)
        v1, v3, t1, t3 = (
            v1_ptr + line * D,
            v3_ptr + line * D,
            t1_ptr + line // 32 * (D // 32),
            t3_ptr + line // 32 * (D // 32),
        )
        for k0 in range(0, D, BK):
            codes, scale = vector_blocks(x, k0, D, BK, NATIVE)
            columns = block_columns(codes, OPERAND)
            gate = fp8_vector_dot(gate, v1, t1, n_ok, k0, columns, scale, D, BK, NATIVE)
            up = fp8_vector_dot(up, v3, t3, n_ok, k0, columns, scale, D, BK, NATIVE)
    a = _swiglu(tl.sum(gate, axis=1), tl.sum(up, axis=1), p, limit, h_ptr.dtype.element_ty, NATIVE)
    tl.store(h_ptr + t.to(tl.int64) * I + n, a, mask=n < I)


@triton.jit
def _vector_down_kernel(
    h_ptr,  # [T * k, I], then [T, I]
    ids_ptr,
    w2_ptr, s2_ptr,  # [E, D, I / 2], [E, D, I / 32] uint8
    v2_ptr, t2_ptr,  # shared: [D, I], [D / 32, I / 32]
    y_ptr,  # [T * k, D], then [T, D]
    n_pairs, rows,
    D: tl.constexpr, I: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OPERAND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    t = rows - 1 - tl.program_id(0) % rows
    n = tl.program_id(0) // rows * BN + tl.arange(0, BN)
    n_ok = (n < D)[:, None]
    acc = tl.zeros([BN, BK // 32], tl.float32)
    h = h_ptr + t.to(tl.int64) * I
    if t < n_pairs:
        expert = tl.load(ids_ptr + t)
        if expert < 0:
            return
        line = expert.to(tl.int64) * D + n[:, None]
        w2, s2 = w2_ptr + line * (I // 2), s2_ptr + line * (I // 32)
        for k0 in range(0, I, BK):
            even, odd, scale = _vector_columns(h, k0, I, BK, OPERAND, NATIVE)
            acc = fp4_vector_dot(acc, w2, s2, n_ok, k0, even, odd, scale, I, BK)
    else:
        line = n[:, None].to(tl.int64)
        v2, t2 = v2_ptr + line * I, t2_ptr + line // 32 * (I // 32)
        for k0 in range(0, I, BK):
            codes, scale = vector_blocks(h, k0, I, BK, NATIVE)
            acc = fp8_vector_dot(acc, v2, t2, n_ok, k0, block_columns(codes, OPERAND), scale, I, BK, NATIVE)
    y = round_like(tl.sum(acc, axis=1), y_ptr.dtype.element_ty, NATIVE)
    tl.store(y_ptr + t.to(tl.int64) * D + n, y, mask=n < D)


@triton.jit
def _combine_kernel(
    y_ptr,  # [T * k, D], then [T, D]
    ids_ptr,  # [T, k] int32
    out_ptr,  # [T, D]
    n_pairs,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # one program per (token, BLOCK channels)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, K_PAD)
    ids = tl.load(ids_ptr + token * TOP_K + i, mask=i < TOP_K, other=-1)
    before = (ids[None, :] < ids[:, None]) | ((ids[None, :] == ids[:, None]) & (i[None, :] < i[:, None]))
    rank = tl.sum((before & (ids >= 0)[None, :]).to(tl.int32), axis=1)
    rank = tl.where(ids >= 0, rank, K_PAD)  # picks that are switched off take no part
    acc = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(TOP_K):  # ascending expert
        pick = tl.sum(tl.where(rank == r, i, 0), axis=0)
        present = tl.sum((rank == r).to(tl.int32), axis=0) > 0
        row = y_ptr + (token * TOP_K + pick) * D
        acc += tl.load(row + d, mask=(d < D) & present, other=0.0).to(tl.float32)
    if SHARED:
        acc += tl.load(y_ptr + (n_pairs + token) * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + d, round_like(acc, out_ptr.dtype.element_ty, NATIVE), mask=d < D)


def moe(x, ids, p, w1, w3, w2, shared=None, limit=10.0):
    """Output [T, D], in x's dtype, of a mixture-of-experts layer for x float32 or bfloat16 [T, D].

    ids, p: int32 and float32 [T, k], the picked experts and their routing weights; an id of -1 is skipped.
    w1, w3, w2: (codes, scales) of the routed experts, uint8: [E, I, D / 2] and [E, I, D / 32], for w2 [E, D, I / 2] and
        [E, D, I / 32].
    shared: three (codes, scales) of the shared expert in the same order, [I, D] and [I / 32, D / 32].
    """
    E, I, D = _check(x, ids, p, w1, w3, w2, shared)
    T, k = ids.shape
    out = torch.empty(T, D, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    native, n_pairs = has_e4m3(x), T * k
    if T <= VECTOR_TOKENS and (native or not x.is_cuda):
        y = _vector_pairs(x, ids, p, w1, w3, w2, shared, limit, E, I, native)
    else:
        y = _matrix_tiles(x, ids, p, w1, w3, w2, shared, limit, E, I, native)
    block = min(1024, triton.next_power_of_2(D))
    _combine_kernel[(T, triton.cdiv(D, block))](
        y, ids, out, n_pairs, TOP_K=k, K_PAD=triton.next_power_of_2(k), D=D, BLOCK=block, SHARED=shared is not None,
        NATIVE=native, num_warps=4,
    )  # fmt: skip
    return out


def _vector_pairs(x, ids, p, w1, w3, w2, shared, limit, E, I, native):
    """Rows y_e [T * k, D], then those of the shared expert [T, D]; a pair is a matrix-vector product."""
    T, D = x.shape
    n_pairs = ids.numel()
    rows = n_pairs + (T if shared is not None else 0)
    v1, v3, v2 = shared if shared is not None else (w1, w3, w2)  # not read without a shared expert
    common = dict(D=D, I=I, OPERAND=tl.float16 if x.is_cuda else tl.float32, NATIVE=native)
    h = torch.empty(rows, I, dtype=x.dtype, device=x.device)
    _vector_up_kernel[(rows * triton.cdiv(I, VECTOR_UP["BN"]),)](
        x, ids, p, *w1, *w3, *v1, *v3, h, n_pairs, rows, float(limit), x.stride(0),
        TOP_K=ids.shape[1], **common, **VECTOR_UP,
    )  # fmt: skip
    y = torch.empty(rows, D, dtype=x.dtype, device=x.device)
    _vector_down_kernel[(rows * triton.cdiv(D, VECTOR_DOWN["BN"]),)](
        h, ids, *w2, *v2, y, n_pairs, rows, **common, **VECTOR_DOWN
    )
    return y


def _matrix_tiles(x, ids, p, w1, w3, w2, shared, limit, E, I, native):
    """Rows y_e [T * k, D], then those of the shared expert [T, D]; the pairs of one expert share a tile."""
    T, D = x.shape
    n_pairs, k = ids.numel(), ids.shape[1]
    new = lambda *shape, dtype: torch.empty(*shape, dtype=dtype, device=x.device)  # noqa: E731
    operand = torch.bfloat16 if x.is_cuda else torch.float32
    (BM, up, down), sort = _tiles(T, n_pairs, E, x.device)
    routed_tiles = n_pairs // BM + E if sort else n_pairs
    all_tiles = routed_tiles + (triton.cdiv(T, BM) if shared is not None else 0)

    split, plain = new(T, D, dtype=operand), new(T, D, dtype=operand)
    pairs = new(n_pairs if sort else 0, dtype=torch.int32)
    tiles = new(routed_tiles if sort else 0, 3, dtype=torch.int32)
    blocks, sorters = T * D // 32, E if sort else 0
    _prepare_kernel[(sorters + triton.cdiv(blocks, ACT_BLOCKS),)](
        x, ids, split, plain, pairs, tiles, blocks, n_pairs, sorters, x.stride(0),
        D=D, BM=BM, PAIRS=PAIRS, BLOCKS=ACT_BLOCKS, NATIVE=native, num_warps=4,
    )  # fmt: skip

    v1, v3, v2 = shared if shared is not None else (w1, w3, w2)  # not read without a shared expert
    w1, w3, w2 = [(codes.view(torch.int16), scales) for codes, scales in (w1, w3, w2)]
    common = dict(D=D, I=I, BM=BM, SORTED=sort, NATIVE=native, PRECISION="tf32" if x.is_cuda else "ieee")
    h = new(n_pairs + T, I, dtype=operand)
    _up_kernel[(all_tiles * triton.cdiv(I, up["BN"]),)](
        split, plain, ids, p, pairs, tiles, *w1, *w3, *v1, *v3, h, T, n_pairs, routed_tiles, all_tiles, float(limit),
        TOP_K=k, DTYPE=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float32, **common, **up,
    )  # fmt: skip
    y = new(n_pairs + T, D, dtype=x.dtype)
    _down_kernel[(all_tiles * triton.cdiv(D, down["BN"]),)](
        h, ids, pairs, tiles, *w2, *v2, y, T, n_pairs, routed_tiles, all_tiles, **common, **down
    )
    return y


def aot_cases():
    names = ["ids", "pairs", "tiles"]
    signature = {f"{name}_ptr": "*i32" for name in names} | dict.fromkeys(("w1_ptr", "w3_ptr", "w2_ptr"), "*i16")
    signature |= dict.fromkeys(
        [f"{name}_ptr" for name in ("s1", "s3", "s2", "v1", "v3", "v2", "t1", "t3", "t2")], "*u8"
    )
    signature |= dict.fromkeys([f"{name}_ptr" for name in ["x", "split", "plain", "h", "y", "out"]], "*bf16")
    signature |= dict.fromkeys(["T", "n_pairs", "routed_tiles", "all_tiles", "n_blocks", "sorters", "x_stride"], "i32")
    signature |= {"p_ptr": "*fp32", "limit": "fp32"}
    cases = []
    hopper = "wgmma.mma_async.sync.aligned.m64{}k16.f32.bf16.bf16"
    for tokens, arch, unit in (
        (1, 80, "mma.sync"), (4096, 80, "mma.sync"),
        (1, 90, hopper.format("n16")), (64, 90, hopper.format("n16")), (4096, 90, hopper.format("n64")),
        (1, 100, "tcgen05.mma"), (4096, 100, "tcgen05.mma"),
    ):  # fmt: skip
        (BM, up, down), sort = _tiles(tokens, 6 * tokens, 384, torch.device("cuda"))
        constants = dict(D=5120, I=2304, BM=BM, SORTED=sort, NATIVE=arch > 80, PRECISION="tf32")
        up_constants, up_options = constants | dict(TOP_K=6, DTYPE=tl.bfloat16), {}
        down_constants, down_options = dict(constants), {}
        for tile, values, options in ((up, up_constants, up_options), (down, down_constants, down_options)):
            for name, value in tile.items():
                (values if name.startswith("B") else options)[name] = value
        expected = {arch: [unit, "fma.rn.bf16x2"]}
        cases.append((f"up {tokens} sm_{arch}", _up_kernel, signature, up_constants, up_options, expected))
        cases.append((f"down {tokens} sm_{arch}", _down_kernel, signature, down_constants, down_options, expected))
    vector = dict(D=5120, I=2304, OPERAND=tl.float16, NATIVE=True)
    signature |= {"rows": "i32"}
    for name, fn, tile in (("up", _vector_up_kernel, VECTOR_UP), ("down", _vector_down_kernel, VECTOR_DOWN)):
        constants = vector | dict(BN=tile["BN"], BK=tile["BK"]) | (dict(TOP_K=6) if name == "up" else {})
        types = signature | dict.fromkeys(("w1_ptr", "w3_ptr", "w2_ptr"), "*u8")
        options = dict(num_warps=tile["num_warps"], num_stages=tile["num_stages"])
        cases.append((f"vector {name}", fn, types, constants, options, {90: ["cvt.rn.f16x2.e4m3x2"], 100: []}))
    prepare = dict(D=5120, BM=64, PAIRS=PAIRS, BLOCKS=ACT_BLOCKS, NATIVE=True)
    cases.append(("prepare", _prepare_kernel, signature, prepare, dict(num_warps=4), {90: [], 100: []}))
    combine = dict(TOP_K=6, K_PAD=8, D=5120, BLOCK=1024, SHARED=True, NATIVE=True)
    cases.append(("combine", _combine_kernel, signature, combine, dict(num_warps=4), None))
    return cases


def _tiles(tokens, n_pairs, experts, device):
    """(BM, tile of up, tile of down) and whether pairs are sorted by expert."""
    sort = tokens > 16
    if device.type != "cuda":
        return (16, _tile(64, 128, 4, 2), _tile(64, 128, 4, 2)), sort
    if not sort:
        return (16, _tile(64, 256, 4, 4), _tile(64, 256, 4, 3)), sort
    if n_pairs <= 24 * experts:
        # 128 inputs a step keep the registers below 100: five programs hide each other's latency on a multiprocessor
        return (16 if n_pairs <= 6 * experts else 32, _tile(64, 128, 4, 3), _tile(64, 128, 4, 3)), sort
    # 168 registers: three programs on a multiprocessor
    tile = _tile(64, 128, 4, 3) | {"maxnreg": 168}
    return (64, tile, tile), sort


def _tile(BN, BK, num_warps, num_stages):
    return dict(BN=BN, BK=BK, BK8=BK // 2, num_warps=num_warps, num_stages=num_stages)


def _check(x, ids, p, w1, w3, w2, shared):
    check_activation("x", x)
    if ids.ndim != 2 or ids.dtype != torch.int32 or p.dtype != torch.float32 or p.shape != ids.shape:
        raise TypeError(
            f"ids and p must be int32 and float32 of one shape [tokens, picks], got {ids.dtype} {tuple(ids.shape)} and "
            f"{p.dtype} {tuple(p.shape)}"
        )
    T, D = x.shape
    if len(ids) != T or not ids.shape[1] or not ids.is_contiguous() or not p.is_contiguous():
        raise ValueError(
            f"ids and p must be contiguous [{T}, picks] for x {tuple(x.shape)}, got {tuple(ids.shape)} with strides "
            f"{ids.stride()} and {p.stride()}"
        )
    E, I = w1[0].shape[:2]
    if I % 32:
        raise ValueError(f"the inner width must be a multiple of 32, got {I}")
    for name, (codes, scales), rows, columns in (("w1", w1, I, D), ("w3", w3, I, D), ("w2", w2, D, I)):
        for part, tensor, width in (("codes", codes, columns // 2), ("scales", scales, columns // 32)):
            if tensor.dtype != torch.uint8 or tensor.shape != (E, rows, width) or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} {part} must be contiguous uint8 {(E, rows, width)}, got {tensor.dtype} "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()}"
                )
            if tensor.device != x.device:
                raise ValueError(f"{name} {part} must be on {x.device}, got {tensor.device}")
    if ids.device != x.device or p.device != x.device:
        raise ValueError(f"ids and p must be on {x.device}, got {ids.device} and {p.device}")
    if shared is not None:
        for name, (codes, scales), rows, columns in zip(
            ("shared w1", "shared w3", "shared w2"), shared, (I, I, D), (D, D, I), strict=True
        ):
            check_fp8_weight(name, codes, scales, rows, columns, x.device)
            if not codes.is_contiguous() or not scales.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {codes.stride()} and {scales.stride()}")
    return E, I, D
