"""Where the work is done: every op under one name, by `reference` (PyTorch, in its mechanism's file) or by `triton`.

The choice is an argument of the model and shown in its repr; nothing falls back. `triton` takes its ops from
`kernels.<module>`, imported when the backend is made; a kernel that is missing is an error then. Matrix products with
weights that are plain numbers are PyTorch's in both. On a CPU the kernels run in Triton's interpreter
(`TRITON_INTERPRET=1`), for tests: a few milliseconds for each program.

| op | reference | kernel |
| --- | --- | --- |
| `pack` | quant.py | block_quant |
| `compress` | compressor.py | compressor |
| `index_scores` | indexer.py | indexer |
| `top_k`, `top_blocks` | indexer.py | topk |
| `sparse_attention` | attention/csa2.py | sparse_attention |
| `coefficients`, `collapse`, `expand` | hyper_connection.py | hyper_connection |
| `remember` | engram.py | engram |
| `routed` | moe.py | none for expanded experts: PyTorch |
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from flashsim.formats import FP4, MXFP4, MXFP8
from model import compressor, engram, hyper_connection, indexer, moe
from model.attention import csa2
from model.hyper_connection import Mix
from model.layers import RMSNorm, arithmetic_dtype
from model.quant import Codec


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
    top_k = staticmethod(indexer.top_k)
    top_blocks = staticmethod(indexer.top_blocks)
    sparse_attention = staticmethod(csa2.sparse_attention)
    coefficients = staticmethod(hyper_connection.coefficients)
    collapse = staticmethod(hyper_connection.collapse)
    expand = staticmethod(hyper_connection.expand)
    remember = staticmethod(engram.remember)
    routed = staticmethod(moe.routed)

    def arithmetic(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """The type of activations."""
        return arithmetic_dtype(dtype, device)

    def check(self, dtype: torch.dtype, cache_rounding: bool) -> None:
        """Whether a model of this kind can run.

        Raises:
            BackendError: it cannot.
        """

    def __repr__(self) -> str:
        return f"backend={self.name!r}"


FORMATS = {MXFP8: "fp8", MXFP4: "mxfp4", FP4: "fp4"}  # what the kernels call them


class TritonBackend(Backend):
    """The ops of `kernels`, reached with flat rows and int32 indices."""

    name = "triton"
    modules = ("block_quant", "compressor", "indexer", "topk", "sparse_attention", "hyper_connection", "engram")

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

    def check(self, dtype: torch.dtype, cache_rounding: bool) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise BackendError(f"dtype is {dtype} with backend triton; accepted: torch.float32, torch.bfloat16")
        if not cache_rounding:
            raise BackendError(
                "cache_rounding is False with backend triton, which reads packed records; accepted: True"
            )

    def pack(self, x: Tensor, codec: Codec) -> Tensor:
        rows = x.reshape(-1, codec.width)
        records = torch.empty(len(rows), codec.nbytes, dtype=torch.uint8, device=x.device)
        self.kernels["block_quant"].block_quant(rows, FORMATS[codec.form], out=_planes(records, codec))
        return records.view(*x.shape[:-1], codec.nbytes)

    def compress(self, value, gate, norm: RMSNorm, frequency, first, dtype, codec: Codec) -> tuple[Tensor, Tensor]:
        batch, groups, ratio, width = value.shape
        records = torch.empty(batch, groups, codec.nbytes, dtype=torch.uint8, device=value.device)
        latents = []
        for b, start in enumerate(first.tolist()):
            codes, scales = _planes(records[b], codec)
            latent, _, _ = self.kernels["compressor"].compressor(
                value[b].reshape(groups * ratio, width),
                None if gate is None else gate[b].reshape(groups * ratio, width),
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
        return self.kernels["indexer"].indexer(
            q_codes, q_scales, weights.contiguous(), k_codes, k_scales, positions.contiguous(), ratio, **chosen
        )

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
        if entries is None:
            entries = torch.zeros(1, main_codec.nbytes, dtype=torch.uint8, device=q.device)
            indices = torch.full((len(q), 1), -1, device=q.device)
        return self.kernels["sparse_attention"].sparse_attention(
            q, *_planes(window, window_codec), slots.int(), *_planes(entries, main_codec), indices.int(), sink
        )

    def coefficients(self, h, fn, scale, base, *, norm_eps: float, iterations: int, eps: float) -> Mix:
        streams, kernel = h.shape[-2], self.kernels["hyper_connection"].hyper_coefficients
        pre, post, comb = kernel(h.flatten(0, -3), fn, base, scale, iterations, eps, norm_eps)
        lead = h.shape[:-2]
        return Mix(pre.view(*lead, streams), post.view(*lead, streams), comb.view(*lead, streams, streams))

    def collapse(self, h: Tensor, pre: Tensor) -> Tensor:
        rows = self.kernels["hyper_connection"].hyper_collapse(h.flatten(0, -3), pre.flatten(0, -2))
        return rows.view(*h.shape[:-2], -1)

    def expand(self, h: Tensor, y: Tensor, mix: Mix) -> Tensor:
        rows = self.kernels["hyper_connection"].hyper_expand(
            h.flatten(0, -3), y.flatten(0, -2), mix.post.flatten(0, -2), mix.comb.flatten(0, -3)
        )
        return rows.view(h.shape)

    def remember(self, h, kv, q_weight, k_weight, images, eps: float) -> Tensor:
        images = None if images is None else images.flatten()
        rows = self.kernels["engram"].engram_update(
            h.flatten(0, -3), kv.flatten(0, -2), q_weight, k_weight, image=images, eps=eps
        )
        return rows.view(h.shape)


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
