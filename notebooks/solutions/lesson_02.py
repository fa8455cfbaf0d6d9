"""Solutions of lesson 02."""

from fractions import Fraction

answers = {
    "02.1": (512 + 64) * 2,  # latent and RoPE key, once for all heads
    "02.2": 35 // (64 // 8),  # eight neighbours share a KV head
    "02.3": 61 * (512 + 64) * 2,  # the whole cache: a latent cannot be divided among heads
    "02.4": Fraction(128 * (128 + 64 + 128), 512 + 64),
    "02.5": 2 * (512 + 64) + 2 * 512,  # the score, then the mix
}
