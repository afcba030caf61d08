"""What a user gets wrong: one line that names the flag or file, the value, and the remedy."""

from collections.abc import Callable
from pathlib import Path

import pytest
from config_commands import command, complaint, run

from miles_dmd2.config import ConfigError, build_config, parse

Write = Callable[..., Path]

# Flags, and what the line must hold: the flag, the value, the remedy.
FLAGS: list[tuple[str, tuple[str, ...]]] = [
    # names
    ("--num-rolout 3", ("--num-rolout", "no such flag", "--num-rollout")),
    ("--num_rollout 3", ("--num_rollout", "no such flag", "--num-rollout")),
    ("--num-roll 3", ("--num-roll", "no such flag", "--num-rollout")),
    ("--learning-rate=1", ("--learning-rate", "no such flag", "nearest is --")),
    ("--no-colocat", ("--no-colocat", "--no-colocate")),
    ("-lr 3", ("-lr", "no such flag", "--lr")),
    ("3", ("3", "a value without a flag")),
    ("--use-wandb true", ("true", "a value without a flag", "--use-wandb takes no value")),
    ("--use-wandb=true", ("--use-wandb", "takes no value", "true")),
    ("--lr", ("--lr", "expected one argument", "a number > 0")),
    ("--dmd2-score-sigma-range 0.1", ("--dmd2-score-sigma-range", "expected 2 arguments", "two numbers")),
    ("--lr 1 --lr 2", ("--lr", "given twice", "1", "2", "keep one")),
    ("--use-wandb --no-use-wandb", ("--use-wandb", "--no-use-wandb", "keep one")),
    # values
    ("--lr fast", ("--lr fast", "a number > 0")),
    ("--lr 0", ("--lr 0", "a number > 0")),
    ("--lr nan", ("--lr nan", "a number > 0")),
    ("--lr inf", ("--lr inf", "a number > 0")),
    ("--adam-beta1 1", ("--adam-beta1 1", ">= 0 and < 1")),
    ("--num-rollout 0", ("--num-rollout 0", "a whole number > 0")),
    ("--num-rollout 2.5", ("--num-rollout 2.5", "a whole number > 0")),
    ("--num-rollout 99999999999", ("--num-rollout 99999999999", "<= 2147483647")),
    ("--diffusion-num-steps 0", ("--diffusion-num-steps 0", "a whole number > 0")),
    ("--diffusion-num-steps -4", ("--diffusion-num-steps -4", "a whole number > 0")),
    ("--micro-batch-size 0", ("--micro-batch-size 0", "a whole number > 0")),
    ("--seed -1", ("--seed -1", "a whole number >= 0")),
    ("--student-ema-decay 1", ("--student-ema-decay 1", ">= 0 and < 1")),
    ("--diffusion-flow-shift 0", ("--diffusion-flow-shift 0", "a number > 0")),
    ("--device gpu", ("--device gpu", "cpu, cuda")),
    ("--lr-schedule Cosine", ("--lr-schedule Cosine", "constant, linear, cosine")),
    ("--dmd2-critic-loss-space v", ("--dmd2-critic-loss-space v", "velocity, x0, eps")),
    ("--dmd2-critic-conditioning yes", ("--dmd2-critic-conditioning yes", "none, stop_step")),
    ("--loss-type sft", ("--loss-type sft", "must be dmd2")),
    ("--rm-type clip", ("--rm-type clip", "must be none")),
    ("--fsdp-flow-shift fast", ("--fsdp-flow-shift fast", "visual=5")),
    ("--fsdp-flow-shift 0", ("--fsdp-flow-shift 0", "> 0")),
    ("--fsdp-flow-shift visual=5,visual=6", ("--fsdp-flow-shift visual=5,visual=6", "visual twice")),
    ("--fsdp-flow-shift depth=5", ("--fsdp-flow-shift depth=5", "visual=5")),
    ("--max-x0-drift 0", ("--max-x0-drift 0", "a number > 0")),
    ("--engine-attempts 0", ("--engine-attempts 0", "a whole number > 0")),
    ("--engine-max-restarts -1", ("--engine-max-restarts -1", "a whole number >= 0")),
    ("--engine-request-timeout inf", ("--engine-request-timeout inf", "a number > 0")),
    ("--verify-weights-every 0", ("--verify-weights-every 0", "a whole number > 0")),
    ("--sglang-weight-sync nccl", ("--sglang-weight-sync nccl", "disk, tensor")),
    ("--rollout-engine-url", ("--rollout-engine-url", "expected at least one argument", "one or more words")),
    ("--eval-metrics-path metrics", ("--eval-metrics-path metrics", "module:function")),
    # sigma range
    ("--dmd2-score-sigma-range 0 0.98", ("--dmd2-score-sigma-range 0 0.98", "0 < LO < HI < 1")),
    ("--dmd2-score-sigma-range 0.02 1", ("--dmd2-score-sigma-range 0.02 1", "0 < LO < HI < 1")),
    ("--dmd2-score-sigma-range 0.9 0.1", ("--dmd2-score-sigma-range 0.9 0.1", "0 < LO < HI < 1")),
    ("--dmd2-score-sigma-range 0.5 0.5", ("--dmd2-score-sigma-range 0.5 0.5", "0 < LO < HI < 1")),
    ("--dmd2-score-sigma-range nan 0.5", ("--dmd2-score-sigma-range nan 0.5", "0 < LO < HI < 1")),
    ("--dmd2-score-sigma-range a b", ("--dmd2-score-sigma-range a b", "two numbers")),
    # not in this version
    ("--dmd2-student-sample-type cps", ("--dmd2-student-sample-type cps", "ode, sde")),
    ("--dmd2-stop-step first", ("--dmd2-stop-step first", "round_robin")),
    ("--diffusion-sigmas 1,b", ("--diffusion-sigmas 1,b", "numbers with commas", "1,0.94")),
    ("--diffusion-sigmas 1,0.5,0.5", ("--diffusion-sigmas 1,0.5,0.5", "must decrease")),
    ("--diffusion-sigmas 0.5,0.50000000001,0", ("--diffusion-sigmas", "must decrease")),
    ("--diffusion-sigmas 0.5,0.49999999999,0", ("--diffusion-sigmas", "must decrease")),  # equal in fp32
    ("--diffusion-sigmas 1000,757,522", ("--diffusion-sigmas 1000,757,522", "(0, 1]")),
    ("--diffusion-sigmas 1e400", ("--diffusion-sigmas 1e400", "(0, 1]")),
    ("--diffusion-sigmas 0", ("--diffusion-sigmas 0", "(0, 1]")),
    ("--diffusion-sigmas 1,-0.5", ("--diffusion-sigmas 1,-0.5", "must decrease")),
    ("--diffusion-sigmas 1,nan", ("--diffusion-sigmas 1,nan", "must decrease")),
    ("--diffusion-sigmas 1,0.5 --diffusion-num-steps 3", ("--diffusion-num-steps 3", "has 2 steps", "set 2")),
    ("--diffusion-sigmas 1,0.5 --diffusion-flow-shift 3", ("--diffusion-flow-shift 3", "the grid itself")),
    ("--dmd2-part-weights visual=0,audio=0", ("--dmd2-part-weights visual=0,audio=0", "above 0")),
    ("--dmd2-part-weights visual=-1", ("--dmd2-part-weights visual=-1", "visual=5,audio=1.25")),
    ("--diffusion-guidance-scale 3", ("--diffusion-guidance-scale 3", "--dmd2-teacher-guidance-scale", "1.0")),
    ("--dmd2-teacher-guidance-scale -1", ("--dmd2-teacher-guidance-scale -1", ">= 0")),
    ("--dmd2-negative-prompt ugly", ("--dmd2-negative-prompt ugly", "--dmd2-teacher-guidance-scale 1")),
    ("--student-ema-start 5", ("--student-ema-start 5", "--student-ema-decay 0")),
    (
        "--dmd2-critic-steps-per-student-step 7",
        ("--dmd2-critic-steps-per-student-step 7", "5 critic steps of a", "use 5 or 10"),
    ),
    ("--dmd2-critic-steps-per-student-step 55", ("--num-rollout 10", "use 11 or more")),
    ("--dmd2-critic-warmup-rollouts 10", ("--num-rollout 10", "--dmd2-critic-warmup-rollouts 10", "use 11 or more")),
    (
        "--dmd2-critic-warmup-rollouts 4 --lr-warmup-updates 6",
        ("trainer actor", "--lr-warmup-updates 6", "this trainer's 6 updates"),
    ),
    ("--dmd2-student-input forward_noise", ("--dmd2-student-input forward_noise", "give --dmd2-latents")),
    ("--dmd2-latents l", ("--dmd2-latents l", "backward_simulation", "leave it out")),
    ("--dmd2-normalizer-eps 0", ("--dmd2-normalizer-eps 0", "> 0")),
    ("--dmd2-normalizer rank", ("--dmd2-normalizer rank", "sample, batch")),
    ("--dmd2-score-sigma-law cosine", ("--dmd2-score-sigma-law cosine", "uniform, logit_normal")),
    ("--dmd2-score-sigma-logit-mean 1", ("--dmd2-score-sigma-logit-mean 1", "--dmd2-score-sigma-law uniform")),
    ("--dmd2-score-sigma-logit-std 2", ("--dmd2-score-sigma-logit-std 2", "logit_normal")),
    ("--dmd2-critic-scoring both", ("--dmd2-critic-scoring both", "fused, original")),
    ("--no-colocate", ("--no-colocate", "not available", "--colocate")),
    # batch arithmetic
    ("--global-batch-size 64", ("--global-batch-size 64", "--rollout-batch-size 20", "set 20")),
    ("--num-steps-per-rollout 3", ("trainer critic", "--num-steps-per-rollout 3", "use 2 or 4", "18 or 21")),
    ("--num-steps-per-rollout 40", ("trainer critic", "--num-steps-per-rollout 40", "use 20", "of 40")),
    ("--micro-batch-size 3", ("trainer critic", "--micro-batch-size 3", "4 samples per rank", "use 2 or 4")),
    ("--micro-batch-size 8", ("trainer critic", "--micro-batch-size 8", "4 samples per rank", "use 4")),
    (
        "--rollout-batch-size 30 --actor-num-gpus-per-node 4",
        ("trainer critic", "window of 6", "4 ranks", "--actor-num-gpus-per-node", "3 or 6"),
    ),
    ("--lr-warmup-updates 50", ("trainer critic", "--lr-warmup-updates 50", "less than", "50 updates")),
    ("--lr-warmup-updates 10", ("trainer actor", "--lr-warmup-updates 10", "less than", "10 updates")),
    # options that go together
    ("--diffusion-step-strategy full --dmd2-stop-step shared", ("--dmd2-stop-step shared", "full", "leave it out")),
    ("--eval-interval 5", ("--eval-interval 5", "--eval-prompt-data")),
    ("--eval-samples-per-prompt 5", ("--eval-samples-per-prompt 5", "--eval-prompt-data")),
    ("--eval-metrics-path a:b", ("--eval-metrics-path a:b", "--eval-prompt-data")),
    (
        "--num-gpus-per-node 1 --actor-num-gpus-per-node 2",
        ("--num-gpus-per-node 1", "--actor-num-gpus-per-node 2", "raise it to 2"),
    ),
    ("--rollout-num-engines 3", ("--rollout-num-engines 3", "1 devices", "use 1 or fewer")),
    # files
    ("--config nowhere.yaml", ("--config nowhere.yaml", "no such file", "YAML mapping")),
    ("--config /", ("--config /", "is a directory", "YAML mapping")),
    ("--trainer-config nowhere.yaml", ("--trainer-config nowhere.yaml", "no such file", "YAML list")),
    ("--diffusion-fps 0", ("--diffusion-fps 0", "a number > 0")),
    ("--diffusion-fps nan", ("--diffusion-fps nan", "a number > 0")),
    ("--wandb-log-num-images -1", ("--wandb-log-num-images -1", "a whole number >= 0")),
    ("--rollout-video-dtype fp16", ("fp16", "one of uint8, fp32")),
    ("--reference-transformer x --debug-rollout-only train", ("--reference-transformer x", "eval")),
]


