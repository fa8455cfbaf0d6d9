"""FP8 linear layer in plain PyTorch: the sum over blocks of 32 inputs as the format defines it."""

import torch

from kernels.reference.block_quant import block_dequant_reference, block_quant_reference


def linear_reference(x, codes, scales, act_quant=True, groups=1):
    if groups > 1:
        parts = zip(x.chunk(groups, dim=1), codes.chunk(groups), scales.chunk(groups), strict=True)
        return torch.cat([linear_reference(*part, act_quant) for part in parts], dim=1)
    M, K = x.shape
    N = codes.shape[0]
    if act_quant:
        a_codes, a_scales = block_quant_reference(x, "fp8")
        ones = torch.full_like(a_scales, 127)
        a = block_dequant_reference(a_codes, ones, "fp8", dtype=torch.float32)  # E4M3 values
        sa = _power_of_two(a_scales)
    else:
        a, sa = x.float(), torch.ones(M, K // 32, device=x.device)
    w = codes.contiguous().view(torch.float8_e4m3fn).float()
    sw = _power_of_two(scales).repeat_interleave(32, dim=0)  # [N, K / 32]
    y = torch.zeros(M, N, device=x.device)
    for b in range(K // 32):
        block = slice(32 * b, 32 * b + 32)
        y += (a[:, block] @ w[:, block].T) * sa[:, b, None] * sw[None, :, b]
    return y.to(x.dtype)


def _power_of_two(scales):
    value = torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - 127)
    return torch.where(scales == 255, float("nan"), value)
