"""The cache of V4: window records of every layer, compressed entries, index keys, and the compressors' state.

| component | tier | record | kept by |
| --- | --- | --- | --- |
| `main_kv` | global | FP8 + BF16 entry, one for `compress_ratio` tokens | CSA and HCA layers |
| `index_key` | global | MXFP4 key of the same tokens | CSA layers |
| `window_kv` | window | FP8 + BF16 record of one token, the last `sliding_window` | every layer |
| `compressor_state` | state | float32 value and gate of each token of an open group | CSA and HCA layers |
| `compressor_overlap` | state | of the last whole group, the halves that go into the next entry | CSA layers |
| `indexer_compressor_state`, `..._overlap` | state | the same at the width of an index key | CSA layers |

Gates are stored with their position bias added. Source: earlier generations, 5.9, 5.10.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashsim.kv_cache import index_record, main_record, window_record
from flashsim.schedule import layer_plan
from model.cache import Ring
from model.record_cache import RecordCache, Store

WINDOW = "window_kv"
STATES = {"main_kv": "compressor_state", "index_key": "indexer_compressor_state"}
OVERLAPS = {"compressor_state": "compressor_overlap", "indexer_compressor_state": "indexer_compressor_overlap"}
REACH = {"csa": 2, "hca": 1}
"""Groups of tokens that an entry is made of: CSA's takes half of each channel pair from the group before its own."""


class V4Cache(RecordCache):
    """`stores` has entries and index keys, `rings` the windows and, for each compressor, the inputs of its groups."""

    def _make(self) -> None:
        config, batch = self.config, self.batch_size
        self.window_codec = self.codec(window_record(config))
        self.main_codec, self.key_codec = self.codec(main_record(config)), self.codec(index_record(config))
        self.plans = layer_plan(config)
        for plan in self.plans:
            size = config.sliding_window + self.rollback
            rows = torch.zeros(batch, size, self.window_codec.row_bytes, dtype=torch.uint8, device=self.device)
            self.rings[plan.layer, WINDOW] = Ring(rows)
            kinds = [("main_kv", self.main_codec)] if plan.owns_kv else []
            kinds += [("index_key", self.key_codec)] if plan.owns_index_keys else []
            for component, codec in kinds:
                self.stores[plan.layer, component] = Store(codec, batch, plan.compress_ratio, self.device)
                reach = REACH[plan.attention]
                size = max(reach * plan.compress_ratio - 1 + self.rollback, 1)
                rows = torch.zeros(batch, size, 2, reach * codec.width, device=self.device)  # value and gate
                self.rings[plan.layer, STATES[component]] = Ring(rows)

    def oldest(self, layer: int, component: str, length: int) -> int:
        if component == WINDOW:
            return length - self.config.sliding_window
        plan = self.plans[layer]
        return length - length % plan.compress_ratio - (REACH[plan.attention] - 1) * plan.compress_ratio

    def _in_ring(self, b: int, layer: int, component: str, ring: Ring) -> Iterator[tuple[int, str, str, Tensor]]:
        length = self.lengths[b]
        if component == WINDOW:
            first = max(ring.first[b], length - self.config.sliding_window)
            yield layer, component, "window", ring.in_order(b, first, length)[:, : self.window_codec.nbytes]
            return
        open_group = length - length % self.plans[layer].compress_ratio
        yield layer, component, "state", ring.in_order(b, open_group, length)
        if REACH[self.plans[layer].attention] == 2:
            rows = ring.in_order(b, max(self.oldest(layer, component, length), 0), open_group)
            yield layer, OVERLAPS[component], "state", rows[..., : rows.shape[-1] // 2]  # the first halves alone
