"""Mixture of experts in plain PyTorch, one expert after the other; see kernels/moe.py for the formulas."""

from functools import partial

import torch

from kernels.reference.block_quant import block_dequant_reference, block_quant_reference
from kernels.reference.linear import linear_reference


def moe_reference(x, ids, p, w1, w3, w2, shared=None, limit=10.0):
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in range(w1[0].shape[0]):
        tokens, picks = torch.where(ids == e)
        if not len(tokens):
            continue
        product = [partial(_fp4_linear, codes=codes[e], scales=scales[e]) for codes, scales in (w1, w3, w2)]
        y = _expert(x[tokens], *product, p[tokens, picks, None], limit)
        out.index_add_(0, tokens, y.float())
    if shared is not None:
        product = [partial(linear_reference, codes=codes, scales=scales) for codes, scales in shared]
        out += _expert(x, *product, 1.0, limit).float()
    return out.to(x.dtype)


def _expert(x, w1, w3, w2, p, limit):
    """The products round to x's dtype, and so does the activation between them."""
    gate = w1(x).float().clamp(max=limit)
    up = w3(x).float().clamp(-limit, limit)
    a = torch.nn.functional.silu(gate) * up * p
    return w2(a.to(x.dtype))


def _fp4_linear(x, codes, scales):
    a = block_dequant_reference(*block_quant_reference(x, "fp8"), "fp8", dtype=torch.float32)
    w = block_dequant_reference(codes, scales, "mxfp4", dtype=torch.float32)
    return (a @ w.T).to(x.dtype)
