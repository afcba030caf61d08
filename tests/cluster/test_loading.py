"""Ranks of a node take turns while they load: which ones at a time, without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from miles_dmd2.cluster import trainer_group
from miles_dmd2.cluster.trainer_group import RayTrainerGroup


class Remote:
    """A worker's method; what it answers is the worker and the method, for `wait` to look at."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name

    def remote(self, *_: object) -> tuple[int, str]:
        return self.rank, self.name


@pytest.mark.parametrize(
    ("ranks", "per_node", "at_once", "turns"),
    [
        (4, 2, 2, [[0, 1, 2, 3]]),
        (4, 2, 1, [[0, 2], [1, 3]]),
        (6, 3, 2, [[0, 1, 3, 4], [2, 5]]),
        (3, 2, 1, [[0, 2], [1]]),
        (1, 4, 1, [[0], [], [], []]),
        (4, 4, 9, [[0, 1, 2, 3]]),
    ],
)
def test_turns(
    monkeypatch: pytest.MonkeyPatch, ranks: int, per_node: int, at_once: int, turns: list[list[int]]
) -> None:
    waited: list[list[tuple[int, str]]] = []

    def wait(refs: list[tuple[int, str]], _timeout: float, _what: str) -> list[tuple[str, int]]:
        waited.append(list(refs))
        return [("host", 1)] * len(refs)

    monkeypatch.setattr(trainer_group, "wait", wait)
    workers = [
        SimpleNamespace(**{name: Remote(rank, name) for name in ("open_rendezvous", "join", "build")})
        for rank in range(ranks)
    ]
    job = SimpleNamespace(spec=SimpleNamespace(name="critic"), ranks_per_node=per_node, load_at_once=at_once)
    RayTrainerGroup(job, workers, 1.0, 1.0).build(None)
    assert waited[:2] == [[(0, "open_rendezvous")], [(rank, "join") for rank in range(ranks)]]
    assert [[rank for rank, name in refs if name == "build"] for refs in waited[2:]] == turns
