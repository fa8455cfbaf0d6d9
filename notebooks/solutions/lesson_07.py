"""Solutions of lesson 07."""

pool = 2048 * 8  # blocks, and entries in each
scans = 3 * 150_000 + 300_000  # layers 2, 8, 14 with one entry for two tokens, layer 20 with one for each

answers = {
    "07.1": 4 * pool * 68,  # four layers, the pool, 64 bytes of elements and 4 of scales
    "07.2": 2048 * 16 + 1,  # up to the size of the pool nothing is left out
    "07.3": [0, 1, 2, 3, 5],  # 1, 3, 5 by score, then the lowest of the zeros
    "07.4": (scans + 4 * 300_000) / (scans + 4 * pool),  # 1.95 million entries against 0.82 million
}
