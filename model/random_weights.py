"""Random weights for a model of any config: every parameter away from its neutral value, so that every rule shows.

Matrices have entries of about 1 / sqrt(inputs), norms lie around 1, router biases and sinks around 0, and the streams
are mixed by coefficients that depend on the input. The same seed gives the same weights, parameter by parameter.
"""

from __future__ import annotations

import zlib

import torch
from torch import nn


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill every parameter of the model in place, and return it."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if name.endswith("tid2eid"):  # experts of a token: distinct ones
            experts = model.get_parameter(name.removesuffix("tid2eid") + "weight").shape[0]
            order = torch.rand(parameter.shape[0], experts, generator=generator).argsort(dim=-1)
            parameter.copy_(order[:, : parameter.shape[1]])
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1 + 0.1 * noise
        elif name.endswith(("bias", "bias_vl", "attn_sink", "q_weight", "k_weight")):
            noise = 0.5 * noise
        elif name.endswith("_scale"):
            noise = 0.5 + 0.1 * noise
        elif name.endswith("_base"):
            noise = 0.5 * noise
        elif name not in ("embed.weight",):
            noise *= parameter.shape[-1] ** -0.5
        parameter.copy_(noise)
    return model
