"""Weights as the release stores them, packed and unpacked: FP8 tiles, FP4 rows, FP8 table rows.

    fp8    value[r, c] = e4m3(weight[r, c]) * 2^(scale[r // 32, c // 32] - 127)
    fp4    value[r, c] = e2m1(nibble c of row r) * 2^(scale[r, c // 32] - 127)       even c in the low nibble
    table  value[r, c] = e4m3(weight[r, c]) * 2^(scale[r, c // 32] - 127)

Every product is exact in float32. Packing takes the smallest power of two that keeps a group in range, so packing
unpacked weights again gives the same values. A group of zeros packs to zeros with a finite scale; NaN codes, NaN scales
and overflow are errors, never numbers. Source: V4.1 architecture, 6.1, 6.3, 6.4, 11.1.
"""

from __future__ import annotations

import itertools

import torch

from model.tensor_table import BLOCK

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits of a code; the fourth is the sign
E2M1_MAX = E2M1_VALUES[-1]
SCALE_BIAS = 127
NAN_SCALE = 255
_SMALLEST_EXPONENT = -126  # of a float32 that keeps all its bits
_ROWS_AT_ONCE = 2**23  # elements unpacked in one go, so that temporaries stay small


class WeightValueError(ValueError):
    """A stored or given weight that is no finite number."""


def decode_scales(scale: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes (uint8, any shape) as float32 powers of two.

    Raises:
        WeightValueError: a byte is 255, which means NaN.
    """
    if scale.numel() and int(scale.max()) == NAN_SCALE:
        place = tuple(int(i) for i in (scale == NAN_SCALE).nonzero()[0])
        raise WeightValueError(f"its scale at {list(place)} is NaN (byte {NAN_SCALE})")
    return scale.view(torch.float8_e8m0fnu).to(torch.float32)


def unpack(weight: torch.Tensor, scale: torch.Tensor, kind: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """The values of a quantised weight.

    Args:
        weight: uint8 [rows, width], or [rows, width / 2] for `fp4`.
        scale: uint8 [ceil(rows / 32), ceil(width / 32)] for `fp8`, [rows, ceil(width / 32)] otherwise.
        kind: `fp8`, `fp4` or `table`.
        out: where to write; by default a new float32 tensor [rows, width]. Another dtype rounds once.

    Raises:
        WeightValueError: a scale or a value is NaN, or a product overflows.
    """
    rows, width = weight.shape[0], weight.shape[1] * (2 if kind == "fp4" else 1)
    out = torch.empty(rows, width, dtype=torch.float32) if out is None else out
    step = max(_ROWS_AT_ONCE // max(width, 1) // BLOCK, 1) * BLOCK
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        values = _decode_e2m1(weight[start:stop]) if kind == "fp4" else _decode_e4m3(weight[start:stop])
        if kind == "fp8":
            factors = decode_scales(scale[start // BLOCK : -(-stop // BLOCK)])
            factors = factors.repeat_interleave(BLOCK, 0)[: stop - start]
        else:
            factors = decode_scales(scale[start:stop])
        values *= factors.repeat_interleave(BLOCK, 1)[:, :width]
        if not torch.isfinite(values).all():
            row, column = (int(i) for i in (~torch.isfinite(values)).nonzero()[0])
            raise WeightValueError(f"its value at [{start + row}, {column}] is not finite")
        out[start:stop].copy_(values)
    return out


def pack(values: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored form of a weight: (weight, scale), both uint8. The inverse of `unpack` up to rounding.

    Args:
        values: float [rows, width]; rounded to nearest, ties to the even code.
        kind: `fp8`, `fp4` or `table`.

    Raises:
        WeightValueError: a value is NaN or infinite.
    """
    values = values.to(torch.float32)
    if not torch.isfinite(values).all():
        row, column = (int(i) for i in (~torch.isfinite(values)).nonzero()[0])
        raise WeightValueError(f"its value at [{row}, {column}] is not finite")
    rows, width = values.shape
    tall, largest = (BLOCK, E4M3_MAX) if kind == "fp8" else (1, E2M1_MAX if kind == "fp4" else E4M3_MAX)
    full_rows, full_width = -(-rows // tall) * tall, -(-width // BLOCK) * BLOCK
    padded = torch.nn.functional.pad(values, (0, full_width - width, 0, full_rows - rows))
    blocks = padded.view(full_rows // tall, tall, full_width // BLOCK, BLOCK)
    exponents = _power_of_two_exponent(blocks.abs().amax(dim=(1, 3)) * (1.0 / largest))
    scaled = torch.ldexp(blocks, -exponents[:, None, :, None]).view(full_rows, full_width)[:rows, :width]
    scaled = scaled.clamp(-largest, largest)
    codes = _encode_e2m1(scaled) if kind == "fp4" else scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.contiguous(), (exponents + SCALE_BIAS).to(torch.uint8)


def _power_of_two_exponent(x: torch.Tensor) -> torch.Tensor:
    """The exponent of the smallest power of two that is at least x (float32, >= 0), int32."""
    fraction, exponent = torch.frexp(x)  # x = fraction * 2^exponent, 0.5 <= fraction < 1
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent)
    return torch.where(x > 0, exponent, _SMALLEST_EXPONENT).clamp(min=_SMALLEST_EXPONENT).to(torch.int32)


def _decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def _decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float32, device=packed.device)
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1)  # [rows, width / 2, 2]
    return values[pairs.flatten(-2).long()]


def _encode_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    size = scaled.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for lower, (small, large) in enumerate(itertools.pairwise(E2M1_VALUES)):
        middle = (small + large) / 2  # a tie goes to the even code: up when the lower one is odd
        code += (size >= middle) if lower % 2 else (size > middle)
    code |= torch.signbit(scaled).to(torch.uint8) << 3
    return code[:, 0::2] | (code[:, 1::2] << 4)
