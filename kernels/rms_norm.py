"""RMS norm: each row divided by its root mean square, times a weight.

    out[r, d] = x[r, d] * rsqrt(sum_d x[r, d]^2 / D + eps) * weight[d]            in float32, rounded once

Shapes: R rows, D channels (1..16,384). One program holds a row, or some narrow ones, in registers.
Reads R*D*2 + D*2 bytes of bfloat16, writes R*D*2: memory bandwidth, and below some hundred rows the launch.
Reference: kernels/reference/rms_norm.py. Test: tests/kernels/test_rms_norm.py. Bench: `rms_norm`.
"""

import torch
import triton
import triton.language as tl

from kernels.numerics import f32_to_bf16

MAX_WIDTH = 16384


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [R, D]
    weight_ptr,  # [D]
    out_ptr,  # [R, D]
    R,
    D,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BF16: tl.constexpr,
):
    # one program per ROWS rows; int64 because R * D passes 2^31
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    inside = (row < R) & (channel < D)
    x = tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    out = x * scale * tl.load(weight_ptr + channel, mask=channel < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + channel, f32_to_bf16(out) if BF16 else out, mask=inside)


def rms_norm(x, weight, eps):
    """x float32 or bfloat16 [R, D] with unit last stride, weight float32 or bfloat16 [D]: [R, D] in the type of x."""
    if x.ndim != 2 or x.dtype not in (torch.float32, torch.bfloat16) or (x.shape[1] > 1 and x.stride(1) != 1):
        raise TypeError(f"x must be float32 or bfloat16 [rows, width] with unit last stride, got {_describe(x)}")
    rows, width = x.shape
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"the width of x must be 1 to {MAX_WIDTH}, got {width}")
    if weight.shape != (width,) or weight.dtype not in (torch.float32, torch.bfloat16) or weight.device != x.device:
        raise ValueError(f"weight must be float32 or bfloat16 [{width}] on {x.device}, got {_describe(weight)}")
    if not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous, got {_describe(weight)}")
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        padded = triton.next_power_of_2(width)
        many = x.device.type == "cpu" or rows >= 4096  # few rows: as many programs as there are
        block = max(1, min(16, 8192 // padded)) if many else 1
        _rms_norm_kernel[(triton.cdiv(rows, block),)](
            x, weight, out, rows, width, x.stride(0), eps,
            WIDTH=padded, ROWS=block, BF16=x.dtype == torch.bfloat16,
            num_warps=max(1, min(16, block * padded // 512)),
        )  # fmt: skip
    return out


def _describe(t):
    return f"{t.dtype} {tuple(t.shape)} with strides {t.stride()} on {t.device}"


def aot_cases():
    """A hidden state, and float32."""
    types = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16", "R": "i32", "D": "i32:16"}
    types |= {"x_stride": "i32:16", "eps": "fp32"}
    wide = {arch: ["ld.global.v4.b32", "st.global.v4.b32"] for arch in (80, 90, 100)}
    floats = types | dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*fp32")
    return [
        ("hidden state", _rms_norm_kernel, types, {"WIDTH": 8192, "ROWS": 1, "BF16": True}, {"num_warps": 16}, wide),
        ("float32", _rms_norm_kernel, floats, {"WIDTH": 512, "ROWS": 16, "BF16": False}, {"num_warps": 16}, wide),
    ]
