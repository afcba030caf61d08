"""What a case of bad input works with, and how cases are told apart."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import train_diffusion
from miles_dmd2.checkpointing import IntervalCheckpoints
from miles_dmd2.config import parse
from tests.saved_groups import FileGroup


@dataclass(frozen=True)
class Bench:
    """A directory for one test, a sound tiny pipeline that nobody may write to, and a patcher."""

    path: Path
    pipeline: Path
    patch: pytest.MonkeyPatch

    def command(self, words: Sequence[str]) -> list[str]:
        """A sound command line, less the flags that `words` give or take away (`--flag=`), then `words`."""
        given = {word.partition("=")[0] for word in words}
        sound = {
            "--hf-checkpoint": self.pipeline,
            "--diffusion-height": 32,
            "--diffusion-width": 32,
            "--prompt-data": self.file("prompts.txt", "the digit one\nthe digit two\n"),
            "--rollout-batch-size": 2,
            "--n-samples-per-prompt": 8,
            "--num-steps-per-rollout": 2,
            "--num-rollout": 3,
            "--run-dir": self.path / "run",
        }
        base = [str(part) for flag, value in sound.items() if flag not in given for part in (flag, value)]
        return [*base, *(word for word in words if not word.endswith("="))]

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def broken(self, damage: Callable[[Path], object]) -> list[str]:
        """Flags that name a copy of the pipeline, damaged."""
        copy = Path(shutil.copytree(self.pipeline, self.path / "broken"))
        damage(copy)
        return ["--hf-checkpoint", str(copy)]

    def checkpoint(self, completed: int = 2, **changes: object) -> Path:
        """A complete checkpoint of the sound command in the run directory; `changes`: options that it was made with."""
        parsed = parse(self.command([]))
        options = {**train_diffusion.options(parsed.config), **changes}
        facts = train_diffusion.run_facts(parsed.config, parsed.trainers)
        root = self.path / "run" / "checkpoints"
        groups = [FileGroup("critic", "critic"), FileGroup("actor", "actor")]
        IntervalCheckpoints(root, None, 3, options, facts)(completed, groups)
        return root / f"step_{completed:06d}"


@dataclass(frozen=True)
class Case:
    """`make` breaks something and returns the words of the command line; the line must hold name, value and remedy."""

    make: Callable[[Bench], Sequence[str]]
    name: str
    value: str
    remedy: str


def flags(words: str, name: str, value: str, remedy: str) -> Case:
    return Case(lambda _: words.split(), name, value, remedy)


def edit_json(path: Path, **changes: object) -> None:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value != "remove"}))


def skeleton(message: str, bench: Bench) -> str:
    """A message without what varies: two cases with one skeleton test the same check."""
    text = message.replace(str(bench.path), "/tmp/x").replace(str(bench.pipeline), "/tmp/x")
    for pattern, word in (
        (r"/[\w./*-]*\w", "PATH"),
        (r"one of [\w, -]+", "CHOICES"),
        (r"'[^']*'", "TEXT"),
        (r"--[a-z0-9-]+", "FLAG"),
        (r"\b(critic|actor|transformer|vae|text_encoder|tokenizer|scheduler)\b", "PART"),
        (r"[\w./*-]+\.(json|safetensors|yaml|txt|jsonl|log)\b", "FILE"),
        (r"-?\d+(\.\d+)?(e-?\d+)?", "N"),
    ):
        text = re.sub(pattern, word, text)
    return text


Table = Mapping[str, Case]
