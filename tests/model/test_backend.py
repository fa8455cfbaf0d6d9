"""The two backends give the same numbers, and a backend that cannot run says so."""

import importlib.util

import pytest
import torch

from model.backend import BackendError, TritonBackend, make_backend
from model.transformer import Transformer

MISSING = [name for name in TritonBackend.modules if importlib.util.find_spec(f"kernels.{name}") is None]
needs_kernels = pytest.mark.skipif(bool(MISSING), reason=f"kernels without {', '.join(MISSING)}")


@needs_kernels
def test_triton_equals_reference(make_model, ids):
    """Prefill past the window and the top-k, then decode over both residues. Triton computes in float32: 3e-6 seen."""
    pytest.importorskip("triton")
    models = [make_model("tiny", torch.float32, backend=name) for name in ("reference", "triton")]
    caches = [model.new_cache(1) for model in models]
    for low, high in ((0, 9), (9, 10), (10, 11)):
        reference, triton = (m(ids[:1, low:high], cache=c) for m, c in zip(models, caches, strict=True))
        assert (triton - reference).norm() / reference.norm() < 1e-5
    assert caches[0].nbytes(by="component") == caches[1].nbytes(by="component")
    assert "backend='triton'" in repr(models[1])


@needs_kernels
def test_what_triton_cannot_run():
    with pytest.raises(BackendError, match="cache_rounding is False with backend triton"):
        Transformer("tiny", backend="triton", device="meta", cache_rounding=False)
    with pytest.raises(BackendError, match=r"dtype is torch\.float64 with backend triton"):
        Transformer("tiny", backend="triton", device="meta", dtype=torch.float64)


def test_a_missing_kernel_is_an_error(monkeypatch):
    monkeypatch.setattr(TritonBackend, "modules", ("no_such_op",))
    with pytest.raises(BackendError, match=r"needs kernels\.no_such_op .*accepted: reference"):
        make_backend("triton")
