"""Engram: a memory of n-grams, looked up by a hash of the last few tokens and gated into the residual streams.

    c_s  = compressed id of the token s places back          blocked places: the compressed pad id
    acc  = c_0 m_0 ^ c_1 m_1 ^ ... ^ c_(n-1) m_(n-1)          for orders n = 2 .. engram_max_ngram_size
    row  = acc mod prime[n, a] + offset[n, a]                 for heads a
    E    = all rows side by side;   keys (one a stream), value = E wkv^T
    t_k  = <h_k qw_k, key_k kw_k> / (rms(h_k) rms(key_k) sqrt(D)),   g_k = sigmoid(sign(t_k) sqrt(max(|t_k|, 1e-6)))
    h_k += g_k value

A place is blocked before the start of the sequence and inside an image span, and so is everything beyond it. Tokens
before a chunk, a replay or a prefix hit count: the cache has their ids. Integers are 64 bits wide and products stay
below 2^63. Source: V4.1 architecture 8; test vectors 16.2.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from flashsim.config import V41Config
from flashsim.reading import ConfigError
from model.cache import Cache
from model.layers import Embedding, Linear, wide
from model.step import Step

if TYPE_CHECKING:
    from model.backend import Backend

SEED_STRIDE = 10007  # the multipliers of layer L come from numpy's generator with this seed times L


class HashTable(NamedTuple):
    """Constants of one layer's hash: `multipliers` [order], `primes` and `offsets` [order - 1, heads]; int64."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def to(self, device: torch.device) -> HashTable:
        """The same constants on a device."""
        return self if self.primes.device == device else HashTable(*(t.to(device) for t in self))


def _primes(start: int):
    """Primes from `start` on, without end."""
    number = max(start, 2)
    while True:
        if all(number % d for d in range(2, int(number**0.5) + 1)):
            yield number
        number += 1


@lru_cache(maxsize=16)
def hash_tables(config: V41Config) -> dict[int, HashTable]:
    """The constants of every Engram layer, by layer number.

    Raises:
        ConfigError: `engram_num_embeddings` is not what the primes add up to.
    """
    order, heads = config.engram_max_ngram_size, config.engram_n_heads
    if config.engram_layer_ids and config.engram_compressed_vocab_size < 1:
        raise ConfigError(
            "engram_compressed_vocab_size",
            config.engram_compressed_vocab_size,
            "a whole number from 1 with Engram layers",
        )
    search, tables = _primes(config.engram_vocab_size), {}
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        primes = [next(search) for _ in range((order - 1) * heads)]
        if sum(primes) != rows:
            raise ConfigError("engram_num_embeddings", rows, f"{sum(primes)} for layer {layer}, the sum of its primes")
        bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
        drawn = numpy.random.default_rng(SEED_STRIDE * layer).integers(0, bound, size=order, dtype=numpy.int64) * 2 + 1
        primes = torch.tensor(primes)
        tables[layer] = HashTable(
            torch.from_numpy(drawn), primes.view(-1, heads), (primes.cumsum(0) - primes).view(-1, heads)
        )
    return tables


def hash_rows(grams: Tensor, table: HashTable) -> Tensor:
    """[..., (order - 1) * heads] table rows of n-grams [..., order] of compressed ids, the newest first."""
    multipliers, primes, offsets = table
    mixed = grams * multipliers
    acc, rows = mixed[..., 0], []
    for n in range(1, grams.shape[-1]):
        acc = acc ^ mixed[..., n]
        rows.append(acc.unsqueeze(-1) % primes[n - 1] + offsets[n - 1])
    return torch.cat(rows, dim=-1)


