"""Which checkpoints stay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_saving import CONFIG, FACTS, GROUPS

from miles_dmd2.checkpointing import CheckpointError, IntervalCheckpoints, Retention, read_manifest


def run(root: Path, retention: Retention, figures: dict[int, float], last: int = 6) -> list[str]:
    """Save after each rollout; the student after r rollouts is evaluated before the next checkpoint is written."""
    checkpoints = IntervalCheckpoints(root, 1, last, CONFIG, FACTS, retention=retention)
    retention.evaluated(0, {"eval/score": 9.0, "eval/other": 9.0})
    for completed in range(1, last + 1):
        checkpoints(completed, GROUPS)
        if completed in figures:
            retention.evaluated(completed, {"eval/score": figures[completed], "eval/other": -figures[completed]})
    return sorted(path.name for path in root.glob("step_*"))


def names(*numbers: int) -> list[str]:
    return [f"step_{number:06d}" for number in numbers]


def test_all_stay_unless_told(tmp_path: Path) -> None:
    assert run(tmp_path, Retention(tmp_path, None), {}) == names(1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(("keep", "left"), [(1, (6,)), (2, (5, 6)), (10, (1, 2, 3, 4, 5, 6))])
def test_the_last_ones_stay(tmp_path: Path, keep: int, left: tuple[int, ...]) -> None:
    assert run(tmp_path, Retention(tmp_path, keep), {}) == names(*left)
    assert [read_manifest(tmp_path / name).rollout for name in names(*left)] == list(left)
    assert not list(tmp_path.glob(".step*"))


SCORES = {1: 0.2, 2: 0.9, 3: 0.4, 4: 0.9, 5: 0.1, 6: float("nan")}


@pytest.mark.parametrize(
    ("figure", "mode", "best"), [("score", "max", 2), ("score", "min", 5), ("other", "max", 5), ("other", "min", 2)]
)
def test_the_best_stays_beside_them(tmp_path: Path, figure: str, mode: str, best: int) -> None:
    """Of equals the first; the untrained student and a figure that is no number count for nothing."""
    retention = Retention(tmp_path, 1, figure, mode)  # type: ignore[arg-type]
    assert run(tmp_path, retention, SCORES) == names(best, 6)
    found = json.loads((tmp_path / "best.json").read_text())
    assert found["checkpoint"] == names(best)[0]
    assert abs(found["value"]) == SCORES[best]


def test_the_best_is_known_again_by_a_run_that_goes_on(tmp_path: Path) -> None:
    run(tmp_path, Retention(tmp_path, 1, "score"), {2: 0.9})
    again = Retention(tmp_path, 1, "score")
    assert again.best() == (tmp_path / "step_000002", 0.9)
    again.evaluated(6, {"eval/score": 0.5})
    assert again.best() == (tmp_path / "step_000002", 0.9)
    assert replace(again, figure="other").best() is None, "another figure begins anew"
    (tmp_path / "best.json").write_text("{")
    assert again.best() is None


def test_a_figure_that_evals_do_not_give_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--keep-best acc: evals give no such figure; use one of: a_raw, b_raw"):
        Retention(tmp_path, 1, "acc").evaluated(0, {"eval/b_raw": 1.0, "eval/a_raw": 2.0})
