"""Fakes with one shared event log, and a device that notices who is awake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_dmd2.types import (
    Chunk,
    GroupState,
    Probe,
    RolloutBatch,
    RolloutRequest,
    TrainResult,
    WeightUpdate,
    WeightVersion,
)


@dataclass
class Log:
    events: list[str] = field(default_factory=list)
    awake: set[str] = field(default_factory=set)
    most_awake: int = 0
    fail_at: str | None = None
    error: BaseException = field(default_factory=lambda: RuntimeError("boom"))

    def add(self, event: str) -> None:
        self.events.append(event)
        if event == self.fail_at:
            raise self.error

    def wake(self, name: str) -> None:
        self.add(f"{name}.wake")
        self.awake.add(name)
        self.most_awake = max(self.most_awake, len(self.awake))

    def sleep(self, name: str) -> None:
        self.add(f"{name}.sleep")
        self.awake.remove(name)


class FakeEngines:
    def __init__(self, log: Log) -> None:
        self.log = log
        self.served: str | None = None

    def wake(self) -> None:
        self.log.wake("engines")

    def sleep(self) -> None:
        self.log.sleep("engines")

    def load_weights(self, update: WeightUpdate) -> None:
        assert "engines" in self.log.awake
        self.served = str(update.version)
        self.log.add(f"engines.load({update.version})")

    def generate(self, windows: Sequence[Sequence[RolloutRequest]]) -> tuple[tuple[Chunk, ...], ...]:
        assert "engines" in self.log.awake
        self.log.add(f"engines.generate({self.served})")
        return tuple((Chunk(tuple(r.sample_id for r in window), "samples"),) for window in windows)

    def evaluate(self, requests: Sequence[RolloutRequest], rollout_id: int, kind: str) -> Mapping[str, float]:
        assert "engines" in self.log.awake
        self.log.add(f"engines.evaluate({self.served})")
        return {"accuracy": 0.5}

    def settle(self) -> None:
        self.log.add("engines.settle")

    def metrics(self) -> Mapping[str, float]:
        return {"samples": 4.0, "forwards": 8.0}

    def dispose(self) -> None:
        self.log.add("engines.dispose")


class FakeGroup:
    def __init__(self, log: Log, name: str, role: str, *, ema: bool = False) -> None:
        self.log, self.name, self.role, self.ema = log, name, role, ema
        self.updates = 0
        self.seen: list[dict[str, tuple[Any, ...]]] = []
        self.batches: list[RolloutBatch] = []

    def wake(self) -> None:
        self.log.wake(self.name)

    def sleep(self) -> None:
        self.log.sleep(self.name)

    def train(self, batch: RolloutBatch, external: Mapping[str, tuple[Any, ...]]) -> TrainResult:
        assert self.log.awake == {self.name}
        self.log.add(f"{self.name}.train({batch.rollout_id})")
        self.seen.append(dict(external))
        self.batches.append(batch)
        self.updates += 1
        return TrainResult({"loss": 1.0}, (f"{self.name}@{batch.rollout_id}",))

    def export_weights(self) -> dict[str, WeightUpdate]:
        assert self.log.awake == {self.name}
        self.log.add(f"{self.name}.export({self.updates})")
        probe: Probe = None  # type: ignore[assignment]
        kinds = ("raw", "ema") if self.ema else ("raw",)
        return {kind: WeightUpdate(WeightVersion(self.updates, kind), "sum", probe, None) for kind in kinds}

    def save(self, directory: Path) -> GroupState:
        self.log.add(f"{self.name}.save")
        return GroupState({})

    def dispose(self) -> None:
        self.log.add(f"{self.name}.dispose")


class RecordingSink:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.rows: dict[int, dict[str, float]] = {}
        self.closed = False

    def phase(self, rollout_id: int, name: str) -> None:
        self.phases.append(name)

    def metrics(self, rollout_id: int, values: Mapping[str, float]) -> None:
        self.rows[rollout_id] = dict(values)

    def close(self) -> None:
        self.closed = True
