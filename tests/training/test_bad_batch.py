"""A step that was not finite is kept, and computed again it gives the same numbers."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from miles_dmd2.training import Ranks, wanted_ids
from miles_dmd2.training.bad_batch import read_bad_batch, write_samples
from miles_dmd2.training.replay import replay
from miles_dmd2.training.trainer import MOST_DUMPS, StepReport, Trainer
from tests.training.pool import RankPool
from tests.training.runs import Setup, make_actor, make_critic, one_rollout, samples_of, windows_of
from tests.training.toy import ToyAdapter

SETUP = Setup(windows=2, micro=2, max_skipped=100)
AWAY = replace(SETUP, law="logit_normal", scoring="original", guidance=3.0, normalizer_eps=2.0, ema_start=1)
BAD = 16 + 8 + 5  # in rollout 1, the last window: the critic's scores of it reach the actor


def keep(trainer: Trainer, directory: Path) -> None:
    trainer.settings = replace(trainer.settings, bad_batch_directory=directory)


def meet_it(ranks: Ranks, directory: Path, setup: Setup = SETUP) -> list[StepReport | None]:
    """A good rollout, then one with a sample that is NaN; what critic and actor saw of the step."""
    critic, actor = make_critic(ranks, setup), make_actor(ranks, setup)
    for trainer in (critic, actor):
        keep(trainer, directory)
    one_rollout(critic, actor, setup, 0)
    assert not directory.exists(), "finite steps are not kept"
    one_rollout(critic, actor, replace(setup, nan_sample=BAD), 1)
    return [critic.last_step, actor.last_step]


def same(a: dict[int, float], b: dict[int, float]) -> bool:
    return a.keys() == b.keys() and all(
        x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a.values(), b.values(), strict=True)
    )


@pytest.mark.parametrize(("world_size", "setup"), [(1, SETUP), (2, SETUP), (1, AWAY)], ids=["one", "two", "away"])
def test_a_kept_step_replays_with_its_numbers(
    ranks: Ranks, two_ranks: RankPool, tmp_path: Path, world_size: int, setup: Setup
) -> None:
    met = two_ranks.run(meet_it, tmp_path / "x") if world_size == 2 else [meet_it(ranks, tmp_path / "x", setup)]
    kept = sorted((tmp_path / "x").iterdir())
    assert [path.name for path in kept] == ["actor_rollout_000001_update_000001", "critic_rollout_000001_update_000003"]
    for directory, reports in zip(kept, zip(*[reversed(report) for report in met], strict=True), strict=True):
        losses = {i: loss for report in reports for i, loss in report.losses.items()}
        assert list(losses) == list(windows_of(SETUP, 1)[-1])
        again = replay(directory, ToyAdapter(), ranks)
        assert not again.taken
        assert same(dict(again.losses), losses), "the same draws, weights and micro-batches"
        assert math.isnan(again.gradient_norm)
        facts = json.loads((directory / "batch.json").read_text())
        assert facts["not_finite"] == [i for i, loss in losses.items() if not math.isfinite(loss)]
        assert facts["world_size"] == world_size
        assert not [
            path for path in directory.rglob("*") if path.is_file() and path.suffix not in (".json", ".safetensors")
        ]


def test_a_repaired_sample_replays_as_a_good_step(ranks: Ranks, tmp_path: Path) -> None:
    """What a replay is for: the step without the sample's NaN is an ordinary one."""
    meet_it(ranks, tmp_path / "x")
    (directory,) = (tmp_path / "x").glob("critic*")
    samples = samples_of(SETUP, 1, windows_of(SETUP, 1)[-1])
    write_samples(directory, 0, samples, {})
    again = replay(directory, ToyAdapter(), ranks)
    assert again.taken
    assert all(map(math.isfinite, again.losses.values()))


def test_samples_and_scores_come_back_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    meet_it(ranks, tmp_path / "x")
    (directory,) = (tmp_path / "x").glob("actor*")
    bad = read_bad_batch(directory)
    wanted = samples_of(replace(SETUP, nan_sample=BAD), 1, windows_of(SETUP, 1)[-1])
    for mine, theirs in zip(bad.samples, wanted, strict=True):
        assert (mine.sample_id, mine.prompt, mine.seed, mine.stop_step) == (
            theirs.sample_id, theirs.prompt, theirs.seed, theirs.stop_step,
        )  # fmt: skip
        assert torch.equal(mine.x_k, theirs.x_k)
        assert torch.allclose(mine.x0, theirs.x0, rtol=0, atol=0, equal_nan=True)
        assert mine.cond.keys() == theirs.cond.keys()
        assert mine.weight_version == theirs.weight_version
    assert bad.scores.keys() == {sample.sample_id for sample in wanted}


def test_only_the_first_ones_are_kept_and_a_full_disk_ends_no_run(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic = make_critic(ranks, SETUP)
    keep(critic, tmp_path / "x")

    def bad_rollout(rollout_id: int) -> None:
        setup = replace(SETUP, nan_sample=windows_of(SETUP, rollout_id)[0][0])
        windows = windows_of(setup, rollout_id)
        critic.train(rollout_id, windows, samples_of(setup, rollout_id, wanted_ids(windows, 0, 1)))

    with caplog.at_level(logging.WARNING):
        for rollout_id in range(MOST_DUMPS + 2):
            bad_rollout(rollout_id)
    assert len(list((tmp_path / "x").iterdir())) == MOST_DUMPS
    assert f"(kept in {tmp_path / 'x'}/critic_rollout_000000_update_000000)" in caplog.text

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    other = make_critic(ranks, SETUP)
    keep(other, tmp_path / "y")
    monkeypatch.setattr("miles_dmd2.training.trainer.write_samples", full)
    critic = other
    bad_rollout(0)
    assert "the bad batch could not be kept: [Errno 28] No space left" in caplog.text
    assert critic.skipped_steps == 1


@pytest.mark.parametrize("damage", ["gone", "cut", "another"])
def test_what_is_no_bad_batch_is_told(ranks: Ranks, tmp_path: Path, damage: str) -> None:
    meet_it(ranks, tmp_path / "x")
    (directory,) = (tmp_path / "x").glob("critic*")
    if damage == "gone":
        directory = tmp_path / "none"
    elif damage == "cut":
        (directory / "samples_00000.safetensors").unlink()
    else:
        (directory / "batch.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="is not a complete bad batch"):
        read_bad_batch(directory)


def test_a_bad_batch_of_before_adapters_is_told_by_its_format(ranks: Ranks, tmp_path: Path) -> None:
    meet_it(ranks, tmp_path / "x")
    (directory,) = (tmp_path / "x").glob("critic*")
    facts = json.loads((directory / "batch.json").read_text())
    assert facts["base_sha256"] is None, "the state has all weights"
    del facts["settings"]["lora"], facts["base_sha256"]
    (directory / "batch.json").write_text(json.dumps({**facts, "format": "miles_dmd2 bad batch 1"}))
    with pytest.raises(ValueError, match=r"is not a complete bad batch .*format 'miles_dmd2 bad batch 1'"):
        replay(directory, ToyAdapter(), ranks)
