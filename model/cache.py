"""The cache of V4.1: packed records of every layer, as bytes, and what it takes to continue a sequence.

| component | tier | record | kept by |
| --- | --- | --- | --- |
| `main_kv` | global | FP4 entry, one for `compress_ratio` tokens | layers that compress |
| `index_key` | global | MXFP4 key of the same entry | the same layers |
| `window_kv` | window | MXFP8 record of one token, the last `sliding_window` | every layer |
| `compressor_state` | state | float32 value and gate of each token of an open group | layers of ratio > 1 |

After n tokens `nbytes()` is `flashsim.kv_cache` of n tokens, to the byte. That is what is *stored*; `reserved_nbytes()`
is what the tensors take: room to grow, and `rollback` more places in each ring, so that a rejected suffix can be taken
back although newer tokens have overwritten the oldest. The token ids are the request itself and counted in neither, as
in every published total; Engram reads the last few of them (`history_nbytes()`), replay all.
Source: V4.1 architecture 3.8, 4.4, 6.6, 9.5, 13.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashsim.config import V41Config
from flashsim.kv_cache import HISTORY_RECORD_BYTES, index_record, main_record, window_record
from flashsim.schedule import layer_plan
from model.memory import MODEST, require
from model.quant import Codec
from model.step import Step

ROLLBACK = 8  # tokens that can always be taken back; more than a draft block
HEADER = "flashsim.cache"  # metadata of a saved cache


class CacheError(ValueError):
    """A cache that cannot do what is asked of it."""


class Ring:
    """Rows of the newest tokens, [B, size, ...], position p at p mod size.

    Written are positions first[b] .. end[b] - 1; rows before lost[b] have been overwritten by tokens since taken back.
    """

    def __init__(self, rows: Tensor):
        self.rows, self.size = rows, rows.shape[1]
        self.first, self.end, self.lost = ([0] * rows.shape[0] for _ in range(3))

    def kept(self, b: int) -> int:
        """The position from which on rows of sequence b have not been overwritten."""
        return max(self.lost[b], self.end[b] - self.size)

    def oldest(self, b: int) -> int:
        """The oldest position of sequence b that is held."""
        return max(self.first[b], self.kept(b))

    def copy(self, other: Ring, chosen: Sequence[int]) -> None:
        """Be as `other` is, with the chosen sequences of it."""
        self.rows = other.rows[chosen].clone()
        self.first, self.end, self.lost = ([side[b] for b in chosen] for side in (other.first, other.end, other.lost))

    def held(self, start: Sequence[int]) -> list[int]:
        """How many rows directly before start[b] are there."""
        return [max(s - self.oldest(b), 0) if s == self.end[b] else 0 for b, s in enumerate(start)]

    def read(self, step: Step, number: int) -> Tensor:
        """[B, number, ...] rows of the positions before the step; arbitrary where nothing is held."""
        sequence = step.once("sequences", lambda: torch.arange(step.batch, device=step.device).unsqueeze(1))
        place = step.once(("place", number, self.size), lambda: step.before(number) % self.size)
        return self.rows[sequence, place]

    def write(self, step: Step, new: Tensor) -> None:
        """Keep the rows [B, S, ...] of a step. A gap before them empties the ring first."""
        sequence, row, position = step.newest(self.size)
        place = step.once(("placed", self.size), lambda: position % self.size)
        self.rows[sequence, place] = new[sequence, row]
        for b, (start, end) in enumerate(zip(step.start, step.end, strict=True)):
            if start != end:
                if start != self.end[b]:
                    self.first[b] = start
                self.end[b] = end

    def in_order(self, b: int, low: int, high: int) -> Tensor:
        """[high - low, ...] copies of the rows of positions low .. high - 1 of sequence b."""
        return self.rows[b, torch.arange(low, high, device=self.rows.device) % self.size]

    def truncate(self, b: int, length: int) -> None:
        """Forget positions from `length` on; what they overwrote stays lost."""
        self.lost[b] = min(self.kept(b), length)
        self.end[b] = min(self.end[b], length)
        self.first[b] = min(self.first[b], self.end[b])


class Counted:
    """Bytes of a cache by what `stored(b)` yields for each of its `batch_size` sequences of `lengths[b]` tokens."""

    def nbytes(self, by: str | None = None, sequence: int | None = None) -> int | dict:
        """Bytes stored, of one sequence or of all: a sum, or a dict by `component`, `tier`, `layer`.

        Raises:
            CacheError: another `by`.
        """
        keys = {"layer": 0, "component": 1, "tier": 2}
        if by is not None and by not in keys:
            raise CacheError(f"by is {by!r}; accepted: {', '.join(keys)}")
        sums: dict = {}
        for b in range(self.batch_size) if sequence is None else (sequence,):
            for row in self.stored(b):
                name = row[keys[by]] if by else None
                sums[name] = sums.get(name, 0) + row[3].nbytes
        return sums if by else sum(sums.values())

    def __len__(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)


class Source:
    """What one layer that compresses keeps: packed entries, packed index keys, the inputs of the open group."""

    def __init__(self, cache: Cache, layer: int, ratio: int):
        self.layer, self.ratio = layer, ratio
        batch, width, device = cache.batch_size, cache.config.head_dim, cache.device
        self.entries = torch.zeros(batch, 0, cache.main_codec.nbytes, dtype=torch.uint8, device=device)
        self.keys = torch.zeros(batch, 0, cache.key_codec.nbytes, dtype=torch.uint8, device=device)
        pending = 0 if ratio == 1 else ratio - 1 + cache.rollback
        self.pending = Ring(torch.zeros(batch, pending, 2, width, device=device)) if pending else None

    def grow(self, tokens: int) -> None:
        """Room for the entries of so many tokens."""
        wanted, there = max(tokens // self.ratio, 1), self.entries.shape[1]
        if wanted > there:
            more = max(wanted, 2 * there) - there
            self.entries, self.keys = (
                torch.cat((t, t.new_zeros(t.shape[0], more, t.shape[2])), dim=1) for t in (self.entries, self.keys)
            )


class Cache(Counted):
    """The cache of `batch_size` sequences, empty or filled; `model.new_cache` makes one that fits the model.

    `lengths[b]` tokens of sequence b are in it. Entries of the first `frozen[b]` tokens are never written again.
    """

    def __init__(
        self,
        config: V41Config,
        batch_size: int = 1,
        *,
        capacity: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        cache_rounding: bool = True,
        rollback: int = ROLLBACK,
    ):
        for name, value, low in (("batch_size", batch_size, 1), ("capacity", capacity, 0), ("rollback", rollback, 0)):
            if type(value) is not int or value < low:
                raise CacheError(f"{name} is {value!r}; accepted: a whole number from {low}")
        self.config, self.batch_size, self.device = config, batch_size, torch.device(device)
        self.dtype, self.cache_rounding, self.rollback = dtype, cache_rounding, rollback
        self.main_codec, self.key_codec, self.window_codec = (
            Codec(record(config), rounding=cache_rounding, dtype=dtype)
            for record in (main_record, index_record, window_record)
        )
        plans, size = layer_plan(config), config.sliding_window + rollback
        self.ratios = [plan.compress_ratio for plan in plans if plan.owns_kv]
        self._require(batch_size * len(plans) * size * self.window_codec.nbytes + self.room_nbytes(capacity))
        self.lengths, self.frozen = [0] * batch_size, [0] * batch_size
        self.tokens = torch.zeros(batch_size, 0, dtype=torch.int64, device=self.device)
        self.images = torch.zeros(batch_size, 0, dtype=torch.bool, device=self.device)
        self.windows: dict[int, Ring] = {}
        self.sources: dict[int, Source] = {}
        for plan in plans:
            rows = torch.zeros(batch_size, size, self.window_codec.nbytes, dtype=torch.uint8, device=self.device)
            self.windows[plan.layer] = Ring(rows)
            if plan.owns_kv:
                self.sources[plan.layer] = Source(self, plan.layer, plan.compress_ratio)
        if capacity:
            self.reserve(capacity)

    # --- filling ----------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens a sequence."""
        there = self.tokens.shape[1]
        if tokens > there:
            more = max(tokens, 2 * there) - there
            self._require(self.room_nbytes(there + more))
            self.tokens = torch.cat((self.tokens, self.tokens.new_zeros(self.batch_size, more)), dim=1)
            self.images = torch.cat((self.images, self.images.new_zeros(self.batch_size, more)), dim=1)
        for source in self.sources.values():
            source.grow(tokens)

    def room_nbytes(self, tokens: int) -> int:
        """Bytes that room for so many tokens of every sequence takes: token ids, entries, index keys."""
        records = self.main_codec.nbytes + self.key_codec.nbytes
        entries = sum(tokens // ratio for ratio in self.ratios)
        return self.batch_size * (tokens * HISTORY_RECORD_BYTES + entries * records)

    def _require(self, needed: int) -> None:
        if needed > MODEST:
            require(f"a cache with room for a batch of {self.batch_size:,}", needed, self.device)

    def begin(self, step: Step, ids: Tensor, images: Tensor | None) -> None:
        """Take in the token ids [B, S] of a step, before the layers run."""
        self.reserve(max(s + step.rows for s in step.start))
        for b, (start, count) in enumerate(zip(step.start, step.count, strict=True)):
            self.tokens[b, start : start + count] = ids[b, :count]
            self.images[b, start : start + count] = False if images is None else images[b, :count]

    def advance(self, step: Step) -> None:
        """All layers have run: the step's tokens count."""
        self.lengths = step.end

    # --- what it holds ----------------------------------------------------------------------------------------------

    def stored(self, b: int) -> Iterator[tuple[int, str, str, Tensor]]:
        """(layer, component, tier, tensor) of everything stored for sequence b; global tensors are views, no copies."""
        length = self.lengths[b]
        for layer, ring in self.windows.items():
            if layer in self.sources:
                source = self.sources[layer]
                entries = length // source.ratio
                yield layer, "main_kv", "global", source.entries[b, :entries]
                yield layer, "index_key", "global", source.keys[b, :entries]
            first = max(ring.first[b], ring.end[b] - self.config.sliding_window)
            yield layer, "window_kv", "window", ring.in_order(b, first, ring.end[b])
            if layer in self.sources and self.sources[layer].pending is not None:
                pending = self.sources[layer].pending
                open_group = max(length - length % self.sources[layer].ratio, pending.first[b])
                rows = pending.in_order(b, open_group, max(pending.end[b], open_group))
                yield layer, "compressor_state", "state", rows

    def history_nbytes(self, sequence: int | None = None) -> int:
        """Bytes of the token history that Engram reads, of one sequence or of all: `flashsim.token_history_bytes`."""
        reach = self.config.engram_max_ngram_size - 1 if self.config.engram_layer_ids else 0
        total = 0
        for b in range(self.batch_size) if sequence is None else (sequence,):
            end = self.lengths[b]
            places = slice(max(end - reach, 0), end)
            total += self.tokens[b, places].nbytes + self.images[b, places].nbytes
        return total

    def reserved_nbytes(self) -> int:
        """Bytes that the tensors of records take, used or not."""
        tensors = [ring.rows for ring in self.windows.values()]
        for source in self.sources.values():
            tensors += [source.entries, source.keys]
            tensors += [source.pending.rows] if source.pending is not None else []
        return sum(tensor.nbytes for tensor in tensors)

    def __repr__(self) -> str:
        rounding = "rounded" if self.cache_rounding else "not rounded"
        return f"<Cache {self.config.name}, tokens {self.lengths}, {self.nbytes():,} bytes stored, {rounding}>"

    # --- taking back, copying, keeping --------------------------------------------------------------------------------

    def truncate(self, length: int | Sequence[int]) -> None:
        """Take back the tokens from position `length` on, of each sequence; one number serves all.

        Windows, open groups, entries, index keys and token history are afterwards as they were at that length.

        Raises:
            CacheError: longer than the sequence, or so short that a ring no longer holds the window there; then nothing
                is changed. `rollback` tokens can always be taken back; `prefix` and a replay go further.
        """
        lengths = [length] * self.batch_size if isinstance(length, int) else list(length)
        if len(lengths) != self.batch_size:
            raise CacheError(f"length has {len(lengths)} numbers; accepted: one, or one for each of {self.batch_size}")
        for b, wanted in enumerate(lengths):
            if not 0 <= wanted <= self.lengths[b]:
                raise CacheError(f"length {wanted} of sequence {b}; accepted: 0 to its {self.lengths[b]} tokens")
            if wanted and not self._can_go_back(b, wanted):
                least = next(n for n in range(wanted, self.lengths[b] + 1) if self._can_go_back(b, n))
                raise CacheError(
                    f"length {wanted} of sequence {b}, whose windows go back to length {least}; accepted: from there "
                    f"on, or prefix({wanted}) and a replay"
                )
        for b, wanted in enumerate(lengths):
            self.lengths[b], self.frozen[b] = wanted, min(self.frozen[b], wanted)
            for ring in self._rings():
                ring.truncate(b, wanted)

    def _can_go_back(self, b: int, wanted: int) -> bool:
        needs = [(ring, wanted - self.config.sliding_window) for ring in self.windows.values()]
        for source in self.sources.values():
            if source.pending is not None:
                needs.append((source.pending, wanted - wanted % source.ratio))
        return all(
            wanted >= ring.first[b] and ring.kept(b) <= max(low, ring.first[b])
            for ring, low in needs
            if wanted < ring.end[b] and low < wanted
        )

    def _named_rings(self) -> Iterator[tuple[str, Ring]]:
        for layer, ring in self.windows.items():
            yield f"{layer}.window_kv", ring
        for layer, source in self.sources.items():
            if source.pending is not None:
                yield f"{layer}.compressor_state", source.pending

    def _rings(self) -> Iterator[Ring]:
        return (ring for _, ring in self._named_rings())

    def _empty(self, batch_size: int) -> Cache:
        return Cache(
            self.config,
            batch_size,
            dtype=self.dtype,
            device=self.device,
            cache_rounding=self.cache_rounding,
            rollback=self.rollback,
        )

    def fork(self, sequences: Sequence[int] | None = None) -> Cache:
        """An independent copy; with `sequences` of these, in this order and as often as they are named."""
        chosen = list(range(self.batch_size)) if sequences is None else list(sequences)
        if not chosen or not all(0 <= b < self.batch_size for b in chosen):
            raise CacheError(f"sequences is {chosen}; accepted: numbers from 0 to {self.batch_size - 1}")
        copy = self._empty(len(chosen))
        copy.lengths, copy.frozen = [self.lengths[b] for b in chosen], [self.frozen[b] for b in chosen]
        copy.tokens, copy.images = self.tokens[chosen].clone(), self.images[chosen].clone()
        for new, old in zip(copy._rings(), self._rings(), strict=True):
            new.copy(old, chosen)
        for layer, source in self.sources.items():
            copy.sources[layer].entries = source.entries[chosen].clone()
            copy.sources[layer].keys = source.keys[chosen].clone()
        return copy

    def prefix(self, length: int, sequence: int = 0) -> Cache:
        """What a service keeps of a prompt for long: the entries and index keys of its first tokens, and the ids.

        Windows and open groups are gone, so the result cannot be continued before a replay (`model.replay`).

        Raises:
            CacheError: more tokens than the sequence has.
        """
        if not 0 < length <= self.lengths[sequence]:
            raise CacheError(f"prefix of {length} tokens; accepted: 1 to {self.lengths[sequence]}")
        copy = self._empty(1)
        copy.lengths, copy.frozen = [length], [length]
        copy.tokens, copy.images = (t[sequence : sequence + 1, :length].clone() for t in (self.tokens, self.images))
        for layer, source in self.sources.items():
            entries = slice(length // source.ratio)
            copy.sources[layer].entries = source.entries[sequence : sequence + 1, entries].clone()
            copy.sources[layer].keys = source.keys[sequence : sequence + 1, entries].clone()
        return copy

    def rewind(self, start: int) -> None:
        """Go back to position `start` with empty windows and groups, for a replay; entries stay and are frozen."""
        self.frozen = [max(n, f) for n, f in zip(self.lengths, self.frozen, strict=True)]
        self.lengths = [start] * self.batch_size
        for ring in self._rings():
            ring.first, ring.end, ring.lost = ([start] * self.batch_size for _ in range(3))

    def save(self, path: str | Path) -> None:
        """Write everything it holds, token ids included, to one safetensors file."""
        tensors = {}
        for b in range(self.batch_size):
            tensors[f"{b}.tokens"] = self.tokens[b, : self.lengths[b]].clone()
            tensors[f"{b}.images"] = self.images[b, : self.lengths[b]].clone()
            for layer, source in self.sources.items():
                entries = self.lengths[b] // source.ratio
                tensors[f"{b}.{layer}.main_kv"] = source.entries[b, :entries].clone()
                tensors[f"{b}.{layer}.index_key"] = source.keys[b, :entries].clone()
            for name, ring in self._named_rings():
                tensors[f"{b}.{name}"] = ring.in_order(b, ring.oldest(b), ring.end[b])
        about = {
            "config": self.config.to_dict(),
            "lengths": self.lengths,
            "frozen": self.frozen,
            "dtype": str(self.dtype).removeprefix("torch."),
            "cache_rounding": self.cache_rounding,
            "rollback": self.rollback,
            "rings": {name: [ring.first, ring.end, ring.lost] for name, ring in self._named_rings()},
        }
        save_file(tensors, str(path), metadata={HEADER: json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path, config: V41Config, device: torch.device | str = "cpu") -> Cache:
        """The cache in a file that `save` wrote, as it was.

        Raises:
            CacheError: no such file, another kind of file, another config, or tensors that do not fit.
        """
        try:
            with safe_open(str(path), framework="pt", device=str(device)) as file:
                about = json.loads((file.metadata() or {}).get(HEADER, "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError) as error:
            raise CacheError(f"{path} is no cache file: {error}") from None
        if not isinstance(about, dict):
            raise CacheError(f"{path} is no cache file: its header has no entry {HEADER}")
        fields, saved = json.loads(json.dumps(config.to_dict())), about.get("config")
        if saved != fields:
            saved = saved if isinstance(saved, dict) else {}
            wrong = sorted(k for k in {**saved, **fields} if saved.get(k) != fields.get(k))
            raise CacheError(f"{path} was saved for another config: {', '.join(wrong)} differ")
        cache = cls._described(about, config, device, path)
        lengths = cache.lengths
        for b, length in enumerate(lengths):
            _fill(cache.tokens[b, :length], tensors, f"{b}.tokens", path)
            _fill(cache.images[b, :length], tensors, f"{b}.images", path)
            for layer, source in cache.sources.items():
                _fill(source.entries[b, : length // source.ratio], tensors, f"{b}.{layer}.main_kv", path)
                _fill(source.keys[b, : length // source.ratio], tensors, f"{b}.{layer}.index_key", path)
            for name, ring in cache._named_rings():
                low, high = ring.oldest(b), ring.end[b]
                rows = ring.in_order(b, low, high)
                _fill(rows, tensors, f"{b}.{name}", path)
                ring.rows[b, torch.arange(low, high, device=rows.device) % ring.size] = rows
        if tensors:
            raise CacheError(f"{path} has tensors that this cache has not: {', '.join(sorted(tensors)[:5])}")
        return cache

    @classmethod
    def _described(cls, about: dict, config: V41Config, device: torch.device | str, path: str | Path) -> Cache:
        """An empty cache as the header of a file describes it, which a stranger may have written."""
        dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float64)}
        lengths, dtype = about.get("lengths"), about.get("dtype")
        if not _whole(lengths) or not lengths or max(lengths) > config.max_position_embeddings:
            accepted = f"numbers of tokens up to {config.max_position_embeddings}"
            raise CacheError(f"{path}: lengths is {lengths}; accepted: {accepted}")
        if not isinstance(dtype, str) or dtype not in dtypes:
            raise CacheError(f"{path}: dtype is {dtype!r}; accepted: {', '.join(dtypes)}")
        if not isinstance(about.get("cache_rounding"), bool):
            raise CacheError(f"{path}: cache_rounding is {about.get('cache_rounding')!r}; accepted: true, false")
        options = {"dtype": dtypes[dtype], "cache_rounding": about["cache_rounding"], "rollback": about.get("rollback")}
        cache = cls(config, len(lengths), capacity=max(lengths), device=device, **options)
        cache.lengths, cache.frozen = lengths, about.get("frozen")
        if not _whole(cache.frozen, len(lengths)):
            raise CacheError(f"{path}: frozen is {cache.frozen}; accepted: one number for each sequence")
        rings = about.get("rings") if isinstance(about.get("rings"), dict) else {}
        for name, ring in cache._named_rings():
            ends = rings.get(name)
            if not isinstance(ends, list) or len(ends) != 3 or not all(_whole(side, len(lengths)) for side in ends):
                raise CacheError(
                    f"{path}: rings.{name} is {ends}; accepted: where each sequence begins, ends and is kept"
                )
            ring.first, ring.end, ring.lost = ends
            if any(not max(first, lost) <= end <= n for first, end, lost, n in zip(*ends, lengths, strict=True)):
                raise CacheError(f"{path}: rings.{name} is {ends}; accepted: positions of {lengths} tokens, in order")
        return cache


def _whole(values, number: int | None = None) -> bool:
    """Whether this is a list of whole numbers from 0, of so many."""
    good = isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
    return good and number in (None, len(values))


def _fill(place: Tensor, tensors: dict[str, Tensor], name: str, path: str | Path) -> None:
    """Copy the tensor of that name into its place, and strike it off the list."""
    found = tensors.pop(name, None)
    if found is None:
        raise CacheError(f"{path} lacks {name}")
    if found.shape != place.shape or found.dtype != place.dtype:
        given, wanted = (f"{tuple(t.shape)} {t.dtype}" for t in (found, place))
        raise CacheError(f"{path}: {name} is {given}; accepted: {wanted}")
    place.copy_(found)
