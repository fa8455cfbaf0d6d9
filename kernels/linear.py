"""Linear layer with block-scaled FP8 weights and activations quantised on the fly.

    y[m, n] = sum over blocks b of 32 inputs: ( sum over k in b: a[m, k] * w[n, k] ) * sa[m, b] * sw[n // 32, b]

w are E4M3 codes with one UE8M0 scale per 32 x 32 tile, a the E4M3 codes of x in blocks of 32 (the fp8 format of
kernels/block_quant.py). A code times a power of two has 4 significant bits, so a*sa and w*sw are exact in bfloat16: one
bfloat16 matrix product with float32 accumulation computes the formula, and only the order of the sums differs.
With act_quant=False the activation stays as it is, in bfloat16 or float32.

Shapes: x [M, K], codes [N, K] uint8, scales [N / 32, K / 32] uint8, y [M, N] in x's dtype; K and N multiples of 32.
Reads N*K*(1 + 1/1024) bytes of weights once per tile of BM rows, 2*M*K*N FLOPs. Up to 16 rows the bound is memory
bandwidth, from some hundred rows on the bfloat16 matrix unit. The weight tile is the left operand (its rows fill the
64 of the matrix instruction however few the activations are) and each value of it is decoded once per BM activations.
A single row takes a kernel of its own: its program quantises the activation as it goes, and makes of each 32 inputs one
column of a matrix, so that one product sums every block apart and scales are applied to sums, not to weights.
Few tiles leave most of the chip idle: then the sum over K is split, and a second kernel adds the parts in order.
Groups, independent products side by side, are one launch: the third axis of the grid.
Reference: kernels/reference/linear.py. Test: tests/kernels/test_linear.py. Bench: `linear`.
"""

import torch
import triton
import triton.language as tl

from kernels.block_quant import has_e4m3, ue8m0_scale
from kernels.numerics import e4m3_bits_to_f32, f32_to_bf16, f32_to_e4m3_bits, ue8m0_to_f32

PROGRAMS = 264  # two for each of the 132 multiprocessors of an H200
ACT_BLOCKS = 64  # activation blocks of one quantising program
VECTOR = dict(BN=128, BK=256, num_warps=4, num_stages=3)  # tiles of a single row


@triton.jit
def round_like(x, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """x rounded to DTYPE; the interpreter, where NATIVE is false, truncates in its own cast."""
    if (tl.bfloat16 == DTYPE) and (not NATIVE):
        return f32_to_bf16(x)
    return x.to(DTYPE)


@triton.jit
def quantised_values(x, AXIS: tl.constexpr, NATIVE: tl.constexpr):
    """float32 blocks along AXIS rounded to E4M3 under their scale: the values a * sa. NaN and infinity give NaN."""
    amax_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS, keep_dims=True)
    byte, reciprocal = ue8m0_scale(amax_bits.to(tl.float32, bitcast=True), 448.0, 1e-4)
    scale = ue8m0_to_f32(tl.where(amax_bits < 0x7F800000, byte, 255))
    if NATIVE:
        value = (x * reciprocal).to(tl.float8e4nv).to(tl.float32)
    else:
        value = e4m3_bits_to_f32(f32_to_e4m3_bits(x * reciprocal))
    return value * scale


