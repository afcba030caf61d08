"""Runs under Ray: they finish, repeat bitwise, agree over ranks, go on where they stopped, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_commands import SECRET, Finished, children, command, environment, wait_for

from miles_dmd2.observability.declared import without_machine

pytestmark = pytest.mark.ray

Run = Callable[..., Finished]


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def without_clocks(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [without_machine(row) for row in rows]


def test_a_run_trains_and_reports(base: Finished, workspace: Path) -> None:
    from safetensors.torch import load_file

    rows = base.rows()
    assert [row["rollout"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["rollout/samples"] == 16
        assert row["critic/critic_forwards"] == 16
        assert row["critic/teacher_forwards"] == 8
        assert row["actor/student_forwards"] == 8
        assert row["actor/dmd_loss"] > 0  # the critic is trained before the student's first step
        assert row["actor/x0_mean_abs_diff"] < 1e-5  # engine and trainer compute the same x0
    assert [row["rollout/weight_step"] for row in rows] == [0, 1, 2]
    (teacher,) = (workspace / "pipeline" / "transformer").glob("*.safetensors")
    moved = distance(load_file(teacher), base.student())
    assert 1e-4 < moved < 3 * 2e-4 * 1.5  # AdamW moves a weight by about the learning rate per update
    summary = json.loads((base.directory / "summary.json").read_text())
    assert summary["rollouts"] == 3
    assert summary["forwards_per_update"]["counted"]["critic"] == summary["forwards_per_update"]["planned"]["critic"]
    assert "Plan: 3 rollouts of 16 samples" in base.out


def test_forwards_counted_by_the_engine_are_those_of_the_stop_steps(base: Finished) -> None:
    from miles_dmd2.data.requests import TrainingRequests, grid

    source = TrainingRequests(["one", "two", "three"], 2, 8, 2, grid(2, 1.0), "per_sample", 0)
    expected = [sum(r.stop_step + 1 for window in source(i) for r in window) for i in range(3)]
    assert [row["rollout/forwards"] for row in base.rows()] == expected


def test_an_export_from_the_checkpoint_is_the_runs_own(base: Finished, tmp_path: Path) -> None:
    from miles_dmd2.cli.main import main

    for kind in ("raw", "ema"):
        output, own = tmp_path / kind, base.directory / f"student_{kind}"
        assert main(["export", str(base.directory), "--output", str(output), "--weights", kind]) == 0
        names = sorted(path.relative_to(own) for path in own.rglob("*") if path.is_file())
        assert names == sorted(path.relative_to(output) for path in output.rglob("*") if path.is_file())
        assert all((own / name).read_bytes() == (output / name).read_bytes() for name in names)


def test_the_same_command_twice_gives_the_same_bits(run: Run, base: Finished) -> None:
    again = run("again", save_interval=2)
    assert again.code == 0, again.err
    for kind in ("raw", "ema"):
        assert distance(base.student(kind), again.student(kind)) == 0.0
    assert without_clocks(base.rows()) == without_clocks(again.rows())


def test_a_resumed_run_ends_with_the_same_bits(run: Run, base: Finished, workspace: Path) -> None:
    first = run("resumed", num_rollout=2)
    assert first.code == 0, first.err
    second = run("resumed", load=workspace / "resumed")
    assert second.code == 0, second.err
    for kind in ("raw", "ema"):
        assert distance(base.student(kind), second.student(kind)) == 0.0
    assert without_clocks(base.rows()) == without_clocks(second.rows())


AWAY = {
    "dmd2_normalizer": "batch",
    "dmd2_teacher_guidance_scale": 3,
    "dmd2_negative_prompt": "the digit three",
    "dmd2_critic_scoring": "original",
    "dmd2_score_sigma_law": "logit_normal",
    "dmd2_student_sample_type": "sde",
    "dmd2_stop_step": "round_robin",
    "dmd2_critic_warmup_rollouts": 1,
    "student_ema_start": 1,
    "diffusion_num_steps": None,
    "diffusion_sigmas": "1,0.757",
}


@pytest.fixture(scope="module")
def away(run: Run) -> Finished:
    """A run away from the defaults of the algorithm."""
    done = run("away", **AWAY)
    assert done.code == 0, done.err
    return done


def test_options_of_the_algorithm_reach_engines_trainers_export_and_summary(away: Finished, base: Finished) -> None:
    rows = away.rows()
    assert [row["critic/teacher_forwards"] for row in rows] == [0, 16, 16]
    assert [row["critic/critic_forwards"] for row in rows] == [16, 16 + 8, 16 + 8]
    assert [row["rollout/forwards"] for row in rows] == [16, 16, 32]  # steps 0, 0 (no student step yet), 1
    assert [row["rollout/weight_step"] for row in rows] == [0, 0, 1]
    assert distance(away.student(), base.student()) > 1e-5
    student = json.loads((away.directory / "student_raw" / "student.json").read_text())
    assert (student["sample_type"], student["sigmas"]) == ("sde", [1.0, 0.7570000290870667, 0.0])
    counted = json.loads((away.directory / "summary.json").read_text())["forwards_per_update"]["counted"]
    assert counted == {"engine": 24, "critic": 24, "teacher": 16, "student": 8}


def test_a_resumed_run_away_from_the_defaults_also_ends_with_the_same_bits(
    run: Run, away: Finished, workspace: Path
) -> None:
    first = run("away resumed", num_rollout=2, **AWAY)
    assert first.code == 0, first.err
    second = run("away resumed", load=workspace / "away resumed", **AWAY)
    assert second.code == 0, second.err
    for kind in ("raw", "ema"):
        assert distance(away.student(kind), second.student(kind)) == 0.0
    assert without_clocks(away.rows()) == without_clocks(second.rows())


def test_a_run_on_real_latents(run: Run, base: Finished, workspace: Path) -> None:
    """One student forward per sample, and the student depends on the data."""
    from miles_dmd2.algo import normal
    from miles_dmd2.data.latents import LatentFile, write_latents
    from miles_dmd2.models.checkpoint import component_digest
    from miles_dmd2.models.registry import build_adapter

    adapter = build_adapter(workspace / "pipeline", 32, 32)
    prompts = tuple(f"the digit {word}" for word in ("one", "two", "three", "three"))
    students = []
    for name, seed in (("real", 0), ("other data", 9)):
        latents = torch.stack([normal(seed + i, adapter.latent_shape) for i in range(4)])
        path = workspace / f"{name}.safetensors"
        write_latents(path, LatentFile(latents, prompts, component_digest(workspace / "pipeline", "vae")))
        done = run(name, num_rollout=2, dmd2_student_input="forward_noise", dmd2_latents=path)
        assert done.code == 0, done.err
        assert [row["rollout/forwards"] for row in done.rows()] == [16, 16]
        assert all(row["actor/x0_mean_abs_diff"] < 1e-5 for row in done.rows())
        assert "it is trained at other inputs than it will see" in done.out
        students.append(done.student())
    assert distance(*students) > 1e-5


def test_the_negative_prompt_is_empty_unless_given(run: Run) -> None:
    """The engine encodes the empty prompt, and the run depends on which prompt it is."""
    plain = run("empty", num_rollout=1, dmd2_teacher_guidance_scale=3)
    other = run("not empty", num_rollout=1, dmd2_teacher_guidance_scale=3, dmd2_negative_prompt="the digit three")
    assert plain.code == other.code == 0, plain.err + other.err
    assert distance(plain.student(), other.student()) > 1e-6


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_two_ranks_and_two_engines_give_the_same_student(run: Run, workspace: Path) -> None:
    """To fp32 rounding. A large AdamW epsilon keeps it from dividing small gradients by small moments."""
    trainers = workspace / "uneven.yaml"
    trainers.write_text(
        "- {name: critic, role: critic, args: {lr: 1.0e-3, num_gpus: 2, micro_batch_size: 2}}\n"
        "- {name: actor, role: actor, args: {lr: 2.0e-4, num_gpus: 1}}\n"
    )
    one = run("one rank", adam_eps=1e-2)
    both = run("two ranks", adam_eps=1e-2, actor_num_gpus_per_node=2, rollout_num_engines=2, load_ranks_at_once=1)
    uneven = run("uneven", adam_eps=1e-2, actor_num_gpus_per_node=2, trainer_config=trainers)
    assert one.code == 0, one.err
    for other in (both, uneven):
        assert other.code == 0, other.err
        assert distance(one.student(), other.student()) < 2e-6
        assert other.rows()[-1]["critic/critic_loss"] == pytest.approx(one.rows()[-1]["critic/critic_loss"], rel=1e-5)


def test_two_runs_at_once_do_not_see_each_other(base: Finished, workspace: Path) -> None:
    """Two of their own directories give the same student; a third that names the first's is told who has it."""
    both = [begin(workspace, name, save_interval=2) for name in ("first", "second")]
    try:
        wait_for(lambda: (workspace / "first" / "logs").exists(), 120)
        third = begin(workspace, "first")
        _, err = third.communicate(timeout=120)
        assert third.returncode == 2
        assert f"is in use by process {both[0].pid} on " in err
        assert err.count("\n") == 1
        for process, name in zip(both, ("first", "second"), strict=True):
            _, err = process.communicate(timeout=240)
            assert process.returncode == 0, err
            done = Finished(0, "", "", workspace / name)
            for kind in ("raw", "ema"):
                assert distance(base.student(kind), done.student(kind)) == 0.0
    finally:
        for process in both:
            process.kill()


