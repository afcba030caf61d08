"""What a prompt file says about single prompts, beside their text."""

from __future__ import annotations

import json
from pathlib import Path

from miles_dmd2.config.errors import ConfigError, show
from miles_dmd2.config.yaml_input import read_text

RM_TYPES = ("none",)  # what metadata.rm_type may be: the reward of such a prompt's samples is 0


def unscored_prompts(path: Path, flag: str = "--prompt-data") -> frozenset[str]:
    """Prompts whose samples have the reward 0 whatever scores the others: of a jsonl, `metadata: {"rm_type": "none"}`.

    The file's other lines are not looked at; `data.prompts` reads and checks them. ConfigError, with flag, file and
    line: metadata or rm_type of another form, or a prompt that is there with the type and without.
    """
    path = Path(path)
    if path.suffix.lower() != ".jsonl":
        return frozenset()
    found: dict[str, bool] = {}
    text = read_text(path, flag, "a prompt file").replace("\r\n", "\n").replace("\r", "\n")
    for number, line in enumerate(text.split("\n"), 1):
        record = json.loads(line) if line.strip() else None
        if record is None:
            continue
        where, prompt = f"{flag} {path}:{number}", record["prompt"].strip()
        unscored = _rm_type(record, where) == "none"
        if found.setdefault(prompt, unscored) != unscored:
            raise ConfigError(f"{where}: prompt {show(prompt)} is there with metadata.rm_type and without; use one")
    return frozenset(prompt for prompt, unscored in found.items() if unscored)


def _rm_type(record: dict[str, object], where: str) -> str | None:
    metadata = record.get("metadata")
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise ConfigError(f'{where}: metadata {show(metadata)}: must be an object, for example {{"rm_type": "none"}}')
    kind = metadata.get("rm_type")
    if kind is None or kind in RM_TYPES:
        return kind
    raise ConfigError(f"{where}: metadata.rm_type {show(kind)}: must be none, or left out for --custom-rm-path")
