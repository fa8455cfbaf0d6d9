"""The benchmark cases of every op, in the form that kernels/bench.py describes.

Each function builds the inputs of one size and says how many bytes and FLOPs the op needs at least.
"""

import itertools

import torch

from kernels.bench import Case, register

# ---- block_quant ----


@register(
    "block_quant",
    sizes={
        "pack fp4, 2^20 x 512": dict(rows=2**20, width=512, format="fp4", unpack=False),
        "pack fp8, 2^20 x 512": dict(rows=2**20, width=512, format="fp8", unpack=False),
        "pack mxfp4, 2^20 x 128": dict(rows=2**20, width=128, format="mxfp4", unpack=False),
        "unpack fp4, 2^20 x 512": dict(rows=2**20, width=512, format="fp4", unpack=True),
        "unpack fp8, 2^20 x 512": dict(rows=2**20, width=512, format="fp8", unpack=True),
    },
    small=dict(rows=5, width=256, format="fp4", unpack=False),
)
def block_quant_case(rows, width, format, unpack, device):
    from kernels.block_quant import FORMATS, block_dequant, block_quant
    from kernels.reference.block_quant import block_dequant_reference, block_quant_reference

    x = torch.randn(rows, width, device=device, generator=torch.Generator(device).manual_seed(0)).bfloat16()
    packed = width // (1 if format == "fp8" else 2) + width // FORMATS[format]
    kernel, reference = (block_dequant, block_dequant_reference) if unpack else (block_quant, block_quant_reference)
    return Case(
        run=lambda *tensors: kernel(*tensors, format),
        reference=lambda *tensors: reference(*tensors, format),
        inputs=block_quant(x, format) if unpack else (x,),
        bytes_moved=rows * (2 * width + packed),
        flops=0,
        dtype="bf16",
        goal="1.4x",
    )


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

    def byte(*shape, low=0, high=256):
        return torch.randint(low, high, shape, generator=g, dtype=torch.uint8, device=device)

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


def _fp8_weight(outputs, inputs, device):
    """E4M3 codes, half of them small, under scales that keep the products near 1."""
    g = torch.Generator(device).manual_seed(1)
    codes = torch.randn(outputs, inputs, device=device, generator=g).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, torch.full((outputs // 32, inputs // 32), 121, dtype=torch.uint8, device=device)


@register(
    "linear",
    sizes={
        f"{m} x {k} to {n}": dict(m=m, k=k, n=n)
        for m, k, n in (
            *((m, 1280, 32768) for m in (1, 16, 64, 4096)),
            *((m, 5120, 512) for m in (1, 4096)),
            (1, 5120, 1280),
        )
    },
    small=dict(m=3, k=96, n=64),
)
def linear_case(m, k, n, device):
    from kernels.linear import linear
    from kernels.reference.linear import linear_reference

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(m, k, device=device, generator=torch.Generator(device).manual_seed(0)).to(dtype)
    return Case(
        run=linear,
        reference=linear_reference,
        inputs=(x, *_fp8_weight(n, k, device)),
        bytes_moved=n * k + n * k // 1024 + 2 * m * (k + n),
        flops=2 * m * k * n,
        dtype="bf16 x fp8",
        tolerance=4e-3,
        goal="1.6x" if m == 1 else "2x",
    )


@register(
    "moe",
    sizes={
        f"{t} tokens, 6 of 384 experts + 1, 5120 x 2304": dict(t=t, experts=384, picks=6, d=5120, i=2304)
        for t in (1, 4, 16, 64, 256, 4096)
    },
    small=dict(t=3, experts=4, picks=2, d=64, i=96),
)
def moe_case(t, experts, picks, d, i, device):
    from kernels.moe import moe
    from kernels.reference.moe import moe_reference

    g = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(t, d, device=device, generator=g).to(dtype)

    def fp4(rows, columns):
        shape = experts, rows, columns // 2
        codes = torch.randint(0, 256, shape, device=device, generator=g, dtype=torch.uint8)
        return codes, torch.full((experts, rows, columns // 32), 121, dtype=torch.uint8, device=device)

    weights = fp4(i, d), fp4(i, d), fp4(d, i)
    shared = _fp8_weight(i, d, device), _fp8_weight(i, d, device), _fp8_weight(d, i, device)
    # Few tokens use few experts, which would stay in the L2 cache: each call takes the next of several selections.
    draws = 8 if t <= 16 and experts > 100 else 1
    ids = [torch.rand(t, experts, device=device, generator=g).topk(picks, dim=1).indices.int() for _ in range(draws)]
    p = torch.full((t, picks), 1.5 / picks, device=device)
    turn = itertools.cycle(ids)
    used = ids[0].unique().numel()
    return Case(
        run=lambda x, p: moe(x, next(turn), p, *weights, shared),
        reference=lambda x, p: moe_reference(x, ids[0], p, *weights, shared),
        inputs=(x, p),
        bytes_moved=3 * d * i * used * 17 // 32 + 3 * d * i * 1025 // 1024 + 4 * t * d,
        flops=6 * t * (picks + 1) * d * i,
        dtype="bf16 x fp4",
        tolerance=5e-3,
        goal="1.8x" if t == 1 else "1.6x" if t <= 64 else "2.2x",
        baselines=("reference",),  # a loop over experts: torch.compile would unroll it
        rotate=False,  # 7 GB of weights
    )


# ---- sparse_attention, hyper_connection, engram ----
