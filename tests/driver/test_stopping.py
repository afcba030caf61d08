"""Asked once, a run saves what is whole and stops; asked twice, it stops."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fakes import FakeEngines, FakeGroup, Log, RecordingSink
from test_driver import source

from miles_dmd2.driver import train
from miles_dmd2.evaluation import NoEvaluation
from miles_dmd2.observability import RunError
from miles_dmd2.stopping import StopRequest


@dataclass
class Told(Log):
    """Calls `at[event]` when an event is logged."""

    at: dict[str, Callable[[], object]] = field(default_factory=dict)

    def add(self, event: str) -> None:
        super().add(event)
        if event in self.at:
            self.at[event]()


@dataclass
class Saving:
    """Saves when asked, never by itself."""

    log: Log

    def due(self, completed: int) -> bool:
        return False

    def __call__(self, completed: int, groups: object, before: Callable[[], None] = lambda: None) -> None:
        before()
        assert not self.log.awake - {"engines"}, "a group is awake while it is saved"
        self.log.add(f"checkpoint({completed})")


def stopped(*events: str) -> Told:
    """A run of four rollouts that is told to stop at these events."""
    stop, log = StopRequest(), Told()
    log.at = dict.fromkeys(events, stop.receive)
    groups = [FakeGroup(log, "critic", "critic"), FakeGroup(log, "actor", "actor")]
    with pytest.raises(KeyboardInterrupt):
        train(range(4), source, FakeEngines(log), groups, NoEvaluation(), Saving(log), RecordingSink(), stop)
    assert log.events[-3:] == ["actor.dispose", "critic.dispose", "engines.dispose"]
    return log


@pytest.mark.parametrize("at", ["engines.load(raw@2)", "engines.generate(raw@2)"])
def test_what_engines_do_is_abandoned(at: str) -> None:
    log = stopped(at)
    assert log.events[log.events.index(at) + 1 :][:2] == ["engines.settle", "checkpoint(2)"]
    assert "critic.train(2)" not in log.events


@pytest.mark.parametrize("at", ["critic.wake", "critic.train(1)", "actor.train(1)", "actor.export(2)"])
def test_training_is_finished(at: str) -> None:
    log = stopped(at)
    last = 0 if at == "critic.wake" else 1
    assert log.events.count(f"actor.train({last})") == 1
    assert log.events[-4] == f"checkpoint({last + 1})"
    assert f"critic.train({last + 1})" not in log.events
    assert log.events.count("engines.wake") == last + 1


def test_twice_stops_without_saving() -> None:
    log = stopped("critic.train(1)", "actor.train(1)")
    assert not [event for event in log.events if event.startswith("checkpoint")]
    assert "actor.export(2)" not in log.events


def test_a_second_request_ends_the_save_too() -> None:
    log = stopped("engines.generate(raw@2)", "checkpoint(2)")
    assert log.events[-4] == "checkpoint(2)"


def test_a_request_while_the_rollouts_done_are_saved_after_a_failure_waits_for_the_save() -> None:
    stop, log = StopRequest(), Told(fail_at="engines.generate(raw@2)", error=RunError("all engines are dead"))
    saved: list[str] = []

    class Slow(Saving):
        def __call__(self, completed: int, groups: object, before: Callable[[], None] = lambda: None) -> None:
            stop.receive()
            super().__call__(completed, groups, before)
            saved.append("to its end")

    groups = [FakeGroup(log, "critic", "critic"), FakeGroup(log, "actor", "actor")]
    with pytest.raises(KeyboardInterrupt) as caught:
        train(range(4), source, FakeEngines(log), groups, NoEvaluation(), Slow(log), RecordingSink(), stop)
    assert str(caught.value.__context__) == "all engines are dead"
    assert saved == ["to its end"]
    assert log.events[-4:] == ["checkpoint(2)", "actor.dispose", "critic.dispose", "engines.dispose"]


def test_after_a_request_a_save_that_fails_is_told() -> None:
    stop, log = StopRequest(), Told()
    log.at = {"engines.generate(raw@2)": stop.receive}

    class Full(Saving):
        def __call__(self, completed: int, groups: object, before: Callable[[], None] = lambda: None) -> None:
            raise OSError("disk full")

    groups = [FakeGroup(log, "critic", "critic"), FakeGroup(log, "actor", "actor")]
    with pytest.raises(OSError, match="disk full"):
        train(range(4), source, FakeEngines(log), groups, NoEvaluation(), Full(log), RecordingSink(), stop)
    assert log.events[-3:] == ["actor.dispose", "critic.dispose", "engines.dispose"]


def deferred_signal(stop: StopRequest, number: signal.Signals, reached: list[str]) -> None:
    with stop.deferred():
        os.kill(os.getpid(), number)
        reached.append("the end of the block")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_requests(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    stop, reached = StopRequest(), list[str]()
    before = signal.getsignal(number)
    with stop.listening():
        with pytest.raises(KeyboardInterrupt):
            deferred_signal(stop, number, reached)
        assert reached, "a first request waits"
        assert (stop.requested, stop.insisted) == (True, False)
        with pytest.raises(KeyboardInterrupt):
            deferred_signal(stop, number, reached)
        assert len(reached) == 1, "a second one does not"
        assert stop.insisted
    assert signal.getsignal(number) == before
    assert "once more stops at once" in capfd.readouterr().err


def test_outside_of_training_a_request_is_obeyed_at_once() -> None:
    with StopRequest().listening(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
