"""Packing and unpacking of the three block formats in plain PyTorch; see kernels/block_quant.py for the formulas."""

import torch

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of the E2M1 codes 0..7


def block_quant_reference(x, format, out=None):
    block = {"fp8": 32, "mxfp4": 32, "fp4": 16}[format]
    rows, width = x.shape
    v = x.float().reshape(rows, width // block, block)
    amax = v.abs().amax(dim=-1)
    finite = amax.isfinite()
    amax = torch.where(finite, amax, 1.0)
    v = torch.where(finite[..., None], v, 0.0)

    if format == "fp4":
        # By a tensor: PyTorch on a GPU turns a division by a Python number into a multiplication.
        wanted = amax.clamp(min=6 * 2.0**-9) / torch.full_like(amax, 6.0)
        scale_fp8 = wanted.clamp(max=448).to(torch.float8_e4m3fn)
        scale, scales = scale_fp8.float(), scale_fp8.view(torch.uint8)
        scales = torch.where(finite, scales, 0x7F)
    else:
        floor, limit = (1e-4, 448) if format == "fp8" else (6 * 2.0**-126, 6)
        wanted = amax.clamp(min=floor) * torch.tensor(1 / limit, dtype=torch.float32, device=x.device)
        mantissa, exponent = torch.frexp(wanted)  # wanted = mantissa * 2^exponent with mantissa in [0.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(wanted), exponent)
        scales = torch.where(finite, (exponent + 127).to(torch.uint8), 255)

    y = v / scale[..., None]
    if format == "fp8":
        codes = y.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        codes = torch.where(finite[..., None], codes, 0).reshape(rows, width)
    else:
        m = y.abs()
        code = (m > 0.25).int() + (m >= 0.75) + (m > 1.25) + (m >= 1.75) + (m > 2.5) + (m >= 3.5) + (m > 5)
        code = (code + 8 * torch.signbit(y)).reshape(rows, width)
        codes = (code[:, 0::2] | (code[:, 1::2] << 4)).to(torch.uint8)
    scales = scales.to(torch.uint8)
    if out is None:
        return codes, scales
    out[0].copy_(codes)
    out[1].copy_(scales)
    return out


def block_dequant_reference(codes, scales, format, dtype=torch.bfloat16):
    rows = codes.shape[0]
    if format == "fp8":
        values = codes.contiguous().view(torch.float8_e4m3fn).float()
    else:
        table = torch.tensor(MAGNITUDES + [-m for m in MAGNITUDES], device=codes.device)
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).reshape(rows, -1)
        values = table[nibbles.long()]
    if format == "fp4":
        scale = scales.contiguous().view(torch.float8_e4m3fn).float()
    else:
        scale = torch.ldexp(torch.ones(scales.shape, device=codes.device), scales.int() - 127)
        scale = torch.where(scales == 255, float("nan"), scale)
    block = values.shape[1] // scales.shape[1] if scales.shape[1] else 1
    return (values * scale.repeat_interleave(block, dim=1)).to(dtype)
