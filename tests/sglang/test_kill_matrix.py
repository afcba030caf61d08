"""SIGKILL of a run with a real server: a dead server is replaced, a dead driver's run resumed; the bits stay the same.

A selection of the matrix; `make kill-matrix ARGS="--engine sglang"` is the whole.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.chain import aloud, command, finish, prepare
from tests.faults.sglang_chain import (
    SERVER,
    SGLANG_SELECTION,
    STRIDE,
    SGLangChain,
    rollouts_for,
    sglang_flags,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]


def test_the_selection_has_every_phase_of_the_server_and_each_of_its_processes() -> None:
    assert {cell.phase for cell in SGLANG_SELECTION} == {"sync", "eval", "generate"}
    assert {cell.victim for cell in SGLANG_SELECTION} == {"driver", *SERVER}


def test_killed_again_and_again_a_run_ends_with_the_same_bits(
    tmp_path: Path, sglang_python: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoint by checkpoint the same files; no process, port, directory or shared memory of any start is left."""

    workspace, rollouts = tmp_path / "work space", rollouts_for(SGLANG_SELECTION)
    prepare(workspace)
    finish(command(workspace, workspace / "base", rollouts, *sglang_flags(sglang_python)))
    chain = SGLangChain(workspace, workspace / "chain", rollouts, sglang_python, aloud(capsys))
    for i, cell in enumerate(SGLANG_SELECTION):
        chain.disturb(cell, 1 + STRIDE * i)
    chain.end()
    chain.check(workspace / "base")
