"""Command lines of small runs, and what they leave behind."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
Flags = dict[str, Any]
SECRET = "c0ffee-a-key-that-nobody-may-read-anywhere"


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str
    directory: Path

    def rows(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    def student(self, kind: str = "raw") -> dict[str, torch.Tensor]:
        (file,) = (self.directory / f"student_{kind}" / "transformer").glob("*.safetensors")
        return load_file(file)


def command(workspace: Path, name: str, **changes: object) -> list[str]:
    """A run of 3 rollouts of 16 samples: 2 critic steps and a student step on 8 each. None removes a flag."""
    flags: Flags = {
        "hf_checkpoint": workspace / "pipeline",
        "diffusion_height": 32,
        "diffusion_width": 32,
        "prompt_data": workspace / "prompts.txt",
        "trainer_config": workspace / "trainers.yaml",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 8,
        "num_steps_per_rollout": 2,
        "num_rollout": 3,
        "diffusion_num_steps": 2,
        "student_ema_decay": 0.5,
        "dmd2_critic_conditioning": "stop_step",
        "cpu_threads": 1,
        "run_dir": workspace / name,
        **changes,
    }
    arguments = [str(part) for flag, value in flags.items() if value is not None for part in _flag(flag, value)]
    return [sys.executable, str(ROOT / "train_diffusion.py"), *arguments]


def _flag(name: str, value: object) -> Sequence[object]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, list):
        return [flag, *value]
    return [flag] if value is True else [flag, value]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_API_KEY": SECRET, "HF_TOKEN": SECRET}


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.2)
