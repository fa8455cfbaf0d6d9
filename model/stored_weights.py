"""Layers whose weights stay as they are stored, packed and possibly on disk.

A `StoredWeight` is the bytes of one parameter: views of a memory-mapped file, or copies in memory. The layers here take
the place of those in `model.layers` and compute the same numbers. Their products are ops of the backend: `reference`
expands what it uses, the rows that an embedding looks up, a band of rows of a linear layer at a time, so a model runs
whose weights are larger than memory; kernels read the bytes as they lie. Pages of a mapped weight are given back after
each use: the system keeps what it has room for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashsim.formats import MXFP8
from model.checkpoint import Checkpoint
from model.layers import Embedding, GroupedLinear, Linear, wide
from model.quant import pack as pack_record
from model.quant import unpack_record
from model.safetensors_file import TORCH_TYPES, CheckpointError, SafetensorsFile
from model.tensor_table import BLOCK, NIBBLES, scale_name
from model.weight_formats import WeightValueError, pack, refuse_nan, unpack

if TYPE_CHECKING:
    from model.backend import Backend

STORABLE = (Embedding, GroupedLinear, Linear)
"""The layers that `store` has a counterpart of."""

Place = tuple[Tensor, Tensor] | None
"""Where the codes and scales of a packed weight go; None for tensors of their own."""

BAND_ELEMENTS = 2**24
"""Numbers of a linear layer's weight that are expanded at a time."""


class StoredWeight:
    """One parameter [rows, width] as a checkpoint has it; `read` takes it from a folder, `pack` from numbers.

    Args:
        name, shape, kind: as in `model.tensor_table`.
        dtype: of the expanded numbers.
        weight, scale: the bytes of a packed weight, uint8; or those of plain numbers and None.
        stored_dtype: of plain numbers.
        files: where a mapped weight lies.

    Raises (a mapped weight when used, one in memory at once):
        CheckpointError: a scale or a value is NaN or infinite; names the tensor.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: str,
        dtype: torch.dtype,
        weight: Tensor,
        scale: Tensor | None,
        *,
        stored_dtype: torch.dtype = torch.uint8,
        files: Sequence[SafetensorsFile] = (),
        where: str = "model",
    ):
        self.name, self.shape, self.kind, self.dtype = name, shape, kind, dtype
        self.weight, self.scale, self.stored_dtype = weight, scale, stored_dtype
        self.packed, self.mapped = scale is not None, bool(files)
        self._files, self._where = list(zip(files, (name, scale_name(name)), strict=False)), where
        if self.packed and not self.mapped:
            with self._named():
                refuse_nan(weight, scale, kind)

    @classmethod
    def read(
        cls, checkpoint: Checkpoint, name: str, dtype: torch.dtype, *, mapped: bool, device="cpu", place: Place = None
    ) -> StoredWeight:
        """A parameter of a checkpoint: left in the file where `mapped`, else copied to `device`, or into `place`."""
        spec, file, scale, files = checkpoint.table[name], checkpoint.owner[name], None, [checkpoint.owner[name]]
        weight = file.raw(name)
        if name in checkpoint.packed:
            scale = checkpoint.packed_rows(name)[1]
            files.append(checkpoint.owner[scale_name(name)])
        if not mapped:
            weight, scale, files = *_put(weight, scale, device, place), ()
        stored_dtype, where = TORCH_TYPES[file.headers[name].dtype], checkpoint.folder.name
        return cls(
            name, spec.shape, spec.kind, dtype, weight, scale, stored_dtype=stored_dtype, files=files, where=where
        )

    @classmethod
    def pack(cls, name: str, values: Tensor, kind: str, dtype: torch.dtype, *, place: Place = None) -> StoredWeight:
        """The numbers [rows, width] of a parameter, packed as the release packs this kind."""
        planes = _put(*pack(values, kind), values.device, place)
        return cls(name, tuple(values.shape), kind, dtype, *planes)

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
        for file, name in self._files:
            file.expect_rows_at_random(name)

    def forget(self) -> None:
        """Gives back the pages of a mapped weight."""
        for file, name in self._files:
            file.forget(name)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Says of which tensor an error is."""
        try:
            yield
        except WeightValueError as error:
            raise CheckpointError(f"{self._where}: {self.name} cannot be used: {error}") from None

    def _expand(self, weight: Tensor, scale: Tensor | None, device) -> Tensor:
        device = device or weight.device
        if not self.packed:
            values = weight.to(device, copy=True).view(self.stored_dtype).to(self.dtype)
        else:
            with self._named():
                values = unpack(weight.to(device), scale.to(device), self.kind).to(self.dtype)
        if not torch.isfinite(values).all():
            raise CheckpointError(f"{self._where}: {self.name} has a value that is not finite in {self.dtype}")
        return values

    def __repr__(self) -> str:
        form = self.kind if self.packed else str(self.stored_dtype).removeprefix("torch.")
        return f"{' x '.join(map(str, self.shape))} {form}, {'mapped' if self.mapped else 'in memory'}"


def _put(weight: Tensor, scale: Tensor | None, device, place: Place) -> tuple[Tensor, Tensor | None]:
    """Copies of both on a device, or in their place."""
    if place is not None:
        return place[0].copy_(weight), place[1].copy_(scale)
    return weight.to(device, copy=True), None if scale is None else scale.to(device, copy=True)


