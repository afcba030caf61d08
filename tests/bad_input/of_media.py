"""Rewards, eval media, and renders without trainers."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file

from tests.bad_input.bench import Bench, Case, Table, flags


def reward(text: str, name: str, value: str, remedy: str) -> Case:
    def make(bench: Bench) -> list[str]:
        return ["--custom-rm-path", f"{bench.file('my_rewards.py', text)}:score"]

    return Case(make, name, value, remedy)


def evaluated(bench: Bench, *words: object) -> list[str]:
    return ["--eval-prompt-data", str(bench.file("eval.txt", "the digit one\n")), *map(str, words)]


def other_transformer(bench: Bench, change: object) -> list[str]:
    """--reference-transformer with a transformer of the tiny pipeline, whose tensors `change` edits."""
    source, copy = bench.pipeline / "transformer", bench.path / "few"
    copy.mkdir()
    (copy / "config.json").write_bytes((source / "config.json").read_bytes())
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, copy / file.name)
    return evaluated(bench, "--debug-rollout-only", "eval", "--reference-transformer", copy)


def widened(tensors: dict[str, torch.Tensor]) -> None:
    tensors["img_in.weight"] = torch.cat([tensors["img_in.weight"]] * 2)


def renamed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["image_in.weight"] = tensors.pop("img_in.weight")


def with_samples(bench: Bench) -> list[str]:
    bench.file("media/eval_000000/index.jsonl", "")
    return evaluated(bench, "--save-eval-media-dir", bench.path / "media")


def no_config(bench: Bench) -> list[str]:
    (bench.path / "few").mkdir()
    return evaluated(bench, "--debug-rollout-only", "eval", "--reference-transformer", bench.path / "few")


def metadata(text: str) -> Case:
    def make(bench: Bench) -> list[str]:
        return ["--prompt-data", str(bench.file("p.jsonl", f'{{"prompt": "one", "metadata": {text}}}\n'))]

    return Case(make, "--prompt-data", "p.jsonl:1: metadata", "must be")


ON = "--debug-rollout-only"
MEDIA: Table = {
    "reward no function": reward("score = 3\n", "--custom-rm-path", "my_rewards.py:score", "has no function score"),
    "reward of two arguments": reward(
        "def score(args, samples): ...\n", "--custom-rm-path", "(args, samples)", "called with one argument"
    ),
    "reward that yields": reward("def score(s):\n    yield 1\n", "--custom-rm-path", "yields", "must return"),
    "reward that does not import": reward("import nothing_of_this_name\n", "--custom-rm-path", "nothing_of", "import"),
    "reward no file": flags("--custom-rm-path no_file.py:score", "--custom-rm-path", "no_file.py", "give module:func"),
    "reward no module": flags("--custom-rm-path no_module_x:score", "--custom-rm-path", "no_module_x", "No module"),
    "reward no path": flags("--custom-rm-path score", "--custom-rm-path", "score", "my_rewards:score"),
    "reward type of a prompt": metadata('{"rm_type": "clip"}'),
    "metadata no object": metadata('["none"]'),
    "dtype": flags("--rollout-video-dtype bf16", "--rollout-video-dtype", "bf16", "one of uint8, fp32"),
    "fps infinite": flags("--diffusion-fps inf", "--diffusion-fps", "inf", "a number > 0"),
    "media without eval": flags("--save-eval-media-dir m", "--save-eval-media-dir", "m", "give a prompt file"),
    "media of another run": Case(with_samples, "--save-eval-media-dir", "eval_000000", "a directory of its own"),
    "rollouts of what": flags(f"{ON} both", ON, "both", "one of train, eval"),
    "render nothing": flags(f"{ON} eval", ON, "eval", "--eval-prompt-data; give a file"),
    "render a checkpoint": Case(
        lambda bench: evaluated(bench, ON, "eval", "--load", bench.checkpoint()), "--load", "checkpoints", "leave it"
    ),
    "reference in a run": flags("--reference-transformer x", "--reference-transformer", "x", "drop this"),
    "reference on running servers": Case(
        lambda bench: evaluated(
            bench, *(ON, "eval", "--reference-transformer", "x", "--rollout-engine", "sglang"),
            *("--rollout-engine-url", "http://127.0.0.1:1"),
        ),
        "--reference-transformer", "x", "give --sglang-python",
    ),
    "reference without config": Case(no_config, "--reference-transformer", "few", "give a transformer's directory"),
    "reference of other shapes": Case(
        lambda bench: other_transformer(bench, widened), "--reference-transformer", "img_in.weight", "is not the"
    ),
    "reference of other names": Case(
        lambda bench: other_transformer(bench, renamed), "--reference-transformer", "image_in.weight", "2 names differ"
    ),
}  # fmt: skip
