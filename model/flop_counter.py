"""FLOPs of a real step, counted where PyTorch dispatches them, sorted by the components of `flashsim.decode_flops`."""

from __future__ import annotations

_labels: list[str] = []


class label:
    """Names the component of the products inside a `with` block."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __enter__(self):
        _labels.append(self.name)

    def __exit__(self, *error):
        _labels.pop()