def packed_linear(x: Tensor, stored: StoredWeight, groups: int, rounding: bool) -> Tensor:
    """x [..., groups * in] times a stored weight [groups * out, in], a band of rows at a time: [..., groups * out].

    With `rounding` x goes through FP8 in groups of 32 first.
    """
    rows, width = stored.shape
    if rounding:
        x = unpack_record(pack_record(x, MXFP8), MXFP8, x.shape[-1], x.dtype)
    out = torch.empty(*x.shape[:-1], rows, dtype=x.dtype, device=x.device)
    per_group = rows // groups
    for start, stop in _bands(rows, width):
        weight = stored.rows(start, stop, x.device).to(x.dtype)
        first, last = start // per_group, (stop - 1) // per_group
        for group in range(first, last + 1):  # a band may end inside a group
            low, high = max(start, group * per_group), min(stop, (group + 1) * per_group)
            part = x[..., group * width : (group + 1) * width]
            out[..., low:high] = F.linear(part, weight[low - start : high - start])
    stored.forget()
    return out


def _bands(rows: int, width: int):
    step = max(BAND_ELEMENTS // width // BLOCK, 1) * BLOCK
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


class StoredEmbedding(nn.Module):
    """`model.layers.Embedding` over a stored weight. `weight` is empty: it says where results go."""

    def __init__(self, stored: StoredWeight, device, backend: Backend):
        super().__init__()
        self.stored, self.backend = stored, backend
        stored.expect_rows_at_random()
        self.register_buffer("weight", torch.empty(0, stored.shape[1], dtype=stored.dtype, device=device), False)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] ids to [..., width]."""
        return self.backend.gather(self.stored, ids)

    def extra_repr(self) -> str:
        return f"{self.stored!r}, read by {self.backend.reader(self.stored)}"


class StoredLinear(nn.Module):
    """`model.layers.Linear` or `GroupedLinear` over a stored weight [groups * out, in].

    With `activation_rounding` the input of a packed weight is rounded to FP8 in groups of 32 first, as the trained
    model did (V4.1 architecture 6.5); the grouped product is never rounded.
    """

    def __init__(
        self,
        stored: StoredWeight,
        backend: Backend,
        *,
        groups: int = 1,
        widened: bool = False,
        activation_rounding: bool = False,
    ):
        super().__init__()
        self.stored, self.backend, self.groups, self.widened = stored, backend, groups, widened
        self.activation_rounding = activation_rounding and stored.packed and groups == 1

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], or [..., G * in] to [..., G * out]."""
        x = wide(x) if self.widened else x
        return self.backend.packed_linear(x, self.stored, self.groups, self.activation_rounding)

    def extra_repr(self) -> str:
        rounding = f"groups={self.groups}, activation_rounding={self.activation_rounding}"
        return f"{self.stored!r}, {rounding}, read by {self.backend.reader(self.stored)}"


def stored_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """The weights of a model, or of a part of it, that stay as they are stored, by their released names."""
    layers = (module for module in model.modules() if isinstance(module, StoredEmbedding | StoredLinear))
    return {layer.stored.name: layer.stored for layer in layers}


class ExpertStack:
    """The packed routed experts of one layer, each of their matrices in one tensor, so that a kernel finds any of them.

    `w1`, `w3` and `w2` are (codes uint8 [experts, out, in / 2], scales uint8 [experts, out, in / 32]). The experts'
    own layers are views of these. `activation_rounding` as of `StoredLinear`.
    """

    MATRICES = ("w1", "w3", "w2")

    def __init__(self, experts: int, hidden: int, inner: int, *, activation_rounding: bool, device):
        self.activation_rounding = activation_rounding
        for name in self.MATRICES:
            out, width = (hidden, inner) if name == "w2" else (inner, hidden)
            planes = (
                torch.empty(experts, out, columns, dtype=torch.uint8, device=device)
                for columns in (width // NIBBLES, -(-width // BLOCK))
            )
            setattr(self, name, tuple(planes))

    def part(self, experts: range) -> ExpertStack:
        """A stack of its own with these experts."""
        other = copy(self)
        for name in self.MATRICES:
            setattr(other, name, tuple(plane[experts.start : experts.stop].clone() for plane in getattr(self, name)))
        return other

    def place(self, expert: int, matrix: str) -> tuple[Tensor, Tensor]:
        """Where the codes and scales of one expert's matrix lie."""
        codes, scales = getattr(self, matrix)
        return codes[expert], scales[expert]


def store(
    module: nn.Module, stored: StoredWeight, device, backend: Backend, activation_rounding: bool = False
) -> nn.Module:
    """The layer that takes the place of `module`, one of `STORABLE`.

    Raises:
        BackendError: the backend cannot compute with this weight.
    """
    backend.check_stored(stored, activation_rounding)
    if isinstance(module, Embedding):
        return StoredEmbedding(stored, device, backend)
    if isinstance(module, GroupedLinear):
        return StoredLinear(stored, backend, groups=module.groups)
    return StoredLinear(stored, backend, widened=module.widened, activation_rounding=activation_rounding)
