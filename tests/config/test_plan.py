"""The plan's arithmetic against sums done by hand, its text, its YAML round trip, and what a resume may change."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from config_commands import command, run

from miles_dmd2.config import Plan, build_plan, flatten, parse, plan_yaml, render_plan
from miles_dmd2.config.clock import StudentClock
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
        ("--dmd2-student-input forward_noise --dmd2-latents l", 20),
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


KEPT = "--eval-prompt-data e --save-eval-media-dir m"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (KEPT, True),
        (f"{KEPT} --diffusion-fps 24", False),
        ("--eval-prompt-data e", False),
        ("--eval-prompt-data e --use-wandb", True),
        ("--eval-prompt-data e --use-wandb --wandb-log-num-images 0", False),
        ("--eval-prompt-data e --debug-rollout-only eval", True),
    ],
)
def test_the_playback_rate_that_clips_fall_back_to_is_said(flags: str, said: bool) -> None:
    parsed = run(*flags.split())
    for clips in (True, False):
        notes = build_plan(parsed.config, parsed.trainers, clips=clips).notes
        assert any("play at 8 frames per second" in note for note in notes) == (said and clips)


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("", (None, None)),
        ("--eval-prompt-data e", (None, None)),
        (KEPT, (Path("m"), None)),
        (f"{KEPT} --wandb-log-num-images 3 --use-wandb", (Path("m"), None)),  # complete whatever wandb shows
        (f"{KEPT} --wandb-log-num-images 0", (Path("m"), None)),
        ("--eval-prompt-data e --use-wandb --wandb-log-num-images 3 --run-dir r", (Path("r/eval"), 3)),
        ("--eval-prompt-data e --debug-rollout-only eval --run-dir r", (Path("r/eval"), None)),
        (f"{KEPT} --debug-rollout-only eval", (Path("m"), None)),
    ],
)
def test_which_eval_samples_are_kept_and_where(flags: str, kept: tuple[Path | None, int | None]) -> None:
    assert run(*flags.split()).config.eval_media == kept


def test_a_run_without_trainers_says_so() -> None:
    plan = plan_of("--debug-rollout-only")
    assert any("no trainer is started" in note for note in plan.notes)
    assert (plan.groups, plan.checkpoints, plan.evals, plan.rollouts > 0) == ((), 0, 0, True)
    one = plan_of("--debug-rollout-only", "eval", "--eval-prompt-data", "e")
    assert (one.groups, one.checkpoints, one.evals, one.rollouts) == ((), 0, 1, 0)
    assert render_plan(one).startswith("Plan: one eval, without trainers\n")
    assert "checkpoints" not in render_plan(one)


@pytest.mark.parametrize(("interval", "count"), [("3", 4), ("5", 2), ("10", 1), ("99", 1)])
def test_checkpoints(interval: str, count: int) -> None:
    assert plan_of("--save-interval", interval).checkpoints == count
    assert plan_of().checkpoints == 1


@pytest.mark.parametrize("text", ["1,0.757,0.522", "1, 0.757, 0.522, 0", "[1, 0.757, 0.522]"])
def test_an_explicit_grid_is_taken_as_it_is(text: str, write: Write) -> None:
    plan = plan_of("--config", str(write(f"diffusion-sigmas: {text}\n")))
    assert plan.sigmas == (1.0, 0.757, 0.522, 0.0)
    assert plan.student_steps == 3
    assert plan.forwards_per_update.engine == 20 * 2
    config = run("--diffusion-sigmas", "1,0.757,0.522").config
    assert flatten(config.resolved())["diffusion_num_steps"] == 3
    assert config.resolved().explicit_sigmas == config.explicit_sigmas == (1.0, 0.757, 0.522, 0.0)


def test_sigmas() -> None:
    assert student_sigmas(1, 5.0) == (1.0, 0.0)
    assert student_sigmas(4, 1.0) == (1.0, 0.75, 0.5, 0.25, 0.0)


@pytest.mark.parametrize(
    ("flags", "teacher", "scoring", "cost"),
    [
        ("", 4, 0, 2.5 * 5 + 15 + 1 + 3),
        ("--dmd2-teacher-guidance-scale 4.5", 8, 0, 2.5 * 5 + 15 + 2 + 3),
        ("--dmd2-critic-scoring original", 4, 4, 2.5 * 5 + 15 + 1 + 1 + 3),
    ],
)
def test_forwards_of_the_scores(flags: str, teacher: int, scoring: int, cost: float) -> None:
    """Windows of 20 / 5 samples; a guided teacher runs twice, a scoring pass is one forward of the critic more."""
    plan = plan_of(*flags.split())
    forwards = plan.forwards_per_update
    assert (forwards.critic, forwards.teacher, forwards.scoring, forwards.cost) == (20, teacher, scoring, cost)
    assert (f"and {scoring} to score" in render_plan(plan)) == bool(scoring)


@pytest.mark.parametrize(
    ("flags", "updates", "cost", "text"),
    [
        ("", 10, 2.5 * 5 + 15 + 1 + 3, "a step on every rollout"),
        # two rollouts of 5 windows of 4 for one student step on 4
        ("--dmd2-critic-steps-per-student-step 10", 5, 2 * (2.5 * 5 + 15) + 1 + 3, "a step on every 2 rollouts"),
        (
            "--dmd2-critic-steps-per-student-step 15 --dmd2-critic-warmup-rollouts 3",
            2,
            3 * (2.5 * 5 + 15) + 1 + 3,
            "a step on every 3 rollouts after 3 for the critic alone",
        ),
        ("--dmd2-critic-warmup-rollouts 9", 1, 31.5, "a step on every rollout after 9 for the critic alone"),
    ],
)
def test_the_student_s_clock(flags: str, updates: int, cost: float, text: str) -> None:
    plan = plan_of(*flags.split())
    critic, actor = plan.groups
    assert (critic.updates, actor.updates, plan.forwards_per_update.cost) == (50, updates, cost)
    assert text in render_plan(plan)


@pytest.mark.parametrize(("warmup", "interval"), [(0, 1), (0, 3), (4, 1), (2, 3)])
def test_a_clock_counts_the_rollouts_that_it_names(warmup: int, interval: int) -> None:
    clock = StudentClock(warmup, interval)
    due = [i for i in range(40) if clock.due(i)]
    assert due == list(range(warmup + interval - 1, 40, interval))
    for rollouts in range(40):
        assert clock.steps(rollouts) == sum(i < rollouts for i in due)


def test_score_sigma_of_the_logit_normal_law() -> None:
    """0.98 is shift_5 of 0.907407, which is 0.924383 of the range, and logit(0.924383) = 2.503361: P(z > that)."""
    flags = ("--dmd2-score-sigma-law", "logit_normal", "--fsdp-flow-shift", "5")
    plain = plan_of(*flags).score_sigma
    assert plain == "logit-normal (0, 1) in [0.02, 0.98], shift 5, clamped (0.6% of the draws at 0.98)"
    moved = plan_of(*flags, "--dmd2-score-sigma-logit-mean", "2.503361", "--dmd2-score-sigma-logit-std", "0.3")
    assert moved.score_sigma.endswith("clamped (50.0% of the draws at 0.98)")


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
        (
            "--dmd2-critic-conditioning stop_step --dmd2-student-input forward_noise --dmd2-latents l",
            "it is trained at other inputs than it will see; sde has no such gap",
        ),
        ("--diffusion-sigmas 0.999", "rollouts scale the initial noise by it"),
        ("--diffusion-num-steps 1 --dmd2-student-sample-type sde", "no effect of --dmd2-student-sample-type sde"),
        (
            "--diffusion-num-steps 1 --dmd2-stop-step last --diffusion-flow-shift 5",
            "no effect of --dmd2-stop-step last, --diffusion-flow-shift 5",
        ),
        (
            "--diffusion-num-steps 1 --student-ema-decay 0.9 --student-ema-start 5000",
            "so its average never begins",
        ),
        ("--diffusion-num-steps 1 --save elsewhere", "checkpoints go to --save elsewhere"),
    ],
)
def test_notes(flags: str, note: str) -> None:
    notes = plan_of(*flags.split()).notes
    assert len(notes) == 1
    assert note in notes[0]


@pytest.mark.parametrize(
    "flags",
    [
        "--diffusion-num-steps 1",
        "--dmd2-critic-conditioning stop_step",
        "--diffusion-num-steps 1 --dmd2-student-input forward_noise --dmd2-latents l",
        "--dmd2-critic-conditioning stop_step --dmd2-student-input forward_noise --dmd2-latents l "
        "--dmd2-student-sample-type sde",
    ],
)
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
