"""The training loop: DMD2 as the paper states it, over protocols, holding references and numbers and never a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from miles_dmd2.config.clock import EVERY_ROLLOUT, StudentClock
from miles_dmd2.observability import PhaseClock, Sink, logger, throughput
from miles_dmd2.stopping import StopRequest
from miles_dmd2.types import (
    Engines,
    RolloutBatch,
    RolloutRequest,
    TrainerGroup,
    TrainResult,
    WeightKind,
    WeightUpdate,
    WeightVersion,
)

Weights = Mapping[WeightKind, WeightUpdate]


class Evaluation(Protocol):
    def due(self, rollout_id: int) -> bool: ...

    def __call__(self, rollout_id: int, engines: Engines, weights: Weights) -> Mapping[str, float]: ...


class Checkpoints(Protocol):
    def due(self, completed: int) -> bool: ...

    def __call__(self, completed: int, groups: Sequence[TrainerGroup], before: Callable[[], None] = ...) -> None:
        """`before` is called when all of it is written and it is no checkpoint yet: what must not be missing then."""


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
    student_clock: StudentClock = EVERY_ROLLOUT,
) -> Weights:
    """Run `rollouts`, evaluate the last student, return its weights, and leave nothing running, whatever happens.

    Everyone arrives asleep. At most one of engines and groups is awake at any time; the engines serve verified
    weights before the first sample; a group sleeps right after its own train step; what a group hands over reaches
    every later group (DMD2, arXiv 2405.14867, algorithm 1, with the roles in processes of their own). The actor trains
    on the rollouts that `student_clock` names; on the others its weights stay, and so does all that counts its steps.

    A first request to stop abandons sync, eval and generation and waits for the end of training, so it comes between
    two rollouts, as the failure of engines does: what is done so far becomes a checkpoint before either goes on, the
    request as KeyboardInterrupt. Nothing is saved when a group fails in its step, nor on a second request.
    """
    clock = PhaseClock(sink)
    with ExitStack() as stack:
        for part in (sink.close, engines.dispose, *(group.dispose for group in groups)):
            stack.callback(part)
        done = _Done(rollouts.start)
        with _kept(done, lambda completed: checkpoints(completed, groups, engines.settle), stop):
            weights = _export(groups, clock, rollouts.start)
            for rollout_id in rollouts:
                with awake(engines):
                    metrics = _sync(engines, weights, clock, rollout_id)
                    if evaluation.due(rollout_id):
                        metrics |= _evaluate(evaluation, engines, weights, clock, rollout_id)
                    with clock(rollout_id, "generate"):
                        learns, windows = student_clock.due(rollout_id), source(rollout_id)
                        batch = _generate(engines, windows, rollout_id, weights["raw"].version, learns)
                    metrics |= _counted(engines, windows)
                with stop.deferred():
                    with done.one_more():
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
                    phases = ("sync", "generate", *(group.name for group in groups))
                    log = partial(_log, sink, clock, rollout_id, metrics, len(batch.sample_ids), phases)
                    if checkpoints.due(done.rollouts):
                        done.saved = True  # or failed to be: there is no second try
                        with clock(rollout_id, "save"):
                            checkpoints(done.rollouts, groups, partial(_before, engines, log))
                    else:
                        log()
                    del batch, external, result  # the object store may drop them before the next rollout is generated
            if evaluation.due(rollouts.stop):
                with awake(engines):
                    metrics = _sync(engines, weights, clock, rollouts.stop)
                    metrics |= _evaluate(evaluation, engines, weights, clock, rollouts.stop)
                sink.metrics(rollouts.stop, metrics | clock.take())
    return weights


def rollouts_only(rollouts: range, source: RequestSource, engines: Engines, sink: Sink) -> None:
    """Generate `rollouts` with the weights that the engines hold, train nothing, and leave nothing running."""
    clock = PhaseClock(sink)
    with _disposed(engines, sink), awake(engines):
        for rollout_id in rollouts:
            with clock(rollout_id, "generate"):
                _generate(engines, source(rollout_id), rollout_id, WeightVersion(0), student_step=False)
            metrics = {f"rollout/{key}": value for key, value in engines.metrics().items()}
            sink.metrics(rollout_id, metrics | clock.take())


def eval_only(evaluation: Evaluation, engines: Engines, sink: Sink) -> None:
    """Evaluate the weights that the engines hold, once, as rollout 0; returns when the last file is written."""
    clock = PhaseClock(sink)
    with _disposed(engines, sink), awake(engines):
        metrics = _evaluate(evaluation, engines, {}, clock, 0)
        sink.metrics(0, metrics | clock.take())


@contextmanager
def _disposed(engines: Engines, sink: Sink) -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(sink.close)
        stack.callback(engines.dispose)
        yield


class awake:
    """Wake for the length of the block; asleep again afterwards unless the block failed (dispose follows then)."""

    def __init__(self, member: Engines | TrainerGroup) -> None:
        self._member = member

    def __enter__(self) -> None:
        self._member.wake()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._member.sleep()


@dataclass
class _Done:
    """What the groups hold: `whole` rollouts, or something in between. `saved`: there is nothing to make of it."""

    rollouts: int
    whole: bool = True
    saved: bool = True  # at the start it is the checkpoint which the run continues, or nothing

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Training on one rollout; a block that fails leaves the groups in between."""
        self.whole = False
        yield
        self.rollouts, self.whole, self.saved = self.rollouts + 1, True, False


