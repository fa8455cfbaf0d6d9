"""Single-pass hyper-connections: K residual streams, mixed around every attention and every feed-forward.

    z    = (f . fn^T) / sqrt(mean(f^2) + eps)         f: the K streams side by side
    pre  = sigmoid(z[:K] scale[0] + base[:K]) + hc_eps
    post = 2 sigmoid(z[K:2K] scale[1] + base[K:2K])
    comb = sinkhorn(z[2K:] scale[2] + base[2K:])      [source stream, destination stream]

A site collapses the streams with the `pre` of the site BEFORE it, runs, and spreads its output with its own `post` and
`comb`; so the coefficients of a site can be computed while the site before it still runs. Layer 0 starts with
(1, 0, ...), the head collapses with the last `pre`. Everything is float32.
Source: V4.1 architecture 2.3, 2.4; test vector 16.5.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from model.flop_counter import label
from model.layers import wide


class Mix(NamedTuple):
    """Coefficients of one site: pre [..., K], post [..., K], comb [..., K source, K destination]."""

    pre: Tensor
    post: Tensor
    comb: Tensor


FEW = 4
"""Matrices 4 x 4 that plain numbers balance sooner than tensors: a decode step is one, and has two sites a layer."""


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """[..., K, K] made nearly doubly stochastic. The first row step is a softmax; the last step is on columns."""
    streams = logits.shape[-1]
    if logits.requires_grad:  # the same steps, none of them in place
        m = torch.softmax(logits, dim=-1) + eps
        m = m / (m.sum(dim=-2, keepdim=True) + eps)
        for _ in range(iterations - 1):
            m = m / (m.sum(dim=-1, keepdim=True) + eps)
            m = m / (m.sum(dim=-2, keepdim=True) + eps)
        return m
    if streams == 4 and logits.device.type == "cpu" and 0 < logits.numel() <= 16 * FEW and eps > 0:
        return _balance_four(torch.softmax(logits, dim=-1) + eps, iterations, eps)
    # A border of eps beside the matrix: then every sum is "+ eps" already, and a step is two small operations.
    bordered = logits.new_full((*logits.shape[:-2], streams + 1, streams + 1), eps)
    m, rows, columns = bordered[..., :-1, :-1], bordered[..., :-1, :], bordered[..., :, :-1]
    torch.add(torch.softmax(logits, dim=-1), eps, out=m)
    column_sums = columns.sum(dim=-2, keepdim=True)
    row_sums = torch.empty_like(column_sums).transpose(-1, -2)
    m.div_(column_sums)
    for _ in range(iterations - 1):
        m.div_(torch.sum(rows, dim=-1, keepdim=True, out=row_sums))
        m.div_(torch.sum(columns, dim=-2, keepdim=True, out=column_sums))
    return m


def _balance_four(m: Tensor, iterations: int, eps: float) -> Tensor:
    """The steps of `sinkhorn` after the softmax, for m [..., 4, 4], as factors of rows and columns in Python numbers.

    m[j, k] r_j c_k is the matrix at any time. Dividing row j by its sum + eps makes 1 / r_j = m[j] . c + eps / r_j.
    """
    factors = []
    for (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3) in m.view(-1, 4, 4).tolist():
        ra = rb = rc = rd = 1.0
        k0, k1 = 1 / (a0 + b0 + c0 + d0 + eps), 1 / (a1 + b1 + c1 + d1 + eps)
        k2, k3 = 1 / (a2 + b2 + c2 + d2 + eps), 1 / (a3 + b3 + c3 + d3 + eps)
        for _ in range(iterations - 1):
            ra = 1 / (a0 * k0 + a1 * k1 + a2 * k2 + a3 * k3 + eps / ra)
            rb = 1 / (b0 * k0 + b1 * k1 + b2 * k2 + b3 * k3 + eps / rb)
            rc = 1 / (c0 * k0 + c1 * k1 + c2 * k2 + c3 * k3 + eps / rc)
            rd = 1 / (d0 * k0 + d1 * k1 + d2 * k2 + d3 * k3 + eps / rd)
            k0 = 1 / (a0 * ra + b0 * rb + c0 * rc + d0 * rd + eps / k0)
            k1 = 1 / (a1 * ra + b1 * rb + c1 * rc + d1 * rd + eps / k1)
            k2 = 1 / (a2 * ra + b2 * rb + c2 * rc + d2 * rd + eps / k2)
            k3 = 1 / (a3 * ra + b3 * rb + c3 * rc + d3 * rd + eps / k3)
        factors.append((ra, rb, rc, rd, k0, k1, k2, k3))
    rows, columns = torch.tensor(factors, dtype=m.dtype).view(*m.shape[:-2], 8).split(4, dim=-1)
    return m * rows.unsqueeze(-1) * columns.unsqueeze(-2)


def coefficients(
    h: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, norm_eps: float, iterations: int, eps: float
) -> Mix:
    """The mix of one site for streams h [..., K, D]; fn [(2 + K) K, K D], scale [3], base [(2 + K) K]."""
    streams = h.shape[-2]
    f = wide(h).flatten(-2)
    with label("hyper_connection"):
        z = F.linear(f, fn.to(f.dtype))
    z *= f.square().sum(dim=-1, keepdim=True).div_(f.shape[-1]).add_(norm_eps).rsqrt_()
    sizes = (streams, streams, streams * streams)
    z = torch.addcmul(base.to(z.dtype), z, scale.to(z.dtype).index_select(0, _kinds(streams, h.device)))
    pre, post, comb = z.split_with_sizes(sizes, dim=-1)
    comb = sinkhorn(comb.unflatten(-1, (streams, -1)), iterations, eps)
    return Mix(torch.sigmoid(pre) + eps, 2 * torch.sigmoid(post), comb)


@cache
def _kinds(streams: int, device: torch.device) -> Tensor:
    """Which of the three scales each coefficient has."""
    with torch.inference_mode(False):  # training may ask for it too
        return torch.tensor([0] * streams + [1] * streams + [2] * streams**2, device=device)


def collapse(h: Tensor, pre: Tensor) -> Tensor:
    """sum_k pre_k h_k: streams [..., K, D] to [..., D]."""
    return (pre.unsqueeze(-1) * wide(h)).sum(dim=-2).to(h.dtype)


def expand(h: Tensor, y: Tensor, mix: Mix) -> Tensor:
    """post_k y + sum_j comb[j, k] h_j: the streams after a site with output y [..., D]. Sums over the FIRST index."""
    with label("hyper_connection_mixing"):
        mixed = mix.comb.transpose(-1, -2) @ wide(h)
    return mixed.addcmul_(mix.post.unsqueeze(-1), wide(y).unsqueeze(-2)).to(h.dtype)