class History:
    """What the hash sees: compressed ids of the rows of a step and of the order - 1 places before them.

    `ids` and `blocked`, both [B, order - 1 + S]; a blocked place lies before the start or inside an image span, and
    counts, like everything beyond it, as `pad`, a compressed id.
    """

    def __init__(self, ids: Tensor, blocked: Tensor, pad: int, order: int):
        self.ids, self.blocked, self.pad, self.order = ids, blocked, pad, order

    @classmethod
    def of(cls, step: Step, cache: Cache, token_map: Tensor, pad: int, order: int) -> History:
        """From the token ids that the cache keeps."""
        position = step.positions[:, :1] + torch.arange(1 - order, step.rows, device=step.device)
        place = position.clamp(0, cache.tokens.shape[1] - 1)
        blocked = cache.images.gather(1, place) | (position < 0)
        return cls(token_map[cache.tokens.gather(1, place)], blocked, pad, order)

    @cached_property
    def grams(self) -> Tensor:
        """[B, S, order] compressed ids of each row's n-gram, the newest first."""
        ids, blocked = (t.unfold(1, self.order, 1).flip(-1) for t in (self.ids, self.blocked))
        return ids.masked_fill(blocked.cumsum(dim=-1) > 0, self.pad)  # a blocked place blocks what lies beyond it


def rows(history: History, table: HashTable) -> Tensor:
    """[B, S, (order - 1) * heads] table rows of every row of the step."""
    return hash_rows(history.grams, table)


def gate(h: Tensor, key: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """[..., K] gates of streams h and keys, both [..., K, D]; weights [K, D]."""
    h, key = wide(h), wide(key)
    norms = torch.rsqrt(h.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    t = (h * wide(q_weight) * wide(k_weight) * key).sum(-1) * norms * h.shape[-1] ** -0.5
    return torch.sigmoid(torch.copysign(t.abs().clamp(min=1e-6).sqrt(), t))


def remember(h: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, images: Tensor | None, eps: float) -> Tensor:
    """Streams h [..., K, D] plus the gated value of kv [..., (K + 1) D]: K keys, then the value.

    images [...] bool: tokens inside an image span, which keep their streams.
    """
    kv = kv.unflatten(-1, (h.shape[-2] + 1, -1))
    key, value = kv[..., :-1, :], kv[..., -1:, :]
    g = gate(h, key, q_weight, k_weight, eps)
    if images is not None:
        g = g.masked_fill(images.unsqueeze(-1), 0)
    return (wide(h) + g.unsqueeze(-1) * wide(value)).to(h.dtype)


class Engram(nn.Module):
    """`embed` [rows, width], `wkv` [(K + 1) D, columns * width], `q_weight` and `k_weight` [K, D]."""

    def __init__(self, config: V41Config, layer: int, backend: Backend, *, dtype, device):
        super().__init__()
        self.config, self.backend, self.table = config, backend, hash_tables(config)[layer]
        self._pad_of: tuple[Tensor | None, int] = (None, 0)
        rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        streams, hidden, options = config.hc_mult, config.hidden_size, {"dtype": dtype, "device": device}
        self.embed = Embedding(rows, config.engram_head_dim, **options)
        self.wkv = Linear(columns * config.engram_head_dim, (streams + 1) * hidden, **options)
        self.q_weight = nn.Parameter(torch.empty(streams, hidden, **options), requires_grad=False)
        self.k_weight = nn.Parameter(torch.empty(streams, hidden, **options), requires_grad=False)

    def forward(self, h: Tensor, step: Step, cache: Cache, token_map: Tensor) -> Tensor:
        """Streams h [B, S, K, D] with the memory added; token_map [vocab_size] gives compressed ids."""
        config, order = self.config, self.config.engram_max_ngram_size
        self.table = self.table.to(h.device)
        history = step.once("history", lambda: History.of(step, cache, token_map, self._pad(token_map), order))
        rows = self.embed(self.backend.rows(history, self.table)).flatten(-2)
        kv = self.wkv(rows.to(h.dtype))
        return self.backend.remember(h, kv, self.q_weight, self.k_weight, step.images, config.rms_norm_eps)

    def _pad(self, token_map: Tensor) -> int:
        """The compressed id of a blocked place, read from the device once for each token map."""
        if self._pad_of[0] is not token_map:
            self._pad_of = token_map, int(token_map[self.config.engram_pad_token_id])
        return self._pad_of[1]
