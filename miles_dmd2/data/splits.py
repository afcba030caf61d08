"""From a source of prompts to train, test and eval_media: cleaned, split by content, written with their hashes."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from miles_dmd2.config.errors import ConfigError, show
from miles_dmd2.data.pinned import FILES, FORMAT, MANIFEST, file_hash, pinned_hashes
from miles_dmd2.data.prompts import LONGEST, PromptFile


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Prompts in NFC, each once, in the order of the source; and how many were changed, left out, or look odd.

    not_nfc: were brought to NFC. duplicates, unseen: left out, as one that is there already, or as nothing but
    invisible characters. invisible: hold such characters and are kept, since joiners are part of words and emoji.
    """

    prompts: tuple[str, ...]
    not_nfc: int
    duplicates: int
    unseen: int
    invisible: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """File name -> content of the three files, and the manifest that names their hashes."""

    contents: Mapping[str, bytes]
    manifest: Mapping[str, Any]

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 in hex by the names train, test and eval_media."""
        return {name: self.manifest["files"][file]["sha256"] for name, file in FILES.items()}


def clean(prompts: Sequence[str]) -> Cleaned:
    kept: dict[str, None] = {}
    not_nfc = unseen = invisible = 0
    for prompt in prompts:
        normal = prompt if prompt.isascii() else unicodedata.normalize("NFC", prompt)
        not_nfc += normal != prompt
        if len(normal) > LONGEST:  # some characters become several
            unseen += 1
            continue
        if not normal.isascii():
            hidden = sum(unicodedata.category(char) == "Cf" for char in normal)
            if hidden == sum(not char.isspace() for char in normal):
                unseen += 1
                continue
            invisible += hidden > 0
        kept[normal] = None
    return Cleaned(tuple(kept), not_nfc, len(prompts) - unseen - len(kept), unseen, invisible)


def split(prompts: Sequence[str], num_test: int, num_eval: int, seed: int) -> dict[str, tuple[str, ...]]:
    """Train, test and eval_media, each in the order of a keyed hash of the prompts: eval_media has the lowest.

    A function of the set of prompts, whatever their order; one prompt more or less moves at most one prompt over each
    border. ConfigError: too few for a prompt to train on.
    """
    if len(prompts) <= num_test + num_eval:
        raise ConfigError(
            f"--num-test {num_test}: {len(prompts)} prompts are too few for it, --num-eval {num_eval} and one to train "
            "on; lower one of them"
        )
    key = f"miles_dmd2/1|{seed}|split".encode()

    def place(prompt: str) -> tuple[bytes, str]:
        return blake2b(prompt.encode(), digest_size=16, key=key).digest(), prompt

    ordered = tuple(sorted(prompts, key=place))
    end = num_eval + num_test
    return {"train": ordered[end:], "test": ordered[num_eval:end], "eval_media": ordered[:num_eval]}


def prepare(source: PromptFile, origin: Mapping[str, str], *, num_test: int, num_eval: int, seed: int) -> Prepared:
    """The files and manifest of a source. `origin`: where it is from, for the manifest. ConfigError: see `split`."""
    cleaned = clean(source.prompts)
    parts = split(cleaned.prompts, num_test, num_eval, seed)
    contents = {FILES[name]: _jsonl(prompts) for name, prompts in parts.items()}
    manifest = {
        "format": FORMAT,
        "source": {**origin, "sha256": source.sha256},
        "seed": seed,
        "counts": {
            "lines": source.lines,
            "prompts": len(source.prompts) + source.unfit,
            "byte_order_mark": int(source.byte_order_mark),
            "carriage_returns": source.carriage_returns,
            "blank_lines": source.blank_lines,
            "unfit": source.unfit + cleaned.unseen,
            "not_nfc": cleaned.not_nfc,
            "invisible": cleaned.invisible,
            "duplicates": cleaned.duplicates,
            "kept": len(cleaned.prompts),
        },
        "files": {
            FILES[name]: {"prompts": len(prompts), "sha256": hashlib.sha256(contents[FILES[name]]).hexdigest()}
            for name, prompts in parts.items()
        },
    }
    return Prepared(contents, manifest)


def write(directory: Path, prepared: Prepared, *, replace: bool = False) -> None:
    """The three files, each written beside its place and renamed, and the manifest last.

    ConfigError: a file in its place that is neither the same nor, with `replace`, as the manifest there pins it.
    """
    _check_places(directory, prepared, replace)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in prepared.contents.items():
        _write(directory / name, content)
    _write(directory / MANIFEST, (json.dumps(prepared.manifest, indent=2) + "\n").encode())


def _check_places(directory: Path, prepared: Prepared, replace: bool) -> None:
    pinned = pinned_hashes(directory)
    for name in prepared.contents:
        path = directory / name
        if not path.exists():
            continue
        held = file_hash(path) if path.is_file() else None
        if held == prepared.manifest["files"][name]["sha256"]:
            continue
        where = f"--output {show(directory)}"
        if held is None or name not in pinned:
            raise ConfigError(f"{where}: {name} there was not made by this script; give another directory")
        if held != pinned[name]:
            raise ConfigError(f"{where}: {name} changed since it was written; move it away, or give another directory")
        if not replace:
            raise ConfigError(f"{where}: holds another {name}; give another directory, or --replace to write it anew")


def _write(path: Path, content: bytes) -> None:
    """Another process, also of another node, that writes the same file is not in the way."""
    aside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.partial")
    try:
        with aside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _jsonl(prompts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts).encode()
