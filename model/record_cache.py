"""What the caches of V1 to V4 share: growing rows of records, rings, and counting, copying and taking back.

A `Store` has one record for `ratio` tokens and grows with the context; a `Ring` (`model.cache`) has the newest tokens
alone. Each belongs to a layer and a component of `flashsim.kv_cache`, and `nbytes()` after n tokens is that report of n
tokens, to the byte. `reserved_nbytes()` is what the tensors take: room to grow, `rollback` more places in each ring,
and, in a model wider than bfloat16, the remainders of BF16 numbers (`model.record_codec`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from flashsim.config import Config
from model.cache import ROLLBACK, CacheError, Counted, Ring
from model.memory import require
from model.record_codec import RecordCodec
from model.step import Step


class Store:
    """Rows [B, capacity, codec.row_bytes] of one layer, one for every `ratio` tokens."""

    def __init__(self, codec: RecordCodec, batch: int, ratio: int, device: torch.device):
        self.codec, self.ratio = codec, ratio
        self.rows = torch.zeros(batch, 0, codec.row_bytes, dtype=torch.uint8, device=device)

    def grow(self, tokens: int) -> None:
        """Room for the records of so many tokens."""
        wanted, there = max(tokens // self.ratio, 1), self.rows.shape[1]
        if wanted > there:
            batch, _, width = self.rows.shape
            self.rows = torch.cat((self.rows, self.rows.new_zeros(batch, max(wanted, 2 * there) - there, width)), dim=1)

    def records(self, b: int, length: int) -> Tensor:
        """[length // ratio, nbytes]: what is stored of sequence b after so many tokens; a view."""
        return self.rows[b, : length // self.ratio, : self.codec.nbytes]


class RecordCache(Counted):
    """The cache of `batch_size` sequences; `lengths[b]` tokens of sequence b are in it.

    A subclass fills `stores` and `rings`, both by (layer, component), and says with `oldest` what a ring has to hold.
    """

    def __init__(
        self,
        config: Config,
        batch_size: int = 1,
        *,
        capacity: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        cache_rounding: bool = True,
        rollback: int = ROLLBACK,
    ):
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise CacheError(f"batch_size is {batch_size!r}; accepted: a whole number from 1")
        if rollback < 0:
            raise CacheError(f"rollback is {rollback}; accepted: a whole number of tokens from 0")
        self.config, self.batch_size, self.device = config, batch_size, torch.device(device)
        self.dtype, self.cache_rounding, self.rollback = dtype, cache_rounding, rollback
        self.lengths = [0] * batch_size
        self.stores: dict[tuple[int, str], Store] = {}
        self.rings: dict[tuple[int, str], Ring] = {}
        self._make()
        self.reserve(capacity)

    def _make(self) -> None:
        """Fill `stores` and `rings`."""
        raise NotImplementedError

    def oldest(self, layer: int, component: str, length: int) -> int:
        """The oldest position that a ring has to hold when a sequence of so many tokens goes on."""
        raise NotImplementedError

    def stored(self, b: int) -> Iterator[tuple[int, str, str, Tensor]]:
        """(layer, component, tier, tensor) of everything stored for sequence b; records are views, no copies."""
        for (layer, component), store in self.stores.items():
            yield layer, component, "global", store.records(b, self.lengths[b])
        for (layer, component), ring in self.rings.items():
            yield from self._in_ring(b, layer, component, ring)

    def _in_ring(self, b: int, layer: int, component: str, ring: Ring) -> Iterator[tuple[int, str, str, Tensor]]:
        raise NotImplementedError

    # --- filling ------------------------------------------------------------------------------------------------------

    def codec(self, record) -> RecordCodec:
        """The codec of a record of `flashsim.kv_cache` in this cache."""
        return RecordCodec(record, rounding=self.cache_rounding, dtype=self.dtype)

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens a sequence.

        Raises:
            MemoryError: they do not fit.
        """
        if any(tokens // store.ratio > store.rows.shape[1] for store in self.stores.values()):
            needed = sum(tokens // store.ratio * store.codec.row_bytes for store in self.stores.values())
            require(f"a cache of {self.batch_size} x {tokens} tokens", self.batch_size * needed, self.device)
        for store in self.stores.values():
            store.grow(tokens)

    def begin(self, step: Step) -> None:
        """Make room for a step, before the layers run."""
        self.reserve(max(start + step.rows for start in step.start))

    def advance(self, step: Step) -> None:
        """All layers have run: the step's tokens count."""
        self.lengths = step.end

    # --- what it holds ------------------------------------------------------------------------------------------------

    def reserved_nbytes(self) -> int:
        """Bytes that the tensors take, used or not."""
        return sum(part.rows.nbytes for part in (*self.stores.values(), *self.rings.values()))

    def __repr__(self) -> str:
        rounding = "" if self.cache_rounding else ", not rounded"
        kind = type(self).__name__
        return f"<{kind} {self.config.name}, tokens {self.lengths}, {self.nbytes():,} bytes stored{rounding}>"

    # --- taking back, copying -----------------------------------------------------------------------------------------

    def truncate(self, length: int | Sequence[int]) -> None:
        """Take back the tokens from position `length` on, of each sequence; one number serves all.

        Raises:
            CacheError: longer than the sequence, or so short that a ring no longer holds what is needed there; then
                nothing is changed. `rollback` tokens can always be taken back.
        """
        lengths = [length] * self.batch_size if isinstance(length, int) else list(length)
        if len(lengths) != self.batch_size:
            raise CacheError(f"length has {len(lengths)} numbers; accepted: one, or one for each of {self.batch_size}")
        for b, wanted in enumerate(lengths):
            if not 0 <= wanted <= self.lengths[b]:
                raise CacheError(f"length {wanted} of sequence {b}; accepted: 0 to its {self.lengths[b]} tokens")
            for (layer, component), ring in self.rings.items():
                needed = max(self.oldest(layer, component, wanted), 0)
                if needed < min(wanted, ring.oldest(b)):
                    raise CacheError(
                        f"length {wanted} of sequence {b} takes back {self.lengths[b] - wanted} tokens; accepted: at "
                        f"most rollback, {self.rollback}"
                    )
        for b, wanted in enumerate(lengths):
            self.lengths[b] = wanted
            for ring in self.rings.values():
                ring.truncate(b, wanted)

    def prefix(self, length: int, sequence: int = 0) -> Self:
        """What V4.1 keeps of a prompt for long (`model.cache.Cache.prefix`); these models have no replay to go on with.

        Raises:
            CacheError: always.
        """
        raise CacheError(
            f"prefix of {self.config.name}; accepted: caches of V4.1; here fork and truncate keep a prefix"
        )

    def fork(self, sequences: Sequence[int] | None = None) -> Self:
        """An independent copy; with `sequences` of these, in this order and as often as they are named.

        Raises:
            CacheError: a sequence that is not there.
        """
        chosen = list(range(self.batch_size)) if sequences is None else list(sequences)
        if not chosen or not all(0 <= b < self.batch_size for b in chosen):
            raise CacheError(f"sequences is {chosen}; accepted: numbers from 0 to {self.batch_size - 1}")
        copy = type(self)(
            self.config,
            len(chosen),
            dtype=self.dtype,
            device=self.device,
            cache_rounding=self.cache_rounding,
            rollback=self.rollback,
        )
        copy.lengths = [self.lengths[b] for b in chosen]
        for key, store in self.stores.items():
            copy.stores[key].rows = store.rows[chosen].clone()
        for key, ring in self.rings.items():
            copy.rings[key].copy(ring, chosen)
        return copy
