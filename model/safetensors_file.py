"""One safetensors file: its header checked before anything is believed, its tensors memory-mapped and never copied.

    8 bytes      length N of the header, little endian
    N bytes      JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__"
    the rest     the data; the offsets count from here, and cover it without gap or overlap

Nothing is unpickled and no code runs. A header that does not fit the file, byte for byte, is an error.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import stat
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from model.tensor_table import DTYPE_BYTES, Header

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""

TORCH_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_NAMES = {dtype: name for name, dtype in TORCH_TYPES.items()}
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or not of this model: names the file, tensor or field."""


class Place(NamedTuple):
    """A tensor's header and where its data begins in the file."""

    header: Header
    begin: int


class SafetensorsFile:
    """An opened file. `places` maps tensor names to headers; data is read only when asked for.

    Raises:
        CheckpointError: not a safetensors file, truncated, or with a header that contradicts itself or the file.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.size, self.data_begin, header = _read_header(self.path)
        self.metadata = header.pop(_METADATA, None) or {}
        self.places = _places(self.path, header, self.size - self.data_begin)
        self._map: mmap.mmap | None = None
        self._bytes: torch.Tensor | None = None

    @property
    def headers(self) -> dict[str, Header]:
        """Name to type and shape, in the order of the file."""
        return {name: place.header for name, place in self.places.items()}

    def raw(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Bytes of rows `start` to `stop` of a tensor as uint8 [rows, bytes of a row]: a view of the mapped file.

        Read-only: writing into it ends the process. A scalar has one row.
        """
        header, begin = self.places[name]
        rows = header.shape[0] if header.shape else 1
        stop = rows if stop is None else stop
        row_bytes = header.nbytes // rows if rows else 0
        first = self.data_begin + begin + start * row_bytes
        return self._mapped()[first : first + (stop - start) * row_bytes].view(stop - start, row_bytes)

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """A copy of rows `start` to `stop`, in the stored type."""
        header = self.places[name].header
        rows = self.raw(name, start, stop)
        shape = (rows.shape[0], *header.shape[1:]) if header.shape else ()
        return rows.clone().view(-1).view(TORCH_TYPES[header.dtype]).view(shape)

    def forget(self, name: str) -> None:
        """Gives back the memory of a tensor's pages; they are read from the file again when next used."""
        header, begin = self.places[name]
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = (self.data_begin + begin) // mmap.PAGESIZE * mmap.PAGESIZE
        last = min(-(-(self.data_begin + begin + header.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE, self.size)
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def expect_rows_at_random(self, name: str) -> None:
        """Tells the system that single rows will be read, so that it does not read ahead."""
        header, begin = self.places[name]
        self._mapped()
        if self._map is None or not hasattr(mmap, "MADV_RANDOM"):
            return
        first = -(-(self.data_begin + begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (self.data_begin + begin + header.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_RANDOM, first, last - first)

    def _mapped(self) -> torch.Tensor:
        if self._bytes is None:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != self.size:
                    raise CheckpointError(f"{self.path.name} changed: it had {self.size:,} bytes, now {size:,}")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._bytes


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch type in a safetensors header.

    >>> dtype_name(torch.bfloat16)
    'BF16'
    """
    return _NAMES[dtype]


def write_file(
    path: str | os.PathLike,
    headers: Mapping[str, Header],
    chunks: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a file of these tensors; `chunks` are their bytes in the order of `headers`, in pieces of any size.

    The whole is written beside `path` first and moved there at the end, so `path` is never half a file.

    Raises:
        CheckpointError: the pieces are not as many bytes as the headers say.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(encode_header(headers, metadata))
            written = 0
            for chunk in chunks:
                data = chunk.detach().cpu().contiguous().view(-1).view(torch.uint8)
                file.write(memoryview(data.numpy()))
                written += data.numel()
            expected = sum(header.nbytes for header in headers.values())
            if written != expected:
                raise CheckpointError(f"{path.name} needs {expected:,} bytes of data, {written:,} were given")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def encode_header(headers: Mapping[str, Header], metadata: Mapping[str, str] | None = None) -> bytes:
    """The length and the JSON of a file with these tensors one after another, padded to 8 bytes."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    begin = 0
    for name, header in headers.items():
        end = begin + header.nbytes
        entries[name] = {"dtype": header.dtype, "shape": list(header.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


# --- reading what a stranger wrote ------------------------------------------------------------------------------------


def _read_header(path: Path) -> tuple[int, int, dict[str, Any]]:
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointError(f"{path.name} is not a regular file")
        with path.open("rb") as file:
            start = file.read(_LENGTH.size + 1)
            if problem := _other_format(start):
                raise CheckpointError(f"{path.name} is {problem}, not safetensors; it was not opened further")
            if len(start) < _LENGTH.size:
                raise CheckpointError(f"{path.name} has {info.st_size} bytes; a safetensors file begins with 8")
            (length,) = _LENGTH.unpack(start[: _LENGTH.size])
            if length > MAX_HEADER_BYTES or length > info.st_size - _LENGTH.size:
                raise CheckpointError(
                    f"{path.name} claims a header of {length:,} bytes; the file has {info.st_size:,} bytes, "
                    f"the format allows {MAX_HEADER_BYTES:,}"
                )
            file.seek(_LENGTH.size)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from None
    try:
        header = json.loads(raw.decode(), object_pairs_hook=lambda pairs: _no_duplicates(path, pairs))
    except CheckpointError:
        raise
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path.name} has a header that is not JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name} has a header that is not a JSON object")
    return info.st_size, _LENGTH.size + length, header


def _other_format(start: bytes) -> str | None:
    if start[:2] == b"PK":
        return "a zip archive (a PyTorch pickle, it seems)"
    if start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5") and start[8:9] != b"{":
        return "a pickle"
    if start[:4] == b"GGUF":
        return "a GGUF file"
    if start.startswith(b"version "):
        return "a Git LFS pointer (the file itself was not downloaded)"
    return None


def _no_duplicates(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise CheckpointError(f"{path.name} names {twice} twice in its header")
    return result


def _places(path: Path, header: Mapping[str, Any], data_bytes: int) -> dict[str, Place]:
    places = {name: Place(*_entry(path, name, entry)) for name, entry in header.items()}
    position = 0
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].header.nbytes)):
        if place.begin != position:
            what = "overlaps another tensor" if place.begin < position else "leaves a gap before it"
            raise CheckpointError(f"{path.name}: {name} begins at byte {place.begin:,}, which {what}")
        position += place.header.nbytes
    if position > data_bytes:
        raise CheckpointError(
            f"{path.name} is truncated: its tensors take {position:,} bytes, the file has {data_bytes:,} for them"
        )
    if position < data_bytes:
        raise CheckpointError(f"{path.name} has {data_bytes - position:,} bytes after its last tensor")
    return places


def _entry(path: Path, name: str, entry: Any) -> Iterator[Any]:
    where = f"{path.name}: {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} needs exactly dtype, shape and data_offsets in its header")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where} has type {dtype!r}; accepted: {', '.join(DTYPE_BYTES)}")
    for field, value in (("shape", shape), ("data_offsets", offsets)):
        whole = isinstance(value, list) and all(type(v) is int and 0 <= v < 2**60 for v in value)
        if not whole:
            raise CheckpointError(f"{where} has {field} {value!r}; accepted: a list of whole numbers")
    header = Header(dtype, tuple(shape))
    if len(offsets) != 2 or offsets[1] - offsets[0] != header.nbytes:
        raise CheckpointError(f"{where} is {header}, {header.nbytes:,} bytes, but its data_offsets are {offsets}")
    yield header
    yield offsets[0]
