"""Rotation tables of V1 to V3.2: one for the whole model, with YaRN and its magnitude where `rope_scaling` says so.

    f_i   = theta^(-2i / r)                       YaRN: slow pairs divided by `factor`, as in `model.rope`
    ms(m) = 0.1 m ln(factor) + 1                  1 where factor is at most 1

The magnitude has two places. The softmax scale is (p + r)^-0.5 ms(mscale_all_dim)^2. Cosine and sine carry the gain
ms(mscale) / ms(mscale_all_dim), or ms(1) where one of the two is absent; the released models set both alike, so theirs
is 1. V1 has neither. Source: earlier generations, 1.1 to 1.3; test vectors 9.1.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from flashsim.config import Config
from flashsim.reading import ConfigError
from model.rope import _yarn


def scaling_of(config: Config) -> dict | None:
    """`rope_scaling` of the config as a dict, or None where frequencies are plain.

    Raises:
        ConfigError: another kind of scaling than YaRN.
    """
    scaling = dict(config.rope_scaling or {})
    if scaling.get("rope_type", "default") == "default":
        return None
    if scaling["rope_type"] != "yarn":
        raise ConfigError("rope_scaling.rope_type", scaling["rope_type"], "yarn, or no rope_scaling")
    return scaling


@lru_cache(maxsize=64)
def frequencies(config: Config, width: int, device: torch.device | str = "cpu") -> Tensor:
    """[width / 2] float32, in radians a token."""
    plain = 1.0 / (config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    scaling = scaling_of(config)
    return (plain if scaling is None else _yarn(plain, config.rope_theta, width, scaling)).to(device)


def magnitude(factor: float, m: float) -> float:
    """ms(m): what a context `factor` times as long adds to the scores.

    >>> round(magnitude(40, 1.0), 9), round(magnitude(40, 0.707), 9)
    (1.368887945, 1.260803777)
    """
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale(config: Config, width: int) -> float:
    """What scores of `width` channels are multiplied by."""
    scaling = scaling_of(config) or {}
    all_dim = scaling.get("mscale_all_dim")
    return width**-0.5 * (magnitude(scaling["factor"], all_dim) ** 2 if all_dim else 1.0)


def gain(config: Config) -> float:
    """What cosines and sines are multiplied by."""
    scaling = scaling_of(config)
    if scaling is None:
        return 1.0
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return magnitude(scaling["factor"], mscale) / magnitude(scaling["factor"], all_dim)
    return magnitude(scaling["factor"], 1.0)
