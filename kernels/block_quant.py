"""Pack rows into block-scaled FP8 or FP4 bytes, and unpack them.

    format   block  A                         scale s                     code
    fp8      32     max(max|v|, 1e-4)         P2(A * fp32(1/448)), UE8M0  E4M3 of v / s
    mxfp4    32     max(max|v|, 6 * 2^-126)   P2(A * fp32(1/6)),   UE8M0  E2M1 of v / s
    fp4      16     max(max|v|, 6 * 2^-9)     E4M3 of A / 6               E2M1 of v / s

P2(y) is the smallest power of two >= y. Both roundings are to nearest, ties to the even code, saturating. Two E2M1
codes share a byte, the even channel in the low nibble. A block that holds NaN or infinity gets the scale NaN and codes
0, so every value of it unpacks to NaN.

Shapes: x [R, W], codes [R, W] (fp8) or [R, W / 2], scales [R, W / block], all with a row stride of their own: the two
slices of one record tensor work as well as two planes.
Reads R*W*2 bytes of bf16 and writes R*W*(1/2 + 1/16) for fp4, or the reverse; the bound is memory bandwidth. Close
behind comes instruction issue: at 4.27 TB/s an H200 has some 17 instructions for each bf16 element, hence the short
encoding of E2M1 below.
Reference: kernels/reference/block_quant.py. Test: tests/kernels/test_block_quant.py. Bench: `block_quant`.
"""

import torch
import triton
import triton.language as tl

from kernels.numerics import (
    e2m1_code_to_f32,
    e4m3_bits_to_f32,
    f32_to_e2m1_code,
    f32_to_e4m3_bits,
    pow2_ceil_exponent,
    ue8m0_to_f32,
)

FORMATS = {"fp8": 32, "mxfp4": 32, "fp4": 16}  # channels that share a scale
ELEMENTS = 4096  # of one program: 32 for each thread of 4 warps, four 16-byte loads in flight


@triton.jit
def ue8m0_scale(amax, LIMIT: tl.constexpr, FLOOR: tl.constexpr):
    """(byte, 1 / s) of P2(max(amax, FLOOR) * fp32(1 / LIMIT)): the reciprocal of a power of two is exact."""
    byte = pow2_ceil_exponent(tl.maximum(amax, FLOOR) * (1.0 / LIMIT))
    return byte, ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1_code_short(x, reciprocal):
    """E2M1 code of x / s for x from bf16: seven float and four integer instructions.

    The code of y >= 0 is the integer nearest to min(2y, y + 2, y/2 + 4), ties to even, and 7 at most. A bf16 value is
    either exactly on a tie of the E2M1 grid or at least 2^-8 of its size beside it. Adding 64 to each line drops the
    last 7 bits, and with them the error of the reciprocal: ties are found exactly. The test tries values with scales.
    """
    y = tl.abs(x)
    line0 = (y * (2.0 * reciprocal) + 64.0).to(tl.int32, bitcast=True)  # positive floats order like their bits
    line1 = (y * reciprocal + 66.0).to(tl.int32, bitcast=True)
    line2 = (y * (0.5 * reciprocal) + 68.0).to(tl.int32, bitcast=True)
    line = tl.minimum(tl.minimum(tl.minimum(line0, line1), line2), 0x428E0000)  # 71
    rounded = (line.to(tl.float32, bitcast=True) + 8388608.0).to(tl.int32, bitcast=True)  # at 2^23: an integer
    bits = x.to(tl.int32, bitcast=True)
    return (rounded & 7) | ((bits >> 28) & 8)


