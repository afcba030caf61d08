"""One run that is killed again and again, and goes on each time from what it has saved.

Every checkpoint must be, file by file, that of a run that nobody disturbed: weights, moments, averages, counters.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles_dmd2.cluster.runtime import sweep_sessions
from miles_dmd2.observability.declared import without_machine

ROOT = Path(__file__).parents[2]
VICTIMS = ("driver", "engine", "critic", "actor", "tree")
PHASES = ("sync", "eval", "generate", "critic", "actor", "save")
DEADLINE = 300.0  # seconds for a phase to come, or a process to go
WORKERS_GONE = 10.0  # seconds for the workers of a killed driver to end: they watch it
RAY_GONE = 240.0  # and for Ray's own processes, which notice late on a busy machine


@dataclass(frozen=True)
class Cell:
    """Kill `victim` with SIGKILL in `phase`. A process that is asleep in that phase is killed in its sleep."""

    victim: str
    phase: str

    def __str__(self) -> str:
        return f"{self.victim} at {self.phase}"


def every_cell(victims: Sequence[str] = VICTIMS) -> list[Cell]:
    return [Cell(victim, phase) for phase in PHASES for victim in victims]


# Every victim and every phase at least once, the pairs where most can go wrong.
SELECTION = (
    Cell("driver", "save"),
    Cell("engine", "generate"),
    Cell("critic", "critic"),
    Cell("tree", "actor"),
    Cell("actor", "sync"),
    Cell("driver", "eval"),
    Cell("actor", "actor"),
    Cell("tree", "save"),
)


def prepare(workspace: Path) -> None:
    """A tiny pipeline, prompts and an eval metric."""
    from tests.tiny_qwen import build

    workspace.mkdir(parents=True, exist_ok=True)
    build(workspace / "pipeline")
    (workspace / "prompts.txt").write_text("the digit one\nthe digit two\nthe digit three\n")
    (workspace / "figures.py").write_text(
        "def figures(samples):\n"
        "    return {'mean': float(sum(s.media.float().mean() for s in samples) / len(samples))}\n"
    )


def command(workspace: Path, run_dir: Path, rollouts: int, *more: str) -> list[str]:
    """Rollouts of 8 samples, 2 critic steps and a student step; an eval and a checkpoint for each."""
    flags = {
        "hf-checkpoint": workspace / "pipeline",
        "diffusion-height": 32,
        "diffusion-width": 32,
        "prompt-data": workspace / "prompts.txt",
        "eval-prompt-data": workspace / "prompts.txt",
        "eval-metrics-path": f"{workspace / 'figures.py'}:figures",
        "eval-interval": 1,
        "save-eval-media-dir": run_dir / "media",
        "rollout-batch-size": 2,
        "n-samples-per-prompt": 4,
        "num-steps-per-rollout": 2,
        "num-rollout": rollouts,
        "diffusion-num-steps": 2,
        "student-ema-decay": 0.5,
        "dmd2-critic-conditioning": "stop_step",
        "lr": 1e-3,
        "save-interval": 1,
        "cpu-threads": 1,
        "run-dir": run_dir,
    }
    words = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    return [sys.executable, str(ROOT / "train_diffusion.py"), *words, *more]


def start(words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def finish(words: Sequence[str]) -> None:
    process = start(words)
    _, err = process.communicate(timeout=2 * DEADLINE)
    if process.returncode:
        raise AssertionError(f"exit code {process.returncode}: {err}")


class Chain:
    """`disturb` starts (or continues) the run and kills in it; `end` lets it finish; both leave nothing behind."""

    WORKERS: tuple[str, ...] = ("engine", "critic", "actor")

    def __init__(
        self,
        workspace: Path,
        run_dir: Path,
        rollouts: int,
        say: Callable[[str], None] = print,
        more: Sequence[str] = (),
    ) -> None:
        """more: further words of the command, as the undisturbed run has them."""
        self.workspace, self.run_dir, self.rollouts, self.say, self.more = workspace, run_dir, rollouts, say, more
        self.drivers: list[int] = []
        self.there = set(sessions())  # of others, whose process ids this chain's drivers may have again
        self.before: list[int] = []  # processes of runs that were killed

    def disturb(self, cell: Cell, rollout: int) -> None:
        """Kill at the first time that the phase comes in this rollout."""

        code = self.kill_when(self.in_phase(cell, rollout), cell.victim, f"{cell} of rollout {rollout}")
        assert code == (-signal.SIGKILL if cell.victim in ("driver", "tree") else 1)

    def in_phase(self, cell: Cell, rollout: int) -> Callable[[subprocess.Popen[str]], bool]:
        def reached(process: subprocess.Popen[str]) -> bool:
            status = self.status(process.pid)
            return (status.get("rollout"), status.get("phase")) == (rollout, cell.phase)

        return reached

    def kill_when(self, reached: Callable[[subprocess.Popen[str]], bool], victim: str, what: str) -> int:
        """Returns the driver's exit code."""
        process = self._start()
        try:
            workers, family = self._strike(process, reached, victim, f"{what} did not come")
            met = self.status(process.pid)
            if victim not in workers:
                process.wait(DEADLINE)  # Ray's processes have its pipes open for a while
            else:
                _, err = process.communicate(timeout=DEADLINE)
                if process.returncode == 1:
                    self._check_told(err, victim)
            until(lambda: not alive(list(workers.values())), WORKERS_GONE, f"{what}: of {workers} some live on")
            self.before += family
            done = len(list((self.run_dir / "checkpoints").glob("step_*")))
            where = f"in {met['phase']} of rollout {met['rollout']}" if met else "before it trained"
            self.say(f"{what}: killed {where}, exit code {process.returncode}, {done} checkpoints")
            return process.returncode
        finally:
            process.kill()

    def _strike(
        self, process: subprocess.Popen[str], reached: Callable[[subprocess.Popen[str]], bool], victim: str, late: str
    ) -> tuple[dict[str, int], list[int]]:
        """Kill as soon as `reached`. Returns the workers by name, and all processes that the driver had started."""
        until(lambda: self.status(process.pid) or reached(process) or process.poll() is not None, DEADLINE, late)
        family = descendants(process.pid)
        workers = self._workers(family)  # now: phases are short
        until(lambda: reached(process) or process.poll() is not None, DEADLINE, late, 0.001)
        if victim == "tree":
            process.send_signal(signal.SIGSTOP)  # while its processes are looked for
            family = descendants(process.pid)
        self._kill(process.pid, victim, workers, family)
        return workers, family

    def kill_after(self, seconds: float, victim: str, *, of_training: bool) -> None:
        """Kill so many seconds after the start, or after training has begun; the driver, if the victim is not there."""
        began = None if of_training else time.monotonic()

        def reached(process: subprocess.Popen[str]) -> bool:
            nonlocal began
            if began is None and self.status(process.pid):
                began = time.monotonic()
            return began is not None and time.monotonic() >= began + seconds

        of = "of training" if of_training else "from the start"
        self.kill_when(reached, victim, f"{victim} after {seconds:.2f} s {of}")

    def end(self) -> None:
        finish(self._command())

    def rows(self, run_dir: Path) -> list[dict[str, Any]]:
        """What two runs of the same bits share of the metrics."""
        return rows(run_dir)

    def status(self, pid: int) -> Mapping[str, Any]:
        """What the driver says that it does; empty before it says anything."""
        try:
            status = json.loads((self.run_dir / "status.json").read_text())
        except FileNotFoundError:
            return {}
        return status if status["pid"] == pid else {}

    def _start(self) -> subprocess.Popen[str]:
        process = start(self._command())
        self.drivers.append(process.pid)
        return process

    def _command(self) -> list[str]:
        """A run that has saved nothing starts anew, as its own last line advises."""
        load: list[str] = []
        if any((self.run_dir / "checkpoints").glob("step_*/manifest.json")):
            load = ["--load", str(self.run_dir)]
        elif self.run_dir.exists():
            shutil.rmtree(self.run_dir)
        return command(self.workspace, self.run_dir, self.rollouts, *self.more, *load)

    def _kill(self, driver: int, victim: str, workers: Mapping[str, int], processes: Sequence[int]) -> None:
        for pid in [driver, *processes] if victim == "tree" else [workers.get(victim, driver)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself meanwhile

    def _workers(self, processes: Sequence[int]) -> dict[str, int]:
        """Of these processes the workers, by what they log first; logs are continued by later runs."""
        found = {}
        for name in self.WORKERS:
            log = self.run_dir / "logs" / f"{name}_0.log"
            logged = re.findall(r"pid (\d+), torch", log.read_text()) if log.exists() else []
            if logged and int(logged[-1]) in processes:
                found[name] = int(logged[-1])
        return found

    def _check_told(self, err: str, victim: str) -> None:
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, err
        assert f"{victim}_0" in lines[0], f"the line does not name {victim}_0: {lines[0]}"
        assert f"{victim}_0.log" in lines[0], lines[0]
        assert "Traceback" not in err, err

    def check(self, base: Path) -> None:
        """Everything that the run has left is that of the undisturbed one, and nothing else is left."""
        mine, theirs = states(self.run_dir), states(base)
        assert mine.keys() == theirs.keys(), (sorted(mine), sorted(theirs))
        differ = [step for step in mine if mine[step] != theirs[step]]
        assert not differ, f"other bits from {differ[0]} on"
        assert self.rows(self.run_dir) == self.rows(base)
        for kind in ("raw", "ema"):
            (ours, other) = (weights(root / f"student_{kind}") for root in (self.run_dir, base))
            assert ours == other, f"student_{kind} differs"
        ours, other = (files(root / "media") for root in (self.run_dir, base))
        assert ours == other, f"eval files differ: {sorted(ours.items() ^ other.items())}"
        assert not list((self.run_dir / "checkpoints").glob(".*.partial"))
        until(lambda: not alive(self.before), RAY_GONE, f"of {self.before} some live on")
        sweep_sessions()  # as the next start does
        left = [path for pid in self.drivers for path in sessions(pid) if path not in self.there]
        assert not left, left


def sessions(driver: int | str = "*") -> list[Path]:
    """Directories of Ray in /tmp, of one driver or of all."""
    return list(Path("/tmp").glob(f"md2-run-{driver}-*"))


def aloud(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints which cells ran, also in a test that passes."""

    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\nkill matrix: {text}", flush=True)

    return say


def states(run_dir: Path) -> dict[str, Any]:
    """Checkpoint -> SHA-256 of every file, counters, cursors."""
    found = {}
    for manifest in sorted((run_dir / "checkpoints").glob("step_*/manifest.json")):
        content = json.loads(manifest.read_text())
        kept = ("rollout", "weight_version", "prompts", "draws", "ema", "groups")
        found[manifest.parent.name] = {name: content[name] for name in kept}
    return found


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics without seconds and bytes."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [without_machine(row) for row in lines]


def files(directory: Path) -> dict[str, str]:
    """Path -> SHA-256 of every file."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def weights(pipeline: Path) -> bytes:
    (file,) = (pipeline / "transformer").glob("*.safetensors")
    return file.read_bytes()


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = list(map(int, task.read_text().split()))
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def alive(pids: Sequence[int]) -> list[int]:
    """Those that run; what is dead and not yet collected does not."""
    return [pid for pid in pids if _state(pid) not in ("Z", "X", "")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def until(condition: Callable[[], object], seconds: float, what: str, pause: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {seconds:g} s"
        time.sleep(pause)
