"""Solutions of lesson 04."""

entry = 448 + 8 + 128  # FP8 numbers, scales with their pad, BF16 numbers that carry the position: 584
key = 64 + 4  # 128 numbers in FP4, 4 scales

read = 128 * entry + 10**6 // 4 * key + 512 * entry  # window, all index keys, the chosen entries
everything = 128 * entry + 10**6 // 4 * entry  # window, all entries

answers = {
    "04.1": 30 * (entry + key) / 4 + 31 * entry / 128,
    "04.2": [10 // 4, 10 // 4 + 1],  # its own group, and the next one, which looks back
    "04.3": 5 * 4 + 3,  # own tokens 20 to 23
    "04.4": 128 + 100_000 // 128,
    "04.5": everything / read,
}
