"""Saved, loaded, continued: as if nothing had happened; anything else is an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_dmd2.training import Ranks
from miles_dmd2.training.checkpoint import rank_file, read_tensors, write_tensors
from miles_dmd2.types import GroupState
from tests.training.pool import RankPool
from tests.training.runs import OPTIONS, Run, Setup, make_actor, make_critic, one_rollout, same_bits, weights

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


def load_error(ranks: Ranks, setup: Setup, directory: Path) -> str:
    try:
        make_actor(ranks, setup).load(directory, COUNTERS)
    except ValueError as error:
        return str(error)
    return "no error"


def test_another_number_of_ranks_is_refused(two_ranks: RankPool, saved: Path) -> None:
    for error in two_ranks.run(load_error, SETUP, saved):
        assert "_of_00002.safetensors" in error
        assert "there: ['rank_00000_of_00001.safetensors']" in error


def test_other_counters_are_refused(ranks: Ranks, saved: Path) -> None:
    with pytest.raises(ValueError, match=r"counters of actor are \['updates'\]"):
        make_actor(ranks, SETUP).load(saved, {"updates": 5})


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {"a": torch.zeros(2), "b": torch.zeros(3)})
    into = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(ValueError, match=r"b is \[3\] torch.float32, this run has \[2\]"):
        read_tensors(tmp_path / "file", into)
    assert torch.equal(into["a"], torch.ones(2))


def test_what_reads_back_differently_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(tensors: dict[str, torch.Tensor], path: Path) -> None:
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, path)

    monkeypatch.setattr("miles_dmd2.training.checkpoint.save_file", damage)
    with pytest.raises(OSError, match="a reads back differently"):
        write_tensors(tmp_path / "file", {"a": torch.zeros(2)})
