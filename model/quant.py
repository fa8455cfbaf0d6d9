"""Block formats of what is cached: packing to bytes and back, exactly as the trained model rounded.

| format | group | scale | code |
| --- | --- | --- | --- |
| MXFP8, window records | 32 | P2(max(A, 1e-4) * fp32(1/448)), UE8M0 | E4M3 of v / s |
| FP4, compressed entries | 16 | E4M3 of max(A, 6 * 2^-9) / 6, a true division | E2M1 of v / s |
| MXFP4, indexer queries and keys | 32 | P2(max(A, 6 * 2^-126) * fp32(1/6)), UE8M0 | E2M1 of v / s |

A is the largest magnitude of the group, P2 the smallest power of two that is at least its argument; all arithmetic is
float32, all rounding to nearest with ties to the even code. A group of zeros decodes to zeros. A group with NaN or
infinity gets a NaN scale: it never decodes to a finite number.

A record is its codes, then its scales, in bytes; two FP4 codes a byte, the even channel in the low nibble.
Source: V4.1 architecture 6.1-6.4, 6.6; test vectors 16.4. Layouts: `flashsim.formats`.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from flashsim.formats import FP4, MXFP4, MXFP8, BlockFormat, Record
from model.weight_formats import E2M1_MAX, E2M1_VALUES, E4M3_MAX

# E2M1 code = how many of these lie below |y|. A tie whose even neighbour is the upper one counts as above.
_MIDDLES = [(a + b) / 2 for a, b in pairwise(E2M1_VALUES)]


@cache
def _middles(device: torch.device) -> Tensor:
    exact = torch.tensor(_MIDDLES)
    below = torch.nextafter(exact, torch.zeros(()))
    upper_is_even = torch.arange(len(_MIDDLES)) % 2 == 1
    return torch.where(upper_is_even, below, exact).to(device)


@cache
def _nibble_pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256, 2]: the two E2M1 values of a byte, low nibble first."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=dtype)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).to(device)


def power_of_two(y: Tensor) -> Tensor:
    """P2(y) for float32 y > 0, by exponent bits: a mantissa that is not zero carries into the exponent.

    NaN and infinity give infinity, whose exponent 255 is the NaN of UE8M0.
    """
    bits = y.view(torch.int32).clamp(max=0x7F800000)
    return bits.add_(0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32)


def encode_e2m1(y: Tensor) -> Tensor:
    """E2M1 codes (uint8) of float32 y: nearest, ties to the even code, saturating at 6."""
    code = torch.bucketize(y.abs(), _middles(y.device), out_int32=True)
    return code.add_(y.signbit(), alpha=8).to(torch.uint8)


def _groups(x: Tensor, form: BlockFormat) -> Tensor:
    return x.to(torch.float32).unflatten(-1, (form.scales(x.shape[-1]), -1))


def pack(x: Tensor, form: BlockFormat) -> Tensor:
    """Records (uint8 [..., form.nbytes(width)]) of vectors x [..., width].

    Raises:
        LayoutError: a width that is neither under one block nor a multiple of it.
    """
    groups = _groups(x, form)
    largest = torch.linalg.vector_norm(groups, torch.inf, dim=-1)
    if form is FP4:
        wanted = largest.clamp(min=E2M1_MAX * 2.0**-9) / E2M1_MAX
        wanted = wanted.clamp(max=E4M3_MAX).where(largest.isfinite(), torch.nan)
        rounded = wanted.to(torch.float8_e4m3fn)
        scale, scales = rounded.float(), rounded.view(torch.uint8)
    else:
        top, floor = (E4M3_MAX, 1e-4) if form is MXFP8 else (E2M1_MAX, E2M1_MAX * 2.0**-126)
        # The reciprocal rounded to float32, as the model has it; a division can give twice the scale.
        scale = power_of_two(largest.clamp_(min=floor).mul_(1.0 / top))
        scales = (scale.view(torch.int32) >> 23).to(torch.uint8)
    scaled = groups / scale.unsqueeze(-1)
    if form is MXFP8:
        codes = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    else:
        nibbles = encode_e2m1(scaled).flatten(-2)
        codes = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return torch.cat((codes, scales), dim=-1)


def unpack_record(records: Tensor, form: BlockFormat, width: int, dtype: torch.dtype) -> Tensor:
    """Vectors [..., width] of records (uint8 [..., form.nbytes(width)]); code times scale is exact in bfloat16."""
    scales = form.scales(width)
    codes, scale = records.split_with_sizes((records.shape[-1] - scales, scales), dim=-1)
    scale = scale.view(torch.float8_e4m3fn if form is FP4 else torch.float8_e8m0fnu).to(dtype)
    if form is MXFP8:
        values = codes.view(torch.float8_e4m3fn).to(dtype)
    else:
        values = F.embedding(codes.int(), _nibble_pairs(records.device, dtype))
    shape = *records.shape[:-1], scales, width // scales
    return values.reshape(shape).mul_(scale.unsqueeze(-1)).flatten(-2)


class Codec:
    """How vectors of one kind are kept: rounded into a record, or as they are where cache rounding is off."""

    def __init__(self, record: Record, *, rounding: bool, dtype: torch.dtype):
        ((self.width, form),) = record.parts
        if form not in (FP4, MXFP4, MXFP8):
            raise ValueError(f"cached record is {form.name}; accepted: {FP4.name}, {MXFP4.name}, {MXFP8.name}")
        self.form, self.dtype = (form if rounding else None), dtype
        self.nbytes = record.nbytes if rounding else self.width * dtype.itemsize

    def pack(self, x: Tensor) -> Tensor:
        """[..., width] to uint8 [..., nbytes]."""
        return x.to(self.dtype).contiguous().view(torch.uint8) if self.form is None else pack(x, self.form)

    def unpack(self, records: Tensor) -> Tensor:
        """uint8 [..., nbytes] to [..., width]; in float32 where it was rounded, which is exact."""
        if self.form is None:
            return records.contiguous().view(self.dtype)
        return unpack_record(records, self.form, self.width, torch.float32)

    def __repr__(self) -> str:
        kind = f"{self.form.name} scales" if self.form else f"not rounded, {self.dtype}".replace("torch.", "")
        return f"Codec({self.width} x {kind}, {self.nbytes} bytes)"
