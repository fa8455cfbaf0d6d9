"""Hyper-connections: N residual streams mixed at every site, in a single pass over the streams.

    z       = (f . fn^T) * rsqrt(mean(f^2) + 1e-20)            f = the N*D values of a token, stream after stream
    pre_k   = sigmoid(z[k] * scale[0] + base[k]) + eps
    post_k  = 2 sigmoid(z[N + k] * scale[1] + base[N + k])
    comb    = Sinkhorn(z[2N + N*j + k] * scale[2] + base[2N + N*j + k])      j source stream, k destination
    c       = sum_k pre_k h_k                                                 collapse
    h'_k    = post_k y + sum_j comb[j, k] h_j                                 expand

A site collapses with the `pre` of the site before, so when its output y is there everything of the next site but the
Sinkhorn can be had from the streams as they pass: `hyper_connection` expands, and from h' in registers, rounded as it
is stored, accumulates the next collapse, the projections and the mean square. Every stream is read once and written
once; `hyper_expand`, `hyper_coefficients` and `hyper_collapse` one after the other read three times and write once. All
four are one kernel with parts left out, and a small second one for sigmoids and Sinkhorn.

The projection needs fp32: streams in bfloat16 meet fn as three bfloat16 terms that add up to it exactly. The
matrix unit rounds its sums toward zero: over all channels of a token they would lose 1e-4, so it adds up one step of
BLOCK_D channels at a time, and the steps are added outside.

Shapes: T tokens, N streams (1..8), D channels, C = (2 + N) * N projections.
Reads T*N*D*2 + T*D*2 bytes of bfloat16 and writes as many; fn (C*N*D*4 bytes) comes from L2 once for BLOCK_T tokens.
The bound is memory bandwidth.
Reference: kernels/reference/hyper_connection.py. Test: tests/kernels/test_hyper_connection.py.
Bench: `hyper_connection`.
"""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def _to_bf16(x):
    """Two at a time: `.to` issues single conversions where the value is also used on, at a quarter of the speed."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _column(tile, k):
    """Column k of a [BLOCK_T, *] tile, as [BLOCK_T, 1]."""
    return tl.sum(tl.where(tl.arange(0, tile.shape[1])[None, :] == k, tile, 0.0), axis=1)[:, None]


@triton.jit
def _pass_kernel(
    h_ptr,  # [T, N, D]
    y_ptr,  # [T, D]
    post_ptr,  # [T, N] fp32
    comb_ptr,  # [T, N, N] fp32
    pre_ptr,  # [T, N] fp32
    fn_ptr,  # [C, N * D] fp32
    new_ptr,  # [T, N, D]
    collapsed_ptr,  # [T, D]
    sums_ptr,  # [T, splits, C + 1] fp32: f . fn^T and sum f^2 over the channels of a split
    T,
    D,
    h_stride,
    h_stream_stride,
    y_stride,
    steps,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    EXPAND: tl.constexpr,
    COLLAPSE: tl.constexpr,
    PROJECT: tl.constexpr,
    BF16: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # one program per (channel split, BLOCK_T tokens); int64 because T * N * D passes 2^31
    split = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = token < T
    projection = tl.arange(0, C_PAD)
    # The coefficients of a token: columns of a tile, by a sum. Were they loaded one by one, the compiler would push the
    # layout that the matrix unit asks of its operand up to the loads and compute the whole expansion in both layouts.
    pre, post, comb = (), (), ()
    cell = tl.arange(0, N_PAD)
    cells = tl.arange(0, N_PAD * N_PAD)
    edge = here[:, None] & (cell < N)[None, :]
    square = here[:, None] & (cells < N * N)[None, :]
    if COLLAPSE:
        pres = tl.load(pre_ptr + (token * N)[:, None] + cell[None, :], mask=edge, other=0.0)
        for k in tl.static_range(N):
            pre += (_column(pres, k),)
    if EXPAND:
        posts = tl.load(post_ptr + (token * N)[:, None] + cell[None, :], mask=edge, other=0.0)
        for k in tl.static_range(N):
            post += (_column(posts, k),)
        combs = tl.load(comb_ptr + (token * N * N)[:, None] + cells[None, :], mask=square, other=0.0)
        for k in tl.static_range(N * N):  # at comb[source * N + destination]
            comb += (_column(combs, k),)

    z = tl.zeros([BLOCK_T, C_PAD], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for step in range(split * steps, tl.minimum((split + 1) * steps, tl.cdiv(D, BLOCK_D))):
        channel = step * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = here[:, None] & (channel < D)[None, :]
        streams = ()
        for j in tl.static_range(N):
            at = (token * h_stride)[:, None] + j * h_stream_stride + channel[None, :]
            streams += (tl.load(h_ptr + at, mask=inside, other=0.0),)
        if EXPAND:
            y = tl.load(y_ptr + (token * y_stride)[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        collapsed = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        part = tl.zeros([BLOCK_T, C_PAD], tl.float32)  # of z, fresh each step
        for k in tl.static_range(N):
            stored = streams[k]
            if EXPAND:
                new = y * post[k]
                for j in tl.static_range(N):
                    new += streams[j].to(tl.float32) * comb[j * N + k]
                stored = _to_bf16(new) if BF16 else new
                tl.store(new_ptr + ((token * N + k) * D)[:, None] + channel[None, :], stored, mask=inside)
            new = stored.to(tl.float32)
            if COLLAPSE:
                collapsed += new * pre[k]
            if PROJECT:
                squares += tl.sum(new * new, axis=1)
                weight = tl.load(
                    fn_ptr + (projection * (N * D))[None, :] + (k * D + channel)[:, None],
                    mask=(projection < C)[None, :] & (channel < D)[:, None],
                    other=0.0,
                )  # [BLOCK_D, C_PAD]
                for _ in tl.static_range(3 if BF16 else 1):
                    term = _to_bf16(weight) if BF16 else weight
                    part = tl.dot(stored, term, part, input_precision="ieee")
                    weight -= term.to(tl.float32)
        if PROJECT:
            z += part
        if COLLAPSE:
            out = collapsed_ptr + (token * D)[:, None] + channel[None, :]
            tl.store(out, _to_bf16(collapsed) if BF16 else collapsed, mask=inside)
    if PROJECT:
        sums = sums_ptr + (token * tl.num_programs(0) + split) * (C + 1)
        tl.store(sums[:, None] + projection[None, :], z, mask=here[:, None] & (projection < C)[None, :])
        tl.store(sums + C, squares, mask=here)


@triton.jit
def _coefficients_kernel(
    sums_ptr,  # [T, splits, C + 1] fp32
    base_ptr,  # [C] fp32
    scale_ptr,  # [3] fp32
    pre_ptr,  # [T, N] fp32
    post_ptr,  # [T, N] fp32
    comb_ptr,  # [T, N, N] fp32
    T,
    splits,
    values,
    eps,
    norm_eps,
    iterations,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # one program per BLOCK_T tokens
    C: tl.constexpr = (2 + N) * N
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = token < T
    k = tl.arange(0, N_PAD)
    edge = here[:, None] & (k < N)[None, :]
    square = here[:, None, None] & (k < N)[None, :, None] & (k < N)[None, None, :]
    cell = k[:, None] * N + k[None, :]  # [source, destination]

    total = tl.zeros([BLOCK_T], tl.float32)
    pre = tl.zeros([BLOCK_T, N_PAD], tl.float32)
    post = tl.zeros([BLOCK_T, N_PAD], tl.float32)
    m = tl.zeros([BLOCK_T, N_PAD, N_PAD], tl.float32)
    for split in range(splits):
        row = sums_ptr + (token.to(tl.int64) * splits + split) * (C + 1)
        total += tl.load(row + C, mask=here, other=0.0)
        pre += tl.load(row[:, None] + k[None, :], mask=edge, other=0.0)
        post += tl.load(row[:, None] + N + k[None, :], mask=edge, other=0.0)
        m += tl.load(row[:, None, None] + 2 * N + cell[None, :, :], mask=square, other=0.0)
    norm = tl.rsqrt(total / values + norm_eps)

    pre = pre * norm[:, None] * tl.load(scale_ptr) + tl.load(base_ptr + k, mask=k < N, other=0.0)[None, :]
    pre = 1.0 / (1.0 + tl.exp(-pre)) + eps
    tl.store(pre_ptr + token[:, None] * N + k[None, :], pre, mask=edge)
    post = post * norm[:, None] * tl.load(scale_ptr + 1) + tl.load(base_ptr + N + k, mask=k < N, other=0.0)[None, :]
    post = 2.0 / (1.0 + tl.exp(-post))
    tl.store(post_ptr + token[:, None] * N + k[None, :], post, mask=edge)

    base = tl.load(base_ptr + 2 * N + cell, mask=(k < N)[:, None] & (k < N)[None, :], other=0.0)
    m = m * norm[:, None, None] * tl.load(scale_ptr + 2) + base[None, :, :]
    m = tl.where(square, m, -1e30)  # finite, so that the rows of padding do not become NaN
    m = tl.where(square, tl.exp(m - tl.max(m, axis=2)[:, :, None]), 0.0)
    m = tl.where(square, m / tl.sum(m, axis=2)[:, :, None] + eps, 0.0)
    m = m / (tl.sum(m, axis=1)[:, None, :] + eps)
    for _ in range(iterations - 1):
        m = m / (tl.sum(m, axis=2)[:, :, None] + eps)
        m = m / (tl.sum(m, axis=1)[:, None, :] + eps)
    tl.store(comb_ptr + (token * N * N)[:, None, None] + cell[None, :, :], m, mask=square)


def hyper_coefficients(h, fn, base, scale, iterations=20, eps=1e-6, norm_eps=1e-20):
    """(pre [T, N], post [T, N], comb [T, N, N]), float32, of streams h [T, N, D], float32 or bfloat16.

    fn float32 [(2 + N) * N, N * D], base float32 [(2 + N) * N], scale float32 [3].
    """
    _check_streams(h)
    _check_projection(h, fn, base, scale)
    return _coefficients(_run(h, fn=fn)[2], h, base, scale, iterations, eps, norm_eps)


def hyper_collapse(h, pre):
    """c [T, D] in the type of h: the sum of the streams h [T, N, D] with weights pre, float32 [T, N]."""
    _check_streams(h)
    _check("pre", pre, h, torch.float32, h.shape[:2])
    return _run(h, pre=pre)[1]


def hyper_expand(h, y, post, comb):
    """h' [T, N, D]: the output y [T, D] of a site put back into its streams, with post [T, N] and comb [T, N, N]."""
    _check_streams(h)
    _check_site(h, y, post, comb)
    return _run(h, y=y, post=post, comb=comb)[0]


