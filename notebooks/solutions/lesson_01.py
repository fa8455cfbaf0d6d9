"""Solutions of lesson 01."""

v1 = 95 * 2 * 8 * 128 * 2  # layers, K and V, KV heads, numbers of a head, bytes of a number: 389,120
weights = 2 * 67_425_001_472  # two bytes a parameter

answers = {
    "01.1": sum(range(1, 501)),  # one row in the first call, 500 in the last
    "01.2": 32 * 2 * 8 * 128 * 2,  # query heads do not count
    "01.3": 4096 * v1 / 2**30,
    "01.4": (2 * 64 - 100) * v1,  # two pages of 64, of which 28 places stay empty
    "01.5": -(-weights // (4096 * v1)),  # rounded up
}
