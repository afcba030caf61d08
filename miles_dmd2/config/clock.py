"""When the student takes a step: a function of the rollout's number, so that a resumed run needs no counter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StudentClock:
    """A step on each `interval`-th rollout after `warmup` ones in which the critic trains alone."""

    warmup: int = 0
    interval: int = 1

    def due(self, rollout_id: int) -> bool:
        since = rollout_id + 1 - self.warmup
        return since > 0 and since % self.interval == 0

    def steps(self, rollouts: int) -> int:
        """Student steps of the first `rollouts` rollouts; of rollout r: the number of the step that it leads to."""
        return max(0, rollouts - self.warmup) // self.interval


EVERY_ROLLOUT = StudentClock()
