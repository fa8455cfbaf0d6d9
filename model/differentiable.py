"""A cache that gradients pass through: numbers, rounded to what their records hold, in place of the records.

    forward    x becomes unpack(pack(x))            the values that the packed cache gives back
    backward   the gradient of x is that of the rounded x (straight through)

A model in training (`model.train()`) makes such a cache for its calls; everything else of a forward is the same code.
Which entries a query selects is a choice and has no gradient, so none reaches the indexer.
Source: V4.1 architecture 0.3, 6 (the model was trained with these roundings).
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.cache import Cache
from model.quant import Codec


class StraightCodec:
    """A `Codec` for training: `pack` rounds and keeps numbers [..., width], `unpack` has nothing to do."""

    def __init__(self, codec: Codec):
        self._codec, self.width = codec, codec.width
        self.nbytes = codec.width * codec.dtype.itemsize

    def pack(self, x: Tensor) -> Tensor:
        """[..., width] rounded; its gradient is that of x."""
        with torch.no_grad():
            lost = self._codec.unpack(self._codec.pack(x)).to(x.dtype) - x
        return x + lost

    def unpack(self, rows: Tensor) -> Tensor:
        """The rows as they are."""
        return rows


class DifferentiableCache(Cache):
    """A `Cache` whose rows are numbers of the model's dtype. What it stores is not what a served sequence stores."""

    def __init__(self, config, batch_size: int = 1, *, capacity: int = 0, **options):
        super().__init__(config, batch_size, **options)
        self.main_codec, self.key_codec, self.window_codec = (
            StraightCodec(codec) for codec in (self.main_codec, self.key_codec, self.window_codec)
        )
        for ring in self.windows.values():
            ring.rows = self._rows(ring.size, self.window_codec)
        for source in self.sources.values():
            source.entries, source.keys = self._rows(0, self.main_codec), self._rows(0, self.key_codec)
        if capacity:
            self.reserve(capacity)

    def _rows(self, number: int, codec: StraightCodec) -> Tensor:
        return torch.zeros(self.batch_size, number, codec.width, dtype=self.dtype, device=self.device)

    def nbytes(self, by: str | None = None, sequence: int | None = None):
        """Not counted.

        Raises:
            TypeError: always; a model in `eval()` makes a cache of packed records.
        """
        raise TypeError("a cache made in training holds no records; accepted: a cache of the model in eval()")
