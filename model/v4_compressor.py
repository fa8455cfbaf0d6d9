"""The compressor of V4: one entry for `compress_ratio` tokens, from disjoint groups (HCA) or overlapping ones (CSA).

    u_i = x_i wkv^T,  z_i = x_i wgate^T + ape[i mod m]                     float32
    e_t = sum_j softmax_j(z_j) u_j                                        each channel for itself
        HCA: j runs over the m tokens of group t
        CSA: u and z are twice as wide; j runs over the m tokens of group t - 1 with their FIRST halves and the m tokens
             of group t with their SECOND halves, one softmax over all 2 m; group 0 has nothing before it
    entry_t = rotate(RMS(e_t), m t)                                       position of the first token of group t

An entry appears with the last token of its group, and that token sees it. The position bias belongs to the token, not
to the slot: row i mod m of `ape`, both halves. Source: earlier generations, 5.3; test vectors 9.3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashsim.config import V4Config
from model.cache import Ring
from model.layers import Linear, RMSNorm, wide_dtype
from model.record_cache import Store
from model.rope import frequencies, rotate, turns
from model.step import Step


def pool(value: Tensor, gate: Tensor, first: Tensor, overlap: bool) -> Tensor:
    """[B, G, W] entries before norm and rotation, of groups first[b], first[b] + 1, ...

    value, gate: [B, G, m, W]; with `overlap` [B, G, 2 m, 2 W], the group before and the own one.
    """
    if overlap:
        ratio, width = value.shape[2] // 2, value.shape[3] // 2
        value, gate = (
            torch.cat((x[:, :, :ratio, :width], x[:, :, ratio:, width:]), dim=2) for x in (value, gate)
        )  # the first halves feed the next group
        start = (first.unsqueeze(1) + torch.arange(value.shape[1], device=value.device)) == 0  # [B, G]
        before = torch.arange(2 * ratio, device=value.device) < ratio
        gate = gate.masked_fill((start.unsqueeze(-1) & before).unsqueeze(-1), -torch.inf)
    return (torch.softmax(gate, dim=2) * value).sum(dim=2)


class V4Compressor(nn.Module):
    """Parameters `wkv`, `wgate` [W or 2 W, D], `ape` [m, W or 2 W] and `norm` [W]; 2 W where groups overlap."""

    def __init__(self, config: V4Config, ratio: int, width: int, overlap: bool, *, dtype, device):
        super().__init__()
        self.config, self.ratio, self.overlap = config, ratio, overlap
        options = {"dtype": dtype, "device": device}
        wide = 2 * width if overlap else width
        self.wkv = Linear(config.hidden_size, wide, widened=True, **options)
        self.wgate = Linear(config.hidden_size, wide, widened=True, **options)
        ape = torch.empty(ratio, wide, dtype=wide_dtype(dtype), device=device)
        self.ape = nn.Parameter(ape, requires_grad=False)
        self.norm = RMSNorm(width, config.rms_norm_eps, **options)

    def forward(self, x: Tensor, step: Step, ring: Ring, store: Store, finish=None) -> None:
        """Append to `store` the entries that the rows x [B, S, D] complete; `finish` is applied before they are packed.

        ring: value and gate of the newest tokens [B, size, 2, W or 2 W], float32.
        """
        gate = self.wgate(x)
        gate = gate + self.ape[step.positions % self.ratio].to(gate.dtype)
        new = torch.stack((self.wkv(x).float(), gate.float()), dim=2)
        reach = 2 * self.ratio if self.overlap else self.ratio  # tokens that an entry is made of
        rows = torch.cat((ring.read(step, reach - 1), new), dim=1)
        ring.write(step, new)
        groups = step.once(("v4 groups", self.ratio, self.overlap), lambda: Groups(step, self.ratio, reach))
        if groups.number == 0:
            return
        value, gate = rows[groups.sequence, groups.rows].unbind(dim=3)
        entries = self.norm(pool(value, gate, groups.first, self.overlap).to(x.dtype))
        position = (groups.first.unsqueeze(1) + torch.arange(groups.number, device=x.device)) * self.ratio
        entries = rotate(entries, turns(position, frequencies(self.config, True, x.device)))
        records = store.codec.pack(entries if finish is None else finish(entries))
        store.rows[groups.written[0], groups.entries] = records[groups.written]


class Groups:
    """The groups that a step completes: at most `number`, from `first` [B] on, and where their tokens stand."""

    def __init__(self, step: Step, ratio: int, reach: int):
        first, last = ([n // ratio for n in side] for side in (step.start, step.end))
        device = step.device
        self.number = max(b - a for a, b in zip(first, last, strict=True))
        self.first = torch.tensor(first, device=device)
        entries = self.first.unsqueeze(1) + torch.arange(self.number, device=device)  # [B, G]
        # At hand are the reach - 1 tokens before the step, then those of the step.
        origin = torch.tensor(step.start, device=device).view(-1, 1, 1) - (reach - 1)
        tokens = (entries.unsqueeze(-1) + 1) * ratio + torch.arange(-reach, 0, device=device)  # [B, G, reach]
        self.rows = (tokens - origin).clamp(max=step.rows + reach - 2)
        self.sequence = torch.arange(step.batch, device=device).view(-1, 1, 1)
        self.written = (entries < torch.tensor(last, device=device).unsqueeze(1)).nonzero(as_tuple=True)
        self.entries = entries[self.written]
