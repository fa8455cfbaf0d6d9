"""Where the work is done: every op under one name, by `reference` (PyTorch, in its mechanism's file) or by `triton`.

The choice is an argument of the model and shown in its repr; nothing falls back. `triton` takes its ops from
`kernels.<module>`, imported when the backend is made; a kernel that is missing is an error then. On a CPU the kernels
run in Triton's interpreter (`TRITON_INTERPRET=1`), for tests: a few milliseconds for each program.

| op | reference | kernel of `triton` |
| --- | --- | --- |
| `pack` | quant.py | block_quant |
| `compress` | compressor.py | compressor |
| `index_scores` | indexer.py | indexer |
| `top_k`, `top_blocks` | indexer.py | topk |
| `sparse_attention` | attention/csa2.py | sparse_attention |
| `coefficients`, `collapse`, `expand` | hyper_connection.py | hyper_connection |
| `rms_norm` | layers.py | rms_norm |
| `rotate`, which may change x | rope.py | rope |
| `route`, without a NaN | moe.py | router |
| `rows`, `remember` | engram.py | engram (`engram_rows`, `engram_update`) |
| `gather`, a packed Engram table | stored_weights.py | engram (`engram_gather`) |
| `packed_linear`, FP8 tiles | stored_weights.py | linear |
| `feed_forward`, packed FP4 experts with `activation_rounding` | moe.py | moe |
| weights that are plain numbers: embedding, linears, experts | PyTorch | PyTorch |
| packed experts without `activation_rounding` | moe.py | PyTorch: the kernel always rounds their inputs |
| weights left in the files (`offload`) | stored_weights.py | PyTorch: the kernels read device memory |
| products of plain weights, pooling of block maxima, rings | PyTorch | PyTorch |

With `activation_rounding` both backends round the same values; without, `linear` multiplies its input as it is.
"""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from flashsim.config import V41Config
from flashsim.formats import FP4, MXFP4, MXFP8
from flashsim.schedule import layer_plan
from model import compressor, engram, hyper_connection, indexer, layers, moe, rope, stored_weights
from model.attention import csa2
from model.flop_counter import count
from model.hyper_connection import Mix
from model.layers import RMSNorm, arithmetic_dtype, wide
from model.quant import Codec
from model.stored_weights import ExpertStack, StoredLinear, StoredWeight
from model.tensor_table import BLOCK


class BackendError(ValueError):
    """A backend that does not exist or cannot run here."""


