"""Workers do not outlive their driver, and dead drivers' sessions are swept."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from miles_dmd2.cluster.runtime import ray_session, sweep_sessions
from miles_dmd2.private_directory import private_directory

ROOT = Path(__file__).parents[2]
WATCH = (
    "import sys, time; from miles_dmd2.cluster.process import end_with\n"
    "end_with(int(sys.argv[1])); print('watching', flush=True); time.sleep(120)\n"
)


def watch(pid: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WATCH, str(pid)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_worker_ends_with_its_driver_at_once() -> None:
    driver = subprocess.Popen(["sleep", "120"])  # noqa: S607 - any process will do
    worker = watch(driver.pid)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "watching\n"
        assert worker.poll() is None
        driver.kill()
        driver.wait()
        assert worker.wait(timeout=30) == 1
    finally:
        driver.kill()
        worker.kill()
    late = watch(driver.pid)
    assert late.wait(timeout=120) == 1, "the driver is gone already"


SETTINGS = (
    "import torch; from miles_dmd2.cluster.process import exact_pinned_memory\n"
    "exact_pinned_memory(); print(torch._C._accelerator_getAllocatorSettings())\n"
)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({}, "pinned_max_round_threshold_mb:1"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
    ],
)
def test_torch_takes_the_setting_of_pinned_memory_after_its_import(given: dict[str, str], read: str) -> None:
    """Under the name that torch's allocator knows: it refuses others. Its effect needs a GPU."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **given}
    done = subprocess.run([sys.executable, "-c", SETTINGS], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == read


def test_a_session_whose_processes_live_on_is_found_again_by_a_later_sweep() -> None:
    """Ray's daemons outlive a killed driver and make their directories anew."""
    session = Path(tempfile.mkdtemp(prefix="md2-run-1-", dir="/tmp"))
    (session / "r" / "session_1").mkdir(parents=True)
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)", f"--dir={session}/r"])
    try:
        sweep_sessions()
        assert not list(session.iterdir())
        (session / "r").mkdir()
    finally:
        daemon.kill()
        daemon.wait()
    sweep_sessions()
    assert not session.exists()


@pytest.mark.ray
def test_sessions_of_dead_drivers_are_removed_and_those_of_living_ones_stay() -> None:
    """What Ray leaves behind when its driver is killed."""
    dead = [Path(tempfile.mkdtemp(prefix="md2-run-1-", dir="/tmp")) for _ in range(2)]
    with private_directory("md2-run-1-") as living:
        for session in (*dead, living):
            (session / "r" / "session_2026-01-01").mkdir(parents=True)
        with ray_session(None, 1, "cpu"):
            own = set(Path("/tmp").glob(f"md2-run-{os.getpid()}-*"))
            assert len(own) == 1
            assert {path.stat().st_mode & 0o777 for path in own} == {0o700}
        assert not any(path.exists() for path in dead)
        assert (living / "r" / "session_2026-01-01").exists()
        assert not any(path.exists() for path in own)
