"""The order of things, asserted on an event log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fakes import FakeEngines, FakeGroup, Log, RecordingSink

from miles_dmd2.driver import train
from miles_dmd2.evaluation import FixedEvaluation, NoEvaluation
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

    def __call__(self, completed: int, groups: object) -> None:
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
    assert log.events[at - 1 : at + 2] == ["actor.sleep", "checkpoint(4)", "engines.wake"]


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
