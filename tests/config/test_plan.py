"""The plan's arithmetic against sums done by hand, its text, its YAML round trip, and what a resume may change."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from config_commands import command, run

from miles_dmd2.config import Plan, build_plan, parse, plan_yaml, render_plan
from miles_dmd2.config.plan import student_sigmas

Write = Callable[..., Path]
# MiniMax H3's recipe: 40 prompts x 8 samples, 5 critic steps of 64, four student steps on the shift-12 grid.
H3_TEXT = (
    "--rollout-batch-size 40 --n-samples-per-prompt 8 --num-rollout 200 --actor-num-gpus-per-node 8 "
    "--actor-num-nodes 2 --diffusion-flow-shift 12 --fsdp-flow-shift 5 --dmd2-score-sigma-range 0.001 0.999 "
    "--micro-batch-size 1"
)
H3 = tuple(H3_TEXT.split())
FREE_TEXT = "--run-dir r --save s --save-interval 3 --load l --eval-prompt-data e --eval-interval 3 --num-rollout 99"


def plan_of(*flags: str) -> Plan:
    parsed = run(*flags)
    return build_plan(parsed.config, parsed.trainers)


def test_the_h3_recipe() -> None:
    plan = plan_of(*H3)
    assert (plan.samples_per_rollout, plan.windows, plan.window_size) == (320, 5, 64)
    assert [f"{sigma:.6f}" for sigma in plan.sigmas] == ["1.000000", "0.972973", "0.923077", "0.800000", "0.000000"]
    forwards = plan.forwards_per_update
    assert (forwards.engine, forwards.critic, forwards.teacher, forwards.student) == (800.0, 320, 64, 64)
    assert forwards.cost == 31.5
    critic, actor = plan.groups
    assert (critic.updates, critic.samples_per_rank, critic.micro_batches) == (1000, 4, 4)
    assert (actor.updates, actor.samples_per_rank, actor.micro_batches) == (200, 4, 4)
    assert critic.placement == "nodes 0-1 devices 0-7"
    assert plan.engine_placement == "node 0 device 0"


@pytest.mark.parametrize(
    ("flags", "forwards"),
    [
        ("", 20 * 2.5),
        ("--dmd2-stop-step shared", 20 * 2.5),
        ("--dmd2-stop-step last", 20 * 4),
        ("--diffusion-step-strategy full", 20 * 4),
        ("--diffusion-num-steps 1", 20),
        ("--diffusion-num-steps 8", 20 * 4.5),
    ],
)
def test_engine_forwards_are_the_mean_of_k_plus_1(flags: str, forwards: float) -> None:
    assert plan_of(*flags.split()).forwards_per_update.engine == forwards


@pytest.mark.parametrize(
    ("flags", "evals", "kinds"),
    [
        ("", 0, ()),
        ("--eval-prompt-data e", 2, ("raw",)),
        ("--eval-prompt-data e --eval-interval 5", 3, ("raw",)),
        ("--eval-prompt-data e --eval-interval 3 --student-ema-decay 0.9", 5, ("raw", "ema")),
        ("--eval-prompt-data e --eval-interval 99", 2, ("raw",)),
    ],
)
def test_evals(flags: str, evals: int, kinds: tuple[str, ...]) -> None:
    plan = plan_of(*flags.split())
    due = [r for r in range(10 + 1) if r % plan.eval_every == 0 or r == 10] if evals else []
    assert (plan.evals, plan.eval_kinds) == (len(due), kinds) == (evals, kinds)


@pytest.mark.parametrize(("interval", "count"), [("3", 4), ("5", 2), ("10", 1), ("99", 1)])
def test_checkpoints(interval: str, count: int) -> None:
    assert plan_of("--save-interval", interval).checkpoints == count
    assert plan_of().checkpoints == 1


def test_sigmas() -> None:
    assert student_sigmas(1, 5.0) == (1.0, 0.0)
    assert student_sigmas(4, 1.0) == (1.0, 0.75, 0.5, 0.25, 0.0)


@pytest.mark.parametrize(
    ("shift", "text"),
    [
        ("1", "uniform in [0.02, 0.98], shift 1"),
        # clamped above: 1 - (s(0.98) - 0.02) / 0.96 with s the shift by 1/5: 0.98 / (5 - 4 * 0.98) = 0.907407
        ("5", "uniform in [0.02, 0.98], shift 5, clamped (7.6% of the draws at 0.98)"),
        ("0.2", "uniform in [0.02, 0.98], shift 0.2, clamped (7.6% of the draws at 0.02)"),
        ("1e9", "uniform in [0.02, 0.98], shift 1e+09, clamped (100.0% of the draws at 0.98)"),
    ],
)
def test_score_sigma(shift: str, text: str) -> None:
    assert plan_of("--fsdp-flow-shift", shift).score_sigma == text


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("", "not told which"),
        ("--dmd2-critic-conditioning stop_step --diffusion-num-steps 1", "tells the critic a constant"),
        ("--dmd2-critic-conditioning stop_step --dmd2-stop-step last", "tells the critic a constant"),
        ("--diffusion-num-steps 1 --num-steps-per-rollout 1", "one step per student step"),
        ("--diffusion-num-steps 1 --rollout-seed 4", "--rollout-seed 4 is not --seed 0"),
        ("--diffusion-num-steps 1 --save elsewhere", "checkpoints go to --save elsewhere"),
    ],
)
def test_notes(flags: str, note: str) -> None:
    notes = plan_of(*flags.split()).notes
    assert len(notes) == 1
    assert note in notes[0]


@pytest.mark.parametrize("flags", ["--diffusion-num-steps 1", "--dmd2-critic-conditioning stop_step"])
def test_plain_settings_have_no_notes(flags: str) -> None:
    assert plan_of(*flags.split()).notes == ()


def test_the_text_is_short_and_says_it_all() -> None:
    text = render_plan(plan_of(*H3, "--eval-prompt-data", "e", "--eval-interval", "20", "--student-ema-decay", "0.99"))
    assert len(text.splitlines()) <= 25
    for part in (
        "200 rollouts of 320 samples (40 prompts x 8), in 5 windows of 64",
        "4 steps, sigmas 1.0000, 0.9730, 0.9231, 0.8000, 0; stop step per_sample",
        "critic on nodes 0-1 devices 0-7; updates of 64 samples = 16 ranks x 4 micro-batches x 1; 5 a rollout, 1000 in",
        "engine 800 forwards, critic 320 with backward, teacher 64, student 64 with backward",
        "11 with raw and ema weights: before the first, every 20 and after the last rollout",
        "note: one critic for all stop steps",
    ):
        assert part in text, text


def test_many_steps_stay_on_one_line() -> None:
    text = render_plan(plan_of("--diffusion-num-steps", "1000"))
    assert len(text.splitlines()) <= 25
    assert "..., 0.0030, 0.0020, 0.0010, 0;" in text


@pytest.mark.parametrize(
    "flags",
    [
        (),
        H3,
        ("--diffusion-step-strategy", "full", "--use-wandb", "--seed", "9223372036854775807"),
        ("--eval-prompt-data", "ein Pfad: mit #.txt", "--eval-interval", "3", "--lr", "1e-300", "--run-dir", "~"),
        ("--wandb-project", "yes", "--ray-address", "1e5"),
    ],
)
def test_dry_run_prints_a_config_file_of_the_same_run(write: Write, flags: tuple[str, ...]) -> None:
    parsed = run(*flags)
    text = plan_yaml(parsed.config, build_plan(parsed.config, parsed.trainers))
    document = yaml.safe_load(text)
    assert list(document)[-1] == "plan"
    assert document["global-batch-size"] == parsed.config.samples_per_rollout
    again = parse(["--config", str(write(text))])
    assert (again.config, again.trainers) == (parsed.config, parsed.trainers)
    assert plan_yaml(again.config, build_plan(again.config, again.trainers)) == text


def test_dry_run_carries_the_trainers(write: Write) -> None:
    trainers = write("- {name: c, role: critic, args: {lr: 1e-7}}\n- {name: a, role: actor}\n", "trainers.yaml")
    parsed = run("--trainer-config", str(trainers))
    text = plan_yaml(parsed.config, build_plan(parsed.config, parsed.trainers))
    trainers.unlink()
    assert parse(["--config", str(write(text))]).trainers == parsed.trainers


def test_the_plan_needs_no_files() -> None:
    parsed = parse(command("--dry-run"))
    assert build_plan(parsed.config, parsed.trainers).rollouts == 10
