"""The training loop: DMD2 as the paper states it, over protocols, holding references and numbers and never a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from miles_dmd2.observability import PhaseClock, Sink
from miles_dmd2.stopping import StopRequest
from miles_dmd2.types import (
    Engines,
    RolloutBatch,
    RolloutRequest,
    TrainerGroup,
    TrainResult,
    WeightKind,
    WeightUpdate,
)

Weights = Mapping[WeightKind, WeightUpdate]


class Evaluation(Protocol):
    def due(self, rollout_id: int) -> bool: ...

    def __call__(self, rollout_id: int, engines: Engines, weights: Weights) -> Mapping[str, float]: ...


class Checkpoints(Protocol):
    def due(self, completed: int) -> bool: ...

    def __call__(self, completed: int, groups: Sequence[TrainerGroup]) -> None: ...


class RequestSource(Protocol):
    """The requests of one rollout, cut into the critic's windows, in sample-id order."""

    def __call__(self, rollout_id: int) -> Sequence[Sequence[RolloutRequest]]: ...


def train(
    rollouts: range,
    source: RequestSource,
    engines: Engines,
    groups: Sequence[TrainerGroup],
    evaluation: Evaluation,
    checkpoints: Checkpoints,
    sink: Sink,
    stop: StopRequest,
) -> Weights:
    """Run `rollouts`, evaluate the last student, return its weights, and leave nothing running, whatever happens.

    Everyone arrives asleep. At most one of engines and groups is awake at any time; the engines serve verified
    weights before the first sample; a group sleeps right after its own train step; what a group hands over reaches
    every later group (DMD2, arXiv 2405.14867, algorithm 1, with the roles in processes of their own).

    A first request to stop abandons sync, eval and generation, waits for the end of training, saves, and goes on as
    KeyboardInterrupt.
    """
    clock = PhaseClock(sink)
    with ExitStack() as stack:
        for part in (sink.close, engines.dispose, *(group.dispose for group in groups)):
            stack.callback(part)
        completed = rollouts.start
        try:
            weights = _export(groups, clock, rollouts.start)
            for rollout_id in rollouts:
                with awake(engines):
                    metrics = _sync(engines, weights, clock, rollout_id)
                    if evaluation.due(rollout_id):
                        metrics |= _evaluate(evaluation, engines, weights, clock, rollout_id)
                    with clock(rollout_id, "generate"):
                        batch = _generate(engines, source(rollout_id), rollout_id, weights)
                    metrics |= {f"rollout/{key}": value for key, value in engines.metrics().items()}
                with stop.deferred():
                    external: dict[str, tuple[Any, ...]] = {}
                    for group in groups:
                        with clock(rollout_id, group.name), awake(group):
                            result = group.train(batch, external)
                            if group.role == "actor":
                                weights = group.export_weights()
                        external[group.name] = result.external
                        metrics |= _prefixed(group.name, result)
                    completed = rollout_id + 1
                    if checkpoints.due(completed):
                        with clock(rollout_id, "save"):
                            checkpoints(completed, groups)
                    sink.metrics(rollout_id, metrics | clock.take())
                    del batch, external, result  # the object store may drop them before the next rollout is generated
            if evaluation.due(rollouts.stop):
                with awake(engines):
                    metrics = _sync(engines, weights, clock, rollouts.stop)
                    metrics |= _evaluate(evaluation, engines, weights, clock, rollouts.stop)
                sink.metrics(rollouts.stop, metrics | clock.take())
        except KeyboardInterrupt:
            if not stop.insisted:
                checkpoints(completed, groups)  # everyone who has something to save is asleep
            raise
    return weights


class awake:
    """Wake for the length of the block; asleep again afterwards unless the block failed (dispose follows then)."""

    def __init__(self, member: Engines | TrainerGroup) -> None:
        self._member = member

    def __enter__(self) -> None:
        self._member.wake()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._member.sleep()


def _export(groups: Sequence[TrainerGroup], clock: PhaseClock, rollout_id: int) -> Weights:
    (actor,) = (group for group in groups if group.role == "actor")
    with clock(rollout_id, "export"), awake(actor):
        return actor.export_weights()


def _sync(engines: Engines, weights: Weights, clock: PhaseClock, rollout_id: int) -> dict[str, float]:
    with clock(rollout_id, "sync"):
        engines.load_weights(weights["raw"])
    return {"rollout/weight_step": float(weights["raw"].version.step)}


def _evaluate(
    evaluation: Evaluation, engines: Engines, weights: Weights, clock: PhaseClock, rollout_id: int
) -> dict[str, float]:
    with clock(rollout_id, "eval"):
        return dict(evaluation(rollout_id, engines, weights))


def _generate(
    engines: Engines, windows: Sequence[Sequence[RolloutRequest]], rollout_id: int, weights: Weights
) -> RolloutBatch:
    batch = RolloutBatch(rollout_id, weights["raw"].version, engines.generate(windows))
    wanted = tuple(request.sample_id for window in windows for request in window)
    if batch.sample_ids != wanted:
        raise ValueError(f"rollout {rollout_id}: engines returned samples {batch.sample_ids}, asked for {wanted}")
    return batch


def _prefixed(name: str, result: TrainResult) -> dict[str, float]:
    return {f"{name}/{key}": value for key, value in result.metrics.items()}


__all__ = ["Checkpoints", "Evaluation", "RequestSource", "awake", "train"]
