"""Saved, loaded, continued: as if nothing had happened; anything else is an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_dmd2.training import Ranks
from miles_dmd2.training.checkpoint import rank_file, read_tensors, write_tensors
from miles_dmd2.training.saved_student import saved_student
from miles_dmd2.types import GroupState
from tests.training.pool import RankPool
from tests.training.runs import OPTIONS, Run, Setup, make_actor, make_critic, one_rollout, same_bits, weights

ROOT = str(Path(__file__).parents[2])
SETUP = Setup(dtype=torch.float32, micro=3)


def save_at_two(ranks: Ranks, setup: Setup, directory: Path) -> tuple[Run, list[GroupState]]:
    """Four rollouts; saved after two, once awake, once asleep."""
    critic, actor = make_critic(ranks, setup), make_actor(ranks, setup)
    states = []
    for rollout_id in range(4):
        one_rollout(critic, actor, setup, rollout_id)
        if rollout_id == 1:
            assert not critic.is_awake
            states = [trainer.save(directory) for trainer in (critic, actor)]
            assert not critic.is_awake
            assert actor.is_awake
            actor.sleep()
            assert actor.save(directory / "again").files == states[1].files
    return final(critic, actor), states


def continue_from(ranks: Ranks, setup: Setup, directory: Path, counters: list[dict[str, int]], asleep: bool) -> Run:
    critic, actor = make_critic(ranks, setup), make_actor(ranks, setup)
    for trainer, values in zip((critic, actor), counters, strict=True):
        if asleep:
            trainer.sleep()
        trainer.load(directory, values)
    for rollout_id in (2, 3):
        one_rollout(critic, actor, setup, rollout_id)
    return final(critic, actor)


def final(critic, actor) -> Run:
    exported = {kind: update.payload or {} for kind, update in actor.export_weights().items()}
    return Run(weights(critic), weights(actor), exported, [{**critic.counters(), **actor.counters()}])


def check_same(first: Run, second: Run) -> None:
    assert same_bits(first.critic, second.critic)
    assert same_bits(first.student, second.student)
    assert same_bits(first.exported["ema"], second.exported["ema"])
    assert first.metrics == second.metrics


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("setup", [SETUP, replace(SETUP, forward_dtype=torch.bfloat16), replace(SETUP, decay=0.0)])
def test_a_resumed_run_is_the_uninterrupted_one(ranks: Ranks, tmp_path: Path, setup: Setup, asleep: bool) -> None:
    whole, states = save_at_two(ranks, setup, tmp_path)
    if not setup.decay:
        whole.exported["ema"] = {}
    assert states[0].counters == {"updates": 6, "skipped_steps": 0, "skipped_in_a_row": 0}
    resumed = continue_from(ranks, setup, tmp_path, [dict(s.counters) for s in states], asleep)
    resumed.exported.setdefault("ema", {})
    check_same(whole, resumed)


@pytest.mark.parametrize("option", [*OPTIONS, "average from the third update on"])
def test_with_every_option(ranks: Ranks, tmp_path: Path, option: str) -> None:
    setup = replace(SETUP, **OPTIONS.get(option, {"ema_start": 3}))
    whole, states = save_at_two(ranks, setup, tmp_path)
    check_same(whole, continue_from(ranks, setup, tmp_path, [dict(s.counters) for s in states], asleep=True))


def test_also_on_two_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    results = two_ranks.run(save_at_two, SETUP, tmp_path)
    files = [list(state.files) for _, states in results for state in states]
    assert files == [[rank_file(name, rank, 2)] for rank in (0, 1) for name in ("critic", "actor")]
    counters = [dict(state.counters) for state in results[0][1]]
    for (whole, _), resumed in zip(
        results, two_ranks.run(continue_from, SETUP, tmp_path, counters, False), strict=True
    ):
        check_same(whole, resumed)


# -- another number of ranks ------------------------------------------------------------------------------------


def load_and_save(ranks: Ranks, setup: Setup, source: Path, world_size: int, target: Path) -> tuple[dict, dict]:
    """Load what `world_size` ranks saved, save it as this group does; returns full weights of critic and student."""
    critic, actor = make_critic(ranks, setup), make_actor(ranks, setup)
    for trainer in (critic, actor):
        trainer.sleep()
        trainer.load(source, COUNTERS, world_size)
        assert trainer.updates == 5
        trainer.save(target)
        trainer.wake()
    return weights(critic), weights(actor)


def whole(directory: Path, name: str, world_size: int) -> dict[str, torch.Tensor]:
    """The state that ranks wrote, put together by rows: parameters, both moments, the average."""
    parts = [load_file(directory / rank_file(name, rank, world_size)) for rank in range(world_size)]
    if world_size == 1:
        return parts[0]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def test_state_of_two_ranks_loads_on_one_and_back(ranks: Ranks, two_ranks: RankPool, tmp_path: Path) -> None:
    """Every number of parameters, moments and average is the same; the toy has rows that do not divide by two."""
    two, one, again = (tmp_path / name for name in ("two", "one", "again"))
    two_ranks.run(save_at_two, SETUP, two)
    on_one = load_and_save(ranks, SETUP, two, 2, one)
    for name in ("critic", "actor"):
        assert same_bits(whole(two, name, 2), whole(one, name, 1))
        kinds = {key.partition("/")[0] for key in whole(one, name, 1)}
        assert kinds >= {"exp_avg", "exp_avg_sq"}
    back = two_ranks.run(load_and_save, SETUP, one, 1, again)
    for mine, theirs in zip(on_one, back[0], strict=True):
        assert same_bits(mine, theirs)
    for name in ("critic", "actor"):
        for rank in (0, 1):
            file = rank_file(name, rank, 2)
            assert same_bits(load_file(two / file), load_file(again / file))
    odd = [len(v) for v in whole(two, "critic", 2).values() if len(v) % 2]
    assert odd, "every first dimension is even: the uneven cut is not tested"


@pytest.mark.parametrize("now", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("before", [1, 2, 3, 4, 7])
def test_any_cut_becomes_any_other(tmp_path: Path, before: int, now: int) -> None:
    """Cut as torch.chunk does, which may leave the last ranks nothing."""
    full = {"a": torch.arange(10.0).reshape(5, 2), "b": torch.arange(3)}

    def cut(rank: int, size: int) -> dict[str, torch.Tensor]:
        parts = {name: torch.chunk(value, size) for name, value in full.items()}
        return {name: part[rank] if rank < len(part) else full[name][:0] for name, part in parts.items()}

    files = [tmp_path / rank_file("x", rank, before) for rank in range(before)]
    for rank, path in enumerate(files):
        write_tensors(path, cut(rank, before))
    for rank in range(now):
        wanted = cut(rank, now)
        into = {name: torch.full_like(value, -1) for name, value in wanted.items()}
        rows = {name: (min(rank * -(-len(v) // now), len(v)), len(v)) for name, v in full.items()}
        read_tensors(files, into, rows)
        assert all(torch.equal(into[name], wanted[name]) for name in full)


def test_parts_of_another_model_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / rank_file("x", rank, 2) for rank in range(2)]
    for path in files:
        write_tensors(path, {"a": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match=r"a is \[4, 3\] torch.float32, this run has \[3, 3\]"):
        read_tensors(files, {"a": torch.ones(3, 3)}, {"a": (0, 6)})


def test_a_full_disk_is_one_error(tmp_path: Path) -> None:
    """In a process whose files may not grow past 100 kB."""
    code = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from miles_dmd2.training.checkpoint import write_tensors\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: write_tensors(Path(sys.argv[1]), {'a': torch.zeros(100_000)})\n"
        "except OSError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x" / "file.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": ROOT})
    assert done.returncode == 0, done.stderr
    assert "file.safetensors (400000 bytes): " in done.stdout
    assert "File too large" in done.stdout


def test_a_file_holds_the_trained_state_and_not_the_teacher(ranks: Ranks, tmp_path: Path) -> None:
    critic = make_critic(ranks, SETUP)
    (name,) = critic.save(tmp_path).files
    kinds = {key.partition("/")[0] for key in load_file(tmp_path / name)}
    assert name == "critic/rank_00000_of_00001.safetensors"
    assert kinds == {"critic", "exp_avg", "exp_avg_sq"}
    critic.sleep()  # writing did not pin the storages to the device
    critic.wake()


# -- refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(ranks: Ranks, tmp_path: Path) -> Path:
    make_actor(ranks, SETUP).save(tmp_path)
    return tmp_path


COUNTERS = {"updates": 5, "skipped_steps": 0, "skipped_in_a_row": 0}


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (replace(SETUP, decay=0.0), r"names differ from this run's; missing \[\], unexpected \['ema/"),
        (replace(SETUP, dtype=torch.float64), r"is \[\d+.*\] torch.float32, this run has .* torch.float64"),
    ],
)
def test_another_state_is_refused_and_nothing_is_loaded(ranks: Ranks, saved: Path, setup: Setup, message: str) -> None:
    actor = make_actor(ranks, setup)
    before = weights(actor)
    with pytest.raises(ValueError, match=message):
        actor.load(saved, COUNTERS)
    assert actor.updates == 0
    assert same_bits(before, weights(actor))


def test_a_rank_file_that_is_not_there_is_refused(ranks: Ranks, saved: Path) -> None:
    with pytest.raises(ValueError, match=r"no rank_00000_of_00002.safetensors .*'rank_00000_of_00001.safetensors'"):
        make_actor(ranks, SETUP).load(saved, COUNTERS, world_size=2)


def test_other_counters_are_refused(ranks: Ranks, saved: Path) -> None:
    with pytest.raises(ValueError, match=r"counters of actor are \['updates'\]"):
        make_actor(ranks, SETUP).load(saved, {"updates": 5})


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {"a": torch.zeros(2), "b": torch.zeros(3)})
    into = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(ValueError, match=r"b is \[3\] torch.float32, this run has \[2\]"):
        read_tensors([tmp_path / "file"], into, {})
    assert torch.equal(into["a"], torch.ones(2))


def test_what_reads_back_differently_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(tensors: dict[str, torch.Tensor], path: Path) -> None:
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, path)

    monkeypatch.setattr("miles_dmd2.training.checkpoint.save_file", damage)
    with pytest.raises(OSError, match="a reads back differently"):
        write_tensors(tmp_path / "file", {"a": torch.zeros(2)})


# -- the student without its ranks --------------------------------------------------------------------------------


def saved_and_exported(ranks: Ranks, setup: Setup, directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Saved after two rollouts; what the student exported at that moment, by kind."""
    critic, actor = make_critic(ranks, setup), make_actor(ranks, setup)
    for rollout_id in range(2):
        one_rollout(critic, actor, setup, rollout_id)
    actor.save(directory)
    return {kind: update.payload for kind, update in actor.export_weights().items()}


