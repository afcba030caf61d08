"""Trainings of the digits table: what a start after an interruption finds, and who is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_dmd2.config.errors import ConfigError
from miles_dmd2.run_directory import LOCK, in_use
from recipes.digits import table

ROOT = Path(__file__).resolve().parents[2]

# A run that takes a second to save after the first signal, and stops at once at the second.
CHILD = """
import signal, sys, time
from pathlib import Path
signals = []
signal.signal(signal.SIGINT, lambda *_: signals.append(1))
place = Path(__file__).parent
(place / "begun").touch()
while not signals:
    time.sleep(0.01)
(place / "saving").touch()
end = time.monotonic() + SECONDS
while time.monotonic() < end and len(signals) < 2:
    time.sleep(0.01)
(place / ("stopped" if len(signals) == 2 else "saved")).touch()
sys.exit(130)
"""
# SIGINT may be ignored where tests run in the background of a shell, and children inherit that.
PARENT = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from recipes.digits import table
table.HERE = Path(sys.argv[1])
try:
    table.train(table.HERE / "run", 2, "told", 0, 5, [])
except KeyboardInterrupt:
    sys.exit(77)
"""


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(("signals", "seconds", "left"), [(1, 1.0, "saved"), (2, 200.0, "stopped")])
def test_a_run_is_waited_for_while_it_saves_until_a_second_interrupt(
    tmp_path: Path, signals: int, seconds: float, left: str
) -> None:
    (tmp_path / "run.py").write_text(CHILD.replace("SECONDS", str(seconds)))
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE) as process:
        try:
            wait_for((tmp_path / "begun").exists)
            os.killpg(process.pid, signal.SIGINT)
            wait_for((tmp_path / "saving").exists)
            if signals == 2:
                assert process.stderr is not None
                while b"waiting for the training" not in process.stderr.readline():
                    assert process.poll() is None
                os.killpg(process.pid, signal.SIGINT)
            assert process.wait(60) == 77
            assert signals == 2 or (tmp_path / left).exists()  # at the end of the wait, not later
            wait_for((tmp_path / left).exists)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """The command lines of the runs that were started; each leaves its run.json."""
    (tmp_path / "run.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "with Path(__file__).with_name('said').open('a') as file:\n    print(*sys.argv[1:], sep='\\t', file=file)\n"
    )
    monkeypatch.setattr(table, "HERE", tmp_path)
    return lambda: [line.split("\t") for line in (tmp_path / "said").read_text().splitlines()]


def left_by_a_run(run_dir: Path, *files: str) -> list[str]:
    for name in ("run.json", "metrics.jsonl", "logs/driver.log", LOCK, *files):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).touch()
    return files_in(run_dir)


def files_in(run_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())


@pytest.mark.parametrize("torn", [(), ("checkpoints/step_000002/actor.pt",)])
def test_a_run_without_a_complete_checkpoint_is_begun_anew(
    tmp_path: Path, commands: Callable[[], list[list[str]]], torn: tuple[str, ...]
) -> None:
    run_dir = tmp_path / "run"
    left_by_a_run(run_dir, *torn)
    table.train(run_dir, 2, "told", 0, 5, ["--adam-beta1", "0.5"])
    assert files_in(run_dir) == [LOCK]
    assert not (run_dir / "checkpoints").exists()
    (command,) = commands()
    assert "--load" not in command
    assert command[-2:] == ["--adam-beta1", "0.5"]


def test_a_run_with_a_checkpoint_goes_on(tmp_path: Path, commands: Callable[[], list[list[str]]]) -> None:
    run_dir = tmp_path / "run"
    before = left_by_a_run(run_dir, "checkpoints/step_000002/manifest.json")
    table.train(run_dir, 2, "told", 0, 5, [])
    assert files_in(run_dir) == before
    assert commands()[0][-2:] == ["--load", str(run_dir)]


@pytest.mark.parametrize(
    ("files", "more"),
    [(["summary.json"], []), ([], ["--save", "elsewhere"]), ([], ["--save=elsewhere"])],
    ids=["finished", "saved elsewhere", "saved elsewhere, in one word"],
)
@pytest.mark.usefixtures("commands")
def test_what_may_still_be_wanted_is_not_removed(tmp_path: Path, files: list[str], more: list[str]) -> None:
    before = left_by_a_run(tmp_path / "run", *files)
    table.train(tmp_path / "run", 2, "told", 0, 5, more)
    assert files_in(tmp_path / "run") == before


@pytest.mark.usefixtures("commands")
def test_a_run_that_is_going_on_is_left_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    before = left_by_a_run(run_dir)
    with in_use([("--run-dir", run_dir)]), pytest.raises(ConfigError, match="is in use by"):
        table.train(run_dir, 2, "told", 0, 5, [])
    assert files_in(run_dir) == before


def test_a_failed_training_is_one_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.py").write_text("raise SystemExit(3)")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "1_steps.yaml").write_text("num-rollout: 5")
    monkeypatch.setattr(table, "HERE", tmp_path)
    assert table.main(["--steps", "1", "--seeds", "0", "--output", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "1-steps-told-seed-0 ended with exit code 3" in line
