"""Writing checkpoints: complete under their name, or not there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_dmd2.checkpointing.manifest import MANIFEST, CheckpointError, RunFacts, manifest_content
from miles_dmd2.checkpointing.retention import Retention
from miles_dmd2.types import GroupState, TrainerGroup


@dataclass
class IntervalCheckpoints:
    """The driver's `Checkpoints`: every `interval` rollouts (None: never in between) and after the last one.

    `start`: rollouts done when this process began; their state is in the checkpoint that it continues, or nothing.
    """

    root: Path
    interval: int | None
    last: int  # num_rollout
    config: Mapping[str, Any]  # as JSON has it
    facts: RunFacts
    start: int = 0
    retention: Retention | None = None
    _written: set[int] = field(default_factory=set)

    def due(self, completed: int) -> bool:
        return completed == self.last or (self.interval is not None and completed % self.interval == 0)

    def __call__(
        self, completed: int, groups: Sequence[TrainerGroup], before: Callable[[], None] = lambda: None
    ) -> None:
        """Write the checkpoint after `completed` rollouts, unless it is there. Wakes nobody.

        before: called when it is written, and has not its name yet.

        CheckpointError: it cannot be written. What was written of it is removed, and earlier ones are as they were.
        """
        if completed == self.start or completed in self._written:
            before()
            return
        partial = begin_checkpoint(self.root, completed)
        try:
            states = {group.name: (group.role, group.save(partial)) for group in groups}
            before()
            publish_checkpoint(partial, manifest_content(partial, completed, states, self.config, self.facts))
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(
                f"checkpoint {step_name(completed)} was not written: {error}; {self._what_is_left()}"
            ) from error
        self._written.add(completed)
        if self.retention is not None:
            self.retention.prune()

    def _what_is_left(self) -> str:
        steps = complete_steps(self.root)
        return f"{steps[-1].name} is the last complete one" if steps else "there is none before it"


def step_name(completed: int) -> str:
    return f"step_{completed:06d}"


def complete_steps(root: Path) -> list[Path]:
    """Checkpoint directories with a manifest, oldest first."""
    steps = [path for path in root.glob("step_*") if (path / MANIFEST).is_file() and step_number(path) is not None]
    return sorted(steps, key=lambda path: step_number(path) or 0)


def step_number(directory: Path) -> int | None:
    number = directory.name.removeprefix("step_")
    return int(number) if number.isdigit() else None


def sweep(root: Path) -> None:
    """Remove what a process that was killed left half written or half removed."""
    for left in (*root.glob(".step_*.partial"), *root.glob(".step_*.removed")):
        shutil.rmtree(left, ignore_errors=True)


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
    final = root / step_name(completed)
    if final.exists():
        raise CheckpointError(f"{final} exists already: it is of another run, use a new --save directory")
    partial = root / f".{final.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoints below {root}: {error}") from error
    return partial


def publish_checkpoint(partial: Path, manifest: Mapping[str, Any]) -> Path:
    """Write the manifest of what is below `partial`, flush all of it to disk, and make it the checkpoint."""
    with (partial / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for directory in {partial, *(path.parent for path in partial.rglob("*"))}:
        _flush(directory)
    final = partial.parent / partial.name.removeprefix(".").removesuffix(".partial")
    partial.rename(final)
    _flush(final.parent)
    return final


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
