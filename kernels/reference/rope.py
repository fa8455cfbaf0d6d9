"""Rotary embedding in plain PyTorch, vector by vector: what `kernels.rope` computes, in a new tensor."""

import torch


def rope_reference(x, turns, back=False):
    """x [R, W] with its last 2 P channels turned by turns [R / share, P]; see `kernels.rope.rope_`."""
    out, pairs = x.clone(), turns.shape[1]
    share = len(x) // max(len(turns), 1)
    for r in range(len(x)):
        turn = turns[r // share]
        values = x[r, x.shape[1] - 2 * pairs :].float()
        turned = torch.complex(values[0::2], values[1::2]) * (turn.conj() if back else turn)
        out[r, x.shape[1] - 2 * pairs :] = torch.stack((turned.real, turned.imag), dim=-1).flatten().to(x.dtype)
    return out
