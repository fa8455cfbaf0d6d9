"""A cache that gradients pass through: numbers, rounded to what their records hold, in place of the records.

    forward    x becomes unpack(pack(x))            the values that the packed cache gives back
    backward   the gradient of x is that of the rounded x (straight through)

A model in training (`model.train()`) makes such a cache for its calls; everything else of a forward is the same code.
Which entries a query selects is a choice and has no gradient: `Selection` trains the indexer by a loss of its own.
Source: V4.1 architecture 0.3, 6 (the model was trained with these roundings).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from model.backend import Backend
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


class Selection(Backend):
    """The reference ops for training: every visible entry is attended to, and the indexer learns which of them matter.

        loss = mean over queries of KL(p || softmax(index scores))      p: attention over entries, mean of the heads

    of each layer that uses a selection; p gets no gradient from it. In use the `index_topk` best entries are taken.
    `loss` adds up until `begin`. Source: V3.2 report, 2.1 (its dense warm-up, here while everything else learns too).
    """

    def __init__(self):
        self.begin()

    def begin(self) -> None:
        """Forget the forward before."""
        self.loss: Tensor | float = 0.0
        self._scores = self._picked = None

    def index_scores(self, *args) -> Tensor:
        """Scores, remembered for what comes of them."""
        self._scores = super().index_scores(*args)
        return self._scores

    def top_k(self, scores: Tensor, k: int) -> Tensor:
        """Of index scores all, of others the k best."""
        if scores is not self._scores:
            return super().top_k(scores, k)
        columns = super().top_k(scores, scores.shape[-1])
        self._picked = scores.gather(-1, columns.clamp(min=0)).flatten(0, 1)
        return columns

    def top_blocks(self, maxima: Tensor, k: int, newest: Tensor) -> Tensor:
        """All blocks."""
        return super().top_blocks(maxima, maxima.shape[-1], newest)

    def score_rows(self, scores: int, heads: int) -> int:
        """All rows at a time."""
        return 2**62

    def attention_rows(self, gathered: int) -> int:
        """All rows at a time."""
        return 2**62

    def sparse_attention(self, q, window, slots, entries, indices, sink, window_codec, main_codec) -> Tensor:
        """Attention, and what the indexer should have said where entries are read."""
        if entries is not None:
            absent = indices < 0
            with torch.no_grad():
                keys = main_codec.unpack(entries[indices.clamp(min=0)])
                products = (q @ keys.transpose(1, 2)) * q.shape[-1] ** -0.5
                shares = products.masked_fill(absent.unsqueeze(1), -torch.inf).softmax(dim=-1)
                wanted = shares.mean(dim=1).nan_to_num()  # [Q, k]; zeros where a query sees no entry
            said = self._picked.masked_fill(absent, torch.finfo(q.dtype).min).log_softmax(dim=-1)
            self.loss = self.loss + F.kl_div(said, wanted, reduction="sum") / len(q)
        return super().sparse_attention(q, window, slots, entries, indices, sink, window_codec, main_codec)
