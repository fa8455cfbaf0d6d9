"""Where the work is done: every op under one name, by `reference` (PyTorch, in its mechanism's file) or by `triton`.

The choice is an argument of the model and shown in its repr; nothing falls back. `triton` takes each op from
`kernels.<module>`, imported when the backend is made, and an op without a kernel is an error. On a CPU it runs in
Triton's interpreter.
"""

from __future__ import annotations

from torch import Tensor

from model import attention, compressor, indexer, moe  # noqa: F401
from model.attention import csa2
from model.quant import Codec


class BackendError(ValueError):
    """A backend that does not exist or cannot run here."""


class Backend:
    """The `reference` ops."""

    name = "reference"

    def pack(self, x: Tensor, codec: Codec) -> Tensor:
        """Records [..., bytes] of vectors [..., width]."""
        return codec.pack(x)

    compress = staticmethod(compressor.compress)
    index_scores = staticmethod(indexer.index_scores)
    top_k = staticmethod(indexer.top_k)
    top_blocks = staticmethod(indexer.top_blocks)
    sparse_attention = staticmethod(csa2.sparse_attention)
    routed = staticmethod(moe.routed)

    def __repr__(self) -> str:
        return f"backend={self.name!r}"


BACKENDS = {"reference": Backend}


def make_backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        BackendError: no such backend.
    """
    if name not in BACKENDS:
        raise BackendError(f"backend is {name!r}; accepted: {', '.join(BACKENDS)}")
    return BACKENDS[name]()
