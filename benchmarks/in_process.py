"""The driver's engines and trainer groups in this process: a local engine, trainers of one rank, no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.training import ActorTrainer, CriticTrainer
from miles_dmd2.types import (
    Chunk,
    Conditioning,
    GroupState,
    RolloutBatch,
    RolloutRequest,
    TrainResult,
    WeightKind,
    WeightUpdate,
)


class Engines:
    """`types.Engines` over one local engine; remembers every request."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine, self.forwards, self.samples = engine, 0, 0
        self.requests: list[RolloutRequest] = []

    def wake(self) -> None:
        self.engine.wake()

    def sleep(self) -> None:
        self.engine.sleep()

    def load_weights(self, update: WeightUpdate) -> None:
        self.engine.load_weights(update, update.payload)

    def conditioning(self, prompts: Sequence[str]) -> list[Conditioning]:
        return self.engine.conditioning(prompts)

    def generate(self, windows: Sequence[Sequence[RolloutRequest]]) -> tuple[tuple[Chunk, ...], ...]:
        wanted = [request for window in windows for request in window]
        self.requests += wanted
        samples = iter(self.engine.generate(wanted))
        ids = (tuple(request.sample_id for request in window) for window in windows)
        return tuple((Chunk(of_window, list(islice(samples, len(of_window)))),) for of_window in ids)

    def evaluate(self, requests: Sequence[RolloutRequest], rollout_id: int, kind: WeightKind) -> Mapping[str, float]:
        raise NotImplementedError("in this process the driver's Evaluation measures by itself, without eval metric")

    def settle(self) -> None:
        """Nothing is written."""

    def metrics(self) -> Mapping[str, float]:
        new, self.forwards = self.engine.forward_count - self.forwards, self.engine.forward_count
        samples, self.samples = len(self.requests) - self.samples, len(self.requests)
        return {"samples": float(samples), "forwards": float(new), "reward_mean": 0.0}

    def dispose(self) -> None:
        self.engine.close()


class Group:
    """`types.TrainerGroup` over one trainer of one rank."""

    def __init__(self, trainer: CriticTrainer | ActorTrainer, *, keeps_ema: bool) -> None:
        self.trainer, self.name, self.role = trainer, trainer.role, trainer.role
        self._kinds: list[WeightKind] = ["raw", "ema"] if keeps_ema else ["raw"]

    def wake(self) -> None:
        self.trainer.wake()

    def sleep(self) -> None:
        self.trainer.sleep()

    def train(self, batch: RolloutBatch, external: Mapping[str, tuple[Any, ...]]) -> TrainResult:
        windows = batch.windows[-1:] if self.role == "actor" else batch.windows
        ids = [[i for chunk in window for i in chunk.sample_ids] for window in windows]
        samples = [sample for window in windows for chunk in window for sample in chunk.payload]
        if isinstance(self.trainer, CriticTrainer):
            metrics, scores = self.trainer.train(batch.rollout_id, ids, samples, score=batch.student_step)
            return TrainResult(metrics, (scores,))
        handed = [scores for parts in external.values() for scores in parts if scores]
        return TrainResult(self.trainer.train(batch.rollout_id, ids, samples, handed))

    def export_weights(self) -> Mapping[WeightKind, WeightUpdate]:
        assert isinstance(self.trainer, ActorTrainer)
        return self.trainer.export_weights(self._kinds)

    def save(self, directory: Path) -> GroupState:
        return self.trainer.save(directory)

    def dispose(self) -> None:
        pass
