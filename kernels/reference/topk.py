"""Top-k by sorting whole rows: what `kernels.topk` computes, one row at a time."""

import torch


def topk_reference(scores, k, lengths=None, blocks=None, block_size=None):
    """Positions of the k best scores of each row, ascending, -1 padded; see `kernels.topk.topk`."""
    rows, n = scores.shape
    out = torch.full((rows, k), -1, dtype=torch.int32)
    for r in range(rows):
        length = n if lengths is None else int(lengths[r])
        picked = _best(scores[r, :length].float().cpu(), k)
        if blocks is not None:
            picked = [p if p < 0 else int(blocks[r, p // block_size]) * block_size + p % block_size for p in picked]
        out[r, : len(picked)] = torch.tensor(picked, dtype=torch.int32)
    return out.to(scores.device)


def topk_blocks_reference(block_scores, k, newest):
    """The k best candidate blocks of each row, `newest[row]` always kept; see `kernels.topk.topk_blocks`."""
    rows, n = block_scores.shape
    out = torch.full((rows, k), -1, dtype=torch.int32)
    for r in range(rows):
        row, kept = block_scores[r].float().cpu(), int(newest[r])
        if 0 <= kept < n and not row.isnan().any():
            others = row.clone()
            others[kept] = -torch.inf  # its place is certain, the others share what is left
            picked = sorted([kept, *_best(others, k - 1)]) if k > 1 else [kept]
        else:
            picked = _best(row, k)
        out[r, : len(picked)] = torch.tensor(picked, dtype=torch.int32)
    return out.to(block_scores.device)


def _best(row, k):
    """Ascending positions of the k highest of one row, ties to the lower position, -inf never; k times -2 for a NaN."""
    if row.isnan().any():
        return [-2] * k
    order = row.sort(descending=True, stable=True).indices[:k].tolist()
    return sorted(p for p in order if row[p] > -torch.inf)
