"""The compressor: what a Full layer adds to the shared cache, one entry for every `compress_ratio` tokens.

    u = x wkv^T,  g = x wgate^T                          float32; ratio 1 has no gate
    l_t[c] = sum_i softmax_i(g_i[c]) u_i[c]              over the tokens i of group t, each channel for itself
    latent_t = RMS(l_t)                                  the indexer key comes from this one
    entry_t = FP4(rotate(latent_t, ratio * t))           position of the FIRST token of the group

Groups do not overlap and there is no position bias. A group that is not complete keeps (u, g) of its tokens; the entry
appears with the group's last token, and that token sees it. Source: V4.1 architecture 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flashsim.config import V41Config
from model.cache import Cache, Source
from model.layers import Linear, RMSNorm
from model.quant import Codec
from model.rope import frequencies, rotate, turns
from model.step import Step

if TYPE_CHECKING:
    from model.backend import Backend


def pool(value: Tensor, gate: Tensor | None) -> Tensor:
    """[B, G, ratio, W] to [B, G, W]: the gated mean of each group, channel by channel; no gate at ratio 1."""
    return value.squeeze(2) if gate is None else (torch.softmax(gate, dim=2) * value).sum(dim=2)


def compress(
    value: Tensor,
    gate: Tensor | None,
    norm: RMSNorm,
    frequency: Tensor,
    first: Tensor,
    dtype: torch.dtype,
    codec: Codec,
) -> tuple[Tensor, Tensor]:
    """The latents [B, G, W], not rotated, and the records [B, G, bytes] of the groups first[b], first[b] + 1, ...

    value, gate: [B, G, ratio, W], float32 where there is a gate. dtype: the precision of latents.
    """
    latent = norm(pool(value, gate).to(dtype))
    ratio, groups = value.shape[2], torch.arange(value.shape[1], device=value.device)
    positions = (first.unsqueeze(1) + groups) * ratio
    return latent, codec.pack(rotate(latent, turns(positions, frequency)))


class Compressor(nn.Module):
    """Parameters `wkv`, `wgate` (ratio > 1) [W, D] and `norm` [W]."""

    def __init__(self, config: V41Config, ratio: int, backend: Backend, *, dtype, device):
        super().__init__()
        self.config, self.ratio, self.backend = config, ratio, backend
        options = {"dtype": dtype, "device": device}
        self.wkv = Linear(config.hidden_size, config.head_dim, widened=ratio > 1, **options)
        if ratio > 1:
            self.wgate = Linear(config.hidden_size, config.head_dim, widened=True, **options)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps, **options)

    def forward(self, x: Tensor, step: Step, cache: Cache, source: Source) -> tuple[Tensor, Groups] | None:
        """Append the entries that the rows x [B, S, D] complete; returns their latents [B, G, W] and which they are."""
        groups = step.once(("groups", self.ratio), lambda: Groups(step, self.ratio, cache.frozen))
        if self.ratio == 1:
            value, gate = self.wkv(x).unsqueeze(2), None
        else:
            new = torch.stack((self.wkv(x).float(), self.wgate(x).float()), dim=2)  # [B, S, 2, W], kept in float32
            rows = torch.cat((source.pending.read(step, self.ratio - 1), new), dim=1)
            source.pending.write(step, new)
            if groups.number == 0:
                return None
            value, gate = groups.take(rows).unbind(dim=3)
        frequency = frequencies(self.config, True, step.device)
        latent, records = self.backend.compress(
            value, gate, self.norm, frequency, groups.first, x.dtype, cache.main_codec
        )
        groups.write(source.entries, records)
        return latent, groups


class Groups:
    """The groups that a step completes: at most `number`, from `first` [B] on, and how their tokens are found."""

    def __init__(self, step: Step, ratio: int, frozen: list[int]):
        first, last = ([n // ratio for n in side] for side in (step.start, step.end))
        self.number = max(b - a for a, b in zip(first, last, strict=True))
        device = step.device
        self.first = torch.tensor(first, device=device)
        entries = self.first.unsqueeze(1) + torch.arange(self.number, device=device)  # [B, G]
        # The rows at hand are the ratio - 1 tokens before the step, then those of the step.
        origin = torch.tensor(step.start, device=device).view(-1, 1, 1) - (ratio - 1)
        rows = entries.unsqueeze(-1) * ratio + torch.arange(ratio, device=device) - origin  # [B, G, ratio]
        self.rows = rows.clamp(max=step.rows + ratio - 2)
        self.sequence = torch.arange(step.batch, device=device).view(-1, 1, 1)
        written = entries < torch.tensor(last, device=device).unsqueeze(1)
        written &= entries >= torch.tensor([n // ratio for n in frozen], device=device).unsqueeze(1)
        self.written = written.nonzero(as_tuple=True)
        self.entries = entries[self.written]

    def take(self, rows: Tensor) -> Tensor:
        """[B, G, ratio, ...] tokens of the groups, from rows [B, ratio - 1 + S, ...]."""
        return rows[self.sequence, self.rows]

    def write(self, store: Tensor, records: Tensor) -> None:
        """Put records [B, G, bytes] into store [B, capacity, bytes], where there is a group and it is not frozen."""
        store[self.written[0], self.entries] = records[self.written]
