"""The script that makes SGLang's environment: where, when, and what it says. Its steps are recorded, not run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import environments
import pytest
import setup_sglang
from environments import SetupError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of the steps; the first makes what a virtual environment is to the script."""
    done: list[list[str]] = []

    def run(self: environments.Builder, step: str, command: list[str]) -> None:
        done.append(command)
        python = self.place / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch(0o755)

    monkeypatch.setattr(environments.Builder, "run", run)
    monkeypatch.setenv("MILES_DMD2_CACHE", str(tmp_path / "a cache"))
    return done


def place(tmp_path: Path) -> Path:
    return setup_sglang.place_in(tmp_path / "a cache")


def run_main(capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = setup_sglang.main()
    said = capsys.readouterr()
    return code, said.out, said.err


def test_it_is_made_once_and_its_python_is_all_of_stdout(
    steps: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_main(capsys)
    python = place(tmp_path) / "bin" / "python"
    assert (code, out) == (0, f"{python}\n")
    assert [command[1:3] for command in steps[1:3]] == [["-m", "pip"]] * 2
    assert steps[0][1:] == ["-m", "venv", "--clear", str(place(tmp_path))]
    assert steps[1][-2:] == ["-r", str(ROOT / "requirements" / "sglang-cpu.txt")]
    assert steps[2][-2:] == ["--no-deps", "sglang==0.5.23"]
    assert {command[0] for command in steps[1:]} == {str(python)}
    assert "is ready" in err
    assert len(steps) == 4
    assert run_main(capsys)[:2] == (0, f"{python}\n")
    assert len(steps) == 4


def test_without_its_stamp_it_is_made_anew(
    steps: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = environments.Builder.run

    def interrupted(self: environments.Builder, step: str, command: list[str]) -> None:
        recorded(self, step, command)
        if "--no-deps" in command:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environments.Builder, "run", interrupted)
        code, out, err = run_main(capsys)
    assert (code, out) == (130, "")
    assert "the next time makes it anew" in err
    assert not setup_sglang.ready(place(tmp_path))
    steps.clear()
    assert run_main(capsys)[0] == 0
    assert len(steps) == 4
    (place(tmp_path) / "bin" / "python").unlink()  # the Python that it was made with is gone
    assert run_main(capsys)[0] == 0
    assert len(steps) == 8


def test_its_name_is_of_pins_and_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [setup_sglang.place_in(tmp_path).name]
    assert re.fullmatch(r"sglang-[0-9a-f]{16}", names[0])
    text = setup_sglang.LIST.read_text()
    copy = tmp_path / "list.txt"
    monkeypatch.setattr(setup_sglang, "LIST", copy)
    copy.write_text(f"# a comment more\n{text}")
    assert setup_sglang.place_in(tmp_path).name == names[0]
    copy.write_text(text.replace("diffusers==0.42.1", "diffusers==0.42.2"))
    names.append(setup_sglang.place_in(tmp_path).name)
    copy.write_text(text)
    monkeypatch.setattr(setup_sglang, "SGLANG", "sglang==0.5.24")
    names.append(setup_sglang.place_in(tmp_path).name)
    monkeypatch.undo()
    monkeypatch.setattr(setup_sglang, "HERE", "3.12.1")
    names.append(setup_sglang.place_in(tmp_path).name)
    assert len(set(names)) == 4


def test_environments_of_other_lists_are_named(
    steps: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, unfinished = tmp_path / "a cache" / "sglang-0123", tmp_path / "a cache" / "sglang-4567"
    for other in (old, unfinished):
        other.mkdir(parents=True)
    (old / "complete.json").write_text(json.dumps({"bytes": 6_950_000_000}))
    (line,) = [line for line in run_main(capsys)[2].splitlines() if "delete at will" in line]
    assert line.endswith(f"{old} (7.0 GB), {unfinished} (unfinished)")
    assert old.is_dir()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MILES_DMD2_CACHE": "/big/disk", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/big/disk"),
        ({"MILES_DMD2_CACHE": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/miles_dmd2"),
        ({"HOME": "/h"}, "/h/.cache/miles_dmd2"),
    ],
)
def test_the_cache_directory(variables: dict[str, str], expected: str) -> None:
    assert setup_sglang.cache_directory(variables) == Path(expected)


def test_no_cache_directory() -> None:
    with pytest.raises(SetupError, match="MILES_DMD2_CACHE"):
        setup_sglang.cache_directory({})


def test_too_little_space_is_said_before_anything_is_done(
    steps: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_sglang.shutil, "disk_usage", lambda path: SimpleNamespace(free=5_100_000_000))
    code, out, err = run_main(capsys)
    assert (code, out, steps) == (1, "", [])
    assert "has 5.1 GB of free space and the environment needs 8 GB" in err
    assert len(err.splitlines()) == 1


def test_a_python_without_wheels_is_refused(
    steps: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environments.sys, "version_info", (3, 14, 0))
    code, _, err = run_main(capsys)
    assert (code, steps) == (1, [])
    assert "sglang==0.5.23 needs 3.11 to 3.13" in err


def test_a_cache_that_cannot_be_written(
    steps: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MILES_DMD2_CACHE", str(tmp_path / "file" / "cache"))
    code, _, err = run_main(capsys)
    assert code == 1
    assert err == f"setup: {tmp_path / 'file' / 'cache'}: Not a directory\n"


@pytest.fixture
def builder(tmp_path: Path) -> environments.Builder:
    return environments.Builder(tmp_path, "it", "setup.log", "8 GB", tmp_path, sys.stderr)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("ERROR: [Errno 28] No space left on device", "the disk is full: the environment needs 8 GB"),
        ("NewConnectionError: Network is unreachable", "the package index cannot be reached"),
        ("ERROR: No matching distribution found for x", "pip's index lacks a package"),
        ("all is well\nERROR: hashes differ.\nbye", "ERROR: hashes differ. Log"),
        ("", "it printed nothing"),
    ],
)
def test_a_failed_step_is_one_line(builder: environments.Builder, tmp_path: Path, output: str, said: str) -> None:
    command = [sys.executable, "-c", f"print({output!r}); raise SystemExit(1)"]
    with pytest.raises(SetupError, match="installing failed: ") as caught:
        builder.run("installing", command)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert output in (tmp_path / "setup.log").read_text()


KILLED = """
import os, subprocess, sys
from pathlib import Path
from environments import Builder, exclusive

here, popen = Path(sys.argv[1]), subprocess.Popen
builder = Builder(here / "place", "it", "setup.log", "8 GB", here, sys.stderr)
held = exclusive(builder, here / "lock")
subprocess.Popen = lambda command, **options: (popen(command, **options), os._exit(1))
builder.run("installing", ["sleep", "0.5"])
"""


def test_only_one_at_a_time_also_when_one_was_killed(builder: environments.Builder, tmp_path: Path) -> None:
    """The step that a killed set-up leaves running goes on holding the lock."""
    (tmp_path / "lock").touch()
    said: list[str] = []
    builder.say = said.append  # type: ignore[method-assign]
    variables = {"PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], timeout=30, check=False, env=variables)
    assert done.returncode == 1
    began = time.monotonic()
    environments.exclusive(builder, tmp_path / "lock").close()
    assert 0.1 < time.monotonic() - began < 5
    assert said == ["another one is setting up it; waiting for it"]


def test_every_package_is_pinned() -> None:
    lines = [line for line in setup_sglang.LIST.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) > 100
    names = [line.partition("==")[0] for line in lines]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line) for line in lines)
    assert len(set(names)) == len(names)
    assert "sglang" not in names
    assert {"torch==2.14.1", "torchvision==0.29.1", "diffusers==0.42.1"} <= set(lines)
