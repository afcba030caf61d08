"""One run at a time writes to a directory, and a dead one does not keep it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_dmd2.config import ConfigError
from miles_dmd2.run_directory import in_use

ROOT = Path(__file__).parent.parent
HOLD = (
    "import sys; from pathlib import Path; from miles_dmd2.run_directory import in_use\n"
    "with in_use([('--run-dir', Path(sys.argv[1]))]): print('held', flush=True); sys.stdin.read()\n"
)


def hold(directory: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def take(*directories: Path) -> None:
    with in_use([("--save", directory) for directory in directories]):
        pass


def test_another_process_is_named_and_once_it_is_killed_the_directory_is_free(tmp_path: Path) -> None:
    holder = hold(tmp_path / "run")
    try:
        with pytest.raises(ConfigError) as caught:
            take(tmp_path / "other", tmp_path / "run")
        text = str(caught.value)
        assert text.startswith(f"--save {tmp_path}/run: is in use by process {holder.pid} on ")
        assert "wait for that run to end, or give another directory" in text
        take(tmp_path / "other")
    finally:
        holder.kill()
        holder.communicate()
    take(tmp_path / "run")


def test_a_directory_may_be_given_twice_and_inside_another(tmp_path: Path) -> None:
    take(tmp_path / "run", tmp_path / "run" / ".." / "run", tmp_path / "run" / "checkpoints")


def test_it_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boom"), in_use([("--run-dir", tmp_path)]):
        raise ValueError("boom")
    take(tmp_path)