@triton.jit
def fp8_operand(q, scale_byte, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Values w * sw [BN, BK] of FP8 codes [BN, BK] with scales [BN, BK / 32]."""
    BN: tl.constexpr = q.shape[0]
    BK: tl.constexpr = q.shape[1]
    value = q.to(tl.float8e4nv, bitcast=True).to(tl.float32) if NATIVE else e4m3_bits_to_f32(q)
    scale = tl.broadcast_to(ue8m0_to_f32(scale_byte)[:, :, None], [BN, BK // 32, 32])
    return (value * tl.reshape(scale, [BN, BK])).to(DTYPE)


@triton.jit
def _quantise_kernel(
    x_ptr,  # [M, K]
    out_ptr,  # [M, K]
    n_blocks,
    x_stride,
    PER_ROW: tl.constexpr,
    BLOCKS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # one program per BLOCKS blocks of 32 activations, across row ends
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (block < n_blocks)[:, None]
    lane = tl.arange(0, 32)[None, :]
    at = (block // PER_ROW * x_stride + block % PER_ROW * 32)[:, None] + lane
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    value = quantised_values(x, 1, NATIVE).to(out_ptr.dtype.element_ty)  # exact
    tl.store(out_ptr + block[:, None] * 32 + lane, value, mask=inside)


@triton.jit
def _linear_kernel(
    x_ptr,  # [M, K] values, the activations or a * sa
    codes_ptr,  # [N, K] uint8
    scales_ptr,  # [N / 32, K / 32] uint8
    out_ptr,  # [M, N], or [SPLITS, M, N] float32
    M,
    N,
    x_stride,
    codes_stride,
    scales_stride,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # one program per (tile of BN outputs, BM rows, SPLIT inputs, group); row tiles vary fastest and share a weight tile
    group, width = tl.program_id(2), N * tl.num_programs(2)
    x_ptr += group * K
    codes_ptr += (group * N).to(tl.int64) * codes_stride
    scales_ptr += group * (N // 32) * scales_stride
    row_tiles = tl.cdiv(M, BM)
    m = tl.program_id(0) % row_tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) // row_tiles * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    k = tl.arange(0, BK)
    block = tl.arange(0, BK // 32)
    x_row = x_ptr + m[None, :].to(tl.int64) * x_stride
    code_row = codes_ptr + n[:, None].to(tl.int64) * codes_stride
    scale_row = scales_ptr + (n[:, None] // 32) * scales_stride
    m_ok, n_ok = m[None, :] < M, n[:, None] < N
    acc = tl.zeros([BN, BM], tl.float32)
    first = part * (SPLIT // 32) + block
    s = tl.load(scale_row + first[None, :], mask=n_ok & (first < K // 32)[None, :], other=0)
    for k0 in range(part * SPLIT, tl.minimum((part + 1) * SPLIT, K), BK):
        k_in = k0 + k
        if K % BK == 0:
            x = tl.load(x_row + k_in[:, None], mask=m_ok, other=0.0)  # [BK, BM]
            q = tl.load(code_row + k_in[None, :], mask=n_ok, other=0)  # [BN, BK]
        else:
            x = tl.load(x_row + k_in[:, None], mask=m_ok & (k_in < K)[:, None], other=0.0)
            q = tl.load(code_row + k_in[None, :], mask=n_ok & (k_in < K)[None, :], other=0)
        w = fp8_operand(q, s, x.dtype, NATIVE)
        # single bytes are too narrow for an asynchronous copy: the scales of the next step are fetched here
        ahead = (k0 + BK) // 32 + block
        s = tl.load(scale_row + ahead[None, :], mask=n_ok & (ahead < K // 32)[None, :], other=0)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
    out = out_ptr + group * N + part.to(tl.int64) * M * width + m[None, :].to(tl.int64) * width + n[:, None]
    tl.store(out, round_like(acc, out_ptr.dtype.element_ty, NATIVE), mask=m_ok & n_ok)


@triton.jit
def vector_blocks(x_ptr, k0, K: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr):
    """(codes, scales) of x[k0 : k0 + BK] in the fp8 format: float32 [BK / 32, 32] and [BK / 32]; zeros from K on."""
    at = k0 + tl.arange(0, BK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    amax_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    byte, reciprocal = ue8m0_scale(amax_bits.to(tl.float32, bitcast=True), 448.0, 1e-4)
    scale = ue8m0_to_f32(tl.where(amax_bits < 0x7F800000, byte, 255))
    if NATIVE:
        return (x * reciprocal[:, None]).to(tl.float8e4nv).to(tl.float32), scale
    return e4m3_bits_to_f32(f32_to_e4m3_bits(x * reciprocal[:, None])), scale


@triton.jit
def block_columns(codes, DTYPE: tl.constexpr):
    """[B * C, B] for codes [B, C]: column b keeps block b alone, so that a product with it sums each block apart."""
    B: tl.constexpr = codes.shape[0]
    C: tl.constexpr = codes.shape[1]
    mine = (tl.arange(0, B * C) // C)[:, None] == tl.arange(0, B)[None, :]
    return tl.where(mine, tl.reshape(codes, [B * C])[:, None], 0.0).to(DTYPE)


@triton.jit
def fp8_vector_dot(
    acc, code_row, scale_row, n_ok, k0, columns, x_scale, K: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr
):
    """acc [BN, BK / 32] += the sums of w[:, k0 : k0 + BK] x over each block of 32 inputs."""
    k = (k0 + tl.arange(0, BK))[None, :]
    block = (k0 // 32 + tl.arange(0, BK // 32))[None, :]
    if K % BK == 0:
        q = tl.load(code_row + k, mask=n_ok, other=0)
        s = tl.load(scale_row + block, mask=n_ok, other=0)
    else:
        q = tl.load(code_row + k, mask=n_ok & (k < K), other=0)
        s = tl.load(scale_row + block, mask=n_ok & (block < K // 32), other=0)
    w = q.to(tl.float8e4nv, bitcast=True) if NATIVE else e4m3_bits_to_f32(q)
    sums = tl.dot(w.to(columns.dtype), columns, input_precision="ieee")
    return acc + sums * x_scale[None, :] * ue8m0_to_f32(s)


@triton.jit
def _vector_kernel(
    x_ptr,  # [K]
    codes_ptr,  # [N, K] uint8
    scales_ptr,  # [N / 32, K / 32] uint8
    out_ptr,  # [splits, N]
    N,
    codes_stride,
    scales_stride,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OPERAND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # one program per (BN outputs, SPLIT inputs, group)
    group = tl.program_id(2)
    x_ptr += group * K
    codes_ptr += (group * N).to(tl.int64) * codes_stride
    scales_ptr += group * (N // 32) * scales_stride
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_ok = (n < N)[:, None]
    first = tl.program_id(1) * SPLIT if SPLIT < K else 0
    code_row = codes_ptr + n[:, None].to(tl.int64) * codes_stride
    scale_row = scales_ptr + (n[:, None] // 32) * scales_stride
    acc = tl.zeros([BN, BK // 32], tl.float32)
    for k0 in range(first, tl.minimum(first + SPLIT, K) if SPLIT < K else K, BK):
        codes, x_scale = vector_blocks(x_ptr, k0, K, BK, NATIVE)
        columns = block_columns(codes, OPERAND)
        acc = fp8_vector_dot(acc, code_row, scale_row, n_ok, k0, columns, x_scale, K, BK, NATIVE)
    out_ptr += tl.program_id(1).to(tl.int64) * N * tl.num_programs(2) + group * N
    tl.store(out_ptr + n, round_like(tl.sum(acc, axis=1), out_ptr.dtype.element_ty, NATIVE), mask=n < N)


@triton.jit
def _sum_parts_kernel(parts_ptr, out_ptr, count, PARTS: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        acc += tl.load(parts_ptr + part * count + i, mask=i < count, other=0.0)
    tl.store(out_ptr + i, round_like(acc, out_ptr.dtype.element_ty, NATIVE), mask=i < count)


def linear(x, codes, scales, act_quant=True, groups=1):
    """y = x W^T for float32 or bfloat16 x [M, K] and FP8 weights, codes [N, K] and scales [N / 32, K / 32] uint8.

    groups: G independent products side by side, x [M, G K], codes [G N, K], y [M, G N]; N is a multiple of 32.
    """
    check_activation("x", x)
    M, outputs = x.shape[0], codes.shape[0]
    if groups < 1 or x.shape[1] % (32 * groups) or outputs % (32 * groups):
        raise ValueError(
            f"groups is {groups}, expected whole blocks of 32 of {x.shape[1]} inputs and {outputs} outputs in each"
        )
    K, N = x.shape[1] // groups, outputs // groups
    check_fp8_weight("codes", codes, scales, outputs, K, x.device)
    out = torch.empty(M, outputs, dtype=x.dtype, device=x.device)
    if out.numel() == 0 or K == 0:
        return out.zero_()
    native = has_e4m3(x)
    vector = act_quant and M == 1 and (native or not x.is_cuda)
    if vector:
        BM, BN, BK = 1, VECTOR["BN"], VECTOR["BK"]
    else:
        x = quantise_activation(x) if act_quant else x
        BM, BN, BK, warps, stages = _tiles(M, x.dtype, x.is_cuda)
    tiles = triton.cdiv(M, BM) * triton.cdiv(N, BN)
    programs = tiles * groups
    most = triton.cdiv(K, BK) if vector else min(triton.cdiv(K, 4 * BK), 8)
    span = triton.cdiv(triton.cdiv(K, max(1, min(PROGRAMS // programs, most))), BK) * BK
    splits = triton.cdiv(K, span)
    parts = out if splits == 1 else torch.empty(splits, M, outputs, dtype=torch.float32, device=x.device)
    if vector:
        _vector_kernel[(tiles, splits, groups)](
            x, codes, scales, parts, N, codes.stride(0), scales.stride(0), K=K, SPLIT=span,
            OPERAND=tl.float16 if x.is_cuda else tl.float32, NATIVE=native, **VECTOR,
        )  # fmt: skip
    else:
        _linear_kernel[(tiles, splits, groups)](
            x, codes, scales, parts, M, N, x.stride(0), codes.stride(0), scales.stride(0), K=K, SPLIT=span,
            BM=BM, BN=BN, BK=BK, NATIVE=native, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    if splits > 1:
        _sum_parts_kernel[(triton.cdiv(out.numel(), 1024),)](
            parts, out, out.numel(), PARTS=splits, BLOCK=1024, NATIVE=native
        )
    return out


def quantise_activation(x):
    """x rounded to the fp8 format, as values [M, K]: exact in bfloat16, which is their dtype on a GPU."""
    M, K = x.shape
    out = torch.empty(M, K, dtype=torch.bfloat16 if x.is_cuda else torch.float32, device=x.device)
    blocks = M * K // 32
    if blocks:
        _quantise_kernel[(triton.cdiv(blocks, ACT_BLOCKS),)](
            x, out, blocks, x.stride(0), PER_ROW=K // 32, BLOCKS=ACT_BLOCKS, NATIVE=has_e4m3(x), num_warps=4
        )
    return out


def _tiles(rows, dtype, on_gpu):
    """BM, BN, BK, num_warps, num_stages by the number of rows."""
    if not on_gpu or dtype == torch.float32:
        return 16 if rows <= 16 else 32, 64, 64, 4, 2
    if rows <= 16:
        return 16, 32, 128, 2, 3
    if rows <= 64:
        return 64, 64, 64, 4, 3
    if rows <= 256:
        return 128, 64, 64, 4, 4
    return 256, 128, 64, 8, 4


def aot_cases():
    signature = {"x_ptr": "*bf16", "codes_ptr": "*u8", "scales_ptr": "*u8", "out_ptr": "*bf16", "parts_ptr": "*fp32"}
    signature |= {"M": "i32", "N": "i32:16", "x_stride": "i32:16", "codes_stride": "i32:16", "scales_stride": "i32"}
    signature |= {"n_blocks": "i32", "count": "i32"}
    cases = []
    for rows, matrix in ((16, ""), (64, "m64n64k16"), (200, "m64n128k16"), (4096, "m64n256k16")):
        BM, BN, BK, warps, stages = _tiles(rows, torch.bfloat16, True)
        constants = dict(K=1280, SPLIT=1280, BM=BM, BN=BN, BK=BK, NATIVE=True, PRECISION="tf32")
        expected = {
            90: [f"wgmma.mma_async.sync.aligned.{matrix}.f32.bf16.bf16" if matrix else "mma.sync"],
            100: ["tcgen05.mma" if matrix else "mma.sync"],
        }
        options = dict(num_warps=warps, num_stages=stages)
        cases.append((f"linear {rows}", _linear_kernel, signature, constants, options, expected))
        cases.append(
            (
                f"linear {rows} sm_80",
                _linear_kernel,
                signature,
                constants | {"NATIVE": False},
                options,
                {80: ["mma.sync"]},
            )
        )
    cases.append(
        ("quantise", _quantise_kernel, signature, dict(PER_ROW=160, BLOCKS=ACT_BLOCKS, NATIVE=True), {}, {90: []})
    )
    vector = dict(K=1280, SPLIT=1280, BN=VECTOR["BN"], BK=VECTOR["BK"], OPERAND=tl.float16, NATIVE=True)
    options = dict(num_warps=VECTOR["num_warps"], num_stages=VECTOR["num_stages"])
    widened = ["cvt.rn.f16x2.e4m3x2"]
    cases.append(("linear vector", _vector_kernel, signature, vector, options, {90: widened, 100: []}))
    cases.append(("sum parts", _sum_parts_kernel, signature, dict(PARTS=4, BLOCK=1024, NATIVE=True), {}, None))
    return cases


def check_activation(name, x):
    if x.ndim != 2 or x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"{name} must be a float32 or bfloat16 matrix [rows, inputs], got {x.dtype} {tuple(x.shape)}")
    if x.shape[1] % 32:
        raise ValueError(f"{name} has {x.shape[1]} inputs, expected a multiple of 32")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{name} must have unit stride along a row, got strides {x.stride()}")


def check_fp8_weight(name, codes, scales, outputs, inputs, device):
    """Codes uint8 [outputs, inputs] and scales uint8 [outputs / 32, inputs / 32], rows contiguous."""
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise TypeError(f"{name} and its scales must be uint8, got {codes.dtype} and {scales.dtype}")
    if codes.shape != (outputs, inputs) or outputs % 32:
        raise ValueError(f"{name} has shape {tuple(codes.shape)}, expected {(outputs, inputs)} in multiples of 32")
    if scales.shape != (outputs // 32, inputs // 32):
        raise ValueError(f"scales of {name} have shape {tuple(scales.shape)}, expected {(outputs // 32, inputs // 32)}")
    if codes.device != device or scales.device != device:
        raise ValueError(f"{name} and its scales must be on {device}, got {codes.device} and {scales.device}")
    if codes.stride(-1) != 1 or scales.stride(-1) != 1:
        raise ValueError(f"{name} and its scales need unit stride along a row, got {codes.stride()}, {scales.stride()}")
