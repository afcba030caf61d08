"""Under Ray: eval samples as files, renders without trainers that compare with them, and a disk that fills up."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from run_commands import Finished, command, environment

from miles_dmd2.checkpointing import read_manifest
from miles_dmd2.media.store import read_index
from tests.cluster.test_full_disk import can_mount, unshared

pytestmark = pytest.mark.ray
Run = Callable[..., Finished]

REWARDS = """async def score(samples):
    assert all(sample.media is not None for sample in samples), "nothing to score"
    return [sample.media.float().mean().item() for sample in samples]
"""


@pytest.fixture(scope="module")
def evals(workspace: Path) -> dict[str, object]:
    (workspace / "eval.txt").write_text("the digit one\nthe digit / two\n")
    return {"eval_prompt_data": workspace / "eval.txt", "eval_samples_per_prompt": 2}


@pytest.fixture(scope="module")
def trained(run: Run, workspace: Path, evals: dict[str, object]) -> Finished:
    (workspace / "scores.py").write_text(REWARDS)
    (workspace / "scored.jsonl").write_text(
        '{"prompt": "the digit one"}\n{"prompt": "the digit two", "metadata": {"rm_type": "none"}}\n'
    )
    done = run(
        "with media",
        **evals,
        prompt_data=workspace / "scored.jsonl",
        custom_rm_path=f"{workspace / 'scores.py'}:score",
        save_eval_media_dir=workspace / "media",
    )
    assert done.code == 0, done.err
    return done


def pictures(directory: Path) -> dict[str, np.ndarray]:
    return {entry["file"]: np.asarray(Image.open(directory / entry["file"])) for entry in read_index_of(directory)}


def read_index_of(directory: Path) -> list[dict[str, object]]:
    return read_index(directory / "index.jsonl")


def test_every_eval_sample_of_both_kinds_is_a_file_with_its_reward(trained: Finished, workspace: Path) -> None:
    assert {path.name for path in (workspace / "media").iterdir()} == {"eval_000000", "eval_000003"}
    rows = {row["rollout"]: row for row in trained.rows()}
    for rollout_id in (0, 3):
        directory = workspace / "media" / f"eval_{rollout_id:06d}"
        entries = read_index_of(directory)
        assert [entry["kind"] for entry in entries] == ["raw"] * 4 + ["ema"] * 4
        assert len({(entry["prompt"], entry["seed"]) for entry in entries}) == 4
        assert {path.name for path in directory.iterdir()} == {"index.jsonl", *(entry["file"] for entry in entries)}
        for entry in entries:
            shown = np.asarray(Image.open(directory / entry["file"]))
            assert entry["reward"] == pytest.approx(shown.mean(), abs=1e-3)
            assert (entry["steps"], entry["weight_version"]) == (2, f"{entry['kind']}@{rollout_id}")
        for kind in ("raw", "ema"):
            rewards = [entry["reward"] for entry in entries if entry["kind"] == kind]
            assert rows[rollout_id][f"eval/reward_{kind}"] == pytest.approx(np.mean(rewards))
    assert (trained.directory / "eval" / "eval_000003_ema.png").is_file()  # the contact sheet stays


def test_rewards_of_training_samples_are_a_metric_and_unscored_prompts_count_0(trained: Finished) -> None:
    """Half of the samples are of the prompt that is not scored; a picture's mean is in 0..255."""
    for row in trained.rows()[:3]:
        assert 20 < row["rollout/reward_mean"] < 128


def test_without_a_reward_function_the_reward_is_0(base: Finished) -> None:
    assert [row["rollout/reward_mean"] for row in base.rows()] == [0, 0, 0]


def test_a_render_of_the_checkpoint_starts_no_trainer_and_compares_by_name(
    run: Run, trained: Finished, workspace: Path, evals: dict[str, object]
) -> None:
    """The untrained student at 2 steps is the checkpoint at 2 steps: the same bits under the same names."""
    done = run("render", **evals, debug_rollout_only="eval", trainer_config=None)
    assert done.code == 0, done.err
    assert {path.name for path in (done.directory / "logs").iterdir()} == {"driver.log", "engine_0.log"}
    assert {path.name for path in (trained.directory / "logs").iterdir()} > {"critic_0.log", "actor_0.log"}
    ours = pictures(done.directory / "eval" / "eval_000000")
    theirs = pictures(workspace / "media" / "eval_000000")
    assert len(ours) == 4
    assert all(np.array_equal(picture, theirs[name]) for name, picture in ours.items())
    assert not (done.directory / "student_raw").exists()
    assert [row["rollout"] for row in done.rows()] == [0]


def test_another_transformer_in_the_same_pipeline(
    run: Run, trained: Finished, workspace: Path, evals: dict[str, object]
) -> None:
    """The run's own student, exported, is that of its last eval."""
    done = run(
        "reference",
        **evals,
        debug_rollout_only="eval",
        trainer_config=None,
        reference_transformer=trained.directory / "student_raw",
        save_eval_media_dir=workspace / "reference media",
    )
    assert done.code == 0, done.err
    ours = pictures(workspace / "reference media" / "eval_000000")
    assert len(ours) == 4
    last, first = (pictures(workspace / "media" / f"eval_{i:06d}") for i in (3, 0))
    assert all(np.array_equal(picture, last[name]) for name, picture in ours.items())
    assert any(not np.array_equal(picture, first[name]) for name, picture in ours.items())
    assert not (done.directory / "reference").exists()  # the links are gone


def test_rollouts_without_trainers(run: Run) -> None:
    done = run("rollouts", debug_rollout_only="train", trainer_config=None, num_rollout=2)
    assert done.code == 0, done.err
    assert {path.name for path in (done.directory / "logs").iterdir()} == {"driver.log", "engine_0.log"}
    assert [row["rollout/samples"] for row in done.rows()] == [16, 16]


ON_A_SMALL_DISK = (
    'disk=$1; shift; mount -t tmpfs -o size=16k none "$disk" || exit 3; "$@"; code=$?; '
    'ls -A "$disk"/eval_000000 >&2; exit $code'
)


def test_a_full_disk_under_the_media_costs_the_files_and_nothing_else(
    workspace: Path, tmp_path: Path, evals: dict[str, object]
) -> None:
    if not can_mount(tmp_path):
        pytest.skip("this system lets no user mount a small disk (unshare --user --mount)")
    disk = tmp_path / "disk"
    disk.mkdir()
    words = command(workspace, "media full", **evals, save_eval_media_dir=disk, num_rollout=1, save_interval=1)
    shell = unshared("sh", "-c", ON_A_SMALL_DISK, "sh", str(disk), *words)
    done = subprocess.run(shell, capture_output=True, text=True, timeout=240, env=environment())
    run_dir = workspace / "media full"
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors
    for line in errors:
        assert "the files of the" in line
        assert "are not complete in" in line
        assert "No space left on device" in line
    assert "Traceback" not in done.stderr
    assert ".partial" not in done.stderr
    assert f"done: the student is {run_dir}/student_ema" in done.stdout
    assert read_manifest(run_dir / "checkpoints" / "step_000001").rollout == 1
    assert (run_dir / "summary.json").is_file()
