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
        mean, deviation = spread(name, parameter.shape[-1])
        parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(deviation).add_(mean))
    return model


def spread(name: str, inputs: int) -> tuple[float, float]:
    """Mean and standard deviation of a parameter of that name, whose last dimension is `inputs` wide."""
    if name.endswith("norm.weight"):
        return 1, 0.1
    if name.endswith("_scale"):
        return 0.5, 0.1
    if name.endswith(("bias", "bias_vl", "attn_sink", "q_weight", "k_weight", "_base")):
        return 0, 0.5
    return (0, 1) if name == "embed.weight" else (0, inputs**-0.5)
