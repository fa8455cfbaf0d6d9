"""Solutions of lesson 03."""

answers = {
    "03.1": 128 + 4,  # a byte for each number, and one FP32 scale
    "03.2": 132 * 100_000 + 656 * 2048,  # all index keys, the chosen latents
    "03.3": 2048 * 2 * 128 * (576 + 512) // (2 * 64 * 128),
    "03.4": [0, 1, 2, 4],  # 2.0 and 1.5, then the two earliest of the zeros
}
