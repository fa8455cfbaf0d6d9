"""The cache of V1 to V3.2: one packed record for each token and layer, and nothing else.

| generation | component | bytes of the release | record |
| --- | --- | --- | --- |
| V1 | `main_kv` | 4,096 | keys of all KV heads, then values, BF16 |
| V2, V3 | `main_kv` | 1,152 | latent and RoPE key, BF16 |
| V3.2 | `main_kv` | 656 | latent in FP8 with a float32 scale for 128 channels, RoPE key in BF16 |
| V3.2 | `index_key` | 132 | FP8 with one float32 scale |

Any number of tokens can be taken back: a record is never changed. Source: earlier generations, 2, 3.5, 4.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashsim.kv_cache import index_record, main_record
from flashsim.schedule import layer_plan
from model.record_cache import RecordCache, Store
from model.step import Step
from model.yarn import frequencies, gain


class TokenStep(Step):
    """A step of these generations: one rotation for the whole model, and every earlier token in sight.

    `form` is the form in which latent attention runs, `naive` or `absorbed`.
    """

    def __init__(self, config, start: list[int], count: list[int], device: torch.device, form: str | None = None):
        super().__init__(config, start, count, device)
        self.form = form

    def rotation(self, width: int) -> Tensor:
        """[B, S, width / 2] complex rotation of every row, the gain of YaRN included."""

        def make() -> Tensor:
            angle = (self.positions.float().unsqueeze(-1) * frequencies(self.config, width, self.device)).double()
            return torch.polar(torch.full_like(angle, gain(self.config)), angle).to(torch.complex64)

        return self.once(("rotation", width), make)

    def visible(self) -> Tensor:
        """[B, S, N] bool: query p sees keys t <= p. A padding row sees key 0, as a softmax needs something."""

        def make() -> Tensor:
            return torch.arange(max(self.end), device=self.device) <= self.positions.clamp(min=0).unsqueeze(-1)

        return self.once("visible", make)


class TokenCache(RecordCache):
    """`stores` has a row for each token, by (layer, component); there are no rings."""

    def _make(self) -> None:
        self.codecs = {"main_kv": self.codec(main_record(self.config))}
        if layer_plan(self.config)[0].owns_index_keys:
            self.codecs["index_key"] = self.codec(index_record(self.config))
        for layer in self.config.layers():
            for component, codec in self.codecs.items():
                self.stores[layer, component] = Store(codec, self.batch_size, 1, self.device)

    def write(self, layer: int, component: str, step: Step, vectors: Tensor) -> None:
        """Keep the vectors [B, S, width] of a step as records."""
        packed = self.codecs[component].pack(vectors)
        sequence, row, position = step.newest(step.rows)
        self.stores[layer, component].rows[sequence, position] = packed[sequence, row]

    def read(self, layer: int, component: str, tokens: int) -> Tensor:
        """[B, tokens, width] vectors of the first tokens, unpacked; of no meaning where a sequence is shorter."""
        return self.codecs[component].unpack(self.stores[layer, component].rows[:, :tokens])

    def gather(self, layer: int, component: str, positions: Tensor) -> Tensor:
        """[B, S, k, width] vectors of the tokens at positions [B, S, k] alone, unpacked."""
        sequence = torch.arange(self.batch_size, device=self.device).view(-1, 1, 1)
        return self.codecs[component].unpack(self.stores[layer, component].rows[sequence, positions])
