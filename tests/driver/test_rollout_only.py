"""Runs without trainers, and what is waited for at the end of any run, on an event log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fakes import FakeEngines, FakeGroup, Log, RecordingSink

from miles_dmd2.driver import eval_only, rollouts_only, train
from miles_dmd2.evaluation import FixedEvaluation, NoEvaluation
from miles_dmd2.observability import RunError
from miles_dmd2.stopping import StopRequest
from miles_dmd2.types import RolloutRequest


class ClosingSink(RecordingSink):
    """Tells the log when it is closed: for wandb, when the uploads are waited for."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def close(self) -> None:
        super().close()
        self.log.add("sink.close")


def source(rollout_id: int) -> list[list[RolloutRequest]]:
    return [[RolloutRequest(2 * rollout_id + i, "a prompt", 7, (1.0, 0.0), 0)] for i in range(2)]


EVAL = FixedEvaluation([RolloutRequest(0, "a prompt", 7, (1.0, 0.0), 0)], interval=3, last=9)


def test_an_eval_without_trainers_is_one_of_what_the_engines_hold() -> None:
    log = Log()
    sink = ClosingSink(log)
    eval_only(EVAL, FakeEngines(log), sink)
    assert log.events == ["engines.wake", "engines.evaluate(None)", "engines.sleep", "engines.dispose", "sink.close"]
    assert set(sink.rows) == {0}
    assert sink.rows[0]["eval/accuracy_raw"] == 0.5
    assert sink.phases == ["eval"]


def test_rollouts_without_trainers() -> None:
    log = Log()
    sink = ClosingSink(log)
    rollouts_only(range(3), source, FakeEngines(log), sink)
    assert log.events == [
        "engines.wake", *["engines.generate(None)"] * 3, "engines.sleep", "engines.dispose", "sink.close",
    ]  # fmt: skip
    assert [sink.rows[i]["rollout/samples"] for i in range(3)] == [4.0] * 3


def test_engines_are_disposed_when_they_fail() -> None:
    log = Log(fail_at="engines.evaluate(None)", error=RunError("gone"))
    with pytest.raises(RunError, match="gone"):
        eval_only(EVAL, FakeEngines(log), ClosingSink(log))
    assert log.events[-2:] == ["engines.dispose", "sink.close"]


def test_samples_that_nobody_asked_for_are_an_error() -> None:
    class Lossy(FakeEngines):
        def generate(self, windows: object) -> tuple[object, ...]:
            return super().generate(windows)[:1]  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="engines returned samples"):
        rollouts_only(range(1), source, Lossy(Log()), ClosingSink(Log()))


def test_a_run_s_sinks_are_closed_when_the_last_file_is_written() -> None:
    """The engines write files until they are disposed; then the sink finds them."""
    log = Log()
    groups = [FakeGroup(log, "critic", "critic"), FakeGroup(log, "actor", "actor")]

    class NoCheckpoints:
        def due(self, completed: int) -> bool:
            return False

    train(range(1), source, FakeEngines(log), groups, NoEvaluation(), NoCheckpoints(), ClosingSink(log), StopRequest())  # type: ignore[arg-type]
    assert log.events[-2:] == ["engines.dispose", "sink.close"]
