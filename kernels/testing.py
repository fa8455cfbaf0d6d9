"""Helpers for the kernel tests: a relative error, and memory that shows when it was not written."""

import torch


def relative_error(out, reference):
    """||out - reference|| / ||reference|| in float64; infinite when NaN or infinity stand in different places."""
    out, reference = out.detach().double().cpu(), reference.detach().double().cpu()
    if out.shape != reference.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the reference has {tuple(reference.shape)}")
    finite = reference.isfinite()
    if not torch.equal(out.isfinite(), finite):
        return float("inf")
    special, expected = out[~finite], reference[~finite]
    if not torch.equal(special.nan_to_num(nan=0.5), expected.nan_to_num(nan=0.5)):
        return float("inf")
    difference = (out[finite] - reference[finite]).norm()
    scale = reference[finite].norm()
    if scale == 0:
        return 0.0 if difference == 0 else float("inf")
    return (difference / scale).item()


class poisoned_empty:
    """Context in which `torch.empty`, `empty_like` and `new_empty` return NaN, or 0xA5 bytes: unwritten results show.

    >>> with poisoned_empty():
    ...     torch.empty(2).isnan().all().item()
    True
    """

    def __enter__(self):
        self._saved = torch.empty, torch.empty_like, torch.Tensor.new_empty
        empty, empty_like, new_empty = self._saved
        torch.empty = lambda *a, **k: _poison(empty(*a, **k))
        torch.empty_like = lambda *a, **k: _poison(empty_like(*a, **k))
        torch.Tensor.new_empty = lambda *a, **k: _poison(new_empty(*a, **k))
        return self

    def __exit__(self, *exc):
        torch.empty, torch.empty_like, torch.Tensor.new_empty = self._saved
        return False


def _poison(tensor):
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(0xA5 if tensor.dtype == torch.uint8 else -0x5A5A if tensor.dtype.itemsize > 1 else -0x5B)
