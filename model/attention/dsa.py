"""DeepSeek sparse attention, V3.2: latent attention over the tokens that an indexer picks, the same for all heads.

Naive: every key is expanded, and those that were not picked are masked. Absorbed: the records of the picked tokens are
gathered, at most `index_topk` a query whatever the context, and nothing else is unpacked. Both give the same numbers.
Nothing is forced in: no window, no sink, not even the query's own token. While the context is no longer than
`index_topk` the layer is that of V3. The latent is cached in FP8, the RoPE key in BF16, and attention sees what is
cached. Source: earlier generations, 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashsim.config import DSAConfig
from flashsim.schedule import LayerPlan
from model.attention import mla
from model.lightning_indexer import LightningIndexer
from model.token_cache import TokenCache, TokenStep

NUMBERS_AT_ONCE = 2**24  # numbers [B, rows, k, c + r] that exist at a time


class Attention(mla.Attention):
    """The parts of MLA, and `indexer`."""

    def __init__(self, config: DSAConfig, plan: LayerPlan, *, dtype, device):
        super().__init__(config, plan, dtype=dtype, device=device)
        self.indexer = LightningIndexer(config, plan, dtype=dtype, device=device)

    def forward(self, x: Tensor, step: TokenStep, cache: TokenCache) -> Tensor:
        """[B, S, D] of the normed rows x [B, S, D]; their latents and index keys go to the cache first."""
        qr = self.low_rank(x)
        q_n, q_r = self.query(qr, step)
        self.remember(x, step, cache)
        self.indexer.remember(x, step, cache)
        selected = self.indexer(x, qr, step, cache)
        if step.form == "naive":
            rows = cache.read(self.layer, "main_kv", max(step.end))
            o = self.attend(q_n, q_r, rows, picked(selected, rows.shape[1]), "naive")
        else:
            o = self._gathered(q_n, q_r, selected, cache)
        return self.o_proj(o.flatten(-2))

    def _gathered(self, q_n: Tensor, q_r: Tensor, selected: Tensor, cache: TokenCache) -> Tensor:
        """[B, S, H, v]: each query a sequence of its own, over its own records."""
        batch, number, k = selected.shape
        size = max(NUMBERS_AT_ONCE // (batch * k * cache.codecs["main_kv"].width), 1)
        out = []
        for low in range(0, number, size):
            part = slice(low, low + size)
            rows = cache.gather(self.layer, "main_kv", selected[:, part].clamp(min=0)).flatten(0, 1)  # [B s, k, c + r]
            q = (t[:, part].flatten(0, 1).unsqueeze(1) for t in (q_n, q_r))
            visible = (selected[:, part] >= 0).flatten(0, 1).unsqueeze(1)
            out.append(self.attend(*q, rows, visible, "absorbed").unflatten(0, (batch, -1)).squeeze(2))
        return torch.cat(out, dim=1)


def picked(selected: Tensor, tokens: int) -> Tensor:
    """[B, S, tokens] bool of selections [B, S, k], -1 absent."""
    mask = torch.zeros(*selected.shape[:2], tokens + 1, dtype=torch.bool, device=selected.device)
    return mask.scatter_(2, selected.where(selected >= 0, tokens), True)[..., :tokens]
