"""Directories of killed owners are found, at whatever point they were killed, and nobody else's is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_dmd2 import private_directory as module
from miles_dmd2.private_directory import abandoned, private_directory

ROOT = Path(__file__).parent.parent
PREFIX = "md2-test-"
# Dies by SIGKILL as soon as the named function has been called for the first time.
KILLED = """
import os, signal, sys
from pathlib import Path
from miles_dmd2 import private_directory as module

place, name, root = sys.argv[1:]
owner = getattr(module, place)
true = getattr(owner, name)

def last(*args, **kwargs):
    true(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(owner, name, last)
with module.private_directory("md2-test-", Path(root)):
    print("owned")
"""


def sweep(root: Path) -> list[str]:
    """Names of what was removed."""
    found = []
    for left in abandoned(PREFIX, root):
        found.append(left.name)
        shutil.rmtree(left)
    return found


@pytest.mark.parametrize(("place", "name"), [("tempfile", "mkdtemp"), ("os", "open"), ("fcntl", "flock")])
def test_an_owner_killed_while_it_makes_its_directory(tmp_path: Path, place: str, name: str) -> None:
    """Just made, opened, and locked."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, place, name, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, ""), done.stderr
    (left,) = tmp_path.iterdir()
    with private_directory(PREFIX, tmp_path) as living:
        assert sweep(tmp_path) == [left.name]
        assert living.exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("place", "name"), [("tempfile", "mkdtemp"), ("fcntl", "flock")])
def test_one_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, name: str
) -> None:
    """Another process looks for abandoned ones right after it was made, or right before the lock is taken."""
    owner = getattr(module, place)
    true: Callable[..., Any] = getattr(owner, name)
    swept: list[str] = []

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, true)
        result = true(*args, **kwargs) if name == "mkdtemp" else None
        swept.extend(sweep(tmp_path))
        return result if name == "mkdtemp" else true(*args, **kwargs)

    monkeypatch.setattr(owner, name, disturbed)
    with private_directory(PREFIX, tmp_path) as directory:
        assert len(swept) == 1
        assert directory.name != swept[0]
        assert list(tmp_path.iterdir()) == [directory]
        assert sweep(tmp_path) == []
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())


def test_many_at_once_and_somebody_who_sweeps_all_the_time(tmp_path: Path) -> None:
    lost: list[Path] = []
    ended = threading.Event()

    def make() -> None:
        for _ in range(100):
            with private_directory(PREFIX, tmp_path) as directory:
                (directory / "mine").touch()
                os.sched_yield()
                if [path.name for path in directory.iterdir()] != ["mine"]:
                    lost.append(directory)

    def clean() -> None:
        while not ended.is_set():
            sweep_all(tmp_path)

    def sweep_all(root: Path) -> None:
        for left in abandoned(PREFIX, root):
            shutil.rmtree(left, ignore_errors=True)

    makers, cleaners = ([threading.Thread(target=work) for _ in range(3)] for work in (make, clean))
    for thread in (*cleaners, *makers):
        thread.start()
    for thread in makers:
        thread.join()
    ended.set()
    for thread in cleaners:
        thread.join()
    sweep_all(tmp_path)
    assert (lost, list(tmp_path.iterdir())) == ([], [])


def test_an_owner_keeps_what_has_lost_every_file(tmp_path: Path) -> None:
    """As a cleaner of old temporary files leaves the directory of a run of weeks."""
    with private_directory(PREFIX, tmp_path) as directory:
        for file in directory.iterdir():
            file.unlink()
        assert sweep(tmp_path) == []
        assert directory.exists()


def test_what_is_no_directory_of_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"{PREFIX}file").touch()
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3
    assert not list((tmp_path / "elsewhere").iterdir())