def hyper_connection(h, y, post, comb, pre, fn, base, scale, iterations=20, eps=1e-6, norm_eps=1e-20):
    """From the end of one site to the start of the next: (h', c, pre', post', comb').

    h' is hyper_expand(h, y, post, comb), c its collapse with pre, and the rest its coefficients.
    """
    _check_streams(h)
    _check_site(h, y, post, comb)
    _check("pre", pre, h, torch.float32, h.shape[:2])
    _check_projection(h, fn, base, scale)
    new, collapsed, sums = _run(h, y, post, comb, pre, fn)
    return new, collapsed, *_coefficients(sums, h, base, scale, iterations, eps, norm_eps)


def _run(h, y=None, post=None, comb=None, pre=None, fn=None):
    """(h', c, sums) of one pass; what is not asked for is None."""
    tokens, n, width = h.shape
    c = (2 + n) * n
    # Splits over channels share out what the tokens alone do not; with many tokens, four programs to a multiprocessor:
    # two run, and the next start as they end. From 7 streams on no shared memory is left to fetch a step ahead.
    many = h.dtype == torch.bfloat16 and tokens > 16
    block_t, block_d, stages = (64, 32, 3) if many else (16, 64, 2)
    blocks, steps = -(-tokens // block_t), -(-width // block_d)
    splits = min(steps, max(1, (4 if blocks > 16 else 1) * _processors(h.device) // max(blocks, 1)))
    per_split = -(-steps // splits)
    splits = -(-steps // per_split)
    new = torch.empty(tokens, n, width, dtype=h.dtype, device=h.device) if y is not None else None
    collapsed = torch.empty(tokens, width, dtype=h.dtype, device=h.device) if pre is not None else None
    sums = torch.empty(tokens, splits, c + 1, dtype=torch.float32, device=h.device) if fn is not None else None
    if tokens:
        _pass_kernel[(splits, blocks)](
            h, y, post, comb, pre, fn, new, collapsed, sums, tokens, width,
            h.stride(0), h.stride(1), y.stride(0) if y is not None else 0, per_split,
            N=n, N_PAD=triton.next_power_of_2(n), C=c, C_PAD=max(16, triton.next_power_of_2(c)),
            EXPAND=y is not None, COLLAPSE=pre is not None,
            PROJECT=fn is not None, BF16=h.dtype == torch.bfloat16, BLOCK_T=block_t, BLOCK_D=block_d,
            num_warps=4, num_stages=stages if n <= 6 else 1,
        )  # fmt: skip
    return new, collapsed, sums


def _coefficients(sums, h, base, scale, iterations, eps, norm_eps):
    tokens, n, width = h.shape
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=h.device)  # noqa: E731
    pre, post, comb = new(tokens, n), new(tokens, n), new(tokens, n, n)
    if tokens:
        _coefficients_kernel[(-(-tokens // 4),)](
            sums, base, scale, pre, post, comb, tokens, sums.shape[1], n * width, eps, norm_eps, iterations,
            N=n, N_PAD=triton.next_power_of_2(n), BLOCK_T=4, num_warps=1,
        )  # fmt: skip
    return pre, post, comb


@functools.cache
def _processors(device):
    return 132 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def _describe(t):
    return f"{t.dtype} {tuple(t.shape)} with strides {t.stride()} on {t.device}"


def _check_streams(h):
    if h.ndim != 3 or h.dtype not in (torch.float32, torch.bfloat16) or h.stride(2) != 1:
        raise TypeError(f"h must be float32 or bfloat16 [tokens, streams, width], unit last stride, got {_describe(h)}")
    if not 1 <= h.shape[1] <= 8:
        raise ValueError(f"h must have 1 to 8 streams, got {h.shape[1]}")
    if not 32 <= h.shape[2] <= 8192:
        raise ValueError(f"the width of h must be between 32 and 8192, got {h.shape[2]}")


def _check(name, t, h, dtype, shape, contiguous=True):
    if t.dtype != dtype or t.shape != torch.Size(shape) or t.device != h.device:
        raise ValueError(f"{name} must be {dtype} {tuple(shape)} on {h.device}, got {_describe(t)}")
    if not (t.is_contiguous() if contiguous else t.stride(-1) == 1):
        raise ValueError(f"{name} must be contiguous, got {_describe(t)}")


def _check_site(h, y, post, comb):
    tokens, n, width = h.shape
    _check("y", y, h, h.dtype, (tokens, width), contiguous=False)
    _check("post", post, h, torch.float32, (tokens, n))
    _check("comb", comb, h, torch.float32, (tokens, n, n))


def _check_projection(h, fn, base, scale):
    _, n, width = h.shape
    _check("fn", fn, h, torch.float32, ((2 + n) * n, n * width))
    _check("base", base, h, torch.float32, ((2 + n) * n,))
    _check("scale", scale, h, torch.float32, (3,))


def aot_cases():
    """The fused pass at released sizes, its fp32 form, and the coefficients."""
    streams = dict.fromkeys(("h_ptr", "y_ptr", "new_ptr", "collapsed_ptr"), "*fp32")
    floats = dict.fromkeys(("post_ptr", "comb_ptr", "pre_ptr", "fn_ptr", "sums_ptr"), "*fp32")
    floats |= {"T": "i32", "D": "i32:16", "h_stride": "i32:16", "h_stream_stride": "i32:16", "y_stride": "i32:16"}
    floats |= streams | {"steps": "i32"}
    halves = floats | dict.fromkeys(streams, "*bf16")
    fused = {
        "N": 4, "N_PAD": 4, "C": 24, "C_PAD": 32, "EXPAND": True, "COLLAPSE": True, "PROJECT": True, "BF16": True,
        "BLOCK_T": 64, "BLOCK_D": 32,
    }  # fmt: skip
    small = dict.fromkeys(("sums_ptr", "base_ptr", "scale_ptr", "pre_ptr", "post_ptr", "comb_ptr"), "*fp32")
    small |= {"T": "i32", "splits": "i32", "values": "i32", "eps": "fp32", "norm_eps": "fp32", "iterations": "i32"}
    product = {80: ("mma.sync",), 90: ("wgmma.mma_async",), 100: ("tcgen05.mma",)}
    return [
        ("fused", _pass_kernel, halves, fused, {"num_warps": 8, "num_stages": 2}, product),
        ("fused fp32", _pass_kernel, floats, fused | {"BF16": False, "BLOCK_T": 16},
         {"num_warps": 4, "num_stages": 1}, {90: ()}),
        ("eight streams", _pass_kernel, halves, fused | {"N": 8, "N_PAD": 8, "C": 80, "C_PAD": 128},
         {"num_warps": 8, "num_stages": 1}, {90: ("wgmma.mma_async",)}),
        ("few tokens", _pass_kernel, halves, fused | {"BLOCK_T": 16}, {"num_warps": 4, "num_stages": 2},
         {90: ("mma.sync",)}),
        ("coefficients", _coefficients_kernel, small, {"N": 4, "N_PAD": 4, "BLOCK_T": 32}, {"num_warps": 1}, None),
    ]  # fmt: skip
