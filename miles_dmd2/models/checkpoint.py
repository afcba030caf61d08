"""Reading a diffusers pipeline directory's JSON files. Standard library only."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

FLAG = "--hf-checkpoint"
_BLOCK = 4096


def read_config(checkpoint: Path, name: str) -> dict[str, Any]:
    """The JSON object in `checkpoint / name`. ValueError, one line, if it is missing, unreadable or no object."""
    path = checkpoint / name
    if not checkpoint.is_dir():
        raise ValueError(f"{FLAG} {checkpoint} is not a directory; give the directory of a diffusers pipeline")
    if not path.is_file():
        raise ValueError(f"{FLAG} {checkpoint} has no {name}; a diffusers pipeline directory must have it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{FLAG} {checkpoint}: cannot read {name}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{FLAG} {checkpoint}: {name} must be a JSON object, got {type(content).__name__}")
    return content


def positive_int(config: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    """config[key] as an int > 0. ValueError names the file and the key."""
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{FLAG}: {where} must have {key} as a positive integer, got {value!r}")
    return value


def component_digest(checkpoint: Path, component: str) -> str:
    """SHA-256 over the names and contents of a component's config.json and .safetensors files, in hex."""
    digest = hashlib.sha256()
    directory = checkpoint / component
    for file in sorted([directory / "config.json", *directory.glob("*.safetensors")]):
        with file.open("rb") as stream:
            digest.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def pipeline_digest(checkpoint: Path) -> str:
    """SHA-256 in hex over a pipeline's parts, as it must be the same for a run that goes on: names and contents of
    model_index.json and of all files in its folders, but of a tensor the first and last 4 KiB alone. A training step
    changes these too, and to read some hundred gigabytes would take longer than to load them.
    """
    digest = hashlib.sha256()
    parts = [path for path in sorted(checkpoint.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    files = [file for part in parts for file in sorted(part.rglob("*")) if file.is_file()]
    index = checkpoint / "model_index.json"
    for file in [index, *files] if index.is_file() else files:
        digest.update(f"{file.relative_to(checkpoint)}\0".encode())
        with file.open("rb") as stream:
            whole = file.suffix != ".safetensors"
            digest.update(hashlib.file_digest(stream, "sha256").digest() if whole else _ends_of_tensors(stream))
    return digest.hexdigest()


def _ends_of_tensors(stream: BinaryIO) -> bytes:
    """Of a safetensors file: length of the header in 8 bytes, little-endian, the header in JSON, the tensors."""
    start = stream.read(8)
    header = stream.read(int.from_bytes(start, "little"))
    digest = hashlib.sha256(header)
    tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    for begin, end in sorted(tuple(entry["data_offsets"]) for entry in tensors.values()):
        for at in (begin, max(begin, end - _BLOCK)):
            stream.seek(8 + len(header) + at)
            digest.update(stream.read(min(_BLOCK, end - at)))
    return digest.digest()