@pytest.mark.parametrize(("flags", "parts"), FLAGS, ids=[flags for flags, _ in FLAGS])
def test_flags(flags: str, parts: tuple[str, ...]) -> None:
    text = complaint(command(*flags.split()))
    for part in parts:
        assert part in text, text


# A --config file's text, and what the line must hold beside `--config PATH` or the value's `(PATH:LINE)`.
FILES: list[tuple[str | bytes, tuple[str, ...]]] = [
    ("lr: 1\nnum-rolout: 3\n", (":2", "no such option num-rolout", "num-rollout")),
    ("3: 4\n", (":1", "no such option 3")),
    ("null: 4\n", ("no such option None",)),
    ("lr: 1\nseed: 2\nlr: 3\n", (":3", "lr is already on line 1", "keep one")),
    ("num-rollout: 1\nnum_rollout: 2\n", (":2", "already on line 1")),
    ("lr: fast\n", ("--lr fast", ":1)", "a number > 0")),
    ("seed: 1\n\nlr: -1\n", ("--lr -1", ":3)", "a number > 0")),
    ("max-skipped-steps: true\n", ("--max-skipped-steps true", ":1)", "a whole number > 0")),
    ("max-skipped-steps: 2.5\n", ("--max-skipped-steps 2.5", "a whole number")),
    ("use-wandb: 1\n", ("--use-wandb 1", "true or false")),
    ("use-wandb: maybe\n", ("--use-wandb maybe", "true or false")),
    ("wandb-mode: off\n", ("--wandb-mode false", "online, offline")),
    ("lr: null\n", ("--lr null", "a number > 0")),
    ("lr: [1, 2]\n", ("--lr 1 2", "a number > 0")),
    ("run-dir: ''\n", ("--run-dir ''", "empty", "leave it out")),
    ('run-dir: "a\\0b"\n', ("--run-dir", "NUL")),
    ("dmd2-score-sigma-range: 0.5\n", ("--dmd2-score-sigma-range 0.5", "two numbers")),
    ("dmd2-score-sigma-range: [0.1, 0.5, 0.9]\n", ("--dmd2-score-sigma-range", "two numbers")),
    ("dmd2-score-sigma-range: [true, false]\n", ("--dmd2-score-sigma-range true false", "two numbers")),
    ("config: other.yaml\n", (":1", "config belongs on the command line", "remove")),
    ("dry-run: true\n", (":1", "dry-run belongs on the command line")),
    ("plan: 3\n", (":1", "no such option plan")),
    ("- lr\n- 3\n", ("must be a YAML mapping", "num-rollout: 100")),
    ("just words\n", ("must be a YAML mapping", "just words")),
    ("", ("is empty", "YAML mapping")),
    ("# nothing\n", ("is empty",)),
    ("lr: 1\n  seed: 2\n", (":2", "not YAML", "fix that line")),
    ("lr: [1\n", ("not YAML", "fix that line")),
    ("lr: 1\n---\nlr: 2\n", (":2", "not YAML")),
    ("a: !!python/object:os.system {}\n", (":1", "not YAML")),
    (b"lr: 1\nrun-dir: \xff\xfe\n", (":2", "not UTF-8", "0xff")),
    ("lr: 1\nrun-dir: a\x07\n", (":2", "control character")),
    ("trainer-config: 3\n", ("--trainer-config", "must be a YAML list", "got 3")),
]


