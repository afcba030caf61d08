"""The training loop: DMD2 as the paper states it, over protocols, holding references and numbers and never a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from miles_dmd2.config.clock import EVERY_ROLLOUT, StudentClock
from miles_dmd2.observability import PhaseClock, Sink, logger
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
    student_clock: StudentClock = EVERY_ROLLOUT,
) -> Weights:
    """Run `rollouts`, evaluate the last student, return its weights, and leave nothing running, whatever happens.

    Everyone arrives asleep. At most one of engines and groups is awake at any time; the engines serve verified
    weights before the first sample; a group sleeps right after its own train step; what a group hands over reaches
    every later group (DMD2, arXiv 2405.14867, algorithm 1, with the roles in processes of their own). The actor trains
    on the rollouts that `student_clock` names; on the others its weights stay, and so does all that counts its steps.
    When the engines fail the groups are asleep between two rollouts: what is done so far becomes a checkpoint before
    the error goes on.
    """
    clock = PhaseClock(sink)
    with ExitStack() as stack:
        for part in (sink.close, engines.dispose, *(group.dispose for group in groups)):
            stack.callback(part)
        weights = _export(groups, clock, rollouts.start)
        saved = True  # the state at the start is that of the checkpoint which the run continues, or nothing
        for rollout_id in rollouts:
            with _kept(None if saved else rollout_id, checkpoints, groups), awake(engines):
                metrics = _sync(engines, weights, clock, rollout_id)
                if evaluation.due(rollout_id):
                    metrics |= _evaluate(evaluation, engines, weights, clock, rollout_id)
                with clock(rollout_id, "generate"):
                    batch = _generate(engines, source(rollout_id), rollout_id, weights, student_clock.due(rollout_id))
                metrics |= {f"rollout/{key}": value for key, value in engines.metrics().items()}
            external: dict[str, tuple[Any, ...]] = {}
            for group in groups:
                if group.role == "actor" and not batch.student_step:
                    continue
                with clock(rollout_id, group.name), awake(group):
                    result = group.train(batch, external)
                    if group.role == "actor":
                        weights = group.export_weights()
                external[group.name] = result.external
                metrics |= _prefixed(group.name, result)
            completed = rollout_id + 1
            saved = checkpoints.due(completed)
            if saved:
                with clock(rollout_id, "save"):
                    checkpoints(completed, groups)
            sink.metrics(rollout_id, metrics | clock.take())
            del batch, external, result  # the object store may drop them before the next rollout is generated
        if evaluation.due(rollouts.stop):
            with awake(engines):
                metrics = _sync(engines, weights, clock, rollouts.stop)
                metrics |= _evaluate(evaluation, engines, weights, clock, rollouts.stop)
            sink.metrics(rollouts.stop, metrics | clock.take())
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


@contextmanager
def _kept(completed: int | None, checkpoints: Checkpoints, groups: Sequence[TrainerGroup]) -> Iterator[None]:
    """Save the state after `completed` rollouts (None: there is nothing to save) if the block fails.

    A save that fails as well is logged: the block's error is the one to tell. Not for an interrupt, which cannot wait.
    """
    try:
        yield
    except Exception as error:
        if completed is not None:
            logger.warning("the engines failed (%s): saving the %d rollouts done", error, completed)
            try:
                checkpoints(completed, groups)
            except Exception:
                logger.exception("the checkpoint after %d rollouts failed as well", completed)
        raise


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
    engines: Engines,
    windows: Sequence[Sequence[RolloutRequest]],
    rollout_id: int,
    weights: Weights,
    student_step: bool,
) -> RolloutBatch:
    batch = RolloutBatch(rollout_id, weights["raw"].version, engines.generate(windows), student_step)
    wanted = tuple(request.sample_id for window in windows for request in window)
    if batch.sample_ids != wanted:
        raise ValueError(f"rollout {rollout_id}: engines returned samples {batch.sample_ids}, asked for {wanted}")
    return batch


def _prefixed(name: str, result: TrainResult) -> dict[str, float]:
    return {f"{name}/{key}": value for key, value in result.metrics.items()}


__all__ = ["Checkpoints", "Evaluation", "RequestSource", "awake", "train"]
