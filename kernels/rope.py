"""Rotary embedding in place: the last channels of each vector, taken as pairs, turned by complex numbers.

    (x[2 i], x[2 i + 1]) <- (x[2 i] + j x[2 i + 1]) * turn[i]        i over the pairs of the last 2 P channels

`back` turns the other way, by the conjugate. Computed in float32, rounded once; the channels before are not touched.

Shapes: R vectors of W channels, of which `share` neighbours have one turn: turns [R / share, P] complex64.
Reads and writes R * 2 P * 2 bytes of bfloat16 (128 of 1,024 for a head of 512 channels): memory bandwidth, and for a
decode step the launch.
Reference: kernels/reference/rope.py. Test: tests/kernels/test_rope.py. Bench: `rope`.
"""

import torch
import triton
import triton.language as tl

from kernels.numerics import f32_to_bf16


@triton.jit
def _rope_kernel(
    x_ptr,  # [R, W]
    turn_ptr,  # [R / share, P, 2] fp32: cosine and sine
    R,
    W,
    P,
    share,
    BACK: tl.constexpr,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    # one program per ROWS vectors; int64 because R * W passes 2^31
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, PAIRS)
    inside = (row < R)[:, None] & (pair < P)[None, :]
    turn = turn_ptr + ((row // share) * (2 * P))[:, None] + 2 * pair[None, :]
    cosine = tl.load(turn, mask=inside, other=0.0)
    sine = tl.load(turn + 1, mask=inside, other=0.0)
    if BACK:
        sine = -sine
    place = x_ptr + (row * W + W - 2 * P)[:, None] + 2 * pair[None, :]
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + 1, mask=inside, other=0.0).to(tl.float32)
    real, imaginary = a * cosine - b * sine, a * sine + b * cosine
    tl.store(place, f32_to_bf16(real) if BF16 else real, mask=inside)
    tl.store(place + 1, f32_to_bf16(imaginary) if BF16 else imaginary, mask=inside)


def rope_(x, turns, back=False):
    """Turn the last 2 P channels of x [R, W] in place, and return x.

    x: contiguous float32 or bfloat16. turns: contiguous complex64 [R / share, P], one for `share` neighbouring vectors.
    """
    if x.ndim != 2 or x.dtype not in (torch.float32, torch.bfloat16) or not x.is_contiguous():
        raise TypeError(f"x must be contiguous float32 or bfloat16 [vectors, width], got {_describe(x)}")
    if turns.ndim != 2 or turns.dtype != torch.complex64 or not turns.is_contiguous() or turns.is_conj():
        raise TypeError(f"turns must be contiguous complex64 [vectors / share, pairs], got {_describe(turns)}")
    (vectors, width), (groups, pairs) = x.shape, turns.shape
    if x.device != turns.device or 2 * pairs > width or (vectors and (not groups or vectors % groups)):
        raise ValueError(f"turns {_describe(turns)} do not fit x {_describe(x)}")
    if vectors and pairs:
        rows = 16
        _rope_kernel[(triton.cdiv(vectors, rows),)](
            x, torch.view_as_real(turns), vectors, width, pairs, vectors // groups,
            BACK=back, BF16=x.dtype == torch.bfloat16, ROWS=rows, PAIRS=triton.next_power_of_2(pairs), num_warps=4,
        )  # fmt: skip
    return x


def _describe(t):
    return f"{t.dtype} {tuple(t.shape)} with strides {t.stride()} on {t.device}"


def aot_cases():
    """Heads of a decode step, and float32 turned back."""
    types = {"x_ptr": "*bf16", "turn_ptr": "*fp32", "R": "i32:16", "W": "i32:16", "P": "i32:16", "share": "i32:16"}
    values = {"BACK": False, "BF16": True, "ROWS": 16, "PAIRS": 32}
    return [
        ("heads", _rope_kernel, types, values, {"num_warps": 4}, None),
        ("float32", _rope_kernel, types | {"x_ptr": "*fp32"}, values | {"BACK": True, "BF16": False},
         {"num_warps": 4}, None),
    ]  # fmt: skip
