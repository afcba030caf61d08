"""Reading a diffusers pipeline directory's JSON files, and what its files are known by. Without torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from miles_dmd2.config.errors import ConfigError, show
from miles_dmd2.config.headers import read_header

FLAG = "--hf-checkpoint"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")  # never read here, so never copied
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


def pipeline_digest(checkpoint: Path, flag: str = FLAG) -> str:
    """SHA-256 in hex over a pipeline's parts, as it must be the same for a run that goes on: names and contents of
    model_index.json and of all files in the folders that it names, but of a tensor the first and last 4 KiB alone, and
    nothing of pickles, which are never loaded. A training step changes these ends too, and to read some hundred
    gigabytes would take longer than to load them. ConfigError: weights that cannot be read.
    """
    digest = hashlib.sha256()
    index = read_config(checkpoint, "model_index.json")
    parts = [checkpoint / name for name, value in sorted(index.items()) if isinstance(value, list)]
    files = [file for part in parts for file in sorted(part.rglob("*")) if file.is_file()]
    for file in [checkpoint / "model_index.json", *files]:
        if file.suffix in PICKLED:
            continue
        digest.update(f"{file.relative_to(checkpoint)}\0".encode())
        if file.suffix == ".safetensors":
            digest.update(_ends_of_tensors(file, flag))
        else:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _ends_of_tensors(file: Path, flag: str) -> bytes:
    header = read_header(file, flag)
    try:
        spans = sorted((int(begin), int(end)) for begin, end in (entry["data_offsets"] for entry in header.values()))
        if any(not 0 <= begin <= end for begin, end in spans):
            raise ValueError("offsets that run backwards")
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{flag}: {show(file)} describes a tensor in a malformed way ({error!r}); get it again"
        ) from None
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        digest = hashlib.sha256(stream.read(start - 8))
        for begin, end in spans:
            for at in (begin, max(begin, end - _BLOCK)):
                stream.seek(start + at)
                digest.update(stream.read(min(_BLOCK, end - at)))
    return digest.digest()
