"""Solutions of lesson 11."""

answers = {
    "11.1": (2 + 6) * 6,  # a pre and a post each, and 6 x 6 of comb
    "11.2": (3 / 4) / (3 / 4 + 1 / 2),  # softmax of rows [1/4, 3/4] and [1/2, 1/2], then the second column to 1
    "11.3": 0.25 * 4 + 0.1 * 10 + 0.7 * 20,  # post y, and the second column of comb
    "11.4": 5 - 1,  # the experts of the layer below
    "11.5": 0,  # nothing of the streams outlives the step
}
