"""The router of a mixture of experts: which experts a token goes to, and with what weight, in one pass.

    s        = sqrt(softplus(logits))                                        float32
    picked   = the k best of s + bias, ties to the lower expert, ascending
    weight_e = s_e / (sum of the picked s + 1e-20) * scale                   the bias chooses, it never weighs

Shapes: T tokens, E experts (1..4,096), k (1..64); logits [T, E], bias [E] or one row a token [T, E].
Reads T*E*4 bytes, writes T*k*8: the launch is the bound for a decode step.
Reference: kernels/reference/router.py. Test: tests/kernels/test_router.py. Bench: `router`.
"""

import torch
import triton
import triton.language as tl

MAX_EXPERTS, MAX_K = 4096, 64


@triton.jit
def _router_kernel(
    logits_ptr,  # [T, E] fp32
    bias_ptr,  # [E] or [T, E] fp32
    experts_ptr,  # [T, k] int64
    weights_ptr,  # [T, k] fp32
    T,
    E,
    k,
    bias_stride,
    scale,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    # one program per ROWS tokens
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, WIDTH)[None, :]
    inside = (token < T) & (expert < E)
    x = tl.load(logits_ptr + token * E + expert, mask=inside, other=0.0)
    # log(1 + e^x) without losing what e^x adds to 1: log(u) e / (u - 1) is exact to rounding for u = 1 + e.
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    soft = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    s = tl.sqrt_rn(tl.where(x > 20.0, x, soft))
    score = s + tl.load(bias_ptr + token * bias_stride + expert, mask=inside, other=0.0)
    picked = tl.zeros([ROWS, WIDTH], tl.int32)
    for _ in range(k):
        left = inside & (picked == 0)
        best = tl.max(tl.where(left, score, float("-inf")), axis=1)[:, None]
        first = tl.min(tl.where(left & (score == best), expert, WIDTH), axis=1)[:, None]
        lowest = tl.min(tl.where(left, expert, WIDTH), axis=1)[:, None]  # where all that is left is NaN
        picked = tl.where(expert == tl.where(first == WIDTH, lowest, first), 1, picked)
    place = token * k + tl.cumsum(picked, axis=1) - 1
    total = tl.sum(tl.where(picked > 0, s, 0.0), axis=1)[:, None] + 1e-20
    write = inside & (picked > 0)
    tl.store(experts_ptr + place, tl.broadcast_to(expert, [ROWS, WIDTH]).to(tl.int64), mask=write)
    tl.store(weights_ptr + place, s / total * scale, mask=write)


def router(logits, bias, k, scale):
    """(experts int64, weights float32), both [T, k], experts ascending.

    logits: contiguous float32 [T, E]; bias: contiguous float32 [E] or [T, E]. A NaN among the logits of a token leaves
    a valid choice that means nothing.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise TypeError(f"logits must be contiguous float32 [tokens, experts], got {_describe(logits)}")
    tokens, number = logits.shape
    if not 1 <= number <= MAX_EXPERTS or not 1 <= k <= min(number, MAX_K):
        raise ValueError(f"experts must be 1 to {MAX_EXPERTS} and k 1 to {MAX_K} of them, got {number} and {k}")
    if bias.shape not in ((number,), (tokens, number)) or bias.dtype != torch.float32 or bias.device != logits.device:
        raise ValueError(f"bias must be float32 [{number}] or [{tokens}, {number}], got {_describe(bias)}")
    if not bias.is_contiguous():
        raise ValueError(f"bias must be contiguous, got {_describe(bias)}")
    experts = torch.empty(tokens, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    if tokens:
        padded = triton.next_power_of_2(number)
        many = logits.device.type == "cpu" or tokens >= 2048
        block = max(1, min(16, 4096 // padded)) if many else 1
        _router_kernel[(triton.cdiv(tokens, block),)](
            logits, bias, experts, weights, tokens, number, k, number if bias.ndim == 2 else 0, scale,
            WIDTH=padded, ROWS=block, num_warps=4,
        )  # fmt: skip
    return experts, weights


def _describe(t):
    return f"{t.dtype} {tuple(t.shape)} with strides {t.stride()} on {t.device}"


def aot_cases():
    """384 experts."""
    types = {"logits_ptr": "*fp32", "bias_ptr": "*fp32", "experts_ptr": "*i64", "weights_ptr": "*fp32"}
    types |= {"T": "i32", "E": "i32:16", "k": "i32", "bias_stride": "i32:16", "scale": "fp32"}
    return [("384 experts", _router_kernel, types, {"WIDTH": 512, "ROWS": 1}, {"num_warps": 4}, None)]
