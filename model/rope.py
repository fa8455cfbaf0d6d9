"""Rotary positions: the LAST `qk_rope_head_dim` channels, adjacent pairs, turned by position * frequency.

    x[2i] + i x[2i+1]  ->  (x[2i] + i x[2i+1]) e^(i p f_i),        f_i = theta^(-2i / rotary width)

Two tables. Window-only layers use `rope_theta` as it is. Every tensor of a layer that reads a compressed cache (its
window keys too) uses `compress_rope_theta` with YaRN: slow pairs divided by `factor`, fast pairs kept, a ramp over the
pairs between; no temperature. Angles are float32 products, also far out, as the trained model had them.
Source: V4.1 architecture 3.3; test vector 16.1.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from flashsim.config import V41Config
from flashsim.reading import ConfigError
from model.layers import wide_dtype


@lru_cache(maxsize=64)
def frequencies(config: V41Config, compressed: bool, device: torch.device | str = "cpu") -> Tensor:
    """[qk_rope_head_dim / 2] float32 frequencies, in radians a token, of window-only or of compressed layers."""
    width = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
    plain = 1.0 / (theta**exponent)
    if compressed and config.rope_scaling is not None:
        plain = _yarn(plain, theta, width, dict(config.rope_scaling))
    return plain.to(device)


def _yarn(plain: Tensor, theta: float, width: int, scaling: dict) -> Tensor:
    if scaling.get("rope_type") != "yarn":
        raise ConfigError("rope_scaling.rope_type", scaling.get("rope_type"), "yarn")
    missing = [key for key in ("factor", "original_max_position_embeddings") if key not in scaling]
    if missing:
        raise ConfigError("rope_scaling", scaling, f"an object with {' and '.join(missing)}")
    scaling = {"beta_fast": 32, "beta_slow": 1} | scaling
    for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
        value = scaling[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"rope_scaling.{key}", value, "a finite number above 0")
    if scaling.get("attention_factor") not in (None, 1):
        raise ConfigError("rope_scaling.attention_factor", scaling["attention_factor"], "1: rotations keep lengths")
    original = scaling["original_max_position_embeddings"]

    def pair(rotations: float) -> float:
        """The pair that turns so many times within the original context."""
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair(scaling["beta_slow"])), width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / scaling["factor"] * ramp + plain * (1 - ramp)


def turns(positions: Tensor, frequency: Tensor) -> Tensor:
    """e^(i p f): complex64 [..., pairs] for integer positions [...]."""
    angle = (positions.float().unsqueeze(-1) * frequency).double()  # a float32 angle, cosine and sine to the last bit
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """x [..., width] with its last 2 * pairs channels turned by `turn` [..., pairs], which broadcasts.

    Rotates back with `turn.conj()`. Computed in float32 and rounded once.
    """
    channels = 2 * turn.shape[-1]
    if channels == 0:
        return x
    out = x.to(wide_dtype(x.dtype), copy=True, memory_format=torch.contiguous_format)
    torch.view_as_complex(out[..., -channels:].unflatten(-1, (-1, 2))).mul_(turn)
    return out.to(x.dtype)
