"""The benchmark cases of every op, in the form that kernels/bench.py describes.

Each function builds the inputs of one size and says how many bytes and FLOPs the op needs at least.
"""

# ---- block_quant, topk, indexer, compressor ----


# ---- linear, moe ----


# ---- sparse_attention, hyper_connection, engram ----
