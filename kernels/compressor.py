"""Compressor: gated pooling of groups of tokens into one latent each, stored at once as a packed cache record.

    l[c]   = sum_i softmax_i(gate[i, c]) * u[i, c]        over the r tokens of group t; r = 1: l = u, no gate
    latent = RMSNorm(round(l)) * norm_weight              rounded to bfloat16 before and after (latent_dtype)
    record = pack(RoPE(latent, position r * t))           adjacent pairs of the last channels, then FP4 or FP8

Groups lie at fixed places, token p belongs to group p // r, so any split of a prompt into calls gives the same records.
Rows of a group that is not complete yet come in as pending_u, pending_gate and go out again.

One program per group, one pass: every input is read once, but for the last channels (64 of 512), which the rotation
reads a second time from the L1 cache so that sines are computed for them alone.

Shapes: tokens [T, W], groups G = T / r. Reads T*W*2 elements (T*W at r = 1), writes G*W*2 bytes of latent and
G*(W/2 + W/16) of FP4 record (FP8: W + W/32). Bound by memory bandwidth, in bfloat16 by instruction issue as well.
Reference: kernels/reference/compressor.py. Test: tests/kernels/test_compressor.py. Bench: `compressor`.
"""

import torch
import triton
import triton.language as tl

from kernels.block_quant import _e2m1_code_short, has_e4m3, ue8m0_scale
from kernels.numerics import e4m3_bits_to_f32, f32_to_bf16, f32_to_e2m1_code, f32_to_e4m3_bits

BLOCKS = {"fp4": 16, "fp8": 32}  # channels that share a scale
UNROLL = tl.constexpr(4)  # rows of a long group whose loads are under way together


@triton.jit
def _round(x, BF16: tl.constexpr, NATIVE: tl.constexpr):
    """x at the precision of the latent, still float32."""
    if BF16:
        x = (x.to(tl.bfloat16) if NATIVE else f32_to_bf16(x)).to(tl.float32)
    return x


