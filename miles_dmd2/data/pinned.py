"""Content hashes beside prompt files: what was prepared once is what is read, on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from miles_dmd2.config.errors import ConfigError, show
from miles_dmd2.config.yaml_input import decoded, read_bytes

MANIFEST = "prompts.manifest.json"
FORMAT = "miles_dmd2 prompts 1"
FILES = {"train": "train.jsonl", "test": "test.jsonl", "eval_media": "eval_media.jsonl"}

_AGAIN = "prepare them again with scripts/prepare_prompts.py"


def pinned_hashes(directory: Path) -> dict[str, str]:
    """File name -> SHA-256 in hex, as the manifest in `directory` has them. ConfigError: unreadable, or another file.

    No manifest: empty.
    """
    path = directory / MANIFEST
    if not path.exists():
        return {}
    what = f"the manifest that scripts/prepare_prompts.py wrote, or {_AGAIN}"
    text = decoded(read_bytes(path, "prompts", what), path, "prompts")
    try:
        content = json.loads(text)
        files = {str(name): str(file["sha256"]) for name, file in content["files"].items()}
        known = content["format"] == FORMAT
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        known, files = False, {}
    if not known:
        raise ConfigError(f"prompts {show(path)}: is no manifest of the format {FORMAT}; remove it and {_AGAIN}")
    return files


def check_pinned(path: Path, sha256: str, flag: str) -> None:
    """ConfigError: `path`, whose content has this hash, has another one in the manifest beside it."""
    pinned = pinned_hashes(path.parent).get(path.name)
    if pinned not in (None, sha256):
        raise ConfigError(
            f"{flag} {show(path)}: has SHA-256 {sha256}, {MANIFEST} beside it pins {pinned}: it changed since; restore "
            f"it, or {_AGAIN}, or take the manifest away to use it as it is"
        )


def verify_split(directory: Path, expected: Mapping[str, str] | None = None) -> dict[str, str]:
    """SHA-256 of train, test and eval_media in `directory`, for a check before a run, on any node that has the files.

    ConfigError, with the file: no manifest, a file that is missing, that is not what the manifest pins, or not what
    `expected` (hashes of some or all of the three, by these names) says.
    """
    pinned = pinned_hashes(directory)
    if not pinned:
        raise ConfigError(f"prompts {show(directory)}: has no {MANIFEST}; {_AGAIN}")
    found = {}
    for name, file in FILES.items():
        path = directory / file
        if not path.is_file():
            raise ConfigError(f"prompts {show(path)}: no such file; {_AGAIN}")
        found[name] = file_hash(path)
        check_pinned(path, found[name], "prompts")
    check_expected(found, expected or {}, str(show(directory)))
    return found


def check_expected(found: Mapping[str, str], expected: Mapping[str, str], where: str) -> None:
    """ConfigError: a name that is not one of the three, or content with another hash than it was said to have."""
    for name, wanted in expected.items():
        if name not in FILES:
            raise ConfigError(f"--expect-sha256 {show(name)}={wanted}: must be of {', '.join(FILES)}")
        if found[name] != wanted.lower():
            raise ConfigError(
                f"--expect-sha256 {name}={wanted}: {FILES[name]} of {where} has SHA-256 {found[name]}; use the source, "
                "seed and sizes that the hash is of, or expect the new one"
            )


def file_hash(path: Path) -> str:
    """SHA-256 in hex, read in parts."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
