"""What one call of the model works on: which rows of which sequences stand at which positions.

A call brings up to S new tokens for each of B sequences, which may have different lengths before and after. Tensors are
[B, S, ...], padded at the end of short rows; a padding row has position -1, sees nothing and is written nowhere.
Index tables that all layers share are made once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashsim.config import V41Config
from model.rope import frequencies, turns


class Step:
    """`start[b]` tokens precede the `count[b]` rows of sequence b in this call; [B, S] `positions`, -1 for padding."""

    def __init__(self, config: V41Config, start: list[int], count: list[int], device: torch.device):
        self.config, self.start, self.count, self.device = config, start, count, device
        self.rows = max(count)  # S
        offsets = torch.arange(self.rows, device=device)
        self.ragged = min(count) != self.rows
        self.positions = torch.tensor(start, device=device).unsqueeze(1) + offsets
        if self.ragged:
            valid = offsets < torch.tensor(count, device=device).unsqueeze(1)
            self.positions = self.positions.where(valid, -1)
        self.selected: Tensor | None = None  # [B, S, k] entries of the newest selection, -1 absent
        self.candidates: Tensor | None = None  # [B, S, C] blocks of the candidate pool, -1 absent; None is every block
        self.images: Tensor | None = None  # [B, S] bool, rows inside an image span; None is none
        self._memo: dict[Any, Any] = {}

    @property
    def batch(self) -> int:
        """B."""
        return len(self.start)

    @property
    def end(self) -> list[int]:
        """Tokens of each sequence after this call."""
        return [s + c for s, c in zip(self.start, self.count, strict=True)]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """A table that depends on this step alone, made when first asked for."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def frequency(self, compressed: bool) -> Tensor:
        """[pairs] the table of window-only or of compressed layers."""
        return self.once(("frequency", compressed), lambda: frequencies(self.config, compressed, self.device))

    def turn(self, compressed: bool) -> Tensor:
        """[B, S, pairs] rotation of every row, by the table of window-only or of compressed layers."""
        return self.once(("turn", compressed), lambda: turns(self.positions, self.frequency(compressed)))

    def newest(self, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """(sequence, row, position) of the last `limit` rows of each sequence at most: those that a ring keeps."""

        def make():
            keep = self.positions >= 0
            if max(self.count) > limit:
                first = torch.tensor([e - limit for e in self.end], device=self.device).unsqueeze(1)
                keep = keep & (self.positions >= first)
            sequence, row = keep.nonzero(as_tuple=True)
            return sequence, row, self.positions[sequence, row]

        return self.once(("newest", limit), make)

    def before(self, number: int) -> Tensor:
        """[B, number] positions that precede the rows of this step; negative where there is nothing."""
        make = lambda: (  # noqa: E731
            torch.tensor(self.start, device=self.device).unsqueeze(1) + torch.arange(-number, 0, device=self.device)
        )
        return self.once(("before", number), make)

    def window(self, old: int, first: tuple[int, ...], size: int) -> Tensor:
        """[B, S, w] rows of the table of `old` earlier records and then S new ones of each sequence; -1 not visible.

        Query p sees max(first, p - size + 1) .. p, where `first` is the oldest position that is there.
        """

        def make():
            width = min(size, old + self.rows)
            back = torch.arange(-width + 1, 1, device=self.device)
            column = torch.arange(self.rows, device=self.device)[:, None] + old + back  # [S, w]
            position = self.positions.unsqueeze(-1) + back  # [B, S, w]
            oldest = torch.tensor(first, device=self.device).view(-1, 1, 1)
            row = column + torch.arange(self.batch, device=self.device).view(-1, 1, 1) * (old + self.rows)
            visible = (position >= oldest) & (self.positions.unsqueeze(-1) >= 0) & (column >= 0)
            return row.where(visible, -1).int()

        return self.once(("window", old, first, size), make)

    def part(self, low: list[int], high: list[int]) -> tuple[Step, Callable[[Tensor], Tensor]] | None:
        """The rows at positions low[b] <= p < high[b], and the function that takes them out of a [B, S, ...] tensor.

        None where no sequence has such a row. Selections are not carried over: they belong to the rows that made them.
        """
        start = [max(s, lo) for s, lo in zip(self.start, low, strict=True)]
        count = [max(min(e, hi) - s, 0) for s, e, hi in zip(start, self.end, high, strict=True)]
        if not any(count):
            return None
        if count == self.count:
            return self, lambda x: x
        step = Step(self.config, start, count, self.device)
        column = step.positions - torch.tensor(self.start, device=self.device).unsqueeze(1)
        column = column.clamp(min=0)
        sequence = torch.arange(self.batch, device=self.device).unsqueeze(1)
        take = lambda x: x[sequence, column]  # noqa: E731
        step.images = None if self.images is None else take(self.images)
        return step, take