@pytest.mark.parametrize("setup", [SETUP, replace(SETUP, forward_dtype=torch.bfloat16), replace(SETUP, decay=0.0)])
def test_the_saved_student_is_the_exported_one(ranks: Ranks, tmp_path: Path, setup: Setup) -> None:
    exported = saved_and_exported(ranks, setup, tmp_path)
    files = [tmp_path / rank_file("actor", 0, 1)]
    for kind, wanted in exported.items():
        assert same_bits(saved_student(files, kind), wanted)
    if setup.decay:
        assert not same_bits(exported["raw"], exported["ema"])
    else:
        with pytest.raises(ValueError, match="holds no average"):
            saved_student(files, "ema")


def test_the_saved_student_of_two_ranks_is_the_exported_one(two_ranks: RankPool, tmp_path: Path) -> None:
    exported, _ = two_ranks.run(saved_and_exported, SETUP, tmp_path)
    files = [tmp_path / rank_file("actor", rank, 2) for rank in (0, 1)]
    for kind in ("raw", "ema"):
        assert same_bits(saved_student(files, kind), exported[kind])
    assert not same_bits(saved_student(files[::-1], "raw"), exported["raw"])


def test_files_that_hold_no_student_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    saved_and_exported(ranks, SETUP, tmp_path)
    critic_like = tmp_path / "critic.safetensors"
    save_file({"critic/exit.bias": torch.zeros(2)}, critic_like)
    with pytest.raises(ValueError, match="holds no student"):
        saved_student([critic_like], "raw")
    with pytest.raises(ValueError, match=r"critic\.safetensors: has no student/"):
        saved_student([tmp_path / rank_file("actor", 0, 1), critic_like], "raw")
    critic_like.write_bytes(b"short")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        saved_student([critic_like], "raw")
