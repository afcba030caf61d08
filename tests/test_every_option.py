"""No option is parsed and ignored: generated from the schema's fields, two values of each give two runs.

And whatever the options, a run that is continued ends with the bits of one that was not stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import torch
import yaml

from miles_dmd2.algo import normal
from miles_dmd2.config.sections import AlgorithmSection, ModelSection, RolloutSection, TrainerSection
from miles_dmd2.data.latents import LatentFile, write_latents
from miles_dmd2.training import ActorTrainer, Ranks
from tests.in_process import PROMPTS, Outcome, run
from tests.training.toy import LATENT

BASE = {
    "num-rollout": "4",
    "rollout-batch-size": "4",
    "n-samples-per-prompt": "4",
    "num-steps-per-rollout": "2",
    "student-ema-decay": "0.5",
    "lr": "1e-2",
    "cpu-threads": "1",
}
SECTIONS = (AlgorithmSection, TrainerSection, RolloutSection, ModelSection)
LATENTS = {"dmd2-student-input": "forward_noise", "dmd2-latents": "real.safetensors"}
# Of fields that are no choice of words: another value. `(value, what goes with it in both runs)`.
VALUES: dict[str, tuple[str, dict[str, str]]] = {
    "dmd2_latents": ("other.safetensors", LATENTS),
    "dmd2_normalizer_eps": ("1.0", {}),
    "dmd2_teacher_guidance_scale": ("3", {}),
    "dmd2_negative_prompt": ("bad", {"dmd2-teacher-guidance-scale": "3"}),
    "dmd2_score_sigma_logit_mean": ("1", {"dmd2-score-sigma-law": "logit_normal"}),
    "dmd2_score_sigma_logit_std": ("0.5", {"dmd2-score-sigma-law": "logit_normal"}),
    "dmd2_score_sigma_range": ("0.2 0.7", {}),
    "fsdp_flow_shift": ("3", {}),
    "dmd2_part_weights": ("2", {}),
    "dmd2_critic_steps_per_student_step": ("4", {}),
    "dmd2_critic_warmup_rollouts": ("1", {}),
    "student_ema_decay": ("0.9", {}),
    "student_ema_start": ("2", {}),
    "lr": ("2e-2", {}),
    "lr_warmup_updates": ("2", {}),
    "adam_beta1": ("0.5", {}),
    "adam_beta2": ("0.9", {}),
    "adam_eps": ("1e-2", {}),
    "weight_decay": ("0.5", {}),
    "clip_grad": ("0.01", {}),
    "num_steps_per_rollout": ("4", {}),
    "num_rollout": ("5", {}),
    "rollout_batch_size": ("2", {}),
    "n_samples_per_prompt": ("2", {}),
    "rollout_seed": ("4", {}),
    "diffusion_num_steps": ("3", {}),
    "diffusion_sigmas": ("0.9,0.6,0.3,0.1", {}),
    "diffusion_flow_shift": ("3", {}),
    "lora_rank": ("2", {}),
    "lora_alpha": ("8", {"lora-rank": "2"}),
    "lora_target_modules": ("inner", {"lora-rank": "2"}),
}
BESIDE = {"dmd2_student_input": {"dmd2-latents": "real.safetensors"}}
# One value only; and what may change nothing but rounding, or nothing at all (tests/training).
WITHOUT_EFFECT = {
    *("loss_type", "rm_type", "diffusion_guidance_scale", "global_batch_size"),
    *("micro_batch_size", "rollout_num_engines", "rollout_engine_batch_size", "gradient_checkpointing"),
}
# No options of the algorithm: what runs, on which pictures and prompts, and what else is done with its samples.
SURROUNDINGS = {
    *("hf_checkpoint", "diffusion_height", "diffusion_width", "diffusion_num_frames", "diffusion_duration"),
    *("prompt_data", "rollout_engine", "custom_rm_path", "rollout_video_dtype"),
    *("debug_rollout_only", "reference_transformer"),
}


def cases() -> Iterator[tuple[str, str]]:
    """(field, value) of every value but the default of a choice, and the other value of the rest."""
    for section in SECTIONS:
        for name, field in section.model_fields.items():
            if name in WITHOUT_EFFECT | SURROUNDINGS:
                continue
            if get_origin(field.annotation) is Literal:
                yield from ((name, value) for value in get_args(field.annotation) if value != field.default)
            elif name in VALUES:
                yield name, VALUES[name][0]


CASES = list(cases())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("options")
    for name, seed in (("real", 0), ("other", 10)):
        latents = torch.stack([normal(seed + i, LATENT) for i in range(len(PROMPTS))])
        write_latents(path / f"{name}.safetensors", LatentFile(latents, PROMPTS, "of no VAE"))
    return path


@pytest.fixture(scope="module")
def outcomes(ranks: Ranks, directory: Path) -> dict[tuple[str, ...], Outcome]:
    """Runs by their flags: most cases share the base."""
    torch.set_num_threads(1)
    return {}


def flags(directory: Path, options: dict[str, str]) -> list[str]:
    words = []
    for name, value in {**BASE, **options}.items():
        values = [str(directory / value)] if value.endswith(".safetensors") else value.split()
        words += [f"--{name}", *values]
    return words


def options_of(name: str, value: str) -> tuple[dict[str, str], dict[str, str]]:
    """Two runs that differ in this option alone."""
    beside = VALUES[name][1] if name in VALUES else {}
    flag = name.replace("_", "-")
    return beside, {**beside, **BESIDE.get(name, {}), flag: value}


def test_the_cases_cover_every_field() -> None:
    fields = {name for section in SECTIONS for name in section.model_fields}
    assert {name for name, _ in CASES} | WITHOUT_EFFECT | SURROUNDINGS == fields


@pytest.mark.parametrize(("name", "value"), CASES)
def test_two_values_give_two_runs(
    ranks: Ranks, directory: Path, outcomes: dict[tuple[str, ...], Outcome], name: str, value: str
) -> None:
    found = []
    for options in options_of(name, value):
        words = flags(directory, options)
        if tuple(words) not in outcomes:
            outcomes[tuple(words)] = run(ranks, directory, words)
        found.append(outcomes[tuple(words)])
    assert found[0].differs(found[1]), f"{name} {value} changes nothing"


ONE_STEP = {"diffusion-num-steps": "1"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dmd2-student-sample-type", "sde"),
        ("dmd2-stop-step", "shared"),
        ("dmd2-stop-step", "last"),
        ("dmd2-stop-step", "round_robin"),
        ("diffusion-flow-shift", "5"),
    ],
)
def test_a_one_step_student_is_the_same_whatever_the_hop_the_stop_and_the_shift(
    ranks: Ranks, directory: Path, outcomes: dict[tuple[str, ...], Outcome], name: str, value: str
) -> None:
    """As the plan's note says, which is why these are no errors there."""
    words = tuple(flags(directory, ONE_STEP))
    if words not in outcomes:
        outcomes[words] = run(ranks, directory, words)
    plain = outcomes[words]
    assert {(request.stop_step, request.sigmas) for request in plain.requests} == {(0, (1.0, 0.0))}
    assert "weights" not in plain.differs(other := run(ranks, directory, flags(directory, {**ONE_STEP, name: value})))
    assert plain.rows == other.rows


