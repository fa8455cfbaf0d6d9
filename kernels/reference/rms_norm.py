"""RMS norm in plain PyTorch, float32: what `kernels.rms_norm` computes."""

import torch


def rms_norm_reference(x, weight, eps):
    """[R, D] rows x over their root mean square, times weight [D]; see `kernels.rms_norm.rms_norm`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
