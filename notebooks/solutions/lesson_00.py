"""Solutions of lesson 00."""

import flashsim

v1, v41 = (flashsim.kv_bytes_per_token(flashsim.load_config(name)) for name in ("v1", "v4.1-flash"))

answers = {
    "00.1": round(v1 / v41),  # 389,120 / 890
    "00.2": 100 * 10**9 // (890 * 131_072 + 40 * 128 * 528),  # what grows, and 40 windows of 128 tokens
    "00.3": 3 * 68 // 2 + 68,  # three layers with a key for two tokens, one with a key for each
}
