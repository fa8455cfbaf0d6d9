"""Solutions of lesson 10."""

import flashsim

report = flashsim.parameters("v4.1-flash")

answers = {
    "10.1": 2 * 4 * 8,  # layers, orders 2 to 5, heads
    "10.2": 2 * 256 / (256 + 256 // 32),  # a row of two bytes a number, against one byte and a scale for every 32
    "10.3": ((7 * 5) ^ (3 * 9)) % 11 + 22,
    "10.4": 2 * 8,  # 3-grams and 4-grams, eight heads each
    "10.5": 100 * (384_006_168 + 384_016_682) * 256 / report.total(),
}