@contextmanager
def _kept(done: _Done, save: Callable[[int], None], stop: StopRequest) -> Iterator[None]:
    """Save what is done, if it is whole and not saved yet, when the block fails or is asked to stop.

    After a request to stop, a save that fails is the error to tell. After a failure it is logged, the failure goes on,
    and a request waits for the save.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if done.saved or not done.whole or stop.insisted:
            raise
        if isinstance(error, KeyboardInterrupt):
            save(done.rollouts)
            raise
        logger.warning("%s: saving the %d rollouts done", error, done.rollouts)
        with stop.deferred():
            try:
                save(done.rollouts)
            except Exception:
                logger.exception("the checkpoint after %d rollouts failed as well", done.rollouts)
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
    version: WeightVersion,
    student_step: bool,
) -> RolloutBatch:
    batch = RolloutBatch(rollout_id, version, engines.generate(windows), student_step)
    wanted = tuple(request.sample_id for window in windows for request in window)
    if batch.sample_ids != wanted:
        raise ValueError(f"rollout {rollout_id}: engines returned samples {batch.sample_ids}, asked for {wanted}")
    return batch


def _counted(engines: Engines, windows: Sequence[Sequence[RolloutRequest]]) -> dict[str, float]:
    """What the engines say of this rollout, their forwards also less those that its requests ask for."""
    counts = {f"rollout/{key}": value for key, value in engines.metrics().items()}
    requests = [request for window in windows for request in window]
    planned = sum(1 if request.real_latent is not None else request.stop_step + 1 for request in requests)
    return counts | {"rollout/forwards_over_plan": counts["rollout/forwards"] - planned}


def _log(
    sink: Sink,
    clock: PhaseClock,
    rollout_id: int,
    metrics: Mapping[str, float],
    samples: int,
    phases: Sequence[str],
) -> None:
    """A rollout's row."""
    seconds = clock.take()
    sink.metrics(rollout_id, dict(metrics) | throughput(samples, seconds, phases) | seconds)


def _before(engines: Engines, log: Callable[[], None]) -> None:
    """A run that goes on from a checkpoint repeats nothing of before it: rows and eval files are there first."""
    engines.settle()
    log()


def _prefixed(name: str, result: TrainResult) -> dict[str, float]:
    return {f"{name}/{key}": value for key, value in result.metrics.items()}


__all__ = ["Checkpoints", "Evaluation", "RequestSource", "awake", "eval_only", "rollouts_only", "train"]
