"""Attention over window and selected records in one softmax with a sink, one query at a time."""

import torch

E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def sparse_attention_reference(q, window_codes, window_scales, slots, codes, scales, indices, sink, splits=None):
    """out [Q, H, D]: softmax over the records named by slots [Q, W] and indices [Q, K], -1 absent, and the sink [H].

        out_a = sum_j exp(s_j - m) k_j / (sum_j exp(s_j - m) + exp(sink_a - m))      s_j = (q_a . k_j) * D^-0.5

    The maximum m leaves the sink out. A query without records gets zeros. A score that is not finite makes its head
    NaN. splits belongs to the kernel and changes nothing.
    """
    queries, heads, width = q.shape
    out = torch.zeros(queries, heads, width, dtype=torch.float32, device=q.device)
    for i in range(queries):
        window, selected = slots[i][slots[i] >= 0].long(), indices[i][indices[i] >= 0].long()
        k = torch.cat(
            [
                decode_fp8(window_codes[window], window_scales[window]),
                decode_fp4(codes[selected], scales[selected]),
            ]
        )  # [J, D]
        if not len(k):
            continue
        s = q[i].float() @ k.T * width**-0.5  # [H, J]
        s = torch.where(s.isfinite(), s, torch.nan)
        m = s.amax(dim=1, keepdim=True).clamp(min=-1e30)
        p = torch.exp(s - m)
        out[i] = (p @ k) / (p.sum(dim=1, keepdim=True) + torch.exp(sink[:, None] - m))
    return out.to(q.dtype)


def decode_fp8(codes, scales):
    """float32 values of E4M3 codes [R, D] with one UE8M0 scale per 32 channels."""
    values = codes.view(torch.float8_e4m3fn).float().unflatten(1, (-1, 32))
    factors = torch.where(scales == 255, torch.nan, torch.exp2(scales.float() - 127))
    return (values * factors[:, :, None]).flatten(1)


def decode_fp4(codes, scales):
    """float32 values of packed E2M1 codes [R, D / 2], low nibble first, with one E4M3 scale per 16 channels."""
    nibbles = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)  # [R, D]
    values = E2M1_VALUES.to(codes.device)[nibbles.long()].unflatten(1, (-1, 16))
    return (values * scales.view(torch.float8_e4m3fn).float()[:, :, None]).flatten(1)
