"""Engram written out: the hash in Python integers, the lookup by indexing, the gate stream by stream."""

import torch


def engram_rows_reference(ids, multipliers, moduli, offsets, pad, image=None, new=None):
    """Rows int64 [B, new, (S - 1) * A] of the last `new` positions."""
    sequences, length = ids.shape
    first = 0 if new is None else length - new
    ids, multipliers = ids.tolist(), multipliers.tolist()
    blocked = image.tolist() if image is not None else [[False] * length] * sequences
    rows = [
        [position_rows(ids[b], blocked[b], i, multipliers, moduli, offsets, pad) for i in range(first, length)]
        for b in range(sequences)
    ]
    shape = sequences, length - first, moduli.numel()
    return torch.tensor(rows, dtype=torch.int64, device=moduli.device).reshape(shape)


def position_rows(ids, blocked, i, multipliers, moduli, offsets, pad):
    """The rows of position i, slots in order and heads in order."""
    rows, acc, is_open = [], 0, True
    for s, multiplier in enumerate(multipliers):
        is_open = is_open and i - s >= 0 and not blocked[i - s]  # once blocked, all further slots are
        acc ^= (ids[i - s] if is_open else pad) * multiplier
        if s > 0:
            pairs = zip(moduli[s - 1].tolist(), offsets[s - 1].tolist(), strict=True)
            rows += [acc % modulus + offset for modulus, offset in pairs]
    return rows


def engram_gather_reference(codes, scales, rows, dtype=torch.bfloat16):
    """Values [..., C * W] of the rows [..., C] of a table of E4M3 codes with one UE8M0 scale per 32."""
    values = codes[rows].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
    factors = torch.where(scales[rows] == 255, torch.nan, torch.exp2(scales[rows].float() - 127))
    return (values * factors[..., None]).flatten(-3).to(dtype)


def engram_update_reference(h, kv, q_weight, k_weight, image=None, eps=1e-20):
    """h_k + g_k * value, with a gate from the normalised product of stream and key."""
    _, n, width = h.shape
    keys, value = kv.float().unflatten(1, (n + 1, width)).split([n, 1], dim=1)
    x = h.float()
    t = (x * q_weight.float() * k_weight.float() * keys).sum(dim=2, keepdim=True)
    t = t * torch.rsqrt(x.square().mean(dim=2, keepdim=True) + eps)
    t = t * torch.rsqrt(keys.square().mean(dim=2, keepdim=True) + eps) * width**-0.5
    gate = torch.sigmoid(torch.copysign(t.abs().clamp(min=1e-6).sqrt(), t))
    out = x + gate * value
    if image is not None:
        out = torch.where(image[:, None, None], x, out)
    return out.to(h.dtype)