@triton.jit
def _pack_kernel(
    x_ptr,  # [R, W]
    codes_ptr,  # [R, W or W / 2] uint8
    scales_ptr,  # [R, W / G] uint8
    n_blocks,
    x_stride,
    codes_stride,
    scales_stride,
    PER_ROW: tl.constexpr,
    G: tl.constexpr,
    BLOCKS: tl.constexpr,
    FOUR_BIT: tl.constexpr,
    E4M3_SCALE: tl.constexpr,
    SHORT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # one program per BLOCKS blocks of G channels, across row ends; int64 because R * W passes 2^31
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < n_blocks
    row, i = block // PER_ROW, block % PER_ROW
    channel = tl.arange(0, G)
    x = tl.load(x_ptr + (row * x_stride + i * G)[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
    x = x.to(tl.float32)  # [BLOCKS, G]

    # The maximum of the bit patterns orders magnitudes like floats and, unlike a float maximum, cannot lose a NaN.
    amax_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = amax_bits < 0x7F800000
    amax = amax_bits.to(tl.float32, bitcast=True)
    if E4M3_SCALE:
        amax = tl.maximum(amax, 0.01171875)  # 6 * 2^-9
        # 6 times a tie of the E4M3 grid times fp32(1/6) is that tie, and no other bf16 value comes close to one
        wanted = amax * (1.0 / 6.0) if SHORT else tl.div_rn(amax, tl.full([BLOCKS], 6.0, tl.float32))
        if NATIVE:
            scale_e4m3 = tl.minimum(wanted, 448.0).to(tl.float8e4nv)
            byte, scale = scale_e4m3.to(tl.uint8, bitcast=True), scale_e4m3.to(tl.float32)
        else:
            byte = f32_to_e4m3_bits(wanted)
            scale = e4m3_bits_to_f32(byte)
        reciprocal = 1.0 / scale  # to 2 ulp, used by the short encoding alone
        byte = tl.where(finite, byte, 0x7F)
    else:
        if FOUR_BIT:
            byte, reciprocal = ue8m0_scale(amax, 6.0, 7.052966104933725e-38)  # 6 * 2^-126
        else:
            byte, reciprocal = ue8m0_scale(amax, 448.0, 1e-4)
        byte = tl.where(finite, byte, 255)
    tl.store(scales_ptr + row * scales_stride + i, byte.to(tl.uint8), mask=inside)

    keep = tl.where(finite, 0xFF, 0).to(tl.uint8)[:, None]
    if FOUR_BIT:
        if SHORT:
            code = _e2m1_code_short(x, reciprocal[:, None])
        elif E4M3_SCALE:  # a true division: this scale has no exact reciprocal
            code = f32_to_e2m1_code(tl.div_rn(x, tl.broadcast_to(scale[:, None], [BLOCKS, G])))
        else:
            code = f32_to_e2m1_code(x * reciprocal[:, None])
        low, high = tl.split(tl.reshape(code, [BLOCKS, G // 2, 2]))
        packed = (low | (high << 4)).to(tl.uint8)
        at = (row * codes_stride + i * (G // 2))[:, None] + tl.arange(0, G // 2)[None, :]
    else:
        if NATIVE:
            code = (x * reciprocal[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            code = f32_to_e4m3_bits(x * reciprocal[:, None])
        packed = code
        at = (row * codes_stride + i * G)[:, None] + channel[None, :]
    tl.store(codes_ptr + at, packed & keep, mask=inside[:, None])


@triton.jit
def _unpack_kernel(
    codes_ptr,  # [R, W or W / 2] uint8
    scales_ptr,  # [R, W / G] uint8
    out_ptr,  # [R, W]
    n_blocks,
    codes_stride,
    scales_stride,
    out_stride,
    PER_ROW: tl.constexpr,
    G: tl.constexpr,
    BLOCKS: tl.constexpr,
    FOUR_BIT: tl.constexpr,
    E4M3_SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < n_blocks
    row, i = block // PER_ROW, block % PER_ROW
    byte = tl.load(scales_ptr + row * scales_stride + i, mask=inside, other=0)
    scale = e4m3_bits_to_f32(byte) if E4M3_SCALE else ue8m0_to_f32(byte)
    BYTES: tl.constexpr = G // 2 if FOUR_BIT else G
    at = (row * codes_stride + i * BYTES)[:, None] + tl.arange(0, BYTES)[None, :]
    code = tl.load(codes_ptr + at, mask=inside[:, None], other=0)
    if FOUR_BIT:
        value = tl.join(e2m1_code_to_f32(code), e2m1_code_to_f32(code >> 4))  # [BLOCKS, G / 2, 2]
        value = tl.reshape(value, [BLOCKS, G])
    elif NATIVE:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        value = e4m3_bits_to_f32(code)
    value = (value * scale[:, None]).to(out_ptr.dtype.element_ty)
    out = out_ptr + (row * out_stride + i * G)[:, None] + tl.arange(0, G)[None, :]
    tl.store(out, value, mask=inside[:, None])


def block_quant(x, format, out=None):
    """Packed (codes, scales) of the rows of x, float32 or bfloat16 [R, W].

    format: "fp8", "mxfp4" or "fp4". out: a (codes, scales) pair to write, for example two slices of a record tensor.
    """
    block = _check_format(format)
    if x.ndim != 2 or x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"x must be a float32 or bfloat16 matrix [rows, width], got {_describe(x)}")
    _check_last_stride("x", x)
    rows, width = x.shape
    _check_width(width, format)
    shapes = (rows, width // (1 if format == "fp8" else 2)), (rows, width // block)
    if out is None:
        out = tuple(torch.empty(shape, dtype=torch.uint8, device=x.device) for shape in shapes)
    for name, tensor, shape in zip(("codes", "scales"), out, shapes, strict=True):
        if tensor.dtype != torch.uint8 or tensor.shape != shape or tensor.device != x.device:
            raise ValueError(f"out {name} must be uint8 {shape} on {x.device}, got {_describe(tensor)}")
        _check_last_stride(f"out {name}", tensor)
    codes, scales = out
    if x.numel():
        elements, warps = _pack_program(format)
        n_blocks, per_program = rows * width // block, elements // block
        _pack_kernel[(triton.cdiv(n_blocks, per_program),)](
            x, codes, scales, n_blocks, x.stride(0), codes.stride(0), scales.stride(0),
            PER_ROW=width // block, G=block, BLOCKS=per_program, FOUR_BIT=format != "fp8", E4M3_SCALE=format == "fp4",
            SHORT=x.dtype == torch.bfloat16, NATIVE=has_e4m3(x), num_warps=warps,
        )  # fmt: skip
    return codes, scales


def _pack_program(format):
    """(elements, warps) of a packing program; rounding to 4 bits hides its latency better in many small ones."""
    return (ELEMENTS, 4) if format == "fp8" else (2048, 1)


def block_dequant(codes, scales, format, dtype=torch.bfloat16):
    """Values [R, W] of packed rows; every finite value of the three formats is exact in bfloat16."""
    block = _check_format(format)
    for name, tensor in (("codes", codes), ("scales", scales)):
        if tensor.ndim != 2 or tensor.dtype != torch.uint8:
            raise TypeError(f"{name} must be a uint8 matrix, got {_describe(tensor)}")
        _check_last_stride(name, tensor)
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"dtype must be torch.float32 or torch.bfloat16, got {dtype}")
    rows, width = codes.shape[0], codes.shape[1] * (1 if format == "fp8" else 2)
    _check_width(width, format)
    if scales.shape != (rows, width // block) or scales.device != codes.device:
        raise ValueError(
            f"scales must have shape {(rows, width // block)} on {codes.device} for {format} codes "
            f"{tuple(codes.shape)}, got {_describe(scales)}"
        )
    out = torch.empty(rows, width, dtype=dtype, device=codes.device)
    if out.numel():
        n_blocks, per_program = rows * width // block, ELEMENTS // block
        _unpack_kernel[(triton.cdiv(n_blocks, per_program),)](
            codes, scales, out, n_blocks, codes.stride(0), scales.stride(0), out.stride(0),
            PER_ROW=width // block, G=block, BLOCKS=per_program, FOUR_BIT=format != "fp8", E4M3_SCALE=format == "fp4",
            NATIVE=has_e4m3(codes), num_warps=4,
        )  # fmt: skip
    return out


def aot_cases():
    strides = dict.fromkeys(("x_stride", "codes_stride", "out_stride"), "i32:16")
    signature = strides | {"scales_stride": "i32", "n_blocks": "i32", "codes_ptr": "*u8", "scales_ptr": "*u8"}
    cases = []
    for format, block in FORMATS.items():
        for native, expected in ((False, {80: []}), (True, {90: ["ld.global.v4"], 100: ["ld.global.v4"]})):
            elements, warps = _pack_program(format)
            constants = dict(PER_ROW=512 // block, G=block, BLOCKS=elements // block, FOUR_BIT=format != "fp8")
            constants |= dict(E4M3_SCALE=format == "fp4", NATIVE=native)
            for kind, short in (("*bf16", True), ("*fp32", False)):
                pack = signature | {"x_ptr": kind}
                case = f"pack {format} {kind[1:]}"
                cases.append((case, _pack_kernel, pack, constants | {"SHORT": short}, dict(num_warps=warps), expected))
            unpack = signature | {"out_ptr": "*bf16"}
            expected = {arch: [] for arch in expected}
            constants |= {"BLOCKS": ELEMENTS // block}
            cases.append((f"unpack {format}", _unpack_kernel, unpack, constants, dict(num_warps=4), expected))
    return cases


def has_e4m3(tensor):
    """Whether the tensor's device converts E4M3 in hardware (compute capability 8.9 and up)."""
    return (
        tensor.is_cuda and torch.version.cuda is not None and torch.cuda.get_device_capability(tensor.device) >= (8, 9)
    )


def _check_format(format):
    if format not in FORMATS:
        raise ValueError(f"format must be one of {sorted(FORMATS)}, got {format!r}")
    return FORMATS[format]


def _check_width(width, format):
    if width % FORMATS[format]:
        raise ValueError(f"width {width} is not a multiple of the {FORMATS[format]} channels of a {format} block")


def _check_last_stride(name, tensor):
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have unit stride along a row, got strides {tensor.stride()}")


def _describe(t):
    return f"{t.dtype} {tuple(t.shape)} with strides {t.stride()} on {t.device}"
