"""HCA, heavily compressed attention of V4: a window, and every entry of a cache with one for many (128) tokens.

No indexer: the entries are few enough to be read all. Entry t of ratio m is visible to position p when
t < floor((p + 1) / m). Source: earlier generations, 5.1, 5.3, 5.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashsim.config import V4Config
from flashsim.schedule import LayerPlan
from model.attention.window import WindowAttention
from model.record_cache import Store
from model.step import Step
from model.v4_cache import V4Cache
from model.v4_compressor import V4Compressor


class HeavilyCompressedAttention(WindowAttention):
    """The window attention with a `compressor` of disjoint groups."""

    component = "attention_compressed"

    def __init__(self, config: V4Config, plan: LayerPlan, *, dtype, device):
        super().__init__(config, plan, dtype=dtype, device=device)
        ratio, width = plan.compress_ratio, config.head_dim
        self.compressor = V4Compressor(config, ratio, width, overlap=False, dtype=dtype, device=device)

    def entries(self, x: Tensor, qr: Tensor, step: Step, cache: V4Cache) -> tuple[Store, Tensor]:
        layer, ratio = self.plan.layer, self.plan.compress_ratio
        store = cache.stores[layer, "main_kv"]
        self.compressor(x, step, cache.rings[layer, "compressor_state"], store)
        return store, step.once(("every entry", ratio), lambda: visible_entries(step, ratio))


def visible_entries(step: Step, ratio: int) -> Tensor:
    """[B, S, E] numbers of all entries that each row sees, -1 where it does not."""
    entry = torch.arange(max(step.end) // ratio, device=step.device)
    return entry.where(entry < ((step.positions + 1) // ratio).unsqueeze(-1), -1)