@pytest.mark.parametrize(("content", "parts"), FILES, ids=[repr(content) for content, _ in FILES])
def test_config_file(write: Write, content: str | bytes, parts: tuple[str, ...]) -> None:
    file = write(content)
    text = complaint(command("--config", str(file)))
    assert str(file) in text or text.startswith("--trainer-config"), text
    for part in parts:
        assert part in text, text


def test_missing_options_are_named_together() -> None:
    text = complaint(["--num-rollout", "3"])
    assert text.startswith("--hf-checkpoint is required: diffusers pipeline directory")
    assert "also required: --prompt-data, --rollout-batch-size" in text


def test_a_wrong_value_is_told_before_a_missing_option() -> None:
    assert complaint(["--lr", "fast"]).startswith("--lr fast: must be a number > 0")


def test_a_bad_value_of_yaml_that_a_flag_overrides_is_no_fault(write: Write) -> None:
    assert run("--config", str(write("lr: fast\n")), "--lr", "1").config.trainer.lr == 1
    assert ".yaml" not in complaint(command("--config", str(write("lr: 1\n")), "--lr", "fast"))


def test_long_and_odd_values_are_shortened_and_quoted() -> None:
    text = complaint(command("--lr", "x" * 5000))
    assert len(text) < 200
    assert "'xxx" in text
    assert r"'a\nb'" in complaint(command("--lr", "a\nb"))
    assert "over 70 digits" in _refusal(lambda: build_config({"lr": 10**400}))


def _refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def test_build_config_refuses_unknown_names() -> None:
    assert "num_rollout" in _refusal(lambda: build_config({"num_rolout": 3}))


def test_a_windows_yaml_with_a_mark_is_read(write: Write) -> None:
    assert run("--config", str(write(b"\xef\xbb\xbflr: 1.0e-5\r\nseed: 3\r\n"))).config.run.seed == 3


def test_exponents_without_a_point_are_numbers(write: Write) -> None:
    """YAML 1.1 reads 1e-5 as text."""
    assert run("--config", str(write("lr: 1e-5\n"))).config.trainer.lr == 1e-5


def test_the_message_of_an_error_is_one_line() -> None:
    assert str(ConfigError("a\nb\u2028c")) == "a b c"
    assert isinstance(ConfigError("x"), ValueError)


def test_parse_takes_an_empty_command_line_for_a_missing_one() -> None:
    assert "is required" in _refusal(lambda: parse([]))
