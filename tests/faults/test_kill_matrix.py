"""SIGKILL, anywhere: the run goes on and ends with the bits of the run that nobody disturbed.

A selection of the matrix; `make kill-matrix` is the whole, `make soak` kills at random moments.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.chain import PHASES, SELECTION, VICTIMS, Chain, aloud, command, finish, prepare

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]


def test_the_selection_has_every_victim_and_every_phase() -> None:
    assert {cell.victim for cell in SELECTION} == set(VICTIMS)
    assert {cell.phase for cell in SELECTION} == set(PHASES)


def test_killed_again_and_again_a_run_ends_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One kill for each rollout from the second on; checkpoint by checkpoint the same files."""
    workspace, rollouts = tmp_path / "work space", len(SELECTION) + 2
    prepare(workspace)
    finish(command(workspace, workspace / "base", rollouts))
    chain = Chain(workspace, workspace / "chain", rollouts, aloud(capsys))
    for rollout, cell in enumerate(SELECTION, 1):
        chain.disturb(cell, rollout)
    chain.end()
    chain.check(workspace / "base")
