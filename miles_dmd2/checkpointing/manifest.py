"""What a checkpoint says about itself, and whether that is true."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from miles_dmd2 import __version__
from miles_dmd2.checkpointing.adapters import SavedAdapter
from miles_dmd2.types import GroupState, Role

FORMAT = "miles_dmd2 checkpoint"
SCHEMA = 3
MANIFEST = "manifest.json"
DRAWS = "miles_dmd2/1"  # the scheme of keyed draws: algo/draws.py
_PACKAGES = ("torch", "ray", "diffusers", "transformers", "peft", "safetensors")
_FILE = re.compile(r"[a-z][a-z0-9_]*/rank_(\d{5})_of_(\d{5})\.safetensors")
_SEAL = "sha256"  # of all the other keys: an edit is noticed


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written, in one line."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """One group's part: `files` relative to the checkpoint directory, one per rank, in rank order. `adapter`: what the
    files hold is over, None if all parameters are in them.
    """

    role: Role
    files: Mapping[str, SavedFile]
    counters: Mapping[str, int]
    adapter: SavedAdapter | None = None

    @property
    def world_size(self) -> int:
        return len(self.files)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the numbers of a run depend on beside its options.

    `contents`: option -> SHA-256 of what the files that it names hold. `schedules`: per trainer, what its learning rate
    follows. `machine`: kept with the package versions; other values there are told, not refused. `adapters`: of the
    trainers that have one.
    """

    seed: int
    rollout_seed: int
    prompts: int
    prompts_per_rollout: int
    samples_per_rollout: int
    ema_decay: float
    schedules: Mapping[str, Mapping[str, Any]]
    contents: Mapping[str, str]
    machine: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, SavedAdapter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """`rollout`: rollouts done, the id of the next one. `weight_version`: of the student, in the engines' words."""

    directory: Path
    rollout: int
    weight_version: str
    contents: Mapping[str, str]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    groups: Mapping[str, SavedGroup]


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 in hex of the config as sorted JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def package_versions() -> dict[str, str]:
    """Versions of what decides the numbers, as far as installed."""
    versions = {"miles_dmd2": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def manifest_content(
    directory: Path,
    completed: int,
    states: Mapping[str, tuple[Role, GroupState]],
    config: Mapping[str, Any],
    facts: RunFacts,
) -> dict[str, Any]:
    """The manifest of the files below `directory`, as JSON has it."""
    groups: dict[str, dict[str, Any]] = {}
    for name, (role, state) in states.items():
        files = {path: {"sha256": digest, "size": (directory / path).stat().st_size} for path, digest in _sorted(state)}
        schedule = {**facts.schedules.get(name, {}), "updates": state.counters.get("updates", 0)}
        groups[name] = {"role": role, "files": files, "counters": dict(state.counters), "schedule": schedule}
        if name in facts.adapters:
            groups[name]["adapter"] = facts.adapters[name].plain()
    (actor,) = (state for role, state in states.values() if role == "actor")
    updates = actor.counters.get("updates", 0)
    content = {
        "format": FORMAT,
        "schema": SCHEMA,
        "rollout": completed,
        "weight_version": f"raw@{updates}",
        "prompts": {
            "count": facts.prompts,
            "cursor": completed * facts.prompts_per_rollout,  # prompts read so far, over all epochs
        },
        "draws": {
            "scheme": DRAWS,
            "seed": facts.seed,
            "rollout_seed": facts.rollout_seed,
            "next_rollout": completed,
            "next_sample_id": completed * facts.samples_per_rollout,
        },
        "ema": {"decay": facts.ema_decay, "updates": updates} if facts.ema_decay else None,
        "groups": groups,
        "contents": dict(facts.contents),
        "config": dict(config),
        "config_hash": config_hash(config),
        "versions": {**package_versions(), **facts.machine},
    }
    return {**content, _SEAL: config_hash(content)}


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory, after every file in it has the right size and SHA-256.

    CheckpointError, one line that names the file: missing, damaged, edited, or of another format.
    """
    file = directory / MANIFEST
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {file} ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not of a checkpoint of miles_dmd2")
    if content.get("schema") != SCHEMA:
        raise CheckpointError(f"{file} has schema {content.get('schema')!r}, this version reads {SCHEMA}")
    seal = content.pop(_SEAL, None)
    if config_hash(content) != seal:
        raise CheckpointError(f"{file} does not have the SHA-256 that it states: it was edited or damaged")
    try:
        manifest = _manifest(directory, content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{file} is malformed ({error!r})") from error
    for group in manifest.groups.values():
        for name, saved in group.files.items():
            _verify(directory / name, saved)
    return manifest


def schedule_facts(trainer: Any) -> dict[str, Any]:
    """What the learning rate of a `TrainerSpec` follows."""
    kept = ("lr", "lr_schedule", "lr_warmup_updates", "total_updates")
    return {name: value for name, value in asdict(trainer).items() if name in kept}


def _sorted(state: GroupState) -> list[tuple[str, str]]:
    return sorted(state.files.items())


def _manifest(directory: Path, content: Mapping[str, Any]) -> Manifest:
    groups = {name: _group(group) for name, group in content["groups"].items()}
    if not groups:
        raise ValueError("no groups")
    if config_hash(content["config"]) != content["config_hash"]:
        raise ValueError("config_hash is not the config's")
    if not isinstance(content["rollout"], int) or content["rollout"] < 0:
        raise ValueError(f"rollout {content['rollout']!r}")
    return Manifest(
        directory=directory,
        rollout=content["rollout"],
        weight_version=str(content["weight_version"]),
        contents=dict(content["contents"]),
        config=dict(content["config"]),
        versions=dict(content["versions"]),
        groups=groups,
    )


def _group(content: Mapping[str, Any]) -> SavedGroup:
    """ValueError: not one file for each rank, or one that is elsewhere."""
    files = {path: SavedFile(entry["sha256"], entry["size"]) for path, entry in sorted(content["files"].items())}
    matches = [_FILE.fullmatch(path) for path in files]
    ranks = [(int(match[1]), int(match[2])) for match in matches if match]
    if ranks != [(rank, len(files)) for rank in range(len(files))] or not files:
        raise ValueError(f"files {list(files)[:3]}")
    if content["role"] not in get_args(Role):
        raise ValueError(f"role {content['role']!r}")
    counters = {str(name): int(value) for name, value in content["counters"].items()}
    adapter = SavedAdapter.read(content["adapter"]) if "adapter" in content else None
    return SavedGroup(content["role"], files, counters, adapter)


def _verify(path: Path, saved: SavedFile) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is not complete")
    size = path.stat().st_size
    if size != saved.size:
        raise CheckpointError(f"{path} has {size} bytes instead of {saved.size}: it is damaged")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != saved.sha256:
            raise CheckpointError(f"{path} does not have the SHA-256 of the manifest: it is damaged")
