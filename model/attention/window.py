"""Sliding-window attention of V4: what all its layers share. CSA and HCA layers add compressed entries to it.

    qr  = RMS(x wq_a^T),  q = rotate(unit(qr wq_b^T), p)             unit: v / sqrt(mean(v^2) + eps) of each head
    kv  = record(rotate(RMS(x wkv^T), p))                            one vector, key and value of all heads
    s_j = q . k_j / sqrt(W)        j in the window, or an entry      sink: one more term in the denominator
    o   = sum_j exp(s_j) k_j / (sum_j exp(s_j) + exp(sink))
    y   = (rotate(o, -p) in groups, times wo_a) wo_b^T

As in V4.1 but for the norm of each query head and the record, which rounds the channels without RoPE alone. Layers with
a compressor rotate everything by the compressed table. Source: earlier generations, 5.2, 5.5.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashsim.config import V4Config
from flashsim.schedule import LayerPlan
from model.attention.csa2 import KEYS_AT_ONCE, sparse_attention
from model.layers import GroupedLinear, Linear, RMSNorm, wide, wide_dtype
from model.record_cache import Store
from model.rope import rotate
from model.step import Step
from model.v4_cache import WINDOW, V4Cache


class WindowAttention(nn.Module):
    """One layer's attention over its window, and over what `entries` of a subclass finds."""

    component = ""  # what FLOPs over entries are counted as

    def __init__(self, config: V4Config, plan: LayerPlan, *, dtype, device):
        super().__init__()
        self.config, self.plan = config, plan
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

    def entries(self, x: Tensor, qr: Tensor, step: Step, cache: V4Cache) -> tuple[Store, Tensor] | None:
        """The compressed entries and which of them each row sees, [B, S, k], -1 absent; None in a window-only layer."""

    def forward(self, x: Tensor, step: Step, cache: V4Cache) -> Tensor:
        """[B, S, D] attention output of the rows x [B, S, D]; adds what they leave in the cache."""
        config, turn = self.config, step.turn(self.plan.compress_ratio > 0)
        qr = self.q_norm(self.wq_a(x))
        q = self.wq_b(qr).unflatten(-1, (config.num_attention_heads, -1))
        q = F.rms_norm(wide(q), q.shape[-1:], None, config.rms_norm_eps).to(q.dtype)
        q = rotate(q, turn.unsqueeze(2))

        ring = cache.rings[self.plan.layer, WINDOW]
        held = ring.held(step.start)
        old = min(max(held), config.sliding_window - 1)
        new = cache.window_codec.pack(rotate(self.kv_norm(self.wkv(x)), turn))
        window = torch.cat((ring.read(step, old), new), dim=1)  # [B, old + S, bytes]
        ring.write(step, new)
        first = tuple(start - n for start, n in zip(step.start, held, strict=True))
        slots = step.window(old, first, config.sliding_window)

        o = self._attend(q, window, slots, self.entries(x, qr, step, cache), cache)
        return self.wo_b(self.wo_a(rotate(o, turn.conj().unsqueeze(2)).flatten(-2)))

    def _attend(self, q: Tensor, window: Tensor, slots: Tensor, found, cache: V4Cache) -> Tensor:
        """[B, S, H, W] outputs, some queries at a time."""
        shape, entries, indices = q.shape, None, None
        if found is not None and found[1].shape[2]:
            store, seen = found
            base = torch.arange(len(seen), device=seen.device).view(-1, 1, 1) * store.rows.shape[1]
            entries, indices = store.rows.flatten(0, 1), (seen + base).where(seen >= 0, -1).flatten(0, 1)
        number = slots.shape[2] + (0 if indices is None else indices.shape[1])
        q, slots, window = q.flatten(0, 1), slots.flatten(0, 1), window.flatten(0, 1)
        block = max(KEYS_AT_ONCE // (number * shape[-1]), 1)
        codecs = cache.window_codec, cache.main_codec
        out = []
        for low in range(0, len(q), block):
            part = slice(low, low + block)
            chosen = None if indices is None else indices[part]
            args = q[part], window, slots[part], entries, chosen, self.attn_sink, *codecs
            out.append(sparse_attention(*args, self.component))
        return torch.cat(out).view(shape)
