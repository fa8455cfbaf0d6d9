"""Solutions of lesson 05."""

import flashsim

plans = flashsim.layer_plan(flashsim.load_config("v4.1-flash"))

answers = {
    "05.1": [plan.layer for plan in plans if plan.kv_source == 14],  # 14 itself, up to the Full layer 20
    "05.2": 890 - (288 + 68) // 2,  # two caches of ratio 2 are left, and the one of ratio 1
    "05.3": 512 + 128,  # index_topk and sliding_window
    "05.4": (25 // 2) * (36 + 34) + 25 * (36 + 34),  # 12 pairs in layer 2, 25 entries in layer 4
}
