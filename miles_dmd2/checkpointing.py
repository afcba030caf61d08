"""Checkpoints of a whole run: one directory with every group's files, and a manifest that is written last.

`step_000123` is the state after 123 rollouts. It is written beside itself (`.step_000123.partial`), flushed to disk
and renamed, so a directory of that name is complete or does not exist, and all groups in it are of the same moment.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_dmd2.types import GroupState, Role, TrainerGroup

SCHEMA = 1
MANIFEST = "manifest.json"
_PACKAGES = ("torch", "ray", "diffusers", "transformers", "safetensors")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written, in one line."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """One group's part: `files` relative to the checkpoint directory, one per rank."""

    role: Role
    files: Mapping[str, SavedFile]
    counters: Mapping[str, int]

    @property
    def world_size(self) -> int:
        return len(self.files)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says about itself. `rollout`: rollouts that are done, the id of the next one."""

    directory: Path
    rollout: int
    weight_step: int
    seed: int
    config: Mapping[str, Any]
    config_hash: str
    versions: Mapping[str, str]
    groups: Mapping[str, SavedGroup]


@dataclass(frozen=True)
class IntervalCheckpoints:
    """The driver's `Checkpoints`: every `interval` rollouts (None: never in between) and after the last one."""

    root: Path
    interval: int | None
    last: int  # num_rollout
    seed: int
    config: Mapping[str, Any] = field(default_factory=dict)  # as JSON has it
    machine: Mapping[str, str] = field(default_factory=dict)  # what else the bits depend on; kept with the versions

    def due(self, completed: int) -> bool:
        return completed == self.last or (self.interval is not None and completed % self.interval == 0)

    def __call__(self, completed: int, groups: Sequence[TrainerGroup]) -> None:
        partial = begin_checkpoint(self.root, completed)
        states = {group.name: (group.role, group.save(partial)) for group in groups}
        publish_checkpoint(partial, completed, states, seed=self.seed, config=self.config, machine=self.machine)


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 in hex of the config as sorted JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def merge_states(states: Sequence[GroupState]) -> GroupState:
    """The ranks of a group as one. ValueError: ranks that wrote the same file or disagree on a counter."""
    files = {path: digest for state in states for path, digest in state.files.items()}
    if len(files) != sum(len(state.files) for state in states):
        raise ValueError("two ranks of a group wrote the same checkpoint file")
    if any(state.counters != states[0].counters for state in states):
        raise ValueError(f"ranks of a group disagree on its counters: {[dict(state.counters) for state in states]}")
    return GroupState(files, states[0].counters)


def begin_checkpoint(root: Path, completed: int) -> Path:
    """An empty directory for the groups to write to; what a crash left there is removed.

    CheckpointError: the checkpoint exists already, or the directory cannot be made.
    """
    final = root / f"step_{completed:06d}"
    if final.exists():
        raise CheckpointError(f"{final} exists already: it is of another run, use a new --save directory")
    partial = root / f".{final.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoints below {root}: {error}") from error
    return partial


def publish_checkpoint(
    partial: Path,
    completed: int,
    states: Mapping[str, tuple[Role, GroupState]],
    *,
    seed: int,
    config: Mapping[str, Any],
    machine: Mapping[str, str] | None = None,
) -> Path:
    """Write the manifest of what the groups wrote below `partial`, and make it the checkpoint; returns its path."""
    groups: dict[str, dict[str, Any]] = {}
    for name, (role, state) in states.items():
        files = {
            path: {"sha256": digest, "size": (partial / path).stat().st_size} for path, digest in state.files.items()
        }
        groups[name] = {"role": role, "files": files, "counters": dict(state.counters)}
    (actor,) = (state for role, state in states.values() if role == "actor")
    content = {
        "schema": SCHEMA,
        "rollout": completed,
        "weight_step": actor.counters.get("updates", 0),
        "seed": seed,
        "config_hash": config_hash(config),
        "config": dict(config),
        "versions": {**package_versions(), **(machine or {})},
        "groups": groups,
    }
    with (partial / MANIFEST).open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for directory in {partial, *(path.parent for path in partial.rglob("*"))}:
        _flush(directory)
    final = partial.parent / partial.name.removeprefix(".").removesuffix(".partial")
    partial.rename(final)
    _flush(final.parent)
    return final


def read_manifest(directory: Path, *, verify: bool = True) -> Manifest:
    """The manifest of a checkpoint directory, after every file in it has the right size and SHA-256.

    CheckpointError, one line that names the file: missing, damaged, or of another format.
    """
    file = directory / MANIFEST
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{file} has schema {found!r}, this version reads {SCHEMA}")
    try:
        manifest = _manifest(directory, content)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is malformed: {error!r}") from error
    if config_hash(manifest.config) != manifest.config_hash:
        raise CheckpointError(f"{file}: its config does not have the hash that it states; it was edited")
    if verify:
        for group in manifest.groups.values():
            for name, saved in group.files.items():
                _verify(directory / name, saved)
    return manifest


def package_versions() -> dict[str, str]:
    """Versions of what decides the numbers, as far as installed."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _manifest(directory: Path, content: Mapping[str, Any]) -> Manifest:
    groups = {
        name: SavedGroup(
            group["role"],
            {path: SavedFile(entry["sha256"], entry["size"]) for path, entry in group["files"].items()},
            dict(group["counters"]),
        )
        for name, group in content["groups"].items()
    }
    return Manifest(
        directory=directory,
        rollout=content["rollout"],
        weight_step=content["weight_step"],
        seed=content["seed"],
        config=content["config"],
        config_hash=content["config_hash"],
        versions=content["versions"],
        groups=groups,
    )


def _verify(path: Path, saved: SavedFile) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is not complete")
    size = path.stat().st_size
    if size != saved.size:
        raise CheckpointError(f"{path} has {size} bytes instead of {saved.size}: it is damaged")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != saved.sha256:
            raise CheckpointError(f"{path} does not have the SHA-256 of the manifest: it is damaged")


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
