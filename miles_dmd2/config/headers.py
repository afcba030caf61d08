"""What a checkpoint holds, tensor by tensor, from the headers of its safetensors files: no weight is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_dmd2.config.errors import ConfigError, show

INDEX = "model_index.json"
_LARGEST_HEADER = 100 * 2**20
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a file. `nbytes`: as it is stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in _FLOATS


def read_components(checkpoint: Path, flag: str = "--hf-checkpoint") -> dict[str, tuple[Weight, ...]]:
    """Component name -> its tensors, for each part of model_index.json that has weights. ConfigError: unreadable."""
    index = _object(checkpoint / INDEX, flag)
    parts = [name for name, value in index.items() if isinstance(value, list) and (checkpoint / name).is_dir()]
    found = {name: read_component(checkpoint / name, flag) for name in sorted(parts)}
    return {name: weights for name, weights in found.items() if weights}


def read_component(directory: Path, flag: str = "--hf-checkpoint") -> tuple[Weight, ...]:
    """The tensors of a component, each name once: of the files that its index names, or of all, also in subfolders.

    Empty for a part without weights, as a tokenizer is. ConfigError: an index or a header that is malformed.
    """
    indexes = sorted(directory.glob("*.safetensors.index.json"))
    if indexes:
        maps = [_object(index, flag).get("weight_map") for index in indexes]
        shards = {str(shard) for names in maps if isinstance(names, Mapping) for shard in names.values()}
        files = [directory / shard for shard in sorted(shards)]
    else:
        files = sorted(directory.rglob("*.safetensors"))
    weights: dict[str, Weight] = {}
    for file in files:
        for name, entry in read_header(file, flag).items():
            weights.setdefault(name, _weight(name, entry, file, flag))
    return tuple(weights.values())


def read_header(file: Path, flag: str = "--hf-checkpoint") -> dict[str, Any]:
    """Tensor name -> its entry. Layout of a safetensors file: length of the header in 8 bytes, little-endian, the
    header in JSON, the tensors. ConfigError: unreadable.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _LARGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}: {show(file)} has no readable safetensors header ({error}); get it again") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{flag}: {show(file)} has no readable safetensors header (no object); get it again")
    header.pop("__metadata__", None)
    return header


def _weight(name: str, entry: Any, file: Path, flag: str) -> Weight:
    try:
        begin, end = entry["data_offsets"]
        return Weight(name, str(entry["dtype"]), tuple(map(int, entry["shape"])), int(end) - int(begin))
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{flag}: {show(file)} describes {show(name)} in a malformed way ({error!r}); get it again"
        ) from None


def _object(file: Path, flag: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}: {show(file)} is not readable JSON ({error}); get it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{flag}: {show(file)} must be a JSON object, got {show(content)}; get it again")
    return content
