"""Cached records of V1 to V4: vectors packed part by part, as `flashsim.formats` lays them out.

| record | parts in bytes |
| --- | --- |
| K, V (V1); latent and RoPE key (V2, V3) | BF16 |
| latent (V3.2) | 512 E4M3, 4 float32 scales (one per 128), 64 BF16 |
| index key (V3.2) | 128 E4M3, 1 float32 scale |
| entry and window (V4) | 448 E4M3, 64 BF16, then 7 UE8M0 scales (one per 64) and a pad byte |
| index key (V4) | 128 E2M1, two a byte, low nibble first; 4 UE8M0 scales (one per 32) |

FP8 scales are P2(max(A, 1e-4) * fp32(1/448)), whether stored as UE8M0 or as float32. Scales follow their codes; those
that are padded (V4) stand at the end of the record, as in a page, where they follow all codes.

BF16 is not a rounding of the cache: it is the type that these models compute in. A wider model loses nothing either: it
keeps, behind each record, what BF16 leaves out of these numbers. That remainder is part of `row_bytes`, not of
`nbytes`, and a bfloat16 model has none. Source: earlier generations, 1.4, 4.3, 5.9; test vectors 9.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashsim.formats import BF16, FP8, FP8_UE8M0_64, MXFP4, BlockFormat, Record
from model.layers import wide_dtype
from model.quant import pack, power_of_two, unpack_record
from model.weight_formats import E4M3_MAX

FLOOR = 1e-4  # the smallest magnitude that sets an FP8 scale


def pack_fp8(x: Tensor, form: BlockFormat) -> tuple[Tensor, Tensor]:
    """E4M3 codes uint8 [..., W] and scale bytes, padded as `form` says, of vectors x [..., W]."""
    number = form.scales(x.shape[-1])
    groups = x.float().unflatten(-1, (number, -1))
    scale = power_of_two(groups.abs().amax(dim=-1).clamp(min=FLOOR) * (1.0 / E4M3_MAX))
    codes = (groups / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    codes = codes.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    if form.scale_bits == 32:
        return codes, scale.contiguous().view(torch.uint8)
    scales = (scale.view(torch.int32) >> 23).to(torch.uint8)
    return codes, torch.nn.functional.pad(scales, (0, form.nbytes(x.shape[-1]) - x.shape[-1] - number))


def unpack_fp8(codes: Tensor, scales: Tensor, form: BlockFormat) -> Tensor:
    """float32 vectors [..., W] of what `pack_fp8` gave."""
    number = form.scales(codes.shape[-1])
    if form.scale_bits == 32:
        scale = _numbers(scales, torch.float32)
    else:
        scale = scales[..., :number].view(torch.float8_e8m0fnu).float()
    values = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (number, -1))
    return (values * scale.unsqueeze(-1)).flatten(-2)


class RecordCodec:
    """How vectors of one kind are kept: as records, or as numbers of `dtype` where cache rounding is off.

    Args:
        record: of `flashsim.formats`; its parts are adjacent channels of the vector.
        rounding: False keeps the vectors as they are.
        dtype: of the model.

    `width` channels, `nbytes` bytes of a record, `row_bytes` bytes of a stored row: the record, and the remainder of
    its BF16 numbers in a model that is wider.
    """

    def __init__(self, record: Record, *, rounding: bool, dtype: torch.dtype):
        self._parts = [(width, form) for width, form in record.parts if width]
        for _, form in self._parts:
            if form not in (BF16, FP8, FP8_UE8M0_64, MXFP4):
                raise ValueError(f"cached record is {form.name}; accepted: BF16, FP8 and MXFP4 blocks")
        self.record, self.rounding, self.dtype = record, rounding, dtype
        self.width = sum(width for width, _ in record.parts)
        self.rest = wide_dtype(dtype) if rounding and dtype != torch.bfloat16 else None
        self.nbytes = record.nbytes if rounding else self.width * dtype.itemsize
        plain = sum(width for width, form in record.parts if form is BF16)
        self.row_bytes = self.nbytes + (plain * self.rest.itemsize if self.rest else 0)

    def pack(self, x: Tensor) -> Tensor:
        """[..., width] to uint8 [..., row_bytes]."""
        if not self.rounding:
            return x.to(self.dtype).contiguous().view(torch.uint8)
        planes, end, rest = [], [], []
        for part, (_, form) in zip(x.split_with_sizes([w for w, _ in self._parts], dim=-1), self._parts, strict=True):
            if form is BF16:
                kept = part.to(self.rest or torch.bfloat16)
                planes.append(_bytes(kept.to(torch.bfloat16)))
                if self.rest:
                    rest.append(_bytes(kept - kept.to(torch.bfloat16)))
            elif form is MXFP4:
                planes.append(pack(part, form))
            else:
                codes, scales = pack_fp8(part, form)
                planes.append(codes)
                (end if form.scale_alignment > 1 else planes).append(scales)
        return torch.cat((*planes, *end, *rest), dim=-1)

    def unpack(self, rows: Tensor) -> Tensor:
        """uint8 [..., row_bytes] to [..., width], in float32 (float64 in a float64 model): exact."""
        if not self.rounding:
            return rows.contiguous().view(self.dtype)
        parts, low, back, rest = [], 0, self.nbytes, self.nbytes
        for width, form in self._parts:
            size = form.nbytes(width)
            if form is BF16:
                part = _numbers(rows[..., low : low + size], torch.bfloat16).to(self.rest or torch.float32)
                if self.rest:
                    high = rest + width * self.rest.itemsize
                    part = part + _numbers(rows[..., rest:high], self.rest)
                    rest = high
            elif form is MXFP4:
                part = unpack_record(rows[..., low : low + size], form, width, torch.float32)
            elif form.scale_alignment > 1:
                scales = rows[..., back - (size - width) : back]
                part, size, back = unpack_fp8(rows[..., low : low + width], scales, form), width, back - (size - width)
            else:
                codes, scales = rows[..., low : low + width], rows[..., low + width : low + size]
                part = unpack_fp8(codes, scales, form)
            parts.append(part)
            low += size
        return torch.cat([part.to(self.rest or torch.float32) for part in parts], dim=-1)

    def __repr__(self) -> str:
        kind = self.record.describe() if self.rounding else f"{self.width} x {self.dtype}, not rounded"
        return f"RecordCodec({kind.replace('torch.', '')}: {self.nbytes} bytes)"


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _numbers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)
