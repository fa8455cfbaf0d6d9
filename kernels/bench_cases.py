"""The benchmark cases of every op, in the form that kernels/bench.py describes.

Each function builds the inputs of one size and says how many bytes and FLOPs the op needs at least.
"""

import torch

from kernels.bench import Case, register

# ---- block_quant ----


# ---- topk, indexer, compressor ----


@register(
    "topk",
    sizes={
        f"{k} of {rows} x {n:,}": dict(rows=rows, n=n, k=k)
        for rows, n, k in ((32, 2**20, 512), (1, 2**20, 512), (32, 131072, 512), (32, 16384, 512), (4096, 131072, 512))
    },
    small=dict(rows=3, n=20000, k=100),
)
def topk_case(rows, n, k, device):
    from kernels.topk import topk

    scores = torch.randn(rows, n, device=device, generator=torch.Generator(device).manual_seed(0))
    return Case(
        run=lambda s: topk(s, k),
        reference=lambda s: s.topk(k, dim=1).indices.sort(dim=1).values.int(),  # what one would call instead
        inputs=(scores,),
        bytes_moved=rows * n * 4 + rows * k * 4,
        flops=0,
        dtype="fp32",
        goal="160 us" if (rows, n) == (32, 2**20) else "",
        baselines=("reference",),
    )


@register(
    "topk_blocks",
    sizes={"2048 of 32 x 131,072": dict(rows=32, n=131072, k=2048)},
    small=dict(rows=3, n=20000, k=100),
)
def topk_blocks_case(rows, n, k, device):
    from kernels.topk import topk_blocks

    scores = torch.randn(rows, n, device=device, generator=torch.Generator(device).manual_seed(0))
    newest = torch.full((rows,), n - 1, dtype=torch.int32, device=device)
    return Case(
        run=lambda s, b: topk_blocks(s, k, b),
        reference=lambda s, b: s.scatter(1, b[:, None].long(), torch.inf).topk(k, dim=1).indices.sort().values.int(),
        inputs=(scores, newest),
        bytes_moved=rows * n * 4 + rows * k * 4,
        flops=0,
        dtype="fp32",
        baselines=("reference",),
    )


@register(
    "indexer",
    sizes={
        "decode 32 x 131,072, 32 heads": dict(requests=32, queries=1, entries=131072, goal="2.5x"),
        "decode 1 x 131,072, 32 heads": dict(requests=1, queries=1, entries=131072),
        "decode 32 x 131,072, block maxima": dict(requests=32, queries=1, entries=131072, maxima=True),
        "decode 32 x 2,048 candidates of 8": dict(requests=32, queries=1, entries=131072, candidates=2048),
        "prefill 4,096 x 131,072, 32 heads": dict(requests=1, queries=4096, entries=131072, goal="2x"),
        "prefill 4,096 x 131,072, block maxima": dict(requests=1, queries=4096, entries=131072, maxima=True),
    },
    small=dict(requests=2, queries=3, entries=150, maxima=True),
)
def indexer_case(requests, queries, entries, device, maxima=False, candidates=0, goal=""):
    from kernels.indexer import indexer
    from kernels.reference.indexer import indexer_reference

    H, D = 32, 128
    g = torch.Generator(device).manual_seed(0)
    byte = lambda *shape, low=0, high=256: torch.randint(
        low, high, shape, generator=g, dtype=torch.uint8, device=device
    )  # noqa: E731, E501
    inputs = (
        byte(requests, queries, H, D // 2),
        byte(requests, queries, H, D // 32, low=120, high=130),
        torch.randn(requests, queries, H, device=device, generator=g),
        byte(requests, entries, D // 2),
        byte(requests, entries, D // 32, low=120, high=130),
        torch.full((requests, queries), entries - 1, dtype=torch.int32, device=device),
    )
    options = dict(block_size=8, block_maxima=maxima)
    scored = entries
    if candidates:
        blocks = torch.rand(requests, queries, entries // 8, device=device, generator=g).topk(candidates).indices
        options["candidates"] = blocks.sort().values.int()
        scored = candidates * 8
    return Case(
        run=lambda *tensors: indexer(*tensors, 1, **options),
        reference=lambda *tensors: indexer_reference(*tensors, 1, **options),
        inputs=inputs,
        bytes_moved=requests * scored * ((queries if candidates else 1) * (D // 2 + D // 32) + queries * 4),
        flops=2 * requests * queries * scored * H * D,
        dtype="mxfp4",
        tolerance=2e-5,
        goal=goal,
        baselines=("reference", "compiled") if queries == 1 else ("reference",),
    )


@register(
    "compressor",
    sizes={
        f"ratio {ratio}, {tokens:,} tokens, {dtype}": dict(ratio=ratio, tokens=tokens, dtype=dtype)
        for ratio, tokens, dtype in (
            *((2, 2**20, "fp32"), (2, 2**20, "bf16"), (1, 2**20, "bf16")),
            *((128, 2**20, "fp32"), (2, 4096, "fp32"), (2, 2, "fp32")),
        )
    },
    small=dict(ratio=2, tokens=7, dtype="fp32"),
)
def compressor_case(ratio, tokens, dtype, device):
    from kernels.compressor import compressor
    from kernels.reference.compressor import compressor_reference

    W, g = 512, torch.Generator(device).manual_seed(0)
    kind, size = (torch.float32, 4) if dtype == "fp32" else (torch.bfloat16, 2)
    rows = lambda: torch.randn(tokens, W, device=device, generator=g, dtype=kind)  # noqa: E731
    groups = tokens // ratio
    inputs = (
        rows(),
        rows() if ratio > 1 else None,
        torch.ones(W, device=device),
        160000.0 ** (-torch.arange(0, 64, 2, device=device) / 64),
        torch.zeros(groups, W // 2, dtype=torch.uint8, device=device),
        torch.zeros(groups, W // 16, dtype=torch.uint8, device=device),
    )
    return Case(
        run=lambda *tensors: compressor(*tensors, ratio, 0)[0],
        reference=lambda *tensors: compressor_reference(*tensors, ratio, 0)[0],
        inputs=inputs,
        bytes_moved=tokens * W * size * (2 if ratio > 1 else 1) + groups * (W * 2 + W // 2 + W // 16),
        flops=0,
        dtype=dtype,
        tolerance=1e-3,  # of the latent; the tests compare the records
        goal="1.7x" if (ratio, tokens) == (2, 2**20) else "",
        baselines=("reference", "compiled") if tokens <= 4096 else ("compiled",),  # eager would need some 100 GB
        rotate=tokens <= 4096,
    )


# ---- linear, moe ----


# ---- sparse_attention, hyper_connection, engram ----
