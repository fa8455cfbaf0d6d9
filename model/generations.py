"""Which model computes a config: one class for each family, with one way to call it.

| family | generation | class |
| --- | --- | --- |
| `GQAConfig` | V1 | `GQATransformer` |
| `MLAConfig` | V2, V2-Lite, V3 | `MLATransformer` |
| `DSAConfig` | V3.2 | `DSATransformer` |
| `V4Config` | V4-Flash, V4-Pro | `V4Transformer` |
| `V41Config` | V4.1-Flash | `Transformer` |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flashsim.config import Config, DSAConfig, GQAConfig, MLAConfig, V4Config, V41Config
from model import tensor_table
from model.prenorm_transformer import DSATransformer, GQATransformer, MLATransformer
from model.tensor_table import TensorSpec
from model.transformer import Transformer
from model.v4_transformer import V4Transformer

MODELS: Mapping[type[Config], type[nn.Module]] = {
    GQAConfig: GQATransformer,
    MLAConfig: MLATransformer,
    DSAConfig: DSATransformer,
    V4Config: V4Transformer,
    V41Config: Transformer,
}
_KINDS = {torch.bfloat16: "bf16", torch.float32: "f32", torch.int64: "ids"}


def tensors(config: Config, vision: Mapping[str, Any] | None = None) -> dict[str, TensorSpec]:
    """Every parameter under its released name, see `model.tensor_table`; before V4.1 read off the model itself.

    >>> from flashsim.config import load_config
    >>> tensors(load_config("v1"))["model.layers.94.self_attn.k_proj.weight"]
    TensorSpec(shape=(1024, 8192), kind='bf16', part='text')
    """
    if isinstance(config, V41Config):
        return tensor_table.tensors(config, vision)
    model = MODELS[type(config)](config, dtype=torch.bfloat16, device="meta", cache_rounding=False)
    return {name: TensorSpec(tuple(p.shape), _KINDS[p.dtype]) for name, p in model.named_parameters()}


def is_draft(config: Config, name: str) -> bool:
    """Whether a tensor belongs to the draft layers of V3 to V4, which are behind the last layer and not computed here.

    >>> from flashsim.config import load_config
    >>> is_draft(load_config("v3"), "model.layers.61.eh_proj.weight"), is_draft(load_config("v4"), "mtp.0.norm.weight")
    (True, True)
    """
    first, drafts = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", 0)
    layers = [f"model.layers.{layer}." for layer in range(first, first + drafts)]
    stages = [f"mtp.{stage}." for stage in range(drafts)]
    return not isinstance(config, V41Config) and name.startswith(tuple(layers + stages))
