"""Layers whose weights stay as they are stored, packed and possibly on disk, and are expanded for each use.

A `StoredWeight` is the bytes of one parameter: views of a memory-mapped file, or copies in memory. The layers here take
the place of those in `model.layers` and compute the same numbers; an embedding expands the rows it looks up, a linear
layer a band of rows at a time. So a model runs whose weights are larger than memory. Pages of a mapped weight are given
back after each use: the system keeps what it has room for.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashsim.formats import MXFP8
from model.checkpoint import Checkpoint
from model.layers import Embedding, GroupedLinear, Linear, wide
from model.quant import pack as pack_record
from model.quant import unpack_record
from model.safetensors_file import TORCH_TYPES, CheckpointError
from model.tensor_table import BLOCK, scale_name
from model.weight_formats import WeightValueError, unpack

STORABLE = (Embedding, GroupedLinear, Linear)
"""The layers that `store` has a counterpart of."""

BAND_ELEMENTS = 2**24
"""Numbers of a linear layer's weight that are expanded at a time."""


class StoredWeight:
    """One parameter [rows, width] as the file has it.

    Args:
        checkpoint, name: where it is.
        dtype: of the expanded numbers.
        mapped: leave the bytes in the file; otherwise copy them, to `device`.

    Raises (when used):
        CheckpointError: a scale or a value is NaN or infinite; names the tensor.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, dtype: torch.dtype, *, mapped: bool, device="cpu"):
        self.name, self.dtype, self.mapped = name, dtype, mapped
        self.shape, self.kind = checkpoint.table[name].shape, checkpoint.table[name].kind
        self.packed, self._where = name in checkpoint.packed, checkpoint.folder.name
        file = checkpoint.owner[name]
        self.stored_dtype = TORCH_TYPES[file.headers[name].dtype]
        self._files = [(file, name)]
        self.weight, self.scale = file.raw(name), None
        if self.packed:
            self._files.append((checkpoint.owner[scale_name(name)], scale_name(name)))
            self.scale = checkpoint.packed_rows(name)[1]
        if not mapped:
            self.weight = self.weight.to(device, copy=True)
            self.scale = None if self.scale is None else self.scale.to(device, copy=True)

    @property
    def nbytes(self) -> int:
        """Bytes as stored, scales included."""
        return self.weight.nbytes + (self.scale.nbytes if self.scale is not None else 0)

    def rows(self, start: int = 0, stop: int | None = None, device=None) -> Tensor:
        """Rows `start` to `stop` as numbers; `start` is a multiple of 32 where the weight is packed in tiles."""
        stop = self.shape[0] if stop is None else stop
        tall = BLOCK if self.kind == "fp8" else 1
        scale = self.scale[start // tall : -(-stop // tall)] if self.packed else None
        return self._expand(self.weight[start:stop], scale, device)

    def gather(self, ids: Tensor) -> Tensor:
        """The rows of `ids` [...] as numbers [..., width]. Not for weights packed in tiles."""
        flat = ids.flatten().to(self.weight.device)
        scale = self.scale[flat] if self.packed else None
        return self._expand(self.weight[flat], scale, ids.device).view(*ids.shape, -1)

    def expect_rows_at_random(self) -> None:
        """Tells the system that single rows will be looked up."""
        for file, name in self._files if self.mapped else ():
            file.expect_rows_at_random(name)

    def forget(self) -> None:
        """Gives back the pages of a mapped weight."""
        for file, name in self._files if self.mapped else ():
            file.forget(name)

    def _expand(self, weight: Tensor, scale: Tensor | None, device) -> Tensor:
        device = device or weight.device
        if not self.packed:
            values = weight.to(device, copy=True).view(self.stored_dtype).to(self.dtype)
        else:
            try:
                values = unpack(weight.to(device), scale.to(device), self.kind).to(self.dtype)
            except WeightValueError as error:
                raise CheckpointError(f"{self._where}: {self.name} cannot be used: {error}") from None
        if not torch.isfinite(values).all():
            raise CheckpointError(f"{self._where}: {self.name} has a value that is not finite in {self.dtype}")
        return values

    def __repr__(self) -> str:
        form = self.kind if self.packed else str(self.stored_dtype).removeprefix("torch.")
        return f"{' x '.join(map(str, self.shape))} {form}, {'mapped' if self.mapped else 'in memory'}"


class StoredEmbedding(nn.Module):
    """`model.layers.Embedding` over a stored weight. `weight` is empty: it says where results go."""

    def __init__(self, stored: StoredWeight, device):
        super().__init__()
        self.stored = stored
        stored.expect_rows_at_random()
        self.register_buffer("weight", torch.empty(0, stored.shape[1], dtype=stored.dtype, device=device), False)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] ids to [..., width]."""
        return self.stored.gather(ids)

    def extra_repr(self) -> str:
        return repr(self.stored)


class StoredLinear(nn.Module):
    """`model.layers.Linear` or `GroupedLinear` over a stored weight [groups * out, in].

    With `activation_rounding` the input of a packed weight is rounded to FP8 in groups of 32 first, as the trained
    model did (V4.1 architecture 6.5); the grouped product is never rounded.
    """

    def __init__(self, stored: StoredWeight, *, groups: int = 1, widened: bool = False, activation_rounding=False):
        super().__init__()
        self.stored, self.groups, self.widened = stored, groups, widened
        self.activation_rounding = activation_rounding and stored.packed and groups == 1

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], or [..., G * in] to [..., G * out]."""
        rows, width = self.stored.shape
        if self.activation_rounding:
            x = unpack_record(pack_record(x, MXFP8), MXFP8, x.shape[-1], x.dtype)
        x = wide(x) if self.widened else x
        out = torch.empty(*x.shape[:-1], rows, dtype=x.dtype, device=x.device)
        per_group = rows // self.groups
        for start, stop in _bands(rows, width):
            weight = self.stored.rows(start, stop, x.device).to(x.dtype)
            first, last = start // per_group, (stop - 1) // per_group
            for group in range(first, last + 1):  # a band may end inside a group
                low, high = max(start, group * per_group), min(stop, (group + 1) * per_group)
                part = x[..., group * width : (group + 1) * width]
                out[..., low:high] = F.linear(part, weight[low - start : high - start])
        self.stored.forget()
        return out

    def extra_repr(self) -> str:
        return f"{self.stored!r}, groups={self.groups}, activation_rounding={self.activation_rounding}"


def store(module: nn.Module, stored: StoredWeight, device, activation_rounding: bool = False) -> nn.Module:
    """The layer that takes the place of `module`, one of `STORABLE`."""
    if isinstance(module, Embedding):
        return StoredEmbedding(stored, device)
    if isinstance(module, GroupedLinear):
        return StoredLinear(stored, groups=module.groups)
    return StoredLinear(stored, widened=module.widened, activation_rounding=activation_rounding)


def _bands(rows: int, width: int):
    step = max(BAND_ELEMENTS // width // BLOCK, 1) * BLOCK
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
