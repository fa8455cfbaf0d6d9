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


def _normal(seed, device):
    """(draw, dtype): seeded normal tensors in the dtype that a case runs in, bf16 or, under the interpreter, fp32."""
    g = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    return lambda *shape: torch.randn(shape, generator=g, device=device), dtype


@register(
    "sparse_attention",
    sizes={
        "decode, 1 x 64 x (128 + 512) x 512": dict(queries=1, goal="0.020 ms"),
        "decode, 32 x 64 x (128 + 512) x 512": dict(queries=32, goal="0.028 ms"),
        "decode, 128 x 64 x (128 + 512) x 512": dict(queries=128, goal="0.045 ms"),
        "decode, 512 x 64 x (128 + 512) x 512": dict(queries=512, goal="0.150 ms"),
        "prefill, 4,096 x 64 x (128 + 512) x 512": dict(queries=4096, prefill=True, goal="0.95 ms"),
    },
    small=dict(queries=2, heads=4, window=6, selected=20, entries=50, width=64),
)
def sparse_attention_case(
    queries, device, heads=64, window=128, selected=512, entries=131072, width=512, prefill=False, goal=""
):
    from kernels.reference.sparse_attention import sparse_attention_reference
    from kernels.sparse_attention import sparse_attention

    normal, dtype = _normal(0, device)
    g = torch.Generator(device).manual_seed(1)
    draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=g, device=device)  # noqa: E731
    # Decode: a ring for each request. Prefill: one run of records, the last `window` of them for each query.
    rows = queries + window - 1 if prefill else queries * window
    slots = torch.arange(queries, device=device)[:, None] * (1 if prefill else window)
    slots = (slots + torch.arange(window, device=device)).int()
    w_codes = draw(0, 0x70, rows, width).byte()
    w_scales = draw(118, 122, rows, width // 32).byte()
    codes = draw(0, 256, entries, width // 2).byte()
    scales = draw(0x20, 0x38, entries, width // 16).byte()
    indices = draw(0, entries, queries, selected).int().sort(dim=1).values.contiguous()
    q = normal(queries, heads, width).to(dtype)
    window_bytes, selected_bytes = w_codes[0].numel() + w_scales[0].numel(), codes[0].numel() + scales[0].numel()
    read = rows * window_bytes + min(queries * selected, entries) * selected_bytes
    return Case(
        run=sparse_attention,
        reference=sparse_attention_reference,
        inputs=(q, w_codes, w_scales, slots, codes, scales, indices, normal(heads)),
        bytes_moved=read + 2 * q.numel() * q.element_size() + 4 * (slots.numel() + indices.numel()),
        flops=4 * queries * heads * (window + selected) * width,
        dtype=str(dtype).removeprefix("torch."),
        tolerance=2e-6 if dtype == torch.float32 else 4e-3,
        goal=goal,
        baselines=("reference",) if queries <= 32 else (),  # one query after the other
    )


@register(
    "hyper_connection",
    sizes={
        "4,096 x 4 x 5,120": dict(tokens=4096, goal="1.6x of 78.6 us"),
        "4,096 x 4 x 5,120, in three parts": dict(tokens=4096, parts=True),
        "64 x 4 x 5,120": dict(tokens=64),
        "1 x 4 x 5,120": dict(tokens=1),
    },
    small=dict(tokens=5, width=96),
)
def hyper_connection_case(tokens, device, n=4, width=5120, parts=False, goal=""):
    from kernels.hyper_connection import hyper_coefficients, hyper_collapse, hyper_connection, hyper_expand
    from kernels.reference.hyper_connection import hyper_connection_reference

    def in_parts(h, y, post, comb, pre, fn, base, scale):
        new = hyper_expand(h, y, post, comb)
        return new, hyper_collapse(new, pre), *hyper_coefficients(new, fn, base, scale)

    normal, dtype = _normal(0, device)
    h, y = normal(tokens, n, width).to(dtype), normal(tokens, width).to(dtype)
    fn = normal((2 + n) * n, n * width) / (n * width) ** 0.5
    stream_bytes, token_bytes = h.numel() * h.element_size(), y.numel() * y.element_size()
    return Case(
        run=in_parts if parts else hyper_connection,
        reference=hyper_connection_reference,
        inputs=(h, y, normal(tokens, n), normal(tokens, n, n), normal(tokens, n), fn, normal((2 + n) * n), normal(3)),
        bytes_moved=(4 if parts else 2) * stream_bytes + 2 * token_bytes + fn.numel() * 4,
        flops=2 * tokens * fn.numel(),
        dtype=str(dtype).removeprefix("torch."),
        tolerance=1e-5 if dtype == torch.float32 else 1e-3,
        goal=goal,
        baselines=() if parts else ("reference", "compiled"),
    )


@register("engram_rows", sizes={"8,192 positions": dict(length=8192)}, small=dict(length=9))
def engram_rows_case(length, device):
    from kernels.engram import engram_rows
    from kernels.reference.engram import engram_rows_reference

    g = torch.Generator(device).manual_seed(0)
    draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=g, device=device)  # noqa: E731
    return Case(
        run=lambda *tensors: engram_rows(*tensors, pad=2),
        reference=lambda *tensors: engram_rows_reference(*tensors, pad=2),
        inputs=(
            draw(0, 99092, 1, length).int(), draw(0, 2**45, 4) * 2 + 1, draw(16_000_000, 16_001_000, 3, 8),
            torch.arange(24, device=device).reshape(3, 8) * 16_000_000,
        ),
        bytes_moved=length * (4 + 24 * 8),
        flops=0,
        dtype="int64",
        baselines=(),  # Python integers
    )  # fmt: skip


@register("engram_gather", sizes={"8,192 x 24 of 16M x 256": dict(tokens=8192)}, small=dict(tokens=3, entries=40))
def engram_gather_case(tokens, device, entries=16_000_000, columns=24, width=256):
    from kernels.engram import engram_gather
    from kernels.reference.engram import engram_gather_reference

    _, dtype = _normal(0, device)
    codes = torch.empty(entries, width, dtype=torch.uint8, device=device).random_(0, 0x7F)
    scales = torch.empty(entries, width // 32, dtype=torch.uint8, device=device).random_(110, 130)
    rows = torch.randint(0, entries, (tokens, columns), device=device)
    values = tokens * columns * width
    return Case(
        run=lambda *tensors: engram_gather(*tensors, dtype=dtype),
        reference=lambda *tensors: engram_gather_reference(*tensors, dtype=dtype),
        inputs=(codes, scales, rows),
        bytes_moved=values + values // 32 + values * dtype.itemsize + rows.numel() * 8,
        flops=0,
        dtype=str(dtype).removeprefix("torch."),
        rotate=False,  # the table is larger than the cache
    )


@register("engram_update", sizes={"4,096 x 4 x 5,120": dict(tokens=4096)}, small=dict(tokens=3, width=96))
def engram_update_case(tokens, device, n=4, width=5120):
    from kernels.engram import engram_update
    from kernels.reference.engram import engram_update_reference

    normal, dtype = _normal(0, device)
    h, kv = normal(tokens, n, width).to(dtype), normal(tokens, (n + 1) * width).to(dtype)
    q_weight, k_weight = normal(n, width).to(dtype), normal(n, width).to(dtype)
    return Case(
        run=engram_update,
        reference=engram_update_reference,
        inputs=(h, kv, q_weight, k_weight),
        bytes_moved=(2 * h.numel() + kv.numel() + 2 * q_weight.numel()) * h.element_size(),
        flops=0,
        dtype=str(dtype).removeprefix("torch."),
        tolerance=1e-6 if dtype == torch.float32 else 3e-4,
    )


# ---- rms_norm, rope, router ----


@register(
    "rms_norm",
    sizes={"1 x 5,120": dict(rows=1, width=5120), "4,096 x 5,120": dict(rows=4096, width=5120)},
    small=dict(rows=3, width=96),
)
def rms_norm_case(rows, width, device):
    from kernels.reference.rms_norm import rms_norm_reference
    from kernels.rms_norm import rms_norm

    normal, dtype = _normal(0, device)
    x, weight = normal(rows, width).to(dtype), normal(width).to(dtype)
    return Case(
        run=lambda x, weight: rms_norm(x, weight, 1e-20),
        reference=lambda x, weight: rms_norm_reference(x, weight, 1e-20),
        inputs=(x, weight),
        bytes_moved=(2 * x.numel() + width) * x.element_size(),
        flops=0,
        dtype=str(dtype).removeprefix("torch."),
        tolerance=1e-6 if dtype == torch.float32 else 4e-3,
    )


@register(
    "rope",
    sizes={"1 x 64 heads x 512": dict(tokens=1), "4,096 x 64 heads x 512": dict(tokens=4096)},
    small=dict(tokens=3, heads=2, width=32, pairs=4),
)
def rope_case(tokens, device, heads=64, width=512, pairs=32):
    from kernels.reference.rope import rope_reference
    from kernels.rope import rope_

    normal, dtype = _normal(0, device)
    x, angle = normal(tokens * heads, width).to(dtype), normal(tokens, pairs)
    return Case(
        run=rope_,
        reference=rope_reference,
        inputs=(x, torch.polar(torch.ones_like(angle), angle)),
        bytes_moved=2 * 2 * pairs * tokens * heads * x.element_size() + 8 * angle.numel(),
        flops=0,
        dtype=str(dtype).removeprefix("torch."),
        tolerance=1e-6 if dtype == torch.float32 else 4e-3,
        baselines=(),  # one vector after the other
    )


@register(
    "router",
    sizes={"1 x 384, 6": dict(tokens=1), "4,096 x 384, 6": dict(tokens=4096)},
    small=dict(tokens=3, number=9, k=2),
)
def router_case(tokens, device, number=384, k=6):
    from kernels.reference.router import router_reference
    from kernels.router import router

    normal, _ = _normal(0, device)
    return Case(
        run=lambda logits, bias: router(logits, bias, k, 1.5)[1],
        reference=lambda logits, bias: router_reference(logits, bias, k, 1.5)[1],
        inputs=(normal(tokens, number), 0.1 * normal(number)),
        bytes_moved=4 * tokens * number + 12 * tokens * k,
        flops=0,
        dtype="float32",
        tolerance=2e-6,
        baselines=(),  # one token after the other
    )
