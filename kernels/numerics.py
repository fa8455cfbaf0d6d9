"""Number formats as integer arithmetic: the same bits on every chip and in Triton's interpreter.

    E4M3   1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, 0x7F is NaN, largest value 448
    E2M1   1 sign, 2 exponent (bias 1), 1 mantissa bit: 0, .5, 1, 1.5, 2, 3, 4, 6
    UE8M0  a byte b that stands for 2^(b - 127); 255 is NaN

Rounding is to nearest, ties to the even code. These helpers are for kernels; the references use PyTorch's casts and
tables instead, so a mistake here cannot hide. Test: tests/kernels/test_numerics.py.
"""

import triton
import triton.language as tl


@triton.jit
def f32_to_e4m3_bits(x):
    """E4M3 byte of a float32, saturating at 448 (infinity too); NaN becomes 0x7F or 0xFF."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    mag = bits & 0x7FFFFFFF
    # From 2^-6 up: round to 3 mantissa bits in the integer domain, rebias the exponent from 127 to 7.
    normal = ((mag + 0x7FFFF + ((mag >> 20) & 1)) >> 20) - (120 << 3)
    # Below: a multiple of 2^-9. Adding 2^23 makes the float adder do the rounding; the low bits are the code.
    small = tl.minimum(mag.to(tl.float32, bitcast=True), 1.0)
    subnormal = (small * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.minimum(tl.where(mag < 0x3C800000, subnormal, normal), 0x7E)
    code = tl.where(mag > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def e4m3_bits_to_f32(code):
    """Float32 value of an E4M3 byte; 0x7F and 0xFF give NaN."""
    c = code.to(tl.int32)
    mag = c & 0x7F
    normal = (mag << 20) + (120 << 23)
    subnormal = (mag.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # mantissa * 2^-9
    bits = tl.where(mag < 8, subnormal, normal)
    bits = tl.where(mag == 0x7F, 0x7FC00000, bits)
    return (bits | ((c & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def f32_to_e2m1_code(x):
    """E2M1 code 0..15 (int32) of a float32, saturating at 6.

    The format has no NaN: a NaN becomes 6 here, so the caller marks it in the block's scale.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 28) & 8
    mag = bits & 0x7FFFFFFF
    normal = ((mag + 0x1FFFFF + ((mag >> 22) & 1)) >> 22) - (126 << 1)
    small = tl.minimum(mag.to(tl.float32, bitcast=True), 1.0)
    subnormal = (small * 2.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000  # below 1: halves
    code = tl.minimum(tl.where(mag < 0x3F800000, subnormal, normal), 7)
    return code | sign


@triton.jit
def e2m1_code_to_f32(code):
    """Float32 value of an E2M1 code; bits above the fourth are ignored."""
    c = code.to(tl.int32)
    mag = c & 7
    bits = tl.where(mag < 2, mag * 0x3F000000, (mag + 252) << 22)  # 0 and 0.5, then normal numbers
    return (bits | ((c & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def ue8m0_to_f32(byte):
    """2^(byte - 127) as a float32; byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x00400000, b << 23)
    return tl.where(b == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def pow2_ceil_exponent(x):
    """UE8M0 byte (int32) of the smallest power of two >= x, for x >= 0; infinity and NaN give 255.

    By exponent bits: adding the largest mantissa carries into the exponent unless the mantissa is zero.
    Positive numbers below 2^-126 give byte 1, zero gives byte 0.
    """
    mag = tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)
    return (mag + 0x7FFFFF) >> 23


@triton.jit
def f32_to_bf16(x):
    """Bfloat16 of a float32, ties to even, NaN kept: Triton's interpreter truncates in `.to(tl.bfloat16)`."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def settled(x):
    """x, unchanged: Triton 3.6 fails to compile when it tries to carry the reshape before this into shared memory."""
    if x.dtype.is_bf16():
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.bfloat16, is_pure=True, pack=2)
    return x
