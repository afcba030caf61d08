"""From prompts and keys to rollout requests: pure functions of (seed, rollout_id), so a resumed run needs no cursor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from miles_dmd2.algo import eval_seed, integer, key_seed, sample_seed, sigma_grid
from miles_dmd2.config.clock import EVERY_ROLLOUT, StudentClock
from miles_dmd2.data.prompts import prompts_for_rollout
from miles_dmd2.types import RolloutRequest, SampleType, VideoDtype

StopLaw = Literal["full", "per_sample", "shared", "round_robin"]


def grid(num_steps: int, shift: float) -> tuple[float, ...]:
    """The student's sigmas `[N+1]` as Python floats that hold the fp32 values exactly."""
    return tuple(sigma_grid(num_steps, shift).tolist())


def explicit_grid(sigmas: Sequence[float]) -> tuple[float, ...]:
    """A grid of its own, `[N+1]`, rounded to fp32."""
    return tuple(torch.tensor(sigmas, dtype=torch.float32).tolist())


@dataclass(frozen=True, slots=True)
class TrainingRequests:
    """The requests of each rollout, in `num_windows` equal windows in sample-id order.

    real_latents: prompt -> rows; then each sample starts from one of its prompt's, drawn uniformly. scored: a reward
    function reads the samples, so they are decoded; but for those of `unscored` prompts.

    stop_law: "full" runs every sample to its last step; "per_sample" and "shared" draw uniformly from 0..N-1, once
    per sample or once per rollout; "round_robin" takes 0, 1, ... N-1 in turn, one for each student step (rCM).
    """

    prompts: Sequence[str]
    prompts_per_rollout: int
    samples_per_prompt: int
    num_windows: int
    sigmas: tuple[float, ...]
    stop_law: StopLaw
    seed: int
    sample_type: SampleType = "ode"
    clock: StudentClock = EVERY_ROLLOUT
    real_latents: Mapping[str, Sequence[int]] | None = None
    scored: bool = False
    unscored: frozenset[str] = frozenset()
    video_dtype: VideoDtype = "uint8"

    def __call__(self, rollout_id: int) -> list[list[RolloutRequest]]:
        chosen = prompts_for_rollout(len(self.prompts), self.prompts_per_rollout, rollout_id, self.seed)
        size = len(chosen) * self.samples_per_prompt
        requests = [
            self._request(rollout_id, rollout_id * size + i, self.prompts[chosen[i // self.samples_per_prompt]])
            for i in range(size)
        ]
        window = size // self.num_windows
        return [requests[start : start + window] for start in range(0, size, window)]

    def _request(self, rollout_id: int, sample_id: int, prompt: str) -> RolloutRequest:
        seed = sample_seed(self.seed, rollout_id, sample_id)
        stop_step = self._stop_step(rollout_id, sample_id)
        scored = self.scored and prompt not in self.unscored
        return RolloutRequest(
            sample_id,
            prompt,
            seed,
            self.sigmas,
            stop_step,
            decode=scored,
            sample_type=self.sample_type,
            real_latent=self._real_latent(rollout_id, sample_id, prompt),
            scored=scored,
            video_dtype=self.video_dtype,
        )

    def _real_latent(self, rollout_id: int, sample_id: int, prompt: str) -> int | None:
        if self.real_latents is None:
            return None
        rows = self.real_latents[prompt]
        return rows[integer(key_seed(self.seed, "real_latent", rollout_id, sample_id), len(rows))]

    def _stop_step(self, rollout_id: int, sample_id: int) -> int:
        num_steps = len(self.sigmas) - 1
        if self.stop_law == "full":
            return num_steps - 1
        if self.stop_law == "round_robin":
            return self.clock.steps(rollout_id) % num_steps
        drawn_for = sample_id if self.stop_law == "per_sample" else -1
        return integer(key_seed(self.seed, "stop_step", rollout_id, drawn_for), num_steps)


def eval_requests(
    prompts: Sequence[str],
    samples_per_prompt: int,
    sigmas: tuple[float, ...],
    seed: int,
    sample_type: SampleType = "ode",
    *,
    scored: bool = False,
    unscored: frozenset[str] = frozenset(),
    video_dtype: VideoDtype = "uint8",
) -> list[RolloutRequest]:
    """Fixed prompts and seeds, all steps, always decoded. Sample ids count from 0 in an id space of their own."""
    count = len(prompts) * samples_per_prompt
    return [
        RolloutRequest(
            sample_id=i,
            prompt=prompts[i // samples_per_prompt],
            seed=eval_seed(seed, 0, i),
            sigmas=sigmas,
            stop_step=len(sigmas) - 2,
            decode=True,
            sample_type=sample_type,
            scored=scored and prompts[i // samples_per_prompt] not in unscored,
            video_dtype=video_dtype,
        )
        for i in range(count)
    ]
