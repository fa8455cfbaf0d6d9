"""A checkpoint folder, checked header by header against its config before any weight is read.

    config.json                     the released fields; `quantization_config` where weights are packed
    model.safetensors               all tensors, or
    model.safetensors.index.json    and the shards that it names, each a plain file name inside the folder
    tokenizer.json                  where Engram or text prompts need it
    token_map.json                  the compressed ids of Engram, where no tokenizer gives them

Each parameter of `model.tensor_table` is there once, as one float tensor or as a packed weight with its scales. The
text part must be whole; drafter and vision are whole or absent. Anything more, less or else is an error that names it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from flashsim.config import Config, V41Config, load_config
from flashsim.reading import ConfigError, read_json_object
from model.safetensors_file import CheckpointError, SafetensorsFile
from model.tensor_table import (
    BLOCK,
    PARTS,
    WEIGHT_TYPES,
    Header,
    packed,
    scale_name,
)
from model.weight_formats import WeightValueError, unpack

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000

QUANTISATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
"""The `quantization_config` of the release: the one layout of packed weights that is read and written here."""

_FLOATS = ("F32", "BF16", "F16", "F64")
_WHOLE = ("I64", "I32")
_PACKED = tuple(WEIGHT_TYPES.values())
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class Checkpoint:
    """An opened folder.

    folder, root (the whole config.json), config (its text part), vision (its `vision_config` or None), table (every
    parameter the config implies), parts (which of them the files have), files.

    Raises:
        CheckpointError, ConfigError: naming the file, tensor or field, as one sentence.
    """

    def __init__(self, folder: str | os.PathLike):
        from model.generations import is_draft, tensors  # the models may read stored weights, which are of a checkpoint

        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is not a folder; a checkpoint is a folder with {CONFIG_FILE}")
        config_path = self.folder / CONFIG_FILE
        if config_path.exists():  # where it is missing, the reader says so
            config_path = _inside(self.folder, CONFIG_FILE)
        self.root = read_json_object(config_path)
        self.config = load_config(config_path)
        self.vision = self.root.get("vision_config")
        self.table = tensors(self.config, self.vision)
        self.files, self.index = _open_files(self.folder)
        self.owner = {name: file for file in self.files.values() for name in file.places}
        self.headers = {name: header for file in self.files.values() for name, header in file.headers.items()}

        known = {name for name in self.table} | {scale_name(name) for name, s in self.table.items() if s.quantised}
        self.extra = [name for name in self.headers if name not in known and not is_draft(self.config, name)]
        self.parts = tuple(part for part in PARTS if part == "text" or self._any_of(part))
        self.packed = {
            name
            for name, spec in self.table.items()
            if spec.quantised and name in self.headers and self.headers[name].dtype == WEIGHT_TYPES[spec.kind]
        }
        if problems := self.problems():
            more = f" (and {len(problems) - 1} more kinds of problem)" if len(problems) > 1 else ""
            raise CheckpointError(f"{self.folder.name}: {problems[0]}{more}")

    def _any_of(self, part: str) -> bool:
        return any(spec.part == part and name in self.headers for name, spec in self.table.items())

    def problems(self) -> list[str]:
        """What does not fit the config, one sentence for each kind of problem. Empty once opened."""
        missing, stray, misshaped, mistyped = [], [], [], []
        for name, spec in self.table.items():
            scale, header = scale_name(name), self.headers.get(name)
            if spec.part not in self.parts:
                continue
            if header is None:
                missing.append(name)
                stray += [scale] if spec.quantised and scale in self.headers else []
                continue
            expected = {name: Header(header.dtype, spec.shape)}
            if name in self.packed:
                expected[name], expected[scale] = packed(spec)
            elif header.dtype not in (_WHOLE if spec.kind == "ids" else _FLOATS):
                kinds = (*_FLOATS, WEIGHT_TYPES[spec.kind]) if spec.quantised else _FLOATS
                kinds = _WHOLE if spec.kind == "ids" else kinds
                mistyped.append(f"{name} is {header.dtype}, accepted: {', '.join(kinds)}")
                continue
            elif spec.quantised and scale in self.headers:
                stray.append(scale)
            for part_name, part in expected.items():
                found = self.headers.get(part_name)
                if found is None:
                    missing.append(part_name)
                elif found.dtype != part.dtype:
                    mistyped.append(f"{part_name} is {found.dtype}, accepted: {part.dtype}")
                elif found.shape != part.shape:
                    misshaped.append(f"{part_name} has shape {list(found.shape)}, the config gives {list(part.shape)}")
        groups = (
            ("lacks {}", missing),
            ("has tensors that the config does not imply: {}", self.extra),
            ("has scales of weights that are not packed: {}", stray),
            ("{}", misshaped),
            ("{}", mistyped),
        )
        found = [text.format(_listed(names)) for text, names in groups if names]
        if not isinstance(self.config, V41Config) and any(h.dtype in _PACKED for h in self.headers.values()):
            found.insert(0, f"has packed weights, which are read for V4.1 alone; accepted: {', '.join(_FLOATS)}")
        return found + quantisation_problems(self.root, bool(self.packed))

    def weight(
        self, name: str, dtype: torch.dtype = torch.float32, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """Rows `start` to `stop` of a parameter as numbers [rows, ...], unpacked where it is packed.

        `start` is a multiple of 32 where the weight is packed in tiles.

        Raises:
            CheckpointError: a value is NaN or infinite, in the file or in `dtype`.
        """
        spec = self.table[name]
        stop = spec.shape[0] if stop is None else stop
        if name in self.packed:
            try:
                values = unpack(*self.packed_rows(name, start, stop), spec.kind)
            except WeightValueError as error:
                raise CheckpointError(f"{self.folder.name}: {name} cannot be used: {error}") from None
        else:
            values = self.owner[name].tensor(name, start, stop)
        values = values.to(dtype)
        if not torch.isfinite(values).all():
            raise CheckpointError(f"{self.folder.name}: {name} has a value that is not finite in {dtype}")
        if spec.kind == "ids" and not set(values.unique().tolist()) <= set(range(self.config.n_routed_experts)):
            most = self.config.n_routed_experts - 1
            raise CheckpointError(f"{self.folder.name}: {name} names experts outside 0 to {most}")
        return values

    def packed_rows(self, name: str, start: int = 0, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and scales of rows of a packed parameter, uint8 views of the mapped file: read-only."""
        scale, spec = scale_name(name), self.table[name]
        stop = spec.shape[0] if stop is None else stop
        tall = BLOCK if spec.kind == "fp8" else 1
        if start % tall:
            raise ValueError(f"rows of {name} begin at {start}; accepted: multiples of {tall}")
        weight = self.owner[name].raw(name, start, stop)
        return weight, self.owner[scale].raw(scale, start // tall, -(-stop // tall))

    def names(self, part: str = "text") -> list[str]:
        """The parameters of one part, in the order of the model."""
        return [name for name, spec in self.table.items() if spec.part == part]

    def inside(self, name: str) -> Path:
        """The path of another file of the folder.

        Raises:
            CheckpointError: it is missing, or a link to a place outside.
        """
        return _inside(self.folder, name)

    def nbytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(header.nbytes for header in self.headers.values())


def text_config(config: Config) -> V41Config:
    """The config, when it is one of V4.1.

    Raises:
        ConfigError: it is of another generation.
    """
    if not isinstance(config, V41Config):
        raise ConfigError("model_type", config.model_type, ", ".join(V41Config.model_types))
    return config


def quantisation_problems(root: Mapping[str, Any], has_packed: bool) -> list[str]:
    """Where `quantization_config` and the weights disagree."""
    given = root.get("quantization_config")
    if given is None:
        return ["has packed weights, but its config.json has no quantization_config"] if has_packed else []
    if not isinstance(given, Mapping):
        return [f"quantization_config is {given!r}; accepted: an object"]
    for field, accepted in QUANTISATION.items():
        if given.get(field, accepted) != accepted:
            return [f"quantization_config.{field} is {given[field]!r}; accepted: {accepted!r}"]
    if not has_packed:
        return ["has a quantization_config, but none of its weights is packed"]
    return []


def _listed(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    rest = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


# --- which files ------------------------------------------------------------------------------------------------------


def _open_files(folder: Path) -> tuple[dict[str, SafetensorsFile], dict[str, str] | None]:
    single, index_path = folder / SINGLE_FILE, folder / INDEX_FILE
    if index_path.exists() and single.exists():
        raise CheckpointError(f"{folder.name} has both {SINGLE_FILE} and {INDEX_FILE}; keep the one that is meant")
    if index_path.exists():
        index = _read_index(_inside(folder, INDEX_FILE))
        files = {shard: SafetensorsFile(_inside(folder, shard)) for shard in sorted(set(index.values()))}
        _compare(index, files)
        return files, index
    if single.exists() or single.is_symlink():
        return {SINGLE_FILE: SafetensorsFile(_inside(folder, SINGLE_FILE))}, None
    if shards := sorted(folder.glob("model-*-of-*.safetensors")):
        raise CheckpointError(f"{folder.name} has {len(shards)} shards but no {INDEX_FILE}")
    if pickles := sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES):
        raise CheckpointError(
            f"{folder.name} has {pickles[0]}, which may be a pickle and is never opened; accepted: {SINGLE_FILE}, "
            f"or {INDEX_FILE} with its shards"
        )
    raise CheckpointError(f"{folder.name} has no {SINGLE_FILE} and no {INDEX_FILE}")


def _inside(folder: Path, name: str) -> Path:
    """The file of that name in the folder. A link may lead within it, or where a hub cache keeps the contents."""
    path = folder / name
    if not path.exists():
        raise CheckpointError(f"{folder.name} lacks {name}" + (" (a broken link)" if path.is_symlink() else ""))
    target, home = path.resolve(), folder.resolve()
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else None  # <cache>/snapshots/<revision>/
    if target.parent not in (home, blobs):
        raise CheckpointError(f"{folder.name}: {name} is a link to a place outside the folder, which is not read")
    return path


def _read_index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{path.name} has {path.stat().st_size:,} bytes; accepted: {MAX_INDEX_BYTES:,}")
        index = json.loads(path.read_bytes().decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path.name} is not JSON") from None
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path.name} has no weight_map from tensor names to files")
    for name, shard in places.items():
        plain = isinstance(shard, str) and shard not in ("", ".", "..") and not set("/\\\0:") & set(shard)
        if not plain:
            raise CheckpointError(
                f"{path.name} places {name} in {shard!r}; accepted: the name of a file in the folder itself"
            )
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path.name} places {name} in {shard!r}; accepted: a .safetensors file")
    return places


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise CheckpointError(f"{INDEX_FILE} names {twice} twice")
    return result


def _compare(index: Mapping[str, str], files: Mapping[str, SafetensorsFile]) -> None:
    absent = [f"{name} ({shard})" for name, shard in index.items() if name not in files[shard].places]
    if absent:
        raise CheckpointError(f"{INDEX_FILE} names tensors that their shard does not have: {_listed(absent)}")
    for shard, file in files.items():
        elsewhere = [name for name in file.places if index.get(name) != shard]
        if elsewhere:
            other = index.get(elsewhere[0])
            where = f"which {INDEX_FILE} places in {other}" if other else f"which {INDEX_FILE} does not name"
            raise CheckpointError(f"{shard} has {_listed(elsewhere)}, {where}")
