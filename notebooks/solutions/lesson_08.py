"""Solutions of lesson 08."""

answers = {
    "08.1": 256 // 2 + 256 // 16,  # half a byte an element, one byte of scale for 16 of them
    "08.2": [e * 0.5 for e in (0, 1, 2, 4, -2)],  # 0.25, 1.25, 2.5, 5, -1.75 are ties: codes 0, 2, 4, 6 are even
    "08.3": 0.5,  # 2.5 / 6 = 0.4167; 1/4 is too small, 1/2 is the next power of two
    "08.4": 0.25 * 24 / 6,  # scale 4; halfway between 0 and 0.5 is 0.25, and the tie goes to code 0
    "08.5": 3 * (528 + 68) // 2 + 528 + 68,  # three caches with half an entry for each token, one with a whole one
}
