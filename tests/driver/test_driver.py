"""The order of things, asserted on an event log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fakes import FakeEngines, FakeGroup, Log, RecordingSink

from miles_dmd2.config import StudentClock
from miles_dmd2.driver import train
from miles_dmd2.evaluation import FixedEvaluation, NoEvaluation
from miles_dmd2.observability import RunError
from miles_dmd2.stopping import StopRequest
from miles_dmd2.types import RolloutRequest


def request(sample_id: int) -> RolloutRequest:
    return RolloutRequest(sample_id, "a prompt", 7, (1.0, 0.0), 0)


def source(rollout_id: int) -> list[list[RolloutRequest]]:
    return [
        [request(4 * rollout_id), request(4 * rollout_id + 1)],
        [request(4 * rollout_id + 2), request(4 * rollout_id + 3)],
    ]


class NoCheckpoints:
    def __init__(self, log: Log, every: int | None = None) -> None:
        self.log, self.every = log, every

    def due(self, completed: int) -> bool:
        return self.every is not None and completed % self.every == 0

    def __call__(self, completed: int, groups: object, before: Callable[[], None] = lambda: None) -> None:
        before()
        self.log.add(f"checkpoint({completed})")


def run(
    log: Log, *, rollouts: range = range(2), ema: bool = False, evaluation: object = None, every: int | None = None
):
    engines, sink = FakeEngines(log), RecordingSink()
    groups = [FakeGroup(log, "critic", "critic"), FakeGroup(log, "actor", "actor", ema=ema)]
    result = train(
        rollouts, source, engines, groups, evaluation or NoEvaluation(), NoCheckpoints(log, every), sink, StopRequest()
    )
    return groups, sink, result


def test_order_of_two_rollouts() -> None:
    log = Log()
    _, _, weights = run(log)
    assert log.events == [
        "actor.wake", "actor.export(0)", "actor.sleep",
        "engines.wake", "engines.load(raw@0)", "engines.generate(raw@0)", "engines.sleep",
        "critic.wake", "critic.train(0)", "critic.sleep",
        "actor.wake", "actor.train(0)", "actor.export(1)", "actor.sleep",
        "engines.wake", "engines.load(raw@1)", "engines.generate(raw@1)", "engines.sleep",
        "critic.wake", "critic.train(1)", "critic.sleep",
        "actor.wake", "actor.train(1)", "actor.export(2)", "actor.sleep",
        "actor.dispose", "critic.dispose", "engines.dispose",
    ]  # fmt: skip
    assert log.most_awake == 1
    assert weights["raw"].version.step == 2


def test_between_student_steps_the_critic_trains_alone_and_nothing_of_the_actor_moves() -> None:
    """Warm-up 1, a step on each second rollout after: on rollouts 2 and 4 of 0..5."""
    log, sink = Log(), RecordingSink()
    groups = [FakeGroup(log, "critic", "critic"), FakeGroup(log, "actor", "actor")]
    engines, clock = FakeEngines(log), StudentClock(warmup=1, interval=2)
    weights = train(range(6), source, engines, groups, NoEvaluation(), NoCheckpoints(log), sink, StopRequest(), clock)
    critic, actor = groups
    assert [batch.rollout_id for batch in critic.batches] == [0, 1, 2, 3, 4, 5]
    assert [batch.student_step for batch in critic.batches] == [False, False, True, False, True, False]
    assert [batch.rollout_id for batch in actor.batches] == [2, 4]
    generated = [event for event in log.events if event.startswith("engines.generate")]
    assert generated == [f"engines.generate(raw@{step})" for step in (0, 0, 0, 1, 1, 2)]
    assert [event for event in log.events if event.startswith("actor.export")] == [
        "actor.export(0)", "actor.export(1)", "actor.export(2)",
    ]  # fmt: skip
    assert ["actor/loss" in sink.rows[i] for i in range(6)] == [False, False, True, False, True, False]
    assert weights["raw"].version.step == 2


def test_a_run_resumed_between_student_steps_goes_on_with_the_same_clock() -> None:
    log = Log()
    groups = [FakeGroup(log, "critic", "critic"), FakeGroup(log, "actor", "actor")]
    clock = StudentClock(warmup=1, interval=2)
    sinks = RecordingSink(), StopRequest()
    train(range(4, 6), source, FakeEngines(log), groups, NoEvaluation(), NoCheckpoints(log), *sinks, clock)
    assert [batch.rollout_id for batch in groups[1].batches] == [4]


class LoggingSink(RecordingSink):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def metrics(self, rollout_id: int, values: Mapping[str, float]) -> None:
        super().metrics(rollout_id, values)
        self.log.add(f"row({rollout_id})")


def test_whoever_goes_on_from_a_checkpoint_finds_the_rows_and_eval_files_of_before() -> None:
    """Killed at any point: what is there but not in a checkpoint is made again, what is missing would stay so."""
    log = Log()
    groups, sink = [FakeGroup(log, "critic", "critic"), FakeGroup(log, "actor", "actor")], LoggingSink(log)
    train(range(3), source, FakeEngines(log), groups, NoEvaluation(), NoCheckpoints(log, 2), sink, StopRequest())
    last = [event for event in log.events if event.startswith(("row", "checkpoint", "engines.settle"))]
    assert last == ["row(0)", "engines.settle", "row(1)", "checkpoint(2)", "row(2)"]
    assert "time/save" in sink.rows[1]


def test_external_data_reaches_every_later_group_and_no_earlier_one() -> None:
    log, sink = Log(), RecordingSink()
    names = [("critic", "critic"), ("judge", "critic"), ("actor", "actor")]
    groups = [FakeGroup(log, name, role) for name, role in names]
    train(range(2), source, FakeEngines(log), groups, NoEvaluation(), NoCheckpoints(log), sink, StopRequest())
    critic, judge, actor = groups
    assert critic.seen == [{}, {}]
    assert judge.seen == [{"critic": ("critic@0",)}, {"critic": ("critic@1",)}]
    assert actor.seen[1] == {"critic": ("critic@1",), "judge": ("judge@1",)}


def test_windows_and_version_reach_the_groups_and_metrics_are_prefixed() -> None:
    groups, sink, _ = run(Log())
    batch = groups[0].batches[1]
    assert batch.sample_ids == (4, 5, 6, 7)
    assert len(batch.windows) == 2
    assert batch.weight_version.step == 1
    assert sink.rows[1]["critic/loss"] == sink.rows[1]["actor/loss"] == 1.0
    assert sink.rows[1]["rollout/samples"] == 4.0
    assert {"time/generate", "time/critic", "time/actor", "time/sync"} <= set(sink.rows[1])
    assert sink.rows[1]["rollout/forwards_over_plan"] == 8 - 4  # the fake engines count 8 for 4 requests of one step
    assert sink.closed


def test_eval_runs_at_start_and_end_with_both_kinds_and_rollouts_use_raw_weights() -> None:
    log = Log()
    evaluation = FixedEvaluation([request(0)], interval=2, last=3)
    _, sink, _ = run(log, rollouts=range(3), ema=True, evaluation=evaluation)
    evaluated = [event for event in log.events if event.startswith("engines.evaluate")]
    assert evaluated == [f"engines.evaluate({v})" for v in ("raw@0", "ema@0", "raw@2", "ema@2", "raw@3", "ema@3")]
    assert all("raw" in event for event in log.events if event.startswith("engines.generate"))
    assert set(sink.rows[3]) >= {"eval/accuracy_raw", "eval/accuracy_ema"}
    assert log.most_awake == 1


def test_a_resumed_run_starts_where_it_is_told_and_checkpoints_when_everyone_sleeps() -> None:
    log = Log()
    groups, _, _ = run(log, rollouts=range(3, 5), every=4)
    assert [batch.rollout_id for batch in groups[0].batches] == [3, 4]
    at = log.events.index("checkpoint(4)")
    assert log.events[at - 2 : at + 2] == ["actor.sleep", "engines.settle", "checkpoint(4)", "engines.wake"]


@pytest.mark.parametrize(
    "at",
    ["actor.export(0)", "engines.wake", "engines.load(raw@0)", "engines.generate(raw@0)", "critic.wake",
     "critic.train(0)", "critic.sleep", "actor.train(1)", "checkpoint(1)"],
)  # fmt: skip
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_everything_is_disposed_whatever_fails(at: str, error: BaseException) -> None:
    log = Log(fail_at=at, error=error)
    with pytest.raises(type(error)):
        run(log, every=1)
    assert log.events[-3:] == ["actor.dispose", "critic.dispose", "engines.dispose"]
    assert log.most_awake == 1


@pytest.mark.parametrize("at", ["engines.load(raw@2)", "engines.evaluate(raw@2)", "engines.generate(raw@2)"])
def test_engines_that_fail_cost_no_finished_rollout(at: str) -> None:
    """Everyone sleeps but the engines, which stay as they failed; the groups are saved, then all is disposed."""
    log = Log(fail_at=at, error=RunError("all engines are dead"))
    evaluation = FixedEvaluation([request(0)], interval=1, last=9)
    with pytest.raises(RunError, match="all engines are dead"):
        run(log, rollouts=range(9), evaluation=evaluation)
    assert log.events[log.events.index(at) :] == [
        at, "engines.settle", "checkpoint(2)", "actor.dispose", "critic.dispose", "engines.dispose",
    ]  # fmt: skip
    assert log.awake == {"engines"}


@pytest.mark.parametrize(
    ("at", "error", "first", "every"),
    [
        ("engines.generate(raw@2)", RunError("boom"), 0, 2),  # saved when it was due
        ("engines.load(raw@0)", RunError("boom"), 0, None),  # nothing is done yet
        ("engines.load(raw@0)", RunError("boom"), 5, None),  # nothing beyond what --load named
        ("critic.train(2)", RunError("boom"), 0, None),  # the critic is ahead of the actor
        ("actor.train(2)", RunError("boom"), 0, None),
    ],
)
def test_nothing_is_saved_twice_or_half_done(at: str, error: BaseException, first: int, every: int | None) -> None:
    log = Log(fail_at=at, error=error)
    with pytest.raises(type(error)):
        run(log, rollouts=range(first, 9), every=every)
    saves = [event for event in log.events if event.startswith("checkpoint")]
    assert saves == (["checkpoint(2)"] if every else [])
    assert log.events[-4:] == [at, "actor.dispose", "critic.dispose", "engines.dispose"]


def test_a_save_that_fails_as_well_does_not_hide_what_failed_first(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(fail_at="engines.generate(raw@1)", error=RunError("all engines are dead"))
    engines = FakeEngines(log)
    groups = [FakeGroup(log, "critic", "critic"), FakeGroup(log, "actor", "actor")]

    class Full(NoCheckpoints):
        def __call__(self, completed: int, groups: object, before: Callable[[], None] = lambda: None) -> None:
            super().__call__(completed, groups, before)
            raise OSError("disk full")

    with pytest.raises(RunError, match="all engines are dead"):
        train(range(3), source, engines, groups, NoEvaluation(), Full(log), RecordingSink(), StopRequest())
    assert log.events[-4:] == ["checkpoint(1)", "actor.dispose", "critic.dispose", "engines.dispose"]
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "the checkpoint after 1 rollouts failed as well" in record.getMessage()
    assert "disk full" in str(record.exc_info[1] if record.exc_info else None)


def test_a_failing_dispose_does_not_keep_the_others() -> None:
    log = Log(fail_at="actor.dispose")
    with pytest.raises(RuntimeError, match="boom"):
        run(log)
    assert log.events[-2:] == ["critic.dispose", "engines.dispose"]


def test_lost_or_doubled_samples_are_refused() -> None:
    class Losing(FakeEngines):
        def generate(self, windows):
            return super().generate([windows[0], windows[1][:1]])

    log = Log()
    groups = [FakeGroup(log, "critic", "critic"), FakeGroup(log, "actor", "actor")]
    with pytest.raises(ValueError, match=r"returned samples \(0, 1, 2\), asked for \(0, 1, 2, 3\)"):
        train(range(1), source, Losing(log), groups, NoEvaluation(), NoCheckpoints(log), RecordingSink(), StopRequest())
    assert "critic.wake" not in log.events
