"""Solutions of lesson 06."""

answers = {
    "06.1": 19,  # layer 20 compresses its input
    "06.2": 20 * 100_000 + 20 * 128,  # the encoder for every token, the decoder for the tail
    "06.3": 40 * 50,  # the whole prompt is tail
    "06.4": 128 + 9 * 127,  # W + (R - 1)(W - 1)
    "06.5": "window_kv",  # the decoder's own records, made from rows with short windows
}
