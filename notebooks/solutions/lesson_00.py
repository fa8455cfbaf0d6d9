"""Solutions of lesson 00."""

import flashsim

v1, v41 = (flashsim.kv_bytes_per_token(flashsim.load_config(name)) for name in ("v1", "v4.1-flash"))

answers = {
    "00.1": round(v1 / v41),  # 389,120 / 890
}
