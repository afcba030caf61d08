"""How long the engines' group waits for files at the end, and what it tells of those that are not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from miles_dmd2.cluster import engine_group
from miles_dmd2.cluster.engine_group import RayEngineGroup
from miles_dmd2.observability import RunError
from miles_dmd2.types import RolloutRequest

REQUEST = RolloutRequest(0, "p", 0, (1.0, 0.0), 0, decode=True)


class Actor:
    """Answers each remote method with what `answers` has for it, or with the method's name."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.asked = answers, []

    def __getattr__(self, name: str) -> Any:
        def remote(*_: object, **__: object) -> Any:
            self.asked.append(name)
            answer = self.answers.get(name, [])
            return [answer or 1, "part"] if name == "generate" else answer

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """What was waited for, and how long at most. An answer that is an exception is raised."""
    seen: list[tuple[str, float]] = []

    def wait(refs: list[Any], timeout: float, what: str) -> list[Any]:
        seen.append((what, timeout))
        for ref in refs:
            if isinstance(ref, BaseException):
                raise ref
        return list(refs)

    monkeypatch.setattr(engine_group, "wait", wait)
    monkeypatch.setattr(engine_group.ray, "kill", lambda actor: actor.asked.append("kill"))
    return seen


def group(**answers: Any) -> tuple[RayEngineGroup, Actor]:
    actor = Actor({"evaluate": {}, **answers})
    return RayEngineGroup([actor], 60.0, 1000.0), actor


def test_the_last_files_are_waited_for_as_long_as_a_phase_and_the_processes_end_after(
    waits: list[tuple[str, float]],
) -> None:
    engines, actor = group(finish_media=["raw 5: full"])
    engines.evaluate([REQUEST], 5, "raw")
    engines.dispose()
    assert waits[-1] == ("files of the evals", 1000.0)
    assert actor.asked[-2:] == ["finish_media", "kill"]
    assert engines.media_failures == ["raw 5: full"]
    engines.dispose()  # of a run, then of the launch
    assert actor.asked.count("kill") == 1


def test_a_failure_is_known_at_the_next_eval_and_told_once(
    waits: list[tuple[str, float]], caplog: pytest.LogCaptureFixture
) -> None:
    engines, _ = group(media_failures=["raw 0: full"], finish_media=["raw 0: full", "raw 5: full"])
    engines.evaluate([REQUEST], 5, "raw")
    assert engines.media_failures == ["raw 0: full"]
    engines.evaluate([REQUEST], 10, "raw")
    engines.dispose()
    assert engines.media_failures == ["raw 0: full", "raw 5: full"]
    assert [record.message for record in caplog.records] == ["raw 0: full", "raw 5: full"]


def test_before_a_checkpoint_all_files_so_far_are_there_or_known_not_to_be(waits: list[tuple[str, float]]) -> None:
    engines, actor = group(settled_media=["raw 5: full"])
    engines.settle()
    assert actor.asked == []  # nothing was evaluated
    engines.evaluate([REQUEST], 5, "raw")
    engines.settle()
    assert actor.asked[-1] == "settled_media"
    assert engines.media_failures == ["raw 5: full"]
    actor.answers["settled_media"] = RunError("engine_0 is gone")
    engines.settle()  # the checkpoint is written all the same
    assert engines.media_failures[1:] == ["the files of the last eval may not be complete: engine_0 is gone"]
    actor.answers["settled_media"] = ["raw 5: full", "raw 10: full"]  # it was only late
    engines.settle()
    assert engines.media_failures[2:] == ["raw 10: full"]


def test_files_of_a_busy_engine_are_not_waited_for_as_long_as_a_phase(waits: list[tuple[str, float]]) -> None:
    """A request to stop leaves an engine in the middle of a rollout, and a checkpoint is to be written."""
    engines, actor = group()
    engines.evaluate([REQUEST], 5, "raw")
    engines.settle()
    assert waits[-1] == ("files of the evals", 1000.0)
    actor.answers["generate"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engines.generate([[REQUEST]])
    engines.settle()
    assert waits[-1] == ("files of the evals", 5.0)


def test_a_run_without_evals_waits_for_nothing(waits: list[tuple[str, float]]) -> None:
    engines, actor = group()
    engines.generate([[REQUEST]])
    engines.dispose()
    assert actor.asked == ["generate", "kill"]


@pytest.mark.parametrize("error", [RunError("rollout: not in time"), KeyboardInterrupt()])
def test_engines_that_may_still_be_busy_are_not_waited_for_long(
    waits: list[tuple[str, float]], error: BaseException
) -> None:
    engines, actor = group()
    engines.evaluate([REQUEST], 0, "raw")
    actor.answers["wake"] = error
    with pytest.raises(type(error)):
        engines.wake()
    actor.answers["finish_media"] = RunError("engine_0 is gone")
    engines.dispose()
    assert waits[-1] == ("files of the evals", 5.0)
    assert engines.media_failures == ["the files of the last eval may not be complete: engine_0 is gone"]
    assert actor.asked[-1] == "kill"


def test_a_second_request_to_stop_does_not_wait(waits: list[tuple[str, float]]) -> None:
    engines, actor = group(finish_media=KeyboardInterrupt())
    engines.evaluate([REQUEST], 0, "raw")
    with pytest.raises(KeyboardInterrupt):
        engines.dispose()
    assert actor.asked[-1] == "kill"


def test_the_mean_reward_is_of_all_engines_samples(waits: list[tuple[str, float]]) -> None:
    """Three samples of one engine and one of the other: each counts once."""
    actors = [Actor({"new_rewards": [1.0, 2.0, 3.0]}), Actor({"new_rewards": [10.0]})]
    for actor in actors:
        actor.answers |= {"new_forwards": 2, "new_faults": {}}
    assert RayEngineGroup(actors, 60.0, 1000.0).metrics() == {"samples": 0.0, "forwards": 4.0, "reward_mean": 4.0}


def test_without_samples_there_is_no_mean(waits: list[tuple[str, float]]) -> None:
    engines, _ = group(new_forwards=0, new_faults={})
    assert "reward_mean" not in engines.metrics()