@pytest.mark.parametrize(("name", "value"), [("clip_grad", 1e-4), ("lr", 5e-3), ("lr_schedule", "linear")])
def test_a_trainer_s_own_option_is_no_other_trainer_s(
    ranks: Ranks, directory: Path, tmp_path: Path, name: str, value: object
) -> None:
    """Given to the actor alone: until its first step has reached the engines, the critic is the same bit for bit."""
    entries = [{"name": "critic", "role": "critic"}, {"name": "actor", "role": "actor", "args": {name: value}}]
    (tmp_path / "trainers.yaml").write_text(yaml.safe_dump(entries))
    rollouts = "2" if name == "lr_schedule" else "1"
    common, run_of = {"num-rollout": rollouts}, {}
    for label, more in (("all", {}), ("own", {"trainer-config": str(tmp_path / "trainers.yaml")})):
        run_of[label] = run(ranks, directory, flags(directory, {**common, **more}))
    first, second = run_of["all"], run_of["own"]
    assert any(not torch.equal(first.weights[key], second.weights[key]) for key in first.weights if "raw/" in key)
    critics = [
        {key: value for key, value in row.items() if key.startswith("critic/")}
        for row in (first.rows[0], second.rows[0])
    ]
    assert critics[0] == critics[1]
    if rollouts == "1":
        names = [key for key in first.weights if key.startswith("critic/")]
        assert all(torch.equal(first.weights[key], second.weights[key]) for key in names)


def test_the_same_flags_give_the_same_run(ranks: Ranks, directory: Path) -> None:
    """Without which the test above would prove nothing."""
    words = flags(directory, {})
    assert run(ranks, directory, words).differs(run(ranks, directory, words)) == []


def test_mutation_an_option_that_is_dropped_on_the_way_is_found(
    ranks: Ranks, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = ActorTrainer.__init__
    monkeypatch.setattr(ActorTrainer, "__init__", lambda *a, normalizer, **more: built(*a, **more))
    found = [run(ranks, directory, flags(directory, options)) for options in options_of("dmd2_normalizer", "batch")]
    assert found[0].differs(found[1]) == []


RESUMED = [case for case in CASES if case[0] in AlgorithmSection.model_fields or case[0].startswith("diffusion_")]


@pytest.mark.parametrize(("name", "value"), RESUMED)
def test_a_run_that_is_continued_is_the_one_that_was_not_stopped(
    ranks: Ranks, directory: Path, tmp_path: Path, name: str, value: str
) -> None:
    """Bitwise, after rollout 3 of 4: in the middle of an interval where a student step takes two."""
    _, options = options_of(name, value)
    words = flags(directory, options)
    whole = run(ranks, tmp_path, words, save_at=3)
    rest = run(ranks, tmp_path, words, start=3, counters=whole.counters)
    assert torch.equal(
        torch.cat([v.flatten() for v in whole.weights.values()]),
        torch.cat([v.flatten() for v in rest.weights.values()]),
    )
    assert whole.rows[3:] == rest.rows
    assert whole.requests[3 * 16 :] == rest.requests
