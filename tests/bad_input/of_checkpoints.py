"""Checkpoints that --load names."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from miles_dmd2.checkpointing import config_hash
from tests.bad_input.bench import Bench, Case, Table, edit_json

FILE = "actor/rank_00000_of_00001.safetensors"


def load(path: Path, *more: str) -> list[str]:
    return ["--load", str(path), *more]


def damaged(damage: Callable[[Path], object], name: str, value: str, remedy: str, *more: str) -> Case:
    def make(bench: Bench) -> list[str]:
        bench.checkpoint(1)
        directory = bench.checkpoint(2)
        damage(directory)
        return load(directory, *more)

    return Case(make, name, value, remedy)


def sealed(directory: Path, change: Callable[[dict], object]) -> None:
    """Change the manifest and seal it anew: what another version would have written."""
    file = directory / "manifest.json"
    content = json.loads(file.read_text())
    del content["sha256"]
    change(content)
    file.write_text(json.dumps({**content, "sha256": config_hash(content)}))


def outside(content: dict) -> None:
    files = content["groups"]["actor"]["files"]
    files["../../../etc/passwd"] = files.pop(FILE)


def later(bench: Bench) -> list[str]:
    first = bench.checkpoint(1)
    bench.checkpoint(2)
    return load(first)


def other_prompts(bench: Bench) -> list[str]:
    directory = bench.checkpoint()
    return load(directory, "--prompt-data", str(bench.file("other.txt", "the digit three\n")))


def other_trainers(bench: Bench) -> list[str]:
    directory = bench.checkpoint()
    content = "- {name: judge, role: critic}\n- {name: actor, role: actor}\n"
    names = ("--trainer-config", str(bench.file("names.yaml", content)), "--allow-config-change", "trainer-config")
    return load(directory, *names)


def other_base(bench: Bench) -> list[str]:
    directory = bench.checkpoint(lora_rank=2)
    adapter = {"rank": 2, "alpha": 2, "target_modules": ["all-linear"], "base_sha256": "abc" * 8}
    sealed(directory, lambda content: [group.update(adapter=adapter) for group in content["groups"].values()])
    return load(directory, "--lora-rank", "2")


def trainer_value(bench: Bench) -> list[str]:
    directory = bench.checkpoint()
    content = "- {name: critic, role: critic, args: {lr: 0.5}}\n- {name: actor, role: actor}\n"
    return load(directory, "--trainer-config", str(bench.file("lr.yaml", content)))


OFFER = "move step_000002 away and give --load "

CHECKPOINTS: Table = {
    "nowhere": Case(lambda b: load(b.path / "none"), "--load", "none: no such directory", "give a run or checkpoint"),
    "a file": Case(lambda b: load(b.file("x", "")), "--load", "x: is a file", "give a run or checkpoint directory"),
    "none in it": Case(lambda b: load(b.path), "--load", "holds no complete checkpoint", "leave it out to start anew"),
    "half": Case(
        lambda b: [*load(b.path / "s"), *((b.path / "s" / "step_000009").mkdir(parents=True) or [])],
        "--load",
        "step_000009: without a manifest",
        "give another directory",
    ),
    "cut manifest": damaged(lambda d: (d / "manifest.json").write_text("{"), "manifest.json", "cannot read", OFFER),
    "foreign": damaged(lambda d: (d / "manifest.json").write_text("{}"), "manifest.json", "is not of a", OFFER),
    "other schema": damaged(lambda d: edit_json(d / "manifest.json", schema=7), "manifest.json", "schema 7", OFFER),
    "edited": damaged(lambda d: edit_json(d / "manifest.json", rollout=1), "manifest.json", "was edited", OFFER),
    "a file elsewhere": damaged(lambda d: sealed(d, outside), "manifest.json", "/etc/passwd", OFFER),
    "no groups": damaged(lambda d: sealed(d, lambda c: c.pop("groups")), "manifest.json", "KeyError", OFFER),
    "odd count": damaged(
        lambda d: sealed(d, lambda c: c.update(rollout="two")), "manifest.json", "rollout 'two'", OFFER
    ),
    "hash of the config": damaged(
        lambda d: sealed(d, lambda c: c.update(config_hash="0")), "manifest.json", "config_hash", OFFER
    ),
    "odd role": damaged(
        lambda d: sealed(d, lambda c: c["groups"]["actor"].update(role="judge")), "manifest.json", "role 'judge'", OFFER
    ),
    "torn": damaged(lambda d: (d / FILE).unlink(), FILE, "is missing", OFFER),
    "truncated": damaged(lambda d: (d / FILE).write_bytes(b"short"), FILE, "5 bytes instead of 50", OFFER),
    "flipped": damaged(lambda d: (d / FILE).write_bytes(b"x" * 50), FILE, "SHA-256 of the manifest", OFFER),
    "all damaged": damaged(
        lambda d: [(d / FILE).unlink(), shutil.rmtree(d.parent / "step_000001")], FILE, "is missing", "start anew"
    ),
    "options": damaged(
        lambda _: None, "--seed", "was 0 and is 5", "--allow-config-change rollout-seed seed", "--seed=5"
    ),
    "trainer's options": Case(
        trainer_value, "trainer critic: lr", "and is 0.5", "--allow-config-change trainer-config"
    ),
    "prompts": Case(other_prompts, "--prompt-data", "holds other prompts", "--allow-config-change prompt-data"),
    "adapter": Case(
        lambda b: load(b.checkpoint(), "--lora-rank", "2", "--allow-config-change", "lora-rank"),
        "--load",
        "trained all parameters and now has LoRA of rank 2",
        "use the --lora-rank",
    ),
    "adapter's base": Case(
        other_base, "--hf-checkpoint has another transformer", "trained on (abcabcabcabc)", "give that one"
    ),
    "trainers": Case(other_trainers, "--load", "critic (critic), actor (actor)", "name them in --trainer-config"),
    "beyond the end": damaged(lambda _: None, "--num-rollout 1", "has 2 rollouts already", "use 2", "--num-rollout=1"),
    "later ones": Case(later, "--load", "step_000002", "move them away, or give a new --run-dir"),
    "allow what": Case(
        lambda b: load(b.checkpoint(), "--allow-config-change", "sed"),
        "--allow-config-change",
        "sed",
        "nearest is seed",
    ),
    "allow without load": Case(
        lambda _: ["--allow-config-change", "seed"], "--allow-config-change", "seed", "leave this out"
    ),
    "best of nothing": Case(
        lambda _: ["--keep-best", "accuracy_raw"], "--keep-best", "accuracy_raw", "give both, or leave it out"
    ),
    "best mode": Case(lambda _: ["--keep-best-mode", "min"], "--keep-best-mode", "min", "give it, or leave this out"),
    "best of some": Case(
        lambda b: (
            f"--eval-prompt-data {b.file('e.txt', 'one')} --eval-metrics-path a:b --keep-best f "
            "--save-interval 3 --eval-interval 2 --num-rollout 6".split()
        ),
        "--keep-best",
        "every 3 rollouts",
        "use an --eval-interval that divides 3",
    ),
}
