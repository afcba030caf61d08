"""How the last window is scored: noised copies of its samples, and the teacher's clean prediction, guided or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from miles_dmd2.algo import (
    Purpose,
    SigmaLaw,
    add_noise,
    guide,
    key_seed,
    normal_batch,
    sample_score_sigma,
    uniform_batch,
    x0_from_velocity,
)
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.training.batching import MicroBatch
from miles_dmd2.training.network import BaseNetwork, Network
from miles_dmd2.types import Conditioning

Scoring = Literal["fused", "original"]
DrawPurposes = tuple[Purpose, Purpose]  # of sigma and noise
CRITIC_STEP: DrawPurposes = ("score_sigma", "score_noise")
SCORING_PASS: DrawPurposes = ("scoring_pass_sigma", "scoring_pass_noise")


@dataclass(frozen=True, slots=True)
class ScoreSigma:
    """The law of noise levels, uniform draws `[batch]` -> score sigma `[batch]`: see `sample_score_sigma`.

    part_shifts: (part, shift) of parts other than the picture whose level is drawn by a shift of their own; the others'
    is the one that the network was trained with beside the picture's (`ModelAdapter.part_sigmas`).
    """

    lo: float = 0.02
    hi: float = 0.98
    shift: float = 1.0
    part_shifts: tuple[tuple[str, float], ...] = ()
    law: SigmaLaw = "uniform"
    logit_mean: float = 0.0
    logit_std: float = 1.0

    def __call__(self, uniform: Tensor, shift: float | None = None) -> Tensor:
        """`shift`: in the place of the picture's."""
        return sample_score_sigma(
            uniform,
            self.lo,
            self.hi,
            self.shift if shift is None else shift,
            law=self.law,
            logit_mean=self.logit_mean,
            logit_std=self.logit_std,
        )


PUBLISHED_SCORE_SIGMA = ScoreSigma()


@dataclass(frozen=True, slots=True)
class Noised:
    """x_sigma = (1 - sigma) x0 + sigma noise of a micro-batch: sigma as `ModelAdapter.spread` gives it, `level` the
    picture's `[batch]`, the others `[batch, *latent]`.
    """

    level: Tensor
    sigma: Tensor
    noise: Tensor
    x: Tensor


def noised(
    batch: MicroBatch,
    adapter: ModelAdapter,
    score_sigma: ScoreSigma,
    seed: int,
    purposes: DrawPurposes,
    rollout_id: int,
) -> Noised:
    """A noised copy of the student's samples, drawn by key: the same on any number of ranks.

    All parts of a sample are at levels of one draw u, with noise of their own.
    """
    of_sigma, of_noise = purposes
    uniform = uniform_batch([key_seed(seed, of_sigma, rollout_id, i) for i in batch.ids]).to(batch.x0.dtype)
    noise = normal_batch([key_seed(seed, of_noise, rollout_id, i) for i in batch.ids], batch.x0.shape[1:])
    level, shifts = score_sigma(uniform), dict(score_sigma.part_shifts)
    levels = [
        score_sigma(uniform, shifts[part.name]) if part.name in shifts else of_part
        for part, of_part in zip(adapter.parts, adapter.part_sigmas(level), strict=True)
    ]
    sigma, noise = adapter.spread(levels).to(batch.x0.device), noise.to(batch.x0)
    return Noised(level, sigma, noise, add_noise(batch.x0, noise, sigma))


@dataclass(frozen=True, slots=True)
class Guidance:
    """Classifier-free guidance of the teacher, standard convention: uncond + scale (cond - uncond), scale not 1."""

    scale: float
    uncond: Conditioning


class GuidedTeacher:
    """The frozen network's clean prediction. Unguided it is one forward per sample, guided it is two."""

    def __init__(self, network: Network | BaseNetwork, adapter: ModelAdapter, guidance: Guidance | None) -> None:
        self.network, self._adapter, self._guidance = network, adapter, guidance
        self.forwards_per_sample = 1 if guidance is None else 2

    @torch.no_grad()
    def x0(self, at: Noised, cond: dict[str, Tensor]) -> Tensor:
        """x0_real `[batch, *latent]` of a micro-batch with this conditioning."""
        x0 = x0_from_velocity(at.x, self.network.velocity(at.x, at.sigma, cond), at.sigma)
        if self._guidance is None:
            return x0
        uncond = self._adapter.collate([self._guidance.uncond] * len(x0))
        on_device = {name: value.to(x0.device) for name, value in uncond.items()}
        x0_uncond = x0_from_velocity(at.x, self.network.velocity(at.x, at.sigma, on_device), at.sigma)
        return guide(x0_uncond, x0, self._guidance.scale)
