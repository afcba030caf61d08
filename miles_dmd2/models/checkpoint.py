"""Reading a diffusers pipeline directory's JSON files. Standard library only."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

FLAG = "--hf-checkpoint"


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
