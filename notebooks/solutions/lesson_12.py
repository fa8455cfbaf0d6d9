"""Solutions of lesson 12."""

expert = 3 * 5120 * 2304  # gate, up, down

answers = {
    "12.1": [1, 2],  # 0.4 + 0.3 and 0.8 + 0.0
    "12.2": 1.5 * 0.8 / (0.4 + 0.8),  # plain scores of the chosen two
    "12.3": expert // 2 + expert // 32,  # four bits a number, a byte a block
    "12.4": (6 + 1) * expert,
    "12.5": round(384 * (1 - (1 - 6 / 384) ** 32)),
}
