"""The Hadamard rotation of indexer queries and keys: spreads outliers over all channels before rounding to FP8 or FP4.

    H(v) = n^-0.5 W_n v        W_1 = [1],  W_2n = [[W, W], [W, -W]],  n a power of two

Orthogonal and symmetric, so H(q) . H(k) = q . k: without the rounding that follows it changes nothing.
Source: earlier generations, 1.5.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """x [..., n] rotated; log2(n) rounds of sums and differences.

    >>> hadamard(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([ 5., -1., -2.,  0.])
    """
    n = x.shape[-1]
    if n & (n - 1):
        raise ValueError(f"a Hadamard rotation of {n} channels; accepted: a power of two")
    half = 1
    while half < n:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(dim=-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return x * n**-0.5