def test_a_run_asked_to_stop_saves_and_the_next_ends_with_the_same_bits(run: Run, workspace: Path) -> None:
    """No checkpoint is due before the end: the one that there is was written because of the request. However far it
    came until then, the next goes one rollout further.
    """
    directory = workspace / "asked"
    process = begin(workspace, "asked", num_rollout=1000)
    try:
        wait_for(lambda: (directory / "metrics.jsonl").exists() and (directory / "metrics.jsonl").read_text(), 120)
        os.killpg(process.pid, signal.SIGTERM)  # Ray is not of the driver's group, and lives until all is saved
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130, err
        (saved,) = (directory / "checkpoints").glob("step_*")
        done = int(saved.name.removeprefix("step_"))
        assert 0 < done < 1000, "the run ended by itself"
        assert "To go on from the newest checkpoint:" in err
    finally:
        process.kill()
    second, whole = run("asked", load=directory, num_rollout=done + 1), run("never asked", num_rollout=done + 1)
    assert (second.code, whole.code) == (0, 0), second.err + whole.err
    for kind in ("raw", "ema"):
        assert distance(whole.student(kind), second.student(kind)) == 0.0
    assert without_clocks(whole.rows()) == without_clocks(second.rows())


def test_no_key_of_the_environment_is_written_and_no_pickle_is(base: Finished) -> None:
    files = [path for path in base.directory.rglob("*") if path.is_file()]
    assert len(files) > 20
    with_key = [path for path in files if SECRET.encode() in path.read_bytes()]
    assert not with_key
    saved = [path for path in files if any(part.startswith("step_") for part in path.parts)]
    assert saved
    assert {path.suffix for path in saved} == {".json", ".safetensors"}


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_a_run_of_two_ranks_goes_on_with_one(run: Run, workspace: Path) -> None:
    """Told, not refused; the state is the same, what follows is to rounding."""
    options = {"adam_eps": 1e-2, "actor_num_gpus_per_node": 2}
    whole = run("on two", **options, save_interval=2)
    assert whole.code == 0, whole.err
    part = run("two then one", **options, num_rollout=2)
    assert part.code == 0, part.err
    then = run("two then one", load=workspace / "two then one", adam_eps=1e-2)
    assert then.code == 0, then.err
    assert "--actor-num-gpus-per-node was 2 and is 1: state is cut anew, bits differ by rounding" in then.out
    assert distance(whole.student(), then.student()) < 2e-6


