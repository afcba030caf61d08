"""Whole runs that start their own server: what they report, what they leave, and a server that is killed in between."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from miles_dmd2.data.requests import TrainingRequests, grid
from tests.tiny_qwen import SIZE

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
FAULTS = ("rollout/faults", "rollout/retries", "rollout/restarts", "rollout/dropped")
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
PROMPTS = ("the digit one", "the digit two")

# Called on each eval, in the process that is the servers' client.
METRIC = """
import json
import os
import signal
import urllib.request
from pathlib import Path

CALLS = Path(__file__).with_suffix(".calls")


def figures(samples):
    '''Before the second rollout, kills the server's worker.'''
    calls = 1 + int(CALLS.read_text() or 0)
    CALLS.write_text(str(calls))
    if calls == 2:
        (log,) = (Path(__file__).parent / "killed" / "logs").glob("sglang_*.log")
        url = log.read_text().partition("http://")[2].partition(",")[0]
        with urllib.request.urlopen(f"http://{url}/miles_dmd2/capabilities", timeout=60) as reply:
            os.kill(json.load(reply)["worker"]["pid"], signal.SIGKILL)
    return {"brightness": float(sum(sample.media.float().mean() for sample in samples) / len(samples))}
"""


@dataclass(frozen=True)
class Done:
    code: int
    err: str
    directory: Path

    def rows(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    def student(self) -> dict[str, Tensor]:
        (file,) = (self.directory / "student_raw" / "transformer").glob("*.safetensors")
        return load_file(file)


@pytest.fixture
def _orphans_come_here() -> Iterator[None]:
    """What a run leaves behind becomes a child of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


def run(workspace: Path, name: str, pipeline: Path, python: Path, **changes: object) -> Done:
    """2 rollouts of 8 samples on one server. None removes a flag."""
    flags = {
        "hf_checkpoint": pipeline,
        "diffusion_height": SIZE,
        "diffusion_width": SIZE,
        "prompt_data": workspace / "prompts.txt",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "num_steps_per_rollout": 2,
        "num_rollout": 2,
        "diffusion_num_steps": 3,
        "lr": 1e-3,
        "cpu_threads": 1,
        "rollout_engine": "sglang",
        "sglang_python": python,
        "sglang_attention_backend": "torch_sdpa",
        "run_dir": workspace / name,
        **changes,
    }
    words = [
        word
        for flag, value in flags.items()
        if value is not None
        for word in (f"--{flag.replace('_', '-')}", str(value))
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train_diffusion.py"), *words],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return Done(done.returncode, done.stderr, workspace / name)


def living_children() -> set[int]:
    """Descendants of this process that are not zombies."""
    found, todo = set(), [os.getpid()]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            for child in map(int, read(task).split()):
                if read(Path(f"/proc/{child}/stat")).rpartition(")")[2].split()[:1] not in (["Z"], ["X"], []):
                    found.add(child)
                    todo.append(child)
    return found


def read(file: Path) -> str:
    """Of /proc; "" when the process has ended meanwhile."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def wait_until_gone(before: set[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while left := living_children() - before:
        commands = [read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")[:200] for pid in left]
        assert time.monotonic() < deadline, commands
        time.sleep(0.2)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    (directory / "prompts.txt").write_text("\n".join(PROMPTS))
    (directory / "metric.py").write_text(METRIC)
    (directory / "metric.calls").touch()
    return directory


@pytest.mark.usefixtures("_orphans_come_here")
def test_a_run_and_one_whose_server_is_killed(workspace: Path, qwen_pipeline: Path, sglang_python: Path) -> None:
    before, weights_before = living_children(), set(Path("/dev/shm").glob("md2-weights-*"))
    plain = run(workspace, "plain", qwen_pipeline, sglang_python)
    assert plain.code == 0, plain.err
    wait_until_gone(before)
    assert not set(Path("/dev/shm").glob("md2-weights-*")) - weights_before  # others' may go meanwhile
    source = TrainingRequests(PROMPTS, 2, 4, 2, grid(3, 1.0), "per_sample", 0)
    for rollout_id, row in enumerate(plain.rows()):
        assert row["rollout/samples"] == 8
        assert row["rollout/forwards"] == sum(r.stop_step + 1 for window in source(rollout_id) for r in window)
        assert row["rollout/weight_step"] == rollout_id
        assert row["actor/x0_mean_abs_diff"] < 1e-4
        assert [row[name] for name in FAULTS] == [0, 0, 0, 0]
    logs = {file.name for file in (plain.directory / "logs").iterdir()}
    assert logs == {"driver.log", "engine_0.log", "server_0.log", "sglang_0.log", "critic_0.log", "actor_0.log"}
    assert (plain.directory / "student_raw" / "model_index.json").is_file()

    evals = {
        "eval_prompt_data": workspace / "prompts.txt",
        "eval_interval": 1,
        "eval_metrics_path": f"{workspace}/metric.py:figures",
    }
    killed = run(workspace, "killed", qwen_pipeline, sglang_python, **evals)
    assert killed.code == 0, killed.err
    wait_until_gone(before)
    rows = killed.rows()
    assert [row["rollout/restarts"] for row in rows[:2]] == [0, 1]
    assert rows[1]["rollout/faults"] >= 1
    assert (killed.directory / "logs" / "sglang_0.log").read_text().count("=== miles_dmd2: start") == 2
    assert len(list((killed.directory / "eval").glob("*.png"))) == 3
    assert 0 < rows[0]["eval/brightness_raw"] < 255
    mine, theirs = killed.student(), plain.student()
    assert mine.keys() == theirs.keys()
    assert all((mine[name] == theirs[name]).all() for name in mine)  # neither the eval nor the restart changes a bit