@triton.jit
def _load_row(ptr, pending_ptr, row, pending, stride, channel, mask, W: tl.constexpr, HAS_PENDING: tl.constexpr):
    """Row `row` of this call's tokens; the rows that were pending come before it and have negative numbers."""
    if HAS_PENDING:
        new = tl.load(ptr + row * stride + channel, mask=mask & (row >= 0), other=0.0).to(tl.float32)
        old = tl.load(pending_ptr + (row + pending) * W + channel, mask=mask & (row < 0), other=0.0)
        return tl.where(row >= 0, new, old)
    else:
        return tl.load(ptr + row * stride + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _latent(
    u_ptr, gate_ptr, pending_u_ptr, pending_gate_ptr, first, pending, u_stride, gate_stride, channel, mask,
    W: tl.constexpr, RATIO: tl.constexpr, HAS_PENDING: tl.constexpr, BF16: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Gated mean of RATIO rows from `first` on, as a running softmax: one pass for a group of any length."""
    total = _load_row(u_ptr, pending_u_ptr, first, pending, u_stride, channel, mask, W, HAS_PENDING)
    if RATIO > 1:
        top = _load_row(gate_ptr, pending_gate_ptr, first, pending, gate_stride, channel, mask, W, HAS_PENDING)
        weights = tl.full(top.shape, 1.0, tl.float32)
        for i in tl.range(1, RATIO, loop_unroll_factor=UNROLL if RATIO > UNROLL else RATIO):
            u = _load_row(u_ptr, pending_u_ptr, first + i, pending, u_stride, channel, mask, W, HAS_PENDING)
            g = _load_row(gate_ptr, pending_gate_ptr, first + i, pending, gate_stride, channel, mask, W, HAS_PENDING)
            # The larger gate so far has weight 1, so one exponential serves both sides and weights stay >= 1.
            ahead = tl.where(g == top, 0.0, g - top)
            decay = tl.exp(-tl.abs(ahead))
            old_weight = tl.where(ahead > 0, decay, 1.0)
            weight = tl.where(ahead > 0, 1.0, decay)
            total = total * old_weight + u * weight
            weights = weights * old_weight + weight
            top = tl.where(ahead > 0, g, top)
        root = tl.rsqrt(weights)  # its square is 1 / weights to 2 ulp, in a third of the instructions of a division
        total = total * (root * root) + (top - top)  # all gates closed, or an infinite one: NaN, as in any softmax
    return _round(total, BF16, NATIVE)


@triton.jit
def _store_record(
    x, codes_ptr, scales_ptr, block, blocks,
    CHANNELS: tl.constexpr, G: tl.constexpr, BF16: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Pack CHANNELS channels from block number `block` on, of `blocks` in all: E2M1 with G = 16, E4M3 with G = 32."""
    COUNT: tl.constexpr = CHANNELS // G
    x = tl.reshape(x, [COUNT, G])
    # The maximum of the bit patterns orders magnitudes like floats and cannot lose a NaN.
    amax_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = amax_bits < 0x7F800000
    amax = amax_bits.to(tl.float32, bitcast=True)
    if G == 16:
        amax = tl.maximum(amax, 0.01171875)  # 6 * 2^-9
        # No bfloat16 comes so near a tie of A / 6 that the product would round to another E4M3.
        wanted = amax * (1.0 / 6.0) if BF16 else tl.div_rn(amax, tl.full([COUNT], 6.0, tl.float32))
        if NATIVE:
            scale_e4m3 = tl.minimum(wanted, 448.0).to(tl.float8e4nv)
            byte, scale = scale_e4m3.to(tl.uint8, bitcast=True), scale_e4m3.to(tl.float32)
        else:
            byte = f32_to_e4m3_bits(wanted)
            scale = e4m3_bits_to_f32(byte)
        byte = tl.where(finite, byte, 0x7F)
        if BF16:
            code = _e2m1_code_short(x, (1.0 / scale)[:, None])
        else:
            code = f32_to_e2m1_code(tl.div_rn(x, tl.broadcast_to(scale[:, None], [COUNT, G])))
        low, high = tl.split(tl.reshape(code, [COUNT, G // 2, 2]))
        packed = (low | (high << 4)).to(tl.uint8)
        BYTES: tl.constexpr = G // 2
    else:
        byte, reciprocal = ue8m0_scale(amax, 448.0, 1e-4)
        byte = tl.where(finite, byte, 255)
        if NATIVE:
            packed = (x * reciprocal[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            packed = f32_to_e4m3_bits(x * reciprocal[:, None])
        BYTES: tl.constexpr = G
    packed = packed & tl.where(finite, 0xFF, 0).to(tl.uint8)[:, None]  # codes 0 where the scale says NaN
    block += tl.arange(0, COUNT)
    tl.store(scales_ptr + block, byte.to(tl.uint8), mask=block < blocks)
    at = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    tl.store(codes_ptr + at, packed, mask=block[:, None] < blocks)


@triton.jit
def _compressor_kernel(
    u_ptr,  # [T, W]
    gate_ptr,  # [T, W]
    pending_u_ptr,  # [pending, W] fp32
    pending_gate_ptr,  # [pending, W] fp32
    norm_weight_ptr,  # [W]
    inv_freq_ptr,  # [R / 2] fp32
    codes_ptr,  # [entries, W / 2 or W] uint8
    scales_ptr,  # [entries, W / G] uint8
    latent_ptr,  # [groups, W]
    pending, first_group, first_entry, u_stride, gate_stride, codes_stride, scales_stride, eps,
    W: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, TAIL: tl.constexpr, G: tl.constexpr,
    RATIO: tl.constexpr, HAS_PENDING: tl.constexpr, BF16: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    # one program per group; int64 because T * W passes 2**31
    group = tl.program_id(0).to(tl.int64)
    first = group * RATIO - pending
    codes_ptr += (first_entry + group) * codes_stride
    scales_ptr += (first_entry + group) * scales_stride

    channel = tl.arange(0, WIDTH)
    mask = channel < W
    x = _latent(
        u_ptr, gate_ptr, pending_u_ptr, pending_gate_ptr, first, pending, u_stride, gate_stride, channel, mask,
        W, RATIO, HAS_PENDING, BF16, NATIVE,
    )  # fmt: skip
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / W + eps)
    weight = tl.load(norm_weight_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    x = _round(weight * (x * rstd), BF16, NATIVE)
    tl.store(latent_ptr + group * W + channel, f32_to_bf16(x) if BF16 else x, mask=mask)
    _store_record(x, codes_ptr, scales_ptr, 0, (W - TAIL) // G, WIDTH, G, BF16, NATIVE)

    if TAIL:  # the blocks that hold rotated channels, again from the inputs
        channel = W - TAIL + tl.arange(0, TAIL)
        mask = channel >= 0
        x = _latent(
            u_ptr, gate_ptr, pending_u_ptr, pending_gate_ptr, first, pending, u_stride, gate_stride, channel, mask,
            W, RATIO, HAS_PENDING, BF16, NATIVE,
        )  # fmt: skip
        weight = tl.load(norm_weight_ptr + channel).to(tl.float32)
        x = _round(weight * (x * rstd), BF16, NATIVE)
        pair = tl.arange(0, TAIL // 2) - (TAIL - ROTARY) // 2
        frequency = tl.load(inv_freq_ptr + pair, mask=pair >= 0, other=0.0)  # a block may begin before the rotation
        angle = ((first_group + group) * RATIO).to(tl.float32) * frequency
        cos, sin = tl.cos(angle), tl.sin(angle)
        even, odd = tl.split(tl.reshape(x, [TAIL // 2, 2]))
        new_even = tl.where(pair >= 0, even * cos - odd * sin, even)
        new_odd = tl.where(pair >= 0, even * sin + odd * cos, odd)
        x = tl.reshape(tl.join(new_even, new_odd), [TAIL])
        _store_record(_round(x, BF16, NATIVE), codes_ptr, scales_ptr, (W - TAIL) // G, W // G, TAIL, G, BF16, NATIVE)


def compressor(
    u, gate, norm_weight, inv_freq, codes, scales, ratio, start_position,
    entry_offset=None, pending_u=None, pending_gate=None, eps=1e-20, format="fp4", latent_dtype=torch.bfloat16,
):  # fmt: skip
    """Compress the tokens start_position, start_position + 1, ... of one sequence into cache records.

    u, gate [T, W]: the projected values and gates, float32 or bfloat16, rows of any stride. gate is None at ratio 1. A
        bias by the token's place in its group (V4) is added to gate by the caller.
    norm_weight [W], inv_freq [R / 2] float32: the last R channels are rotated; R is a power of two, or 0.
    codes, scales: uint8 rows of the cache, written from row entry_offset on (by default start_position // ratio).
        format "fp4": W/2 and W/16 bytes; "fp8": W and W/32.
    pending_u, pending_gate [start_position % ratio, W] float32: the rows of the group that is not complete yet.
    latent_dtype: bfloat16 rounds as the model does, float32 not at all.

    Returns (latent [groups, W] before rotation, pending_u, pending_gate), the pending rows in new tensors; both None at
    ratio 1. A value that is not finite makes its block of the record NaN.
    """
    T, W = _check(u, gate, norm_weight, inv_freq, ratio, format, latent_dtype)
    pending = start_position % ratio
    _check_pending(pending_u, pending_gate, pending, u)
    groups = (pending + T) // ratio
    first_group = start_position // ratio
    first_entry = first_group if entry_offset is None else entry_offset
    block = BLOCKS[format]
    for name, t, width in (("codes", codes, W // 2 if format == "fp4" else W), ("scales", scales, W // block)):
        if t.dtype != torch.uint8 or t.ndim != 2 or t.shape[1] != width or t.stride(1) != 1 or t.device != u.device:
            raise ValueError(f"{name} must be uint8 [entries, {width}] with unit last stride, got {_describe(t)}")
        if groups and not 0 <= first_entry <= t.shape[0] - groups:
            raise ValueError(f"{name} has {t.shape[0]} entries, {groups} from entry {first_entry} on do not fit")

    latent = torch.empty(groups, W, dtype=latent_dtype, device=u.device)
    if groups:
        rotary = 2 * len(inv_freq)
        _compressor_kernel[(groups,)](
            u, gate, pending_u if pending else None, pending_gate if pending else None, norm_weight, inv_freq,
            codes, scales, latent, pending, first_group, first_entry,
            u.stride(0), 0 if gate is None else gate.stride(0), codes.stride(0), scales.stride(0), eps,
            W=W, WIDTH=triton.next_power_of_2(W), ROTARY=rotary, TAIL=max(rotary, block) if rotary else 0, G=block,
            RATIO=ratio, HAS_PENDING=pending > 0, BF16=latent_dtype == torch.bfloat16, NATIVE=has_e4m3(u),
            num_warps=1 if ratio <= 8 else 4,
        )  # fmt: skip
    if ratio == 1:
        return latent, None, None
    return latent, _left_over(pending_u, u, pending, ratio), _left_over(pending_gate, gate, pending, ratio)


def _left_over(old, new, pending, ratio):
    """The rows after the last complete group, a float32 copy."""
    count = (pending + len(new)) % ratio
    if count <= len(new):
        return new[len(new) - count :].to(torch.float32, copy=True)
    return torch.cat([old, new.float()])  # no group was completed


def _describe(t):
    return "None" if t is None else f"{t.dtype} {tuple(t.shape)} with strides {t.stride()} on {t.device}"


def _check(u, gate, norm_weight, inv_freq, ratio, format, latent_dtype):
    if format not in BLOCKS:
        raise ValueError(f"format must be one of {sorted(BLOCKS)}, got {format!r}")
    if latent_dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"latent_dtype must be torch.bfloat16 or torch.float32, got {latent_dtype}")
    if ratio < 1:
        raise ValueError(f"ratio must be at least 1, got {ratio}")
    if (gate is None) != (ratio == 1):
        raise ValueError(f"gate must be None at ratio 1 and a tensor above, got {_describe(gate)} at ratio {ratio}")
    for name, t in (("u", u), ("gate", gate)):
        if t is None:
            continue
        if t.ndim != 2 or t.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"{name} must be a float32 or bfloat16 matrix [tokens, width], got {_describe(t)}")
        if t.shape != u.shape or t.device != u.device or t.stride(1) != 1:
            raise ValueError(f"{name} must be {tuple(u.shape)} on {u.device}, unit last stride, got {_describe(t)}")
    T, W = u.shape
    if W == 0 or W % BLOCKS[format]:
        raise ValueError(f"width {W} is not a multiple of the {BLOCKS[format]} channels of a {format} block")
    if norm_weight.shape != (W,) or norm_weight.device != u.device or not norm_weight.is_contiguous():
        raise ValueError(f"norm_weight must be contiguous ({W},) on {u.device}, got {_describe(norm_weight)}")
    R = 2 * inv_freq.numel()
    if inv_freq.dtype != torch.float32 or inv_freq.ndim != 1 or inv_freq.device != u.device or R > W or R & (R - 1):
        raise ValueError(
            f"inv_freq must be float32 [R / 2] on {u.device} with R = 0 or a power of two up to {W}, "
            f"got {_describe(inv_freq)}"
        )
    return T, W


def _check_pending(pending_u, pending_gate, pending, u):
    for name, t in (("pending_u", pending_u), ("pending_gate", pending_gate)):
        if t is None and not pending:
            continue
        shape = (pending, u.shape[1])
        if t is None or t.dtype != torch.float32 or t.shape != shape or t.device != u.device or not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous float32 {shape} on {u.device}, got {_describe(t)}")


def aot_cases():
    signature = {
        **dict.fromkeys(("pending_u_ptr", "pending_gate_ptr", "inv_freq_ptr", "norm_weight_ptr"), "*fp32"),
        **dict.fromkeys(("codes_ptr", "scales_ptr"), "*u8"),
        **dict.fromkeys(("pending", "first_group", "first_entry"), "i32"),
        **dict.fromkeys(("u_stride", "gate_stride", "codes_stride", "scales_stride"), "i32:16"),
        "eps": "fp32",
    }

    def case(name, ratio, dtype, block, native, pending=False, warps=1):
        types = signature | {"u_ptr": dtype, "gate_ptr": dtype, "latent_ptr": "*bf16"}
        values = {
            "W": 512, "WIDTH": 512, "ROTARY": 64, "TAIL": 64, "G": block, "RATIO": ratio, "HAS_PENDING": pending,
            "BF16": True, "NATIVE": native,
        }  # fmt: skip
        if ratio == 1:
            values["gate_ptr"] = None
        if not pending:
            values |= {"pending_u_ptr": None, "pending_gate_ptr": None}
        expected = {90: ["cvt.rn.satfinite.e4m3x2"], 100: ["cvt.rn.satfinite.e4m3x2"]} if native else {80: None}
        return name, _compressor_kernel, types, values, {"num_warps": warps}, expected

    return [
        case("ratio 2, fp4", 2, "*fp32", 16, True),
        case("ratio 2, fp4, pending", 2, "*bf16", 16, True, pending=True),
        case("ratio 1, fp8", 1, "*bf16", 32, True),
        case("ratio 128, fp4", 128, "*fp32", 16, True, warps=4),
        case("ratio 4, fp4, converted by integers", 4, "*bf16", 16, False),
    ]