class Backend:
    """The `reference` ops. Contracts stand at the functions."""

    name = "reference"

    def pack(self, x: Tensor, codec: Codec) -> Tensor:
        """Records uint8 [..., bytes] of vectors [..., width]."""
        return codec.pack(x)

    compress = staticmethod(compressor.compress)
    index_scores = staticmethod(indexer.index_scores)
    score_rows = staticmethod(indexer.score_rows)
    top_k = staticmethod(indexer.top_k)
    top_blocks = staticmethod(indexer.top_blocks)
    sparse_attention = staticmethod(csa2.sparse_attention)
    attention_rows = staticmethod(csa2.attention_rows)
    rms_norm = staticmethod(layers.rms_norm)
    route = staticmethod(moe.route)
    coefficients = staticmethod(hyper_connection.coefficients)
    collapse = staticmethod(hyper_connection.collapse)
    expand = staticmethod(hyper_connection.expand)
    rows = staticmethod(engram.rows)
    remember = staticmethod(engram.remember)
    feed_forward = staticmethod(moe.feed_forward)
    packed_linear = staticmethod(stored_weights.packed_linear)

    def rotate(self, x: Tensor, turn: Tensor, back: bool = False) -> Tensor:
        """x [..., width] with its last channels turned, `back` by the conjugate; x itself may be changed."""
        return rope.rotate(x, turn.conj() if back else turn)

    def gather(self, stored: StoredWeight, ids: Tensor) -> Tensor:
        """[..., width] rows of a stored weight."""
        return stored.gather(ids)

    def arithmetic(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """The type of activations."""
        return arithmetic_dtype(dtype, device)

    def check(self, config: V41Config, dtype: torch.dtype, device: torch.device, cache_rounding: bool) -> None:
        """Whether a model of this kind can run. On `meta` it will not, so any kind may be there.

        Raises:
            BackendError: it cannot.
        """

    def check_stored(self, stored: StoredWeight, rounding: bool) -> None:
        """Whether a packed weight can be used, its input rounded or not.

        Raises:
            BackendError: it cannot.
        """

    def reader(self, stored: StoredWeight) -> str:
        """Who multiplies with a stored weight, for people."""
        return "PyTorch"

    def expert_runner(self, layer: moe.MoE) -> str:
        """Who runs the experts of a layer, for people."""
        return "PyTorch"

    def __repr__(self) -> str:
        return f"backend={self.name!r}"


SCORES_AT_ONCE = 2**28  # float32 scores [rows, entries] that exist at a time, 1 GiB
QUERIES_AT_ONCE = 2**15  # of one launch; a grid takes 65,535 of them
NARROWEST = 64  # channels of a head that the attention kernel begins with
FORMATS = {MXFP8: "fp8", MXFP4: "mxfp4", FP4: "fp4"}  # what the kernels call them


class TritonBackend(Backend):
    """The ops of `kernels`, reached with flat rows and int32 indices."""

    name = "triton"
    modules = (
        "block_quant",
        "compressor",
        "indexer",
        "topk",
        "sparse_attention",
        "hyper_connection",
        "engram",
        "linear",
        "moe",
        "rms_norm",
        "rope",
        "router",
    )

    def __init__(self):
        found = {}
        for name in self.modules:
            try:
                found[name] = importlib.import_module(f"kernels.{name}")
            except ModuleNotFoundError as error:
                raise BackendError(
                    f"backend is 'triton', which needs kernels.{name} ({error}); accepted: reference"
                ) from None
        self.kernels: dict[str, ModuleType] = found

    def arithmetic(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        return dtype

    def check(self, config: V41Config, dtype: torch.dtype, device: torch.device, cache_rounding: bool) -> None:
        if device.type == "cpu" and not self._interpreted():
            raise BackendError(
                "device is cpu with backend triton, whose kernels are compiled for a GPU; accepted: cuda, or "
                "TRITON_INTERPRET=1 in the environment before they are imported"
            )
        if dtype not in (torch.float32, torch.bfloat16):
            raise BackendError(f"dtype is {dtype} with backend triton; accepted: torch.float32, torch.bfloat16")
        if not cache_rounding:
            raise BackendError(
                "cache_rounding is False with backend triton, which reads packed records; accepted: True"
            )
        for field, good, accepted in self._limits(config):
            if not good(getattr(config, field)):
                raise BackendError(f"{field} is {getattr(config, field)} with backend triton; accepted: {accepted}")

    def _interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels."""
        from triton import JITFunction

        return not isinstance(self.kernels["linear"]._linear_kernel, JITFunction)

    def _limits(self, config: V41Config):
        """(field, test, words) of what the kernels take of a config."""
        most, columns, entries = (
            getattr(self.kernels[kernel], name)
            for kernel, name in (("topk", "MAX_K"), ("indexer", "MAX_COLUMNS"), ("indexer", "BLOCK_E"))
        )
        yield "head_dim", lambda n: n % BLOCK == 0 and n <= 512, f"a multiple of {BLOCK} up to 512"
        yield "num_attention_heads", lambda n: n <= 128, "up to 128"
        yield "hidden_size", lambda n: 32 <= n <= 8192, "32 to 8192"
        yield "hc_mult", lambda n: n <= 8, "up to 8"
        plans = layer_plan(config)
        if any(plan.owns_kv for plan in plans):
            yield "qk_rope_head_dim", lambda n: n & (n - 1) == 0, "0 or a power of two"
        if any(plan.selects for plan in plans):
            yield "index_head_dim", lambda n: n in (32, 64, 128, 256), "32, 64, 128 or 256"
            yield "index_n_heads", lambda n: n <= columns, f"up to {columns}"
            yield "index_topk", lambda n: n <= most, f"up to {most}"
        if any(plan.builds_candidates for plan in plans):
            yield "candidate_topk_blocks", lambda n: n <= most, f"up to {most}"
            yield "candidate_block_size", lambda n: n & (n - 1) == 0 and n <= entries, f"a power of two up to {entries}"
        if config.engram_layer_ids:
            yield "engram_max_ngram_size", lambda n: 2 <= n <= 8, "2 to 8"

    def pack(self, x: Tensor, codec: Codec) -> Tensor:
        rows = x.reshape(-1, codec.width)
        records = torch.empty(len(rows), codec.nbytes, dtype=torch.uint8, device=x.device)
        self.kernels["block_quant"].block_quant(rows, FORMATS[codec.form], out=_planes(records, codec))
        return records.view(*x.shape[:-1], codec.nbytes)

    def compress(self, value, gate, norm: RMSNorm, frequency, groups, dtype, codec: Codec) -> tuple[Tensor, Tensor]:
        batch, number, ratio, width = value.shape
        records = torch.empty(batch, number, codec.nbytes, dtype=torch.uint8, device=value.device)
        latents = []
        for b, start in enumerate(groups.starts):
            codes, scales = _planes(records[b], codec)
            latent, _, _ = self.kernels["compressor"].compressor(
                value[b].reshape(number * ratio, width),
                None if gate is None else gate[b].reshape(number * ratio, width),
                norm.weight,
                frequency,
                codes,
                scales,
                ratio,
                start * ratio,
                entry_offset=0,
                eps=norm.eps,
                format=FORMATS[codec.form],
                latent_dtype=dtype,
            )
            latents.append(latent)
        return torch.stack(latents), records

    def index_scores(self, queries, weights, keys, positions, ratio, codec: Codec, candidates=None, block_size=1):
        q_codes, q_scales = (plane.contiguous() for plane in _planes(queries, codec))
        k_codes, k_scales = _planes(keys, codec)
        chosen = {}
        if candidates is not None:
            chosen = {"candidates": candidates.int().contiguous(), "block_size": block_size}
        scores = self.kernels["indexer"].indexer(
            q_codes, q_scales, weights.contiguous(), k_codes, k_scales, positions.contiguous(), ratio, **chosen
        )
        count(2 * scores.numel() * queries.shape[2] * codec.width)
        return scores

    def score_rows(self, scores: int, heads: int) -> int:
        return SCORES_AT_ONCE // scores  # the products of the heads never leave the kernel

    def top_k(self, scores: Tensor, k: int) -> Tensor:
        k = min(k, scores.shape[-1])
        if k == 0:
            return torch.empty(*scores.shape[:-1], 0, dtype=torch.int64, device=scores.device)
        picked = self.kernels["topk"].topk(scores.flatten(0, -2), k)
        return picked.long().view(*scores.shape[:-1], k)

    def top_blocks(self, maxima: Tensor, k: int, newest: Tensor) -> Tensor:
        k = min(k, maxima.shape[-1])
        if k == 0:
            return torch.empty(*maxima.shape[:-1], 0, dtype=torch.int64, device=maxima.device)
        picked = self.kernels["topk"].topk_blocks(maxima.flatten(0, -2), k, newest.flatten().int())
        return picked.long().view(*maxima.shape[:-1], k)

    def sparse_attention(
        self, q, window, slots, entries, indices, sink, window_codec: Codec, main_codec: Codec
    ) -> Tensor:
        count(4 * q.numel() * slots.shape[1], "attention_window")
        if entries is not None:
            count(4 * q.numel() * indices.shape[1], "attention_selected")
        else:
            entries = torch.zeros(1, main_codec.nbytes, dtype=torch.uint8, device=q.device)
            indices = torch.full((len(q), 1), -1, device=q.device)
        planes, width = [*_planes(window, window_codec), *_planes(entries, main_codec)], q.shape[-1]
        if width < NARROWEST:  # a small model: zeros beside query and records, whose products are zeros
            wider = NARROWEST / width
            planes = [F.pad(p, (0, int(p.shape[1] * wider) - p.shape[1])) for p in planes]
            q = F.pad(q * wider**0.5, (0, NARROWEST - width))  # the kernel divides by the root of the width it sees
        attend = self.kernels["sparse_attention"].sparse_attention
        return attend(q, *planes[:2], slots.int(), *planes[2:], indices.int(), sink)[..., :width]

    def attention_rows(self, gathered: int) -> int:
        return QUERIES_AT_ONCE  # nothing is gathered

    def rms_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        rows = self.kernels["rms_norm"].rms_norm(x.reshape(-1, x.shape[-1]), norm.weight, norm.eps)
        return rows.view(x.shape)

    def rotate(self, x: Tensor, turn: Tensor, back: bool = False) -> Tensor:
        pairs, lead = turn.shape[-1], x.shape[:-1]
        if not pairs or not x.is_contiguous() or turn.shape[:-1] not in (lead, (*lead[:-1], 1)):
            return super().rotate(x, turn, back)
        self.kernels["rope"].rope_(x.flatten(0, -2), turn.reshape(-1, pairs), back)
        return x

    def route(self, logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
        return self.kernels["router"].router(logits, bias, k, scale)

    def coefficients(self, h, fn, scale, base, *, norm_eps: float, iterations: int, eps: float) -> Mix:
        streams, kernel = h.shape[-2], self.kernels["hyper_connection"].hyper_coefficients
        pre, post, comb = kernel(h.flatten(0, -3), fn, base, scale, iterations, eps, norm_eps)
        lead = h.shape[:-2]
        count(2 * lead.numel() * fn.numel(), "hyper_connection")
        return Mix(pre.view(*lead, streams), post.view(*lead, streams), comb.view(*lead, streams, streams))

    def collapse(self, h: Tensor, pre: Tensor) -> Tensor:
        rows = self.kernels["hyper_connection"].hyper_collapse(h.flatten(0, -3), pre.flatten(0, -2))
        return rows.view(*h.shape[:-2], -1)

    def expand(self, h: Tensor, y: Tensor, mix: Mix) -> Tensor:
        rows = self.kernels["hyper_connection"].hyper_expand(
            h.flatten(0, -3), y.flatten(0, -2), mix.post.flatten(0, -2), mix.comb.flatten(0, -3)
        )
        count(2 * h.numel() * h.shape[-2], "hyper_connection_mixing")
        return rows.view(h.shape)

    def remember(self, h, kv, q_weight, k_weight, images, eps: float) -> Tensor:
        images = None if images is None else images.flatten()
        rows = self.kernels["engram"].engram_update(
            h.flatten(0, -3), kv.flatten(0, -2), q_weight, k_weight, image=images, eps=eps
        )
        return rows.view(h.shape)

    def rows(self, history: engram.History, table: engram.HashTable) -> Tensor:
        new = history.ids.shape[1] - history.order + 1
        return self.kernels["engram"].engram_rows(history.ids, *table, history.pad, history.blocked, new)

    # --- packed weights ---------------------------------------------------------------------------------------------

    def check_stored(self, stored: StoredWeight, rounding: bool) -> None:
        expert = stored.kind == "fp4" and stored.packed and not stored.mapped and rounding
        if self.reader(stored) == "PyTorch" and not expert:
            return
        rows, width = stored.shape
        if width % BLOCK or (stored.kind != "table" and rows % BLOCK):
            raise BackendError(
                f"{stored.name} has shape {[rows, width]} with backend triton, whose kernels read whole blocks; "
                f"accepted: multiples of {BLOCK}"
            )

    def reader(self, stored: StoredWeight) -> str:
        in_memory = stored.packed and not stored.mapped
        return {"fp8": "kernel linear", "table": "kernel engram_gather"}.get(
            stored.kind if in_memory else "", "PyTorch"
        )

    def expert_runner(self, layer: moe.MoE) -> str:
        return "kernel moe" if layer.stack is not None and layer.stack.activation_rounding else "PyTorch"

    def gather(self, stored: StoredWeight, ids: Tensor) -> Tensor:
        if self.reader(stored) == "PyTorch":
            return stored.gather(ids)
        rows = ids.unsqueeze(-1).contiguous()
        return self.kernels["engram"].engram_gather(stored.weight, stored.scale, rows, stored.dtype)

    def packed_linear(self, x: Tensor, stored: StoredWeight, groups: int, rounding: bool) -> Tensor:
        if self.reader(stored) == "PyTorch":
            return stored_weights.packed_linear(x, stored, groups, rounding)
        rows, width = stored.shape
        if rows // groups % BLOCK == 0:
            x, lead = x.reshape(-1, groups * width), x.shape[:-1]
            y = self.kernels["linear"].linear(x, stored.weight, stored.scale, act_quant=rounding, groups=groups)
            count(2 * y.numel() * width)
            return y.view(*lead, rows)
        x, lead, per_group, out = x.reshape(-1, groups, width), x.shape[:-1], rows // groups, []
        for group in range(groups):
            first, last = group * per_group, (group + 1) * per_group
            low, high = first // BLOCK, -(-last // BLOCK)  # whole tiles, also where a group ends inside one
            y = self.kernels["linear"].linear(
                x[:, group], stored.weight[low * BLOCK : high * BLOCK], stored.scale[low:high], act_quant=rounding
            )
            count(2 * y.numel() * width)
            out.append(y[:, first - low * BLOCK : last - low * BLOCK])
        return (torch.cat(out, dim=1) if groups > 1 else out[0]).view(*lead, rows)

    def feed_forward(self, x: Tensor, experts: Tensor, weights: Tensor, layer: moe.MoE) -> Tensor:
        if self.expert_runner(layer) == "PyTorch":
            return moe.feed_forward(x, experts, weights, layer)
        stack, shared = layer.stack, layer.shared_experts
        together = self._planes_beside(stack, shared)
        out = self.kernels["moe"].moe(
            x.contiguous(),
            experts.int(),
            weights.float(),
            stack.w1,
            stack.w3,
            stack.w2,
            shared=together,
            limit=math.inf if layer.limit is None else layer.limit,
        )
        one_each = 6 * x.numel() * stack.w1[0].shape[1]  # an expert for every row: three products of D x I
        count(one_each * experts.shape[1], "routed_experts")
        if together is not None:
            count(one_each, "shared_experts")
        return out if shared is None or together is not None else wide(out) + wide(shared(x))

    def _planes_beside(self, stack: ExpertStack, shared: moe.Expert | None):
        """Codes and scales of w1, w3, w2 of a shared expert that the kernel can run with the routed ones, or None."""
        layers = [] if shared is None else [getattr(shared, name) for name in stack.MATRICES]
        if not layers or not all(isinstance(each, StoredLinear) and each.stored.packed for each in layers):
            return None
        if layers[0].stored.shape[0] != stack.w1[0].shape[1]:  # several shared experts are one wide one
            return None
        return [(each.stored.weight, each.stored.scale) for each in layers]


def _planes(records: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Codes and scales of records, two views."""
    scales = codec.form.scales(codec.width)
    return records[..., :-scales], records[..., -scales:]


BACKENDS = {"reference": Backend, "triton": TritonBackend}


def make_backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        BackendError: no such backend, or one that cannot run here.
    """
    if name not in BACKENDS:
        raise BackendError(f"backend is {name!r}; accepted: {', '.join(BACKENDS)}")
    return BACKENDS[name]()


def measured_rates() -> tuple[float, dict[str, float]]:
    """(bytes a second of a copy, FLOPs a second of a product by type) on the GPU that `kernels.bench` knows."""
    bench = importlib.import_module("kernels.bench")
    return bench.COPY_BYTES_PER_S, bench.FLOPS_PER_S
