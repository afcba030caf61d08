"""Checkpoints are complete or do not exist, and what is damaged is refused by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_dmd2.checkpointing import (
    CheckpointError,
    IntervalCheckpoints,
    begin_checkpoint,
    config_hash,
    merge_states,
    publish_checkpoint,
    read_manifest,
)
from miles_dmd2.config import ConfigError
from miles_dmd2.config.checks import find_checkpoint
from miles_dmd2.types import GroupState, Role

CONFIG = {"lr": 0.1, "name": "x"}


@dataclass
class FileGroup:
    name: str
    role: Role
    fail: bool = False

    def save(self, directory: Path) -> GroupState:
        path = directory / self.name / "rank_00000_of_00001.safetensors"
        path.parent.mkdir()
        path.write_bytes(self.name.encode() * 10)
        if self.fail:
            raise OSError("disk full")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return GroupState({str(path.relative_to(directory)): digest}, {"updates": 7})


GROUPS = [FileGroup("critic", "critic"), FileGroup("actor", "actor")]


def write(root: Path, completed: int = 5) -> Path:
    IntervalCheckpoints(root, None, completed, seed=3, config=CONFIG)(completed, GROUPS)
    return root / f"step_{completed:06d}"


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    directory = write(tmp_path)
    manifest = read_manifest(directory)
    assert manifest.directory == directory
    assert (manifest.rollout, manifest.weight_step, manifest.seed) == (5, 7, 3)
    assert manifest.config == CONFIG
    assert manifest.config_hash == config_hash({"name": "x", "lr": 0.1})
    assert manifest.versions["torch"]
    critic = manifest.groups["critic"]
    assert (critic.role, critic.world_size, critic.counters) == ("critic", 1, {"updates": 7})
    assert critic.files["critic/rank_00000_of_00001.safetensors"].size == 60
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


def test_when_checkpoints_are_due() -> None:
    every_four = IntervalCheckpoints(Path("x"), 4, 10, seed=0)
    assert [n for n in range(1, 11) if every_four.due(n)] == [4, 8, 10]
    assert [n for n in range(1, 11) if IntervalCheckpoints(Path("x"), None, 10, seed=0).due(n)] == [10]


def test_the_newest_is_taken_and_an_unfinished_one_is_not(tmp_path: Path) -> None:
    for completed in (9, 10, 2):
        write(tmp_path, completed)
    begin_checkpoint(tmp_path, 11)
    assert find_checkpoint(tmp_path).name == "step_000010"
    assert read_manifest(find_checkpoint(tmp_path)).rollout == 10


def test_a_failed_save_leaves_no_checkpoint_and_the_next_try_succeeds(tmp_path: Path) -> None:
    failing = [GROUPS[0], FileGroup("actor", "actor", fail=True)]
    with pytest.raises(OSError, match="disk full"):
        IntervalCheckpoints(tmp_path, None, 5, seed=3)(5, failing)
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path)
    write(tmp_path)
    assert read_manifest(tmp_path / "step_000005").rollout == 5
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


def test_an_existing_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(CheckpointError, match="step_000005 exists already"):
        write(tmp_path)


def edit(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "manifest.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return apply


FILE = "actor/rank_00000_of_00001.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / FILE).unlink(), f"{FILE} is missing"),
        (lambda d: (d / FILE).write_bytes(b"short"), f"{FILE} has 5 bytes instead of 50"),
        (lambda d: (d / FILE).write_bytes(b"x" * 50), f"{FILE} does not have the SHA-256"),
        (lambda d: (d / "manifest.json").write_text("{"), r"cannot read .*manifest\.json"),
        (edit(lambda c: c.update(schema=2)), "has schema 2, this version reads 1"),
        (edit(lambda c: c.pop("groups")), "is malformed: KeyError"),
        (edit(lambda c: c["config"].update(lr=0.2)), "config does not have the hash"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(write(tmp_path))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_manifest(tmp_path / "step_000005")
    assert "\n" not in str(caught.value)


def test_ranks_become_one_group() -> None:
    merged = merge_states([GroupState({"a": "1"}, {"updates": 2}), GroupState({"b": "2"}, {"updates": 2})])
    assert merged == GroupState({"a": "1", "b": "2"}, {"updates": 2})
    with pytest.raises(ValueError, match="same checkpoint file"):
        merge_states([GroupState({"a": "1"}), GroupState({"a": "1"})])
    with pytest.raises(ValueError, match="disagree on its counters"):
        merge_states([GroupState({"a": "1"}, {"updates": 2}), GroupState({"b": "1"}, {"updates": 3})])


def test_publishing_needs_the_files_that_were_promised(tmp_path: Path) -> None:
    partial = begin_checkpoint(tmp_path, 1)
    states: dict[str, tuple[Role, GroupState]] = {"actor": ("actor", GroupState({"actor/x": "0"}))}
    with pytest.raises(FileNotFoundError):
        publish_checkpoint(partial, 1, states, seed=0, config={})
