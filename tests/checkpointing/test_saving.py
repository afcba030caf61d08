"""Checkpoints are complete or do not exist, say what is in them, and nothing damaged is taken for one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_dmd2 import __version__
from miles_dmd2.checkpointing import (
    CheckpointError,
    IntervalCheckpoints,
    RunFacts,
    config_hash,
    merge_states,
    read_manifest,
    sweep,
)
from miles_dmd2.checkpointing.adapters import SavedAdapter, check_adapters
from miles_dmd2.checkpointing.manifest import manifest_content
from miles_dmd2.checkpointing.saving import begin_checkpoint
from miles_dmd2.config import ConfigError
from miles_dmd2.config.checks import find_checkpoint
from miles_dmd2.config.lora import Lora
from miles_dmd2.types import GroupState
from tests.saved_groups import FileGroup

CONFIG = {"lr": 0.1, "name": "x"}
FACTS = RunFacts(
    seed=3,
    rollout_seed=4,
    prompts=10,
    prompts_per_rollout=2,
    samples_per_rollout=16,
    ema_decay=0.9,
    schedules={"critic": {"lr": 1e-3, "lr_schedule": "cosine"}},
    contents={"prompt_data": "abc"},
    machine={"torch threads": "1"},
)
GROUPS = [FileGroup("critic", "critic"), FileGroup("actor", "actor")]


def saving(root: Path, last: int = 5, interval: int | None = None, start: int = 0) -> IntervalCheckpoints:
    return IntervalCheckpoints(root, interval, last, CONFIG, FACTS, start=start)


def write(root: Path, completed: int = 5) -> Path:
    saving(root)(completed, GROUPS)
    return root / f"step_{completed:06d}"


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    directory = write(tmp_path)
    manifest = read_manifest(directory)
    assert manifest.directory == directory
    assert (manifest.rollout, manifest.weight_version, manifest.contents) == (5, "raw@7", FACTS.contents)
    assert manifest.config == CONFIG
    assert manifest.versions["torch"]
    assert (manifest.versions["miles_dmd2"], manifest.versions["torch threads"]) == (__version__, "1")
    critic = manifest.groups["critic"]
    assert (critic.role, critic.world_size, critic.counters) == ("critic", 1, {"updates": 7})
    assert critic.files["critic/rank_00000_of_00001.safetensors"].size == 60
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


def test_the_manifest_says_where_every_sequence_stands(tmp_path: Path) -> None:
    content = json.loads((write(tmp_path) / "manifest.json").read_text())
    assert (content["format"], content["schema"]) == ("miles_dmd2 checkpoint", 3)
    assert content["prompts"] == {"count": 10, "cursor": 5 * 2}
    assert content["draws"] == {
        "scheme": "miles_dmd2/1",
        "seed": 3,
        "rollout_seed": 4,
        "next_rollout": 5,
        "next_sample_id": 5 * 16,
    }
    assert content["ema"] == {"decay": 0.9, "updates": 7}
    assert content["groups"]["critic"]["schedule"] == {"lr": 1e-3, "lr_schedule": "cosine", "updates": 7}
    assert content["config_hash"] == hashlib.sha256(b'{"lr": 0.1, "name": "x"}').hexdigest()
    seal = content.pop("sha256")
    assert seal == hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def test_an_adapter_is_kept_with_what_it_is_over(tmp_path: Path) -> None:
    adapter = SavedAdapter.of(Lora(4, 8, ("to_q", "to_v")), "0123")
    facts = replace(FACTS, adapters={"actor": adapter})
    IntervalCheckpoints(tmp_path, None, 5, CONFIG, facts)(5, GROUPS)
    groups = read_manifest(tmp_path / "step_000005").groups
    assert (groups["critic"].adapter, groups["actor"].adapter) == (None, adapter)
    assert adapter.lora == Lora(4, 8, ("to_q", "to_v"))


ADAPTER = SavedAdapter(4, 8, ("to_q", "to_v"), "0123" * 4)


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (ADAPTER, None),
        (replace(ADAPTER, target_modules=("to_v", "to_q")), None),
        (replace(ADAPTER, alpha=16), None),  # of which the options are asked: it can be allowed
        (replace(ADAPTER, rank=5), "trained LoRA of rank 4 over to_q to_v and now has LoRA of rank 5 over to_q to_v"),
        (replace(ADAPTER, target_modules=("to_q",)), "and now has LoRA of rank 4 over to_q: what"),
        (None, "and now has all parameters"),
        (replace(ADAPTER, base_sha256="4567" * 4), "another transformer .SHA-256 456745674567. than .* .012301230123."),
    ],
)
def test_what_an_adapter_goes_on_with(now: SavedAdapter | None, told: str | None) -> None:
    if told is None:
        check_adapters("--load x", {"actor": ADAPTER}, {"actor": now})
        return
    with pytest.raises(ConfigError, match=f"^--load x: trainer actor.*{told}"):
        check_adapters("--load x", {"actor": ADAPTER}, {"actor": now})
    with pytest.raises(ConfigError, match=r"^--load x: trainer actor"):
        check_adapters("--load x", {"actor": now}, {"actor": ADAPTER})


def test_when_checkpoints_are_due() -> None:
    every_four = saving(Path("x"), last=10, interval=4)
    assert [n for n in range(1, 11) if every_four.due(n)] == [4, 8, 10]
    assert [n for n in range(1, 11) if saving(Path("x"), last=10).due(n)] == [10]


def test_what_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    """A run that is asked to stop saves what it has, which may be what it has just saved, or started from."""
    checkpoints = saving(tmp_path, start=3)
    checkpoints(3, GROUPS)
    assert not list(tmp_path.iterdir())
    checkpoints(4, GROUPS)
    before = (tmp_path / "step_000004" / "manifest.json").stat().st_mtime_ns
    checkpoints(4, GROUPS)
    assert (tmp_path / "step_000004" / "manifest.json").stat().st_mtime_ns == before


def test_the_newest_is_taken_and_an_unfinished_one_is_not(tmp_path: Path) -> None:
    for completed in (9, 10, 2):
        write(tmp_path, completed)
    begin_checkpoint(tmp_path, 11)
    assert find_checkpoint(tmp_path).name == "step_000010"
    assert read_manifest(find_checkpoint(tmp_path)).rollout == 10


def test_a_failed_save_leaves_the_last_checkpoint_and_says_so_and_the_next_try_succeeds(tmp_path: Path) -> None:
    failing = [GROUPS[0], FileGroup("actor", "actor", fail=OSError(28, "No space left on device"))]
    message = r"checkpoint step_000005 was not written: \[Errno 28\] No space left on device; there is none before it"
    with pytest.raises(CheckpointError, match=message):
        saving(tmp_path)(5, failing)
    assert not list(tmp_path.iterdir()), "the disk is full: what was written makes room again"
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path)
    write(tmp_path)
    with pytest.raises(CheckpointError, match=r"step_000006 was not written: .*; step_000005 is the last complete one"):
        saving(tmp_path)(6, failing)
    assert read_manifest(tmp_path / "step_000005").rollout == 5
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


def test_what_must_be_there_first_comes_when_all_is_written_and_nothing_has_its_name(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def before() -> None:
        seen.append(sorted(path.name for path in tmp_path.glob(".step_000005.partial/*")))
        assert not (tmp_path / "step_000005").exists()

    saving(tmp_path)(5, GROUPS, before)
    assert seen == [["actor", "critic"]]
    assert (tmp_path / "step_000005" / "manifest.json").exists()

    def fails() -> None:
        raise OSError("no room for the row")

    with pytest.raises(CheckpointError, match=r"step_000004 was not written: no room for the row"):
        saving(tmp_path)(4, GROUPS, fails)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


def test_an_interrupted_save_is_no_checkpoint_either(tmp_path: Path) -> None:
    stopped = FileGroup("actor", "actor", fail=KeyboardInterrupt())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        saving(tmp_path)(5, [GROUPS[0], stopped])
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    kept = write(tmp_path)
    (begin_checkpoint(tmp_path, 6) / "half").write_text("")
    (tmp_path / ".step_000004.removed").mkdir()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [kept]


def test_an_existing_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(CheckpointError, match="step_000005 exists already"):
        write(tmp_path)


def resealed(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "manifest.json"
        content = json.loads(path.read_text())
        del content["sha256"]
        change(content)
        path.write_text(json.dumps({**content, "sha256": config_hash(content)}))

    return apply


FILE = "actor/rank_00000_of_00001.safetensors"


def two_files(content: dict) -> None:
    files = content["groups"]["actor"]["files"]
    files["actor/rank_00002_of_00003.safetensors"] = files[FILE]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / FILE).unlink(), f"{FILE} is missing"),
        (lambda d: (d / FILE).write_bytes(b"short"), f"{FILE} has 5 bytes instead of 50"),
        (lambda d: (d / FILE).write_bytes(b"x" * 50), f"{FILE} does not have the SHA-256"),
        (lambda d: (d / "manifest.json").write_text("{"), r"cannot read .*manifest\.json"),
        (lambda d: (d / "manifest.json").write_text("[" * 100_000), r"cannot read .*manifest\.json"),
        (lambda d: (d / "manifest.json").write_text('{"schema": 1}'), "not of a checkpoint of miles_dmd2"),
        (resealed(lambda c: c.update(schema=1)), "has schema 1, this version reads 3"),
        (resealed(lambda c: c.pop("groups")), r"is malformed \(KeyError"),
        (resealed(lambda c: c["config"].update(lr=0.2)), "config_hash is not the config's"),
        (resealed(two_files), "is malformed .*rank_00002_of_00003"),
        (resealed(lambda c: c["groups"]["actor"]["files"].clear()), r"is malformed \(ValueError\('files \[\]'"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(write(tmp_path))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_manifest(tmp_path / "step_000005")
    assert "\n" not in str(caught.value)


def test_any_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    """An edited counter would continue another run than the one that was saved."""
    path = write(tmp_path) / "manifest.json"
    sound = path.read_text()
    for old, new in (('"updates": 7', '"updates": 8'), ('"cursor": 10', '"cursor": 11'), ("0.9", "0.8")):
        assert old in sound
        path.write_text(sound.replace(old, new, 1))
        with pytest.raises(CheckpointError, match="was edited or damaged"):
            read_manifest(path.parent)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=6), values, max_size=3),
)
KEYS = ("format", "schema", "rollout", "weight_version", "prompts", "groups", "config", "config_hash", "versions")


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), st.dictionaries(st.text(max_size=5), JSON, max_size=2))
def test_no_manifest_brings_a_traceback(tmp_path_factory: pytest.TempPathFactory, changes: dict, group: dict) -> None:
    directory = tmp_path_factory.mktemp("fuzz")
    state = {"actor": ("actor", GroupState({})), **({"x": ("critic", GroupState({}))} if group else {})}
    content = manifest_content(directory, 1, state, CONFIG, FACTS)  # type: ignore[arg-type]
    del content["sha256"]
    content = {**content, **changes}
    if isinstance(content["groups"], dict) and group:
        content["groups"]["x"] = group
    (directory / "manifest.json").write_text(json.dumps({**content, "sha256": config_hash(content)}))
    with pytest.raises(CheckpointError) as caught:
        read_manifest(directory)
    assert len(str(caught.value).splitlines()) == 1


@given(st.binary(max_size=60))
def test_no_bytes_bring_a_traceback(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        read_manifest(directory)


def test_ranks_become_one_group() -> None:
    merged = merge_states([GroupState({"a": "1"}, {"updates": 2}), GroupState({"b": "2"}, {"updates": 2})])
    assert merged == GroupState({"a": "1", "b": "2"}, {"updates": 2})
    with pytest.raises(ValueError, match="same checkpoint file"):
        merge_states([GroupState({"a": "1"}), GroupState({"a": "1"})])
    with pytest.raises(ValueError, match="disagree on its counters"):
        merge_states([GroupState({"a": "1"}, {"updates": 2}), GroupState({"b": "1"}, {"updates": 3})])


def test_publishing_needs_the_files_that_were_promised(tmp_path: Path) -> None:
    class Forgetful(FileGroup):
        def save(self, directory: Path) -> GroupState:
            return GroupState({"actor/x": "0"})

    groups: list[FileGroup] = [Forgetful("actor", "actor")]
    with pytest.raises(CheckpointError, match=r"was not written: .*No such file"):
        saving(tmp_path)(1, groups)
