"""Solutions of lesson 14."""

import flashsim

release = flashsim.load_config("v4.1-flash")
short, long = flashsim.decode_flops(release, [4096, 2**20]).weighted_total()
near, far = (int(flashsim.kv_cache(release, tokens).total()) for tokens in (2**18, 2**20))
slope = (far - near) / (2**20 - 2**18)  # bytes a token

answers = {
    "14.1": 13e9 / 4.27e12 * 1e3,  # bytes over bytes a second, in milliseconds
    "14.2": 100 * (1 - (378 / 384) ** 32),  # the chance that at least one of 32 tokens picks it
    "14.3": far - slope * 2**20,  # where the line through both points meets the axis
    "14.4": float(long / short),  # 20.2 to 25.7 GFLOPs
}