def test_going_back_behind_a_later_checkpoint_is_refused_before_anything_starts(run: Run, base: Finished) -> None:
    again = run("base", load=base.directory / "checkpoints" / "step_000002")
    assert again.code == 2
    assert "holds later checkpoints (step_000003)" in again.err
    assert again.err.count("\n") == 1


def test_a_killed_rank_ends_the_run_with_one_line_and_a_log(workspace: Path) -> None:
    directory = workspace / "killed"
    process = begin(workspace, "killed", num_rollout=1000, save_interval=1)
    try:
        wait_for(lambda: any((directory / "checkpoints").glob("step_*")), 120)
        left = children(process.pid)
        pid = int((directory / "logs" / "critic_0.log").read_text().split("pid ")[1].split(",")[0])
        os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert f"critic_0 (pid {pid} on " in line
        assert "critic_0.log" in line
        assert "To go on from the newest checkpoint:" in err
        assert "Traceback" not in err
        assert "the run failed" in (directory / "logs" / "driver.log").read_text()
        wait_for(lambda: not [pid for pid in left if Path(f"/proc/{pid}").exists()], 10)
    finally:
        process.kill()


def test_a_cluster_that_does_not_answer_is_one_line(run: Run) -> None:
    done = run("nowhere", ray_address="nonsense:1")
    assert done.code == 2
    assert "error: --ray-address nonsense:1: no answer there" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_stops_in_seconds_says_how_to_go_on_and_leaves_no_process(
    workspace: Path, how: signal.Signals
) -> None:
    name = f"interrupted {how.name}"
    process = begin(workspace, name, num_rollout=1000, save_interval=1)
    try:
        wait_for(lambda: any((workspace / name / "checkpoints").glob("step_*")), 120)
        left = children(process.pid)
        assert len(left) > 3  # Ray and the workers
        os.killpg(process.pid, how)  # as a terminal, timeout and some schedulers do: to the whole group
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "stopped. To go on from the newest checkpoint:" in err
        assert "--load" in err
        assert "Traceback" not in err
        wait_for(lambda: not [pid for pid in left if Path(f"/proc/{pid}").exists()], 10)
        assert not list(Path("/tmp").glob(f"md2-run-{process.pid}-*"))
    finally:
        process.kill()


def begin(workspace: Path, name: str, **changes: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(workspace, name, **changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
