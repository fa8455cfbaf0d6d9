"""Engram: rows of a huge table found by hashing the last ids, and a gated update of the streams with them.

    acc_s    = c_0 m_0 xor c_1 m_1 xor ... xor c_s m_s                       s = 1 .. S - 1, c_s the id s positions back
    row[s,a] = acc_s mod modulus[s, a] + offset[s, a]                        a = 0 .. A - 1
    E        = the rows' values, one after the other, E4M3 times UE8M0 per 32            (kv = E . wkv^T outside)
    t_k      = sum_c(h_k qw_k kw_k key_k) * rsqrt(mean h_k^2 + eps) * rsqrt(mean key_k^2 + eps) * D^-0.5
    h_k     <- h_k + sigmoid(copysign(sqrt(max(|t_k|, 1e-6)), t_k)) * value

A position before the start or inside an image blocks its slot and all further ones; a blocked slot takes the id `pad`.
Multipliers are such that id times multiplier stays below 2^63: the signed xor is never negative.

Shapes: B sequences of L positions, S slots, A heads a slot, T tokens, R rows of W bytes, N streams of D channels.
engram_rows     reads L ids, writes (S - 1) * A * 8 bytes a position; 64-bit arithmetic, a few microseconds.
engram_gather   reads W + W/32 bytes a row and writes 2*W; addresses are 64 bits wide, tables pass 2^31 bytes by far.
engram_update   reads (2N + 1) * D * 2 bytes a token and writes N*D*2; the weights stay in the caches.
The last two are bound by memory bandwidth.
Reference: kernels/reference/engram.py. Test: tests/kernels/test_engram.py. Bench: `engram_rows`, `engram_gather`,
`engram_update`.
"""

import torch
import triton
import triton.language as tl

from kernels.numerics import e4m3_bits_to_f32, ue8m0_to_f32


