"""Indexer scores written out: unpack both sides with a table, one matrix product per head, mask."""

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def indexer_reference(
    q_codes, q_scales, weights, k_codes, k_scales, positions, ratio,
    lengths=None, candidates=None, block_size=None, block_maxima=False,
):  # fmt: skip
    """Scores [R, Q, E] in float32, or [R, Q, C * block_size] for candidates [R, Q, C]; see `kernels.indexer`."""
    q = _unpack_mxfp4(q_codes, q_scales)  # [R, Q, H, D]
    k = _unpack_mxfp4(k_codes, k_scales)  # [R, E, D]
    R, Q, H, _ = q.shape
    E = k.shape[1]

    scores = torch.zeros(R, Q, E, device=q.device)
    for h in range(H):
        dot = torch.einsum("rqd,red->rqe", q[:, :, h], k)
        scores += torch.where(dot < 0, 0, dot) * weights[:, :, h, None].float()  # a NaN stays

    limit = (positions + 1) // ratio  # entry j covers tokens j * ratio .. j * ratio + ratio - 1
    if lengths is not None:
        limit = torch.minimum(limit, lengths[:, None])
    scores.masked_fill_(torch.arange(E, device=q.device) >= limit[:, :, None], -torch.inf)

    if candidates is not None:
        entries = candidates[..., None].long() * block_size + torch.arange(block_size, device=q.device)
        absent = (candidates[..., None] < 0) | (entries >= E)
        padded = torch.cat([scores, scores.new_full((R, Q, 1), -torch.inf)], dim=2)  # column E: nothing there
        scores = padded.gather(2, entries.masked_fill(absent, E).flatten(2))
    if not block_maxima:
        return scores
    blocks = -(-scores.shape[2] // block_size)
    padded = scores.new_full((R, Q, blocks * block_size), -torch.inf)
    padded[..., : scores.shape[2]] = scores
    return scores, padded.unflatten(2, (blocks, block_size)).amax(dim=3)


def _unpack_mxfp4(codes, scales):
    """Values [..., D] of codes [..., D/2] (low nibble first) and UE8M0 scales [..., D/32]."""
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    values = E2M1.to(codes.device)[pairs.long()]
    power = torch.exp2(scales.double() - 127).float()
    power = torch.where(scales == 255, torch.nan, power)
    return (values.unflatten(-1, (-1, 32)) * power[..., None]).flatten(-2)
