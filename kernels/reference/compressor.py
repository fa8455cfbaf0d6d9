"""Compressor step by step over all groups: pool, normalise, rotate, round, pack. See `kernels.compressor`."""

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def compressor_reference(
    u, gate, norm_weight, inv_freq, codes, scales, ratio, start_position,
    entry_offset=None, pending_u=None, pending_gate=None, eps=1e-20, format="fp4", latent_dtype=torch.bfloat16,
):  # fmt: skip
    """Writes records into codes and scales; returns (latent, pending_u, pending_gate). See `kernels.compressor`."""
    rows, gates = u.float(), None if gate is None else gate.float()
    if pending_u is not None:
        rows = torch.cat([pending_u.float(), rows])
        gates = torch.cat([pending_gate.float(), gates])
    first = start_position // ratio
    entry = first if entry_offset is None else entry_offset
    groups = len(rows) // ratio

    complete = slice(0, groups * ratio)
    pooled = rows[complete].unflatten(0, (groups, ratio))  # [groups, ratio, W]
    if ratio > 1:
        pooled = gates[complete].unflatten(0, (groups, ratio)).softmax(dim=1) * pooled
    latent = rms_norm(pooled.sum(dim=1).to(latent_dtype), norm_weight, eps)
    positions = (first + torch.arange(groups, device=u.device)) * ratio
    packed = (pack_fp4 if format == "fp4" else pack_fp8)(rotate(latent, inv_freq, positions))
    codes[entry : entry + groups], scales[entry : entry + groups] = packed
    if ratio == 1:
        return latent, None, None
    return latent, rows[groups * ratio :].clone(), gates[groups * ratio :].clone()


def rms_norm(x, weight, eps):
    y = weight.float() * (x.float() * torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + eps))
    return y.to(x.dtype)


def rotate(x, inv_freq, positions):
    """Adjacent pairs of the last 2 * len(inv_freq) channels of each row, by position * inv_freq in float32."""
    plain, tail = x.float().split([x.shape[1] - 2 * len(inv_freq), 2 * len(inv_freq)], dim=1)
    angle = positions[:, None].float() * inv_freq.float()
    even, odd = tail[:, 0::2], tail[:, 1::2]
    pairs = torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], dim=2)
    return torch.cat([plain, pairs.flatten(1)], dim=1).to(x.dtype)


def pack_fp4(x):
    """E2M1 codes, two a byte, and E4M3 scales per 16 channels; a block that is not finite has scale NaN and codes 0."""
    blocks = x.float().unflatten(1, (-1, 16))  # [rows, blocks, 16]
    finite = blocks.isfinite().all(dim=2)
    amax = blocks.abs().amax(dim=2).clamp(min=6 * 2.0**-9)
    scale = (amax / 6).clamp(max=448).to(torch.float8_e4m3fn)
    ratio = (blocks / scale.float()[..., None]).clamp(-6, 6)
    distance = (ratio.abs()[..., None] - E2M1.to(x.device)).abs()
    # nearest value; of two equally near ones the even code
    near = distance == distance.amin(dim=-1, keepdim=True)
    even = near & (torch.arange(8, device=x.device) % 2 == 0)
    code = torch.where(even.any(dim=-1), even.int().argmax(dim=-1), near.int().argmax(dim=-1))
    code = torch.where(ratio.signbit(), code + 8, code)
    code = torch.where(finite[..., None], code, 0).to(torch.uint8).flatten(1)
    return code[:, 0::2] | code[:, 1::2] << 4, torch.where(finite, scale.view(torch.uint8), 0x7F)


def pack_fp8(x):
    """E4M3 codes and UE8M0 scales per 32 channels; a block that is not finite has scale 255 and codes 0."""
    blocks = x.float().unflatten(1, (-1, 32))
    finite = blocks.isfinite().all(dim=2)
    wanted = blocks.abs().amax(dim=2).clamp(min=1e-4) * torch.tensor(1 / 448, dtype=torch.float32)
    mantissa, exponent = torch.frexp(wanted)  # wanted = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    ratio = blocks.double() * torch.exp2(-exponent.double())[..., None]
    code = ratio.clamp(-448, 448).float().to(torch.float8_e4m3fn).view(torch.uint8)
    code = torch.where(finite[..., None], code, 0).flatten(1)
    return code, torch.where(finite, exponent + 127, 255).to(torch.uint8)
