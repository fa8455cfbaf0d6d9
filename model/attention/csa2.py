"""CSA2, the attention of V4.1: a sliding window and selected entries of a shared compressed cache, in one softmax.

    qr  = RMS(x wq_a^T),  q = rotate(qr wq_b^T, p)                        no norm on q
    kv  = MXFP8(rotate(RMS(x wkv^T), p))                                  one vector, key and value of all heads
    s_j = q . k_j / sqrt(W)        j in the window, or selected           sink: one more term in the denominator
    o   = sum_j exp(s_j) k_j / (sum_j exp(s_j) + exp(sink))
    y   = (rotate(o, -p) in groups, times wo_a) wo_b^T

| role | window | compresses | selects |
| --- | --- | --- | --- |
| window | yes | | |
| full | yes | entries and index keys of its own | among all entries |
| reindex | yes | | again, among the entries of another layer |
| reuse | yes | | takes the newest selection as it is |

Values carry rotation, as they are the keys: the output is turned back by the position of the query. Window and entries
may describe the same token; both count. Source: V4.1 architecture 3, 4.5, 5.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flashsim.config import V41Config
from flashsim.schedule import LayerPlan
from model.cache import Cache
from model.compressor import Compressor
from model.flop_counter import label
from model.indexer import Indexer
from model.layers import GroupedLinear, Linear, RMSNorm, wide, wide_dtype
from model.quant import Codec
from model.step import Step

if TYPE_CHECKING:
    from model.backend import Backend

KEYS_AT_ONCE = 2**24  # numbers [rows, keys, width] that exist at a time


def attention_rows(gathered: int) -> int:
    """How many queries to attend with at a time, when each gathers so many numbers."""
    return KEYS_AT_ONCE // gathered


def sparse_attention(
    q: Tensor,
    window: Tensor,
    slots: Tensor,
    entries: Tensor | None,
    indices: Tensor | None,
    sink: Tensor,
    window_codec: Codec,
    main_codec: Codec,
    component: str = "attention_selected",
) -> Tensor:
    """[Q, H, W] outputs of queries q [Q, H, W] over packed records.

    window [*, bytes] with slots [Q, w], entries [*, bytes] with indices [Q, k]: rows that each query sees, -1 absent.
    sink [H], not scaled. A query that sees nothing gets zeros. component: what the FLOPs over entries are counted as.
    """
    parts = [("attention_window", window, slots, window_codec)]
    if entries is not None:
        parts.append((component, entries, indices, main_codec))
    query = wide(q) * q.shape[-1] ** -0.5
    keys = []
    for _, records, rows, codec in parts:
        at = rows.clamp(min=0)
        few = rows.numel() <= records.shape[0]  # unpack what is read, or everything once
        keys.append((codec.unpack(records[at]) if few else codec.unpack(records)[at]).to(query.dtype))  # [Q, n, W]
    scores = []
    for (name, _, rows, _), key in zip(parts, keys, strict=True):
        with label(name):
            products = query @ key.transpose(1, 2)  # [Q, H, n]
        scores.append(products.masked_fill_((rows < 0).unsqueeze(1), -torch.inf))
    scores.append(sink.to(query.dtype).view(1, -1, 1).expand(len(q), -1, 1))  # the sink: a key without a value
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1).split_with_sizes(
        [k.shape[1] for k in keys] + [1], dim=-1
    )
    out = 0
    for (name, *_), key, weight in zip(parts, keys, weights, strict=False):
        with label(name):
            out = out + weight @ key
    return out.to(q.dtype)


class Attention(nn.Module):
    """One layer's attention in the role that its plan gives it; `compressor` and `indexer` where it has them."""

    def __init__(self, config: V41Config, plan: LayerPlan, backend: Backend, *, dtype, device):
        super().__init__()
        self.config, self.plan, self.backend = config, plan, backend
        hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
        options = {"dtype": dtype, "device": device}
        self.wq_a = Linear(hidden, config.q_lora_rank, **options)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps, **options)
        self.wq_b = Linear(config.q_lora_rank, heads * width, **options)
        self.wkv = Linear(hidden, width, **options)
        self.kv_norm = RMSNorm(width, config.rms_norm_eps, **options)
        self.attn_sink = nn.Parameter(torch.empty(heads, dtype=wide_dtype(dtype), device=device), requires_grad=False)
        self.wo_a = GroupedLinear(config.o_groups, heads * width // config.o_groups, config.o_lora_rank, **options)
        self.wo_b = Linear(config.o_groups * config.o_lora_rank, hidden, **options)
        if plan.owns_kv:
            self.compressor = Compressor(config, plan.compress_ratio, backend, **options)
        if plan.selects:
            self.indexer = Indexer(config, plan, backend, **options)

    @property
    def compressed(self) -> bool:
        """Whether the layer reads compressed entries, and so rotates everything by the compressed table."""
        return self.plan.compress_ratio > 0

    def compress(self, x: Tensor, step: Step, cache: Cache) -> None:
        """Add the entries and index keys that the rows x [B, S, D] complete. Does nothing in other roles than full."""
        if not self.plan.owns_kv:
            return
        source = cache.sources[self.plan.layer]
        made = self.compressor(x, step, cache, source)
        if made is not None:
            self.indexer.add_keys(*made, step, cache, source)

    def remember(self, x: Tensor, step: Step, cache: Cache) -> Tensor:
        """Put the window records of the rows x into the ring, and return them: [B, S, bytes]."""
        kv = self.backend.rotate(self.kv_norm(self.wkv(x)), step.turn(self.compressed))
        records = self.backend.pack(kv, cache.window_codec)
        cache.windows[self.plan.layer].write(step, records)
        return records

    def forward(self, x: Tensor, step: Step, cache: Cache) -> Tensor:
        """[B, S, D] attention output of the rows x [B, S, D]; `compress` has run for them."""
        config, plan, turn = self.config, self.plan, step.turn(self.compressed).unsqueeze(2)
        qr = self.q_norm(self.wq_a(x))
        q = self.backend.rotate(self.wq_b(qr).unflatten(-1, (config.num_attention_heads, -1)), turn)

        ring = cache.windows[plan.layer]
        old = min(max(ring.held(step.start)), config.sliding_window - 1)
        first = tuple(s - n for s, n in zip(step.start, ring.held(step.start), strict=True))
        earlier = ring.read(step, old)
        window = torch.cat((earlier, self.remember(x, step, cache)), dim=1)  # [B, old + S, bytes]
        slots = step.window(old, first, config.sliding_window)

        entries = indices = None
        if plan.kv_source is not None:
            source = cache.sources[plan.kv_source]
            if plan.selects:
                step.selected = self.indexer(x, qr, step, cache, source)
            if step.selected.shape[2]:
                entries = source.entries.flatten(0, 1)
                # layers that reuse a selection read the same rows
                key = ("rows", plan.kv_source, plan.selection_source)
                indices = step.once(key, lambda: _rows(step.selected, source.entries.shape[1]))

        o = self._attend(q, window, slots, entries, indices, cache)
        return self.wo_b(self.wo_a(self.backend.rotate(o, turn, back=True).flatten(-2)))

    def _attend(self, q, window, slots, entries, indices, cache: Cache) -> Tensor:
        """[B, S, H, W] outputs, as many queries at a time as the backend takes."""
        shape, number = q.shape, slots.shape[2] + (0 if indices is None else indices.shape[1])
        q, slots, window = q.flatten(0, 1), slots.flatten(0, 1), window.flatten(0, 1)
        block = max(self.backend.attention_rows(number * shape[-1]), 1)
        out = []
        for low in range(0, len(q), block):
            part = slice(low, low + block)
            chosen = None if indices is None else indices[part]
            codecs = cache.window_codec, cache.main_codec
            out.append(
                self.backend.sparse_attention(q[part], window, slots[part], entries, chosen, self.attn_sink, *codecs)
            )
        return (torch.cat(out) if len(out) > 1 else out[0]).view(shape)


def _rows(selected: Tensor, capacity: int) -> Tensor:
    """Selected entries [B, S, k] of each sequence as int32 rows [B * S, k] of all entries [B * capacity, bytes]."""
    base = torch.arange(len(selected), device=selected.device).view(-1, 1, 1) * capacity
    return (selected + base).where(selected >= 0, -1).flatten(0, 1).int()
