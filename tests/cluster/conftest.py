"""Whole runs as a user starts them: a command, in a process of its own, with its own Ray."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from run_commands import Finished, command, environment


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a space in its path, holding a tiny pipeline, prompts and a trainer list."""
    from tests.tiny_qwen import build

    directory = tmp_path_factory.mktemp("a run") / "with spaces"
    directory.mkdir()
    build(directory / "pipeline")
    (directory / "prompts.txt").write_text("the digit one\nthe digit two\nthe digit three\n")
    trainers = [
        {"name": "critic", "role": "critic", "args": {"lr": 1e-3}},
        {"name": "actor", "role": "actor", "args": {"lr": 2e-4}},
    ]
    (directory / "trainers.yaml").write_text(yaml.safe_dump(trainers))
    return directory


@pytest.fixture(scope="session")
def engine_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Python of an engine with a stand-in for SGLang, which behaves as the given word says."""
    from tests.engines.engine_stand_in import make_engine

    directory = tmp_path_factory.mktemp("an engine")
    engine = make_engine(directory / "venv")

    def that(behaves: str) -> Path:
        file = engine.parent / f"python_{behaves or 'well'}"
        record = shlex.quote(str(directory / "record.json"))
        file.write_text(f'#!/bin/sh\nFAKE={behaves} FAKE_RECORD={record} exec {shlex.quote(str(engine))} "$@"\n')
        file.chmod(0o755)
        return file

    return that


@pytest.fixture(scope="session")
def run(workspace: Path) -> Callable[..., Finished]:
    def start(name: str, **changes: object) -> Finished:
        done = subprocess.run(
            command(workspace, name, **changes), capture_output=True, text=True, timeout=240, env=environment()
        )
        return Finished(done.returncode, done.stdout, done.stderr, workspace / name)

    return start


@pytest.fixture(scope="session")
def base(run: Callable[..., Finished]) -> Finished:
    """The run that the others are compared with."""
    done = run("base", save_interval=2)
    assert done.code == 0, done.err
    return done
