"""Every option from flags and from YAML, precedence, --help, and that nothing but a ConfigError escapes."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_commands import REQUIRED, command, complaint, run
from hypothesis import example, given
from hypothesis import strategies as st

from miles_dmd2.config import Config, ConfigError, build_config, flatten, parse
from miles_dmd2.config.flags import help_text
from miles_dmd2.config.options import OPTIONS

Write = Callable[..., Path]

SGLANG = ("--rollout-engine", "sglang", "--sglang-python", "engine/bin/python")
TENSOR = ("--sglang-weight-sync", "tensor")
RUNNING = ("--rollout-engine", "sglang", "--rollout-engine-url", "http://127.0.0.1:30000")

# For each option a value that is not its default, as typed and as stored, and what else has to be given with it.
OTHERS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "hf_checkpoint": ("elsewhere", "elsewhere", ()),
    "diffusion_height": ("64", 64, ()),
    "diffusion_width": ("96", 96, ()),
    "diffusion_num_frames": ("5", 5, ()),
    "diffusion_duration": ("2.5", 2.5, ()),
    "dmd2_part_weights": ("visual=2,audio=1", "visual=2.0,audio=1.0", ()),
    "forward_dtype": ("bf16", "bf16", ()),
    "gradient_checkpointing": ("true", True, ()),
    "loss_type": ("dmd2", "dmd2", ()),
    "dmd2_student_sample_type": ("sde", "sde", ()),
    "dmd2_student_input": ("forward_noise", "forward_noise", ("--dmd2-latents", "l")),
    "dmd2_latents": ("real.safetensors", "real.safetensors", ("--dmd2-student-input", "forward_noise")),
    "dmd2_stop_step": ("shared", "shared", ()),
    "dmd2_critic_loss_space": ("x0", "x0", ()),
    "dmd2_critic_conditioning": ("stop_step", "stop_step", ()),
    "dmd2_normalizer": ("batch", "batch", ()),
    "dmd2_normalizer_eps": ("1e-4", 1e-4, ()),
    "dmd2_teacher_guidance_scale": ("4.5", 4.5, ()),
    "dmd2_negative_prompt": ("blurry", "blurry", ("--dmd2-teacher-guidance-scale", "3")),
    "dmd2_critic_scoring": ("original", "original", ()),
    "dmd2_score_sigma_law": ("logit_normal", "logit_normal", ()),
    "dmd2_score_sigma_logit_mean": ("-0.5", -0.5, ("--dmd2-score-sigma-law", "logit_normal")),
    "dmd2_score_sigma_logit_std": ("0.8", 0.8, ("--dmd2-score-sigma-law", "logit_normal")),
    "dmd2_score_sigma_range": ("0.001 0.999", [0.001, 0.999], ()),
    "fsdp_flow_shift": ("visual=5", "5.0", ()),
    "dmd2_critic_steps_per_student_step": ("10", 10, ()),
    "dmd2_critic_warmup_rollouts": ("3", 3, ()),
    "student_ema_start": ("7", 7, ("--student-ema-decay", "0.9")),
    "student_ema_decay": ("0.99", 0.99, ()),
    "num_rollout": ("200", 200, ()),
    "prompt_data": ("p.jsonl", "p.jsonl", ()),
    "rollout_batch_size": ("40", 40, ()),
    "n_samples_per_prompt": ("8", 8, ()),
    "global_batch_size": ("20", 20, ()),
    "diffusion_num_steps": ("1", 1, ()),
    "diffusion_sigmas": ("1,0.757,0.522,0", "1,0.757,0.522", ()),
    "diffusion_flow_shift": ("12", 12.0, ()),
    "diffusion_guidance_scale": ("1", 1.0, ()),
    "diffusion_step_strategy": ("full", "full", ()),
    "rollout_engine": ("sglang", "sglang", ("--sglang-python", "engine/bin/python")),
    "rollout_num_engines": ("2", 2, ("--actor-num-gpus-per-node", "2")),
    "rollout_engine_batch_size": ("16", 16, ()),
    "rm_type": ("none", "none", ()),
    "rollout_seed": ("7", 7, ()),
    "custom_rm_path": ("rewards.py:score", "rewards.py:score", ()),
    "rollout_video_dtype": ("fp32", "fp32", ()),
    "debug_rollout_only": ("eval", "eval", ("--eval-prompt-data", "eval.txt")),
    "reference_transformer": ("few",) * 2 + (("--debug-rollout-only", "eval", "--eval-prompt-data", "eval.txt"),),
    "save_eval_media_dir": ("media", "media", ("--eval-prompt-data", "eval.txt")),
    "diffusion_fps": ("23.976", 23.976, ()),
    "eval_prompt_data": ("eval.txt", "eval.txt", ()),
    "eval_interval": ("5", 5, ("--eval-prompt-data", "eval.txt")),
    "eval_samples_per_prompt": ("4", 4, ("--eval-prompt-data", "eval.txt")),
    "eval_metrics_path": ("recipes.digits.metrics:evaluate",) * 2 + (("--eval-prompt-data", "eval.txt"),),
    "sglang_python": ("elsewhere/bin/python", "elsewhere/bin/python", SGLANG[:2]),
    "rollout_engine_url": ("http://a:1 https://[::1]:2/", ["http://a:1", "https://[::1]:2"], (*SGLANG[:2], *TENSOR)),
    "require_engine_plugin": ("true", True, RUNNING),
    "sglang_allow_untested_version": ("true", True, SGLANG),
    "sglang_weight_sync": ("tensor", "tensor", SGLANG),
    "sglang_weight_directory": ("/dev/shm/w", "/dev/shm/w", SGLANG),
    "verify_weights_every": ("5", 5, SGLANG),
    "probe_tolerance": ("0.001", 0.001, SGLANG),
    "engine_request_timeout": ("30", 30.0, SGLANG),
    "engine_attempts": ("1", 1, SGLANG),
    "engine_max_in_flight": ("4", 4, SGLANG),
    "engine_max_restarts": ("0", 0, SGLANG),
    "lr": ("1e-5", 1e-5, ()),
    "lr_schedule": ("cosine", "cosine", ()),
    "lr_warmup_updates": ("3", 3, ()),
    "adam_beta1": ("0", 0.0, ()),
    "adam_beta2": ("0.99", 0.99, ()),
    "adam_eps": ("1e-6", 1e-6, ()),
    "weight_decay": ("0", 0.0, ()),
    "clip_grad": ("0", 0.0, ()),
    "num_steps_per_rollout": ("4", 4, ()),
    "micro_batch_size": ("2", 2, ()),
    "lora_rank": ("4", 4, ()),
    "lora_alpha": ("8", 8, ("--lora-rank", "4")),
    "lora_target_modules": ("to_q to_v", ["to_q", "to_v"], ("--lora-rank", "4")),
    "device": ("cuda", "cuda", ()),
    "actor_num_nodes": ("2", 2, ()),
    "actor_num_gpus_per_node": ("2", 2, ()),
    "num_gpus_per_node": ("8", 8, ()),
    "colocate": ("true", True, ()),
    "ray_address": ("auto", "auto", ()),
    "cpu_threads": ("1", 1, ()),
    "gpu_memory_gb": ("141", 141.0, ()),
    "host_memory_gb": ("2000", 2000.0, ()),
    "load_ranks_at_once": ("1", 1, ()),
    "start_timeout": ("60", 60.0, ()),
    "phase_timeout": ("60", 60.0, ()),
    "run_dir": ("runs/a", "runs/a", ()),
    "seed": ("3", 3, ()),
    "save": ("elsewhere", "elsewhere", ()),
    "save_interval": ("5", 5, ()),
    "load": ("runs/a", "runs/a", ()),
    "keep_last": ("2", 2, ()),
    "keep_best": ("accuracy_raw",) * 2 + (("--eval-prompt-data", "e.txt", "--eval-metrics-path", "m:f"),),
    "keep_best_mode": (
        "min",
        "min",
        ("--keep-best", "loss", "--eval-prompt-data", "e.txt", "--eval-metrics-path", "m:f"),
    ),
    "allow_config_change": ("seed lr-schedule", ["seed", "lr-schedule"], ("--load", "x")),
    "dump_bad_batch": ("true", True, ()),
    "connect_timeout": ("5", 5.0, ()),
    "max_skipped_steps": ("1", 1, ()),
    "max_x0_drift": ("0.5", 0.5, ()),
    "use_wandb": ("true", True, ()),
    "wandb_log_num_images": ("0", 0, ()),
    "wandb_project": ("p", "p", ()),
    "wandb_mode": ("offline", "offline", ()),
}


def values_of(argv: list[str]) -> dict[str, Any]:
    return flatten(parse(argv).config)


def test_every_option_is_reachable_by_its_flag_and_by_both_spellings_in_yaml(write: Write) -> None:
    assert set(OTHERS) | {"trainer_config", "sglang_args"} == set(OPTIONS)
    for name, (typed, stored, beside) in OTHERS.items():
        flag = f"--{name.replace('_', '-')}"
        words = [flag] if OPTIONS[name].is_switch else [flag, *typed.split()]
        assert values_of(command(*words, *beside))[name] == stored, name
        several = OPTIONS[name].is_pair or OPTIONS[name].is_list
        in_yaml = json.dumps(typed.split()) if several else typed
        for key in (name, name.replace("_", "-")):
            others = command(*beside)
            if flag in others:  # a flag would win over the file
                others = [w for i, w in enumerate(others) if flag not in (w, others[i - 1] if i else "")]
            assert values_of([*others, "--config", str(write(f"{key}: {in_yaml}\n"))])[name] == stored, name


def test_names_are_unique_over_sections_and_free_of_the_general_flags() -> None:
    names = [name for field in Config.model_fields.values() for name in field.annotation.model_fields]  # type: ignore[union-attr]
    assert len(names) == len(set(names)) == len(OPTIONS)
    assert not {"config", "dry_run", "help", "plan"} & set(names)
    assert not any(name.startswith("no_") for name in names)


def test_defaults_give_way_to_yaml_and_yaml_to_flags(write: Write) -> None:
    file = write("lr: 1.0e-5\nadam-beta1: 0.5\nuse_wandb: true\n")
    values = values_of(command("--config", str(file), "--lr", "3e-5", "--no-use-wandb"))
    assert (values["lr"], values["adam_beta1"], values["adam_beta2"]) == (3e-5, 0.5, 0.999)
    assert values["use_wandb"] is False


def test_required_options_may_come_from_yaml(write: Write) -> None:
    file = write("".join(f"{name}: {value}\n" for name, value in REQUIRED.items()))
    assert parse(["--config", str(file)]).config == run().config


def test_a_flag_given_twice_with_the_same_value_is_no_conflict() -> None:
    assert run("--lr", "1e-5", "--lr", "1e-5").config.trainer.lr == 1e-5


def test_negative_and_scientific_numbers_are_values_and_not_flags() -> None:
    assert "-1e-5" in complaint(command("--lr", "-1e-5"))
    assert "--seed -3" in complaint(command("--seed", "-3"))
    assert run("--wandb-project", "-5").config.run.wandb_project == "-5"
    assert "-1e-3 0.9" in complaint(command("--dmd2-score-sigma-range", "-1e-3", "0.9"))


def test_a_flag_that_may_stand_alone(write: Write) -> None:
    assert run("--debug-rollout-only").config.rollout.debug_rollout_only == "train"
    assert run("--debug-rollout-only", "--seed", "3").config.rollout.debug_rollout_only == "train"
    assert "must be one of train, eval" in complaint(command("--debug-rollout-only", "both"))
    assert run("--debug-rollout-only", "train").config.rollout.debug_rollout_only == "train"


def test_derived_defaults_are_filled_in() -> None:
    config = run("--n-samples-per-prompt", "2", "--seed", "3", "--run-dir", "runs/a").config
    assert (config.rollout.global_batch_size, config.samples_per_rollout) == (40, 40)
    assert (config.rollout.rollout_seed, config.rollout_seed) == (3, 3)
    assert config.run.save == config.save_dir == Path("runs/a/checkpoints")
    assert (config.cluster.num_gpus_per_node, config.devices_per_node, config.num_ranks) == (1, 1, 1)
    assert [(entry.name, entry.role) for entry in config.run.trainer_config or ()] == [
        ("critic", "critic"),
        ("actor", "actor"),
    ]
    assert config.eval_every == 10
    assert config.resolved() == config


@pytest.mark.parametrize(
    ("flags", "law"),
    [
        ((), "per_sample"),
        (("--dmd2-stop-step", "shared"), "shared"),
        (("--dmd2-stop-step", "last"), "full"),
        (("--diffusion-step-strategy", "full"), "full"),
        (("--diffusion-step-strategy", "full", "--dmd2-stop-step", "last"), "full"),
    ],
)
def test_stop_law(flags: tuple[str, ...], law: str) -> None:
    config = run(*flags).config
    assert config.stop_law == law
    assert build_config(flatten(config)) == config, "the resolved form is valid input"


@pytest.mark.parametrize(("text", "shift"), [("5", 5.0), ("visual=5", 5.0), (" visual = 0.5 ", 0.5), ("1e1", 10.0)])
def test_score_shift(text: str, shift: float) -> None:
    assert run("--fsdp-flow-shift", text).config.score_shift == shift


def test_values_by_part_have_one_way_to_be_written() -> None:
    config = run("--fsdp-flow-shift", "audio=1.25, visual=5", "--dmd2-part-weights", "visual=1,audio=0.5").config
    assert (config.score_shift, config.part_shifts) == (5.0, {"audio": 1.25})
    assert config.part_weights == {"visual": 1.0, "audio": 0.5}
    assert config.algorithm.fsdp_flow_shift == "visual=5.0,audio=1.25"
    assert run("--fsdp-flow-shift", "visual=5").config.algorithm.fsdp_flow_shift == "5.0"


def test_help_lists_every_option_in_its_group_with_its_default_and_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = help_text()
    for option in OPTIONS.values():
        assert f"\n  {option.flag}" in text, option.name
        assert text.count(option.description) >= 1, option.name
        assert all(choice in text for choice in option.choices)
    assert text.count("(required)") == len(REQUIRED)
    for line in (
        "  --lr NUMBER           learning rate (default: 2e-06)",
        "  --colocate, --no-colocate",
        "  --wandb-mode {online,offline}",
        "  --dmd2-score-sigma-range LO HI",
    ):
        assert f"\n{line}" in text
    headings = [line for line in text.splitlines() if line and not line.startswith(" ") and line.endswith(":")]
    assert headings[:4] == ["General:", "Model and canvas:", "DMD2:", "Rollouts:"]


def test_help_needs_nothing_else_and_exits_with_0() -> None:
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    assert "--hf-checkpoint PATH" in out.getvalue()


def test_dry_run_is_reported() -> None:
    assert not run().dry_run
    assert run("--dry-run").dry_run


def test_no_torch_and_no_ray_at_import() -> None:
    code = (
        "import sys, json, miles_dmd2.config, miles_dmd2.config.checks, miles_dmd2.data.prompts;"
        "print(json.dumps([m for m in ('torch', 'ray', 'numpy', 'diffusers') if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(out.stdout) == []


# Fuzz: plausible command lines (valid flags with odd values, odd flags, odd files).
FLAGS = st.sampled_from([option.flag for option in OPTIONS.values()])
ODD_WORDS = [
    "0",
    "-1",
    "1e400",
    "nan",
    "-inf",
    "true",
    "null",
    "[]",
    "{}",
    "--lr",
    "--sglang-",
    "--sglang-args",
    "--sglang-a=",
    "--rollout-engine=sglang",
    "--",
    "-",
    "=",
    ",",
    "visual=",
    "0x10",
    "1_0",
    "½",
    "9999999999999999999999",
    "{a:",
    "*",
    "\x00",
    "\ud800",
]
ODD = st.sampled_from(ODD_WORDS)
WORD = st.one_of(FLAGS, ODD, st.text(max_size=12), FLAGS.map(lambda flag: f"{flag}=1"), FLAGS.map(lambda f: f[:-1]))


def outcome(argv: list[str]) -> ConfigError | SystemExit | None:
    try:
        with redirect_stdout(io.StringIO()):
            parse(argv)
    except (ConfigError, SystemExit) as error:
        return error
    return None


def survives(argv: list[str]) -> None:
    """Accepted, or refused in one line, or answered with help; no other exception, and no other exit."""
    error = outcome(argv)
    if isinstance(error, SystemExit):
        assert error.code == 0
    elif error is not None:
        assert str(error).splitlines() == [str(error)]


@given(st.lists(WORD, max_size=8), st.booleans())
@example(["--"], True)
@example(["--config"], True)
@example(["--no-colocate=1"], True)
@example(["-hx"], True)
@example(["--seed", "9" * 5000], True)
@example(["--fsdp-flow-shift", "9" * 5000], True)
@example(["--lr", "x\ny\u2028z"], True)
def test_only_config_errors_and_help_escape(argv: list[str], complete: bool) -> None:
    survives([*command(), *argv] if complete else argv)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), ODD)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3))


@given(st.dictionaries(st.sampled_from(sorted(OPTIONS)), VALUES, max_size=4))
def test_only_config_errors_escape_from_odd_yaml_values(tmp_path_factory: Any, values: dict[str, Any]) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8", errors="surrogatepass")
    survives([*command(), "--config", str(file)])


TRICKY = "{}[]:-#&*!|>'\"%@`,\n\t ?<abc019.~_=\x00\u2028\ufeff"


@given(st.text(st.sampled_from(TRICKY), max_size=40))
@example("a: &a [*a]\n")
@example("<<: {lr: 1}\n")
@example("? [a]\n: b\n")
@example("seed: " + "9" * 5000)
@example("[" * 5000)
@example("lr: 2001-99-99\n")
@example("a: b\n---\nc: d\n")
@example("lr: !!python/object/apply:os.system [ls]\n")
def test_only_config_errors_escape_from_odd_yaml_text(tmp_path_factory: Any, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_bytes(text.encode())
    survives([*command(), "--config", str(file)])
    survives([*command(), "--trainer-config", str(file)])
