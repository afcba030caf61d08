"""A failure is one line that names process, node, phase and log."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from miles_dmd2.cluster import failures
from miles_dmd2.cluster.failures import introduce
from miles_dmd2.cluster.runtime import ray_session, wait
from miles_dmd2.observability import RunError

pytestmark = pytest.mark.ray
LOGS = Path("/somewhere/logs")


class Worker:
    def __init__(self, fail: str = "") -> None:
        if fail:
            raise ValueError(fail)

    def pid(self) -> int:
        return os.getpid()

    def answer(self, after: float = 0.0) -> int:
        time.sleep(after)
        return 3

    def refuse(self, error: Exception, after: float = 0.0) -> None:
        time.sleep(after)
        raise error

    def die(self, after: float = 0.0) -> None:
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(None, 2, "cpu"):
        yield


def start(*names: str, **arguments: str) -> list[ray.actor.ActorHandle]:
    workers = [ray.remote(Worker).options(num_cpus=0.1).remote(**arguments) for _ in names]
    for worker, name in zip(workers, names, strict=True):
        introduce(worker, name, LOGS)
    return workers


def line(refs: list[ray.ObjectRef], timeout: float = 60.0) -> str:
    with pytest.raises(RunError) as caught:
        wait(refs, timeout, "rollout 3, critic training")
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert text.startswith("rollout 3, critic training: ")
    return text


def test_each_kind_of_failure_names_the_process() -> None:
    first, second, third = start("critic_0", "critic_1", "engine_0")
    assert wait([first.answer.remote(), second.answer.remote()], 60, "x") == [3, 3]
    pid = ray.get(second.pid.remote())

    text = line([first.answer.remote(), second.refuse.remote(ValueError("odd\nshape"))])
    assert re.search(rf"critic_1 \(pid {pid} on [\d.]+\): ValueError: odd shape; its log: {LOGS}/critic_1.log$", text)

    text = line([first.answer.remote(), third.answer.remote(30.0)], timeout=1.0)
    assert "no answer from engine_0 within 1 s (--phase-timeout" in text
    assert text.endswith("logs: /somewhere/logs/engine_0.log")

    # The first rank to report only noticed that the second one is gone.
    echo = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:31")
    text = line([first.refuse.remote(echo), second.die.remote(0.5)])
    assert re.search(rf"critic_1 \(pid {pid} on [\d.]+\) died: ", text)
    assert "its log: /somewhere/logs/critic_1.log" in text

    text = line([first.refuse.remote(echo), first.refuse.remote(ValueError("the cause"), 0.5)])
    assert "critic_0" in text
    assert "ValueError: the cause" in text


@pytest.mark.parametrize(
    ("at", "others", "lost", "most"),
    [
        (2, "b", True, 2),  # Ray calls it dead before we look
        (3, "b", True, 3),  # and while we do
        (1000, "b", False, 8),  # neither is lost
        (1000, "", False, 2),  # there is no other, and nothing to wait for
    ],
)
def test_an_actor_out_of_reach_is_told_with_the_node_that_goes(
    at: int, others: str, lost: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes are looked at when the worker starts, and again when it fails; without a lost one Ray's own words stay."""
    looks = 0

    def nodes() -> list[dict[str, object]]:
        nonlocal looks
        looks += 1
        names = {"a": True, **dict.fromkeys(others, looks < at)}
        return [
            {"NodeID": name, "Alive": alive, "NodeManagerHostname": f"host-{name}", "NodeManagerAddress": "10.0.0.3"}
            for name, alive in names.items()
        ]

    monkeypatch.setattr(ray, "nodes", nodes)
    monkeypatch.setattr(failures, "_NODE_SECONDS", 2.0)
    monkeypatch.setattr(failures, "_nodes", {})
    (worker,) = start("critic_1")
    error = ray.exceptions.ActorUnavailableError("connection reset", None)
    text = failures.told(worker.pid.remote(), error)
    where = "its node is lost: host-b (10.0.0.3)" if lost else str(error)
    assert text == f"critic_1 cannot be reached: {where}; its log: {LOGS}/critic_1.log"
    assert looks <= most


def test_a_constructor_that_fails_is_told_by_its_error() -> None:
    (worker,) = start("actor_0", fail="no such checkpoint")
    text = line([worker.pid.remote()])
    assert "actor_0" in text
    assert "ValueError: no such checkpoint" in text
