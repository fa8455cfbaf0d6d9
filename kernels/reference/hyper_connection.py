"""Hyper-connections written out: coefficients, collapse and expand, one after the other."""

import torch


def hyper_coefficients_reference(h, fn, base, scale, iterations=20, eps=1e-6, norm_eps=1e-20):
    """pre [T, N], post [T, N], comb [T, N, N] of streams h [T, N, D]; all in fp32."""
    tokens, n, _ = h.shape
    f = h.float().flatten(1)  # stream after stream
    z = f @ fn.T * torch.rsqrt(f.square().mean(dim=1, keepdim=True) + norm_eps)  # the norm after the projection
    pre = torch.sigmoid(z[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(z[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (z[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(tokens, n, n)
    return pre, post, sinkhorn(logits, iterations, eps)


def sinkhorn(logits, iterations, eps):
    """Rows, then columns to sum 1, again and again; the first row step is the softmax, the last step is a column."""
    m = torch.softmax(logits, dim=2) + eps
    m = m / (m.sum(dim=1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(dim=2, keepdim=True) + eps)
        m = m / (m.sum(dim=1, keepdim=True) + eps)
    return m


def hyper_collapse_reference(h, pre):
    """c [T, D] = sum_k pre_k h_k."""
    return (pre[:, :, None] * h.float()).sum(dim=1).to(h.dtype)


def hyper_expand_reference(h, y, post, comb):
    """h'_k = post_k y + sum_j comb[j, k] h_j: the sum runs over the first index of comb."""
    mixed = torch.einsum("tjk,tjd->tkd", comb, h.float())
    return (post[:, :, None] * y.float()[:, None] + mixed).to(h.dtype)


def hyper_connection_reference(h, y, post, comb, pre, fn, base, scale, iterations=20, eps=1e-6, norm_eps=1e-20):
    """(h', its collapse with pre, and the coefficients of the next site)."""
    new = hyper_expand_reference(h, y, post, comb)
    coefficients = hyper_coefficients_reference(new, fn, base, scale, iterations, eps, norm_eps)
    return new, hyper_collapse_reference(new, pre), *coefficients
