"""Evaluation: the same prompts and seeds every time, with raw and averaged student weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from miles_dmd2.types import Engines, RolloutRequest, WeightKind, WeightUpdate


@dataclass(frozen=True, slots=True)
class FixedEvaluation:
    """Evaluates at rollout 0, every `interval` rollouts, and after the last one.

    Rollout r's figures are those of the student after r rollouts: r = 0 is the untrained student. The engines hold the
    raw weights when it is called and when it returns. `watch` is told (rollout, figures), and may refuse them.
    """

    requests: Sequence[RolloutRequest]
    interval: int
    last: int  # num_rollout
    watch: Callable[[int, Mapping[str, float]], None] | None = None

    def due(self, rollout_id: int) -> bool:
        return rollout_id % self.interval == 0 or rollout_id == self.last

    def __call__(
        self, rollout_id: int, engines: Engines, weights: Mapping[WeightKind, WeightUpdate]
    ) -> dict[str, float]:
        figures = _labelled("raw", engines.evaluate(self.requests, rollout_id, "raw"))
        if "ema" in weights:
            engines.load_weights(weights["ema"])
            figures |= _labelled("ema", engines.evaluate(self.requests, rollout_id, "ema"))
            engines.load_weights(weights["raw"])
        if self.watch is not None:
            self.watch(rollout_id, figures)
        return figures


class NoEvaluation:
    """For runs without eval prompts."""

    def due(self, rollout_id: int) -> bool:
        return False

    def __call__(
        self, rollout_id: int, engines: Engines, weights: Mapping[WeightKind, WeightUpdate]
    ) -> dict[str, float]:
        raise RuntimeError("this run has no eval prompts")


def _labelled(kind: WeightKind, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"eval/{name}_{kind}": value for name, value in figures.items()}
