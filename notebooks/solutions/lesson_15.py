"""Solutions of lesson 15."""

import flashsim
from flashsim.budget import Fleet, capacity, weight_bytes

free = 192 * 10**9 * 9 // 10 - -(-weight_bytes("v3.2") // 8)  # of one GPU
short, long = (890 * n + 40 * 128 * 528 for n in (4096, 10**6))
degrees = {tp: capacity("v4-flash", Fleet("h200-sxm", 8, tp), "128Ki").sequences for tp in (1, 2, 4, 8)}
replica = (141 * 10**9 * 9 // 10 - -(-weight_bytes("v4.1-flash") // 8)) // (890 * 131_072 + 40 * 128 * 528)

answers = {
    "15.1": free // flashsim.kv_cache("v3.2", 65_536).total(),  # the latent is on each of the eight
    "15.2": (9 * short + long) / 10,
    "15.3": max(degrees, key=degrees.get),  # 1 holds no weights; 4 and 8 keep more copies
    "15.4": (288 + 68) * 2 // 2 + (288 + 68) // 4,  # two owners with a ratio of 2, one with 4
    "15.5": -(-10_000 // replica) * 8,  # whole replicas
}