@triton.jit
def _rows_kernel(
    ids_ptr,  # [B, L] int32 or int64
    image_ptr,  # [B, L] bool as uint8
    multipliers_ptr,  # [S] int64
    moduli_ptr,  # [S - 1, A] int64
    offsets_ptr,  # [S - 1, A] int64
    rows_ptr,  # [B, new, S - 1, A] int64
    length,
    new,
    pad,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HAS_IMAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # one program per (BLOCK positions, sequence)
    sequence = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = length - new + i
    head = tl.arange(0, HEADS_PAD)
    out = rows_ptr + ((sequence * new + i) * ((SLOTS - 1) * HEADS))[:, None] + head[None, :]
    inside = (i < new)[:, None] & (head < HEADS)[None, :]
    acc = tl.zeros([BLOCK], tl.int64)
    open_ = i < new
    for s in tl.static_range(SLOTS):
        open_ = open_ & (position >= s)
        at = sequence * length + position - s
        if HAS_IMAGE:
            open_ = open_ & (tl.load(image_ptr + at, mask=open_, other=1) == 0)
        c = tl.load(ids_ptr + at, mask=open_, other=0).to(tl.int64)
        acc ^= tl.where(open_, c, pad) * tl.load(multipliers_ptr + s)
        if s > 0:
            constant = (s - 1) * HEADS + head
            modulus = tl.load(moduli_ptr + constant, mask=head < HEADS, other=1)
            offset = tl.load(offsets_ptr + constant, mask=head < HEADS, other=0)
            row = acc[:, None] % modulus[None, :] + offset[None, :]
            tl.store(out + (s - 1) * HEADS, row, mask=inside)


@triton.jit
def _gather_kernel(
    codes_ptr,  # [R, W] uint8
    scales_ptr,  # [R, W / 32] uint8
    rows_ptr,  # [n] int64
    out_ptr,  # [n, W]
    n,
    codes_stride,
    scales_stride,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # one program per ROWS rows; int64 because a table is 100 GB
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.arange(0, GROUPS)
    row = tl.load(rows_ptr + i, mask=i < n, other=0)
    inside = (i < n)[:, None] & (group < WIDTH // 32)[None, :]
    # Loaded and stored as matrices: in three dimensions Triton 3.6 would give each thread a row of its own.
    channel = tl.arange(0, GROUPS * 32)
    wide = (i < n)[:, None] & (channel < WIDTH)[None, :]
    scale = tl.load(scales_ptr + (row * scales_stride)[:, None] + group[None, :], mask=inside, other=0)
    code = tl.load(codes_ptr + (row * codes_stride)[:, None] + channel[None, :], mask=wide, other=0)
    code = tl.reshape(code, [ROWS, GROUPS, 32])
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) if NATIVE else e4m3_bits_to_f32(code)
    value = tl.reshape(value * ue8m0_to_f32(scale)[:, :, None], [ROWS, GROUPS * 32])
    out = out_ptr + (i * WIDTH)[:, None] + channel[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=wide)


@triton.jit
def _update_kernel(
    h_ptr,  # [T, N, D]
    kv_ptr,  # [T, (N + 1) * D]
    q_weight_ptr,  # [N, D]
    k_weight_ptr,  # [N, D]
    image_ptr,  # [T] bool as uint8
    out_ptr,  # [T, N, D]
    h_stride,
    h_stream_stride,
    kv_stride,
    eps,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_IMAGE: tl.constexpr,
):
    # one program per token: what streams through leaves the caches first, the weights of all tokens last
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < D
    kv = kv_ptr + token * kv_stride + channel
    value = tl.load(kv + N * D, mask=inside, other=0.0, eviction_policy="evict_first")
    keep = tl.load(image_ptr + token) != 0 if HAS_IMAGE else False
    for k in tl.static_range(N):
        h = tl.load(
            h_ptr + token * h_stride + k * h_stream_stride + channel,
            mask=inside, other=0.0, eviction_policy="evict_first",
        ).to(tl.float32)  # fmt: skip
        key = tl.load(kv + k * D, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        weight = tl.load(q_weight_ptr + k * D + channel, mask=inside, other=0.0, eviction_policy="evict_last").to(
            tl.float32
        ) * tl.load(k_weight_ptr + k * D + channel, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        t = tl.sum(h * weight * key, axis=0)
        t *= tl.rsqrt(tl.sum(h * h, axis=0) / D + eps) * tl.rsqrt(tl.sum(key * key, axis=0) / D + eps)
        t /= tl.sqrt_rn(D * 1.0)
        bits = t.to(tl.int32, bitcast=True)
        size = tl.sqrt_rn(tl.maximum(tl.abs(t), 1e-6)).to(tl.int32, bitcast=True)
        signed = (size | (bits & -2147483648)).to(tl.float32, bitcast=True)  # the sign of a zero counts
        signed = tl.where(t == t, signed, t)  # the maximum passes over NaN
        gate = 1.0 / (1.0 + tl.exp(-signed))
        new = h + gate * value.to(tl.float32)
        if HAS_IMAGE:
            new = tl.where(keep, h, new)
        tl.store(out_ptr + (token * N + k) * D + channel, new.to(out_ptr.dtype.element_ty), mask=inside)


def engram_rows(ids, multipliers, moduli, offsets, pad, image=None, new=None):
    """Table rows int64 [B, new, (S - 1) * A] of the last `new` positions of ids, all by default.

    ids int32 or int64 [B, L]: compressed ids, from the start of the sequence or at least S - 1 positions before the
    first new one. multipliers int64 [S], moduli and offsets int64 [S - 1, A]. image bool [B, L]: inside an image span.
    """
    if ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids must be int32 or int64 [sequences, positions], got {_describe(ids)}")
    sequences, length = ids.shape
    new = length if new is None else new
    if not 0 <= new <= length:
        raise ValueError(f"new must be between 0 and the {length} positions of ids, got {new}")
    slots = multipliers.shape[0]
    if not 2 <= slots <= 8 or moduli.ndim != 2 or moduli.shape[0] != slots - 1:
        raise ValueError(
            f"multipliers [S] and moduli [S - 1, A] need 2 to 8 slots S, got {tuple(multipliers.shape)} and "
            f"{tuple(moduli.shape)}"
        )
    heads = moduli.shape[1]
    _check("ids", ids, ids.dtype, ids.shape, ids.device)
    _check("multipliers", multipliers, torch.int64, (slots,), ids.device)
    _check("moduli", moduli, torch.int64, (slots - 1, heads), ids.device)
    _check("offsets", offsets, torch.int64, (slots - 1, heads), ids.device)
    if image is not None:
        _check("image", image, torch.bool, ids.shape, ids.device)
        image = image.view(torch.uint8)
    rows = torch.empty(sequences, new, (slots - 1) * heads, dtype=torch.int64, device=ids.device)
    if rows.numel():
        _rows_kernel[(triton.cdiv(new, 64), sequences)](
            ids, image, multipliers, moduli, offsets, rows, length, new, pad,
            SLOTS=slots, HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads), HAS_IMAGE=image is not None, BLOCK=64,
            num_warps=4,
        )  # fmt: skip
    return rows


def engram_gather(codes, scales, rows, dtype=torch.bfloat16):
    """Values [..., C * W] of table rows int64 [..., C].

    A table is E4M3 codes uint8 [R, W] and UE8M0 scales uint8 [R, W / 32]. The values are exact in bfloat16. Rows are
    not checked against R.
    """
    for name, t in (("codes", codes), ("scales", scales)):
        if t.dtype != torch.uint8 or t.ndim != 2 or t.stride(1) != 1 or t.device != rows.device:
            raise ValueError(
                f"{name} must be a uint8 matrix with unit last stride on {rows.device}, got {_describe(t)}"
            )
    width = codes.shape[1]
    if width % 32 or not 32 <= width <= 1024:
        raise ValueError(f"the width of codes must be a multiple of 32 from 32 to 1024, got {width}")
    if scales.shape != (codes.shape[0], width // 32):
        raise ValueError(f"scales must have shape {(codes.shape[0], width // 32)}, got {tuple(scales.shape)}")
    if rows.dtype != torch.int64 or not rows.is_contiguous() or rows.ndim < 1:
        raise ValueError(f"rows must be contiguous int64 [..., columns], got {_describe(rows)}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"dtype must be float32 or bfloat16, got {dtype}")
    out = torch.empty(*rows.shape[:-1], rows.shape[-1] * width, dtype=dtype, device=rows.device)
    if rows.numel():
        groups = triton.next_power_of_2(width // 32)
        per_program = max(1, 128 // groups)
        native = rows.device.type == "cuda" and torch.cuda.get_device_capability(rows.device) >= (8, 9)
        _gather_kernel[(triton.cdiv(rows.numel(), per_program),)](
            codes, scales, rows, out, rows.numel(), codes.stride(0), scales.stride(0),
            WIDTH=width, GROUPS=groups, ROWS=per_program, NATIVE=native, num_warps=4,
        )  # fmt: skip
    return out


def engram_update(h, kv, q_weight, k_weight, image=None, eps=1e-20):
    """h' [T, N, D], streams h (float32 or bfloat16) plus gated value.

    kv [T, (N + 1) * D] in the type of h: N keys, then the value that the streams share. q_weight, k_weight [N, D],
    float32 or bfloat16. image bool [T]: these tokens keep their streams.
    """
    if h.ndim != 3 or h.dtype not in (torch.float32, torch.bfloat16) or h.stride(2) != 1:
        raise TypeError(f"h must be float32 or bfloat16 [tokens, streams, width], unit last stride, got {_describe(h)}")
    tokens, n, width = h.shape
    if not 1 <= n <= 8 or not 32 <= width <= 8192:
        raise ValueError(f"h must have 1 to 8 streams of 32 to 8192 channels, got {n} of {width}")
    if kv.dtype != h.dtype or kv.shape != (tokens, (n + 1) * width) or kv.stride(1) != 1 or kv.device != h.device:
        raise ValueError(f"kv must be {h.dtype} {(tokens, (n + 1) * width)} on {h.device}, got {_describe(kv)}")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"{name} must be float32 or bfloat16, got {weight.dtype}")
        _check(name, weight, weight.dtype, (n, width), h.device)
    if image is not None:
        _check("image", image, torch.bool, (tokens,), h.device)
        image = image.view(torch.uint8)
    out = torch.empty(tokens, n, width, dtype=h.dtype, device=h.device)
    if tokens:
        block = triton.next_power_of_2(width)
        _update_kernel[(tokens,)](
            h, kv, q_weight, k_weight, image, out, h.stride(0), h.stride(1), kv.stride(0), eps,
            N=n, D=width, BLOCK=block, HAS_IMAGE=image is not None, num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
    return out


def _describe(t):
    return f"{t.dtype} {tuple(t.shape)} with strides {t.stride()} on {t.device}"


def _check(name, t, dtype, shape, device):
    if t.dtype != dtype or t.shape != torch.Size(shape) or t.device != device or not t.is_contiguous():
        raise ValueError(f"{name} must be contiguous {dtype} {tuple(shape)} on {device}, got {_describe(t)}")


def aot_cases():
    """Released sizes: 4 slots of 8 heads, rows of 256 bytes, 4 streams of 5,120."""
    rows = dict.fromkeys(("multipliers_ptr", "moduli_ptr", "offsets_ptr", "rows_ptr"), "*i64")
    rows |= {"ids_ptr": "*i32", "image_ptr": "*u8", "length": "i32", "new": "i32", "pad": "i32"}
    gather = {
        "codes_ptr": "*u8", "scales_ptr": "*u8", "rows_ptr": "*i64", "out_ptr": "*bf16", "n": "i32",
        "codes_stride": "i32:16", "scales_stride": "i32",
    }  # fmt: skip
    update = dict.fromkeys(("h_ptr", "kv_ptr", "q_weight_ptr", "k_weight_ptr", "out_ptr"), "*bf16")
    update |= {"image_ptr": "*u8", "h_stride": "i32:16", "h_stream_stride": "i32:16", "kv_stride": "i32:16"}
    update |= {"eps": "fp32"}
    hashing = {"SLOTS": 4, "HEADS": 8, "HEADS_PAD": 8, "HAS_IMAGE": True, "BLOCK": 64}
    sizes = {"WIDTH": 256, "GROUPS": 8, "ROWS": 16}
    streams = {"N": 4, "D": 5120, "BLOCK": 8192, "HAS_IMAGE": True}
    native = {90: ("e4m3x2",), 100: ("e4m3x2",)}  # the conversion in hardware
    return [
        ("rows", _rows_kernel, rows, hashing, {"num_warps": 4}, None),
        ("gather", _gather_kernel, gather, sizes | {"NATIVE": True}, {"num_warps": 4}, native),
        ("gather", _gather_kernel, gather, sizes | {"NATIVE": False}, {"num_warps": 4}, {80: ()}),
        ("update", _update_kernel, update, streams, {"num_warps": 8}, None),
    ]
