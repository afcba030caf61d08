"""The critic group's rank: keeps the critic at the student's score, and scores the last window against the teacher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from miles_dmd2.algo import (
    CriticSpace,
    add_noise,
    critic_loss,
    key_seed,
    normal_batch,
    sample_score_sigma,
    uniform_batch,
    x0_from_velocity,
)
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.training.batching import MicroBatch, Windows
from miles_dmd2.training.conditioning import StopStepConditioning
from miles_dmd2.training.distributed import Ranks
from miles_dmd2.training.metrics import Reduction
from miles_dmd2.training.network import Network
from miles_dmd2.training.trainer import Trainer, TrainerSettings
from miles_dmd2.types import Role, RolloutSample, ScoreRow


class CriticTrainer(Trainer):
    """Trainable critic and frozen teacher in one process (DMD2, arXiv 2405.14867, sections 3 and 4.2)."""

    role: ClassVar[Role] = "critic"
    network_role: ClassVar[str] = "critic"
    metric_names: ClassVar[Mapping[str, Reduction]] = {}
    metric_names_per_step: ClassVar[Mapping[str, Reduction]] = {"critic_loss": "mean"}

    def __init__(
        self,
        settings: TrainerSettings,
        adapter: ModelAdapter,
        critic: nn.Module,
        teacher: nn.Module,
        ranks: Ranks,
        *,
        score_sigma_range: tuple[float, float] = (0.02, 0.98),
        score_sigma_shift: float = 1.0,
        loss_space: CriticSpace = "velocity",
        told_stop_steps: int | None = None,
    ) -> None:
        """Takes both modules over. `told_stop_steps`: the student's number of steps N if the critic is told the stop
        step of a sample, None for the plain critic. ValueError: critic and teacher are one module.
        """
        if critic is teacher:
            raise ValueError("critic and teacher must be two modules: one of them trains")
        self.teacher = Network(
            "teacher",
            adapter,
            teacher,
            ranks,
            trainable=False,
            forward_dtype=settings.forward_dtype,
            master_dtype=settings.master_dtype,
        )
        self.conditioning: StopStepConditioning | None = None

        def add_conditioning(module: nn.Module) -> None:
            if told_stop_steps is not None:
                self.conditioning = StopStepConditioning(adapter, module, told_stop_steps)

        super().__init__(settings, adapter, critic, ranks, frozen=(self.teacher,), before_sharding=add_conditioning)
        self.score_sigma_range = score_sigma_range
        self.score_sigma_shift = score_sigma_shift
        self.loss_space = loss_space
        self.told_stop_steps = told_stop_steps

    def train(
        self, rollout_id: int, windows: Windows, samples: Iterable[RolloutSample]
    ) -> tuple[dict[str, float], dict[int, ScoreRow]]:
        """One critic step per window, in order; metrics over all ranks, and scores of this rank's part of the last.

        `samples` are those of `wanted_ids(windows, rank, world_size)`, in any order. A collective.
        """
        batches, metrics = self._prepare(rollout_id, windows, samples)
        scores: dict[int, ScoreRow] = {}
        taken = 0
        for index, window in enumerate(windows):
            last = index == len(windows) - 1
            pending, losses = metrics.fresh(), []
            for batch in batches[index]:
                loss, rows = self._step_forward(rollout_id, batch, window, score=last)
                losses.append(loss)
                scores |= rows
                pending.add_per_step("critic_loss", loss, batch.stop_steps)
            ids = [i for batch in batches[index] for i in batch.ids]
            if self._update(losses, ids, window, pending):
                metrics.extend(pending)
                taken += 1
        return self._reduce(metrics, skipped=len(windows) - taken), scores

    def _own_facts(self) -> dict[str, Any]:
        return {
            "score_sigma_range": list(self.score_sigma_range),
            "score_sigma_shift": self.score_sigma_shift,
            "loss_space": self.loss_space,
            "told_stop_steps": self.told_stop_steps,
        }

    def _step_forward(
        self, rollout_id: int, batch: MicroBatch, window: Sequence[int], *, score: bool
    ) -> tuple[Tensor, dict[int, ScoreRow]]:
        """Forward and backward of one micro-batch: per-sample losses `[batch]`, and score rows if asked for.

        Scores are fused: x0_fake is from the very forward that trains, before its update, and the teacher sees the
        same (x_sigma, sigma) in the same micro-batch, so critic == teacher gives a gap of exactly zero.
        """
        sigma, noise = self._draw(rollout_id, batch)
        x_sigma = add_noise(batch.x0, noise, sigma)
        with self.conditioning.told(batch.stop_steps) if self.conditioning else nullcontext():
            velocity = self.network.velocity(x_sigma, sigma, batch.cond)
            loss = critic_loss(velocity, x_sigma, sigma, noise, batch.x0, space=self.loss_space, reduction="sample")
            self._backward(loss, window)
        if not score:
            return loss.detach(), {}
        with torch.no_grad():
            x0_fake = x0_from_velocity(x_sigma, velocity, sigma).cpu()
            x0_real = x0_from_velocity(x_sigma, self.teacher.velocity(x_sigma, sigma, batch.cond), sigma).cpu()
        rows = zip(batch.ids, x0_real, x0_fake, sigma.tolist(), strict=True)
        return loss.detach(), {i: ScoreRow(real, fake, level) for i, real, fake, level in rows}

    def _draw(self, rollout_id: int, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Score sigma `[batch]` and noise `[batch, *latent]`, by key: the same on any number of ranks."""
        seed, shape = self.settings.seed, self.adapter.latent_shape
        uniform = uniform_batch([key_seed(seed, "score_sigma", rollout_id, i) for i in batch.ids])
        noise = normal_batch([key_seed(seed, "score_noise", rollout_id, i) for i in batch.ids], shape)
        sigma = sample_score_sigma(uniform.to(batch.x0.dtype), *self.score_sigma_range, self.score_sigma_shift)
        return sigma.to(batch.x0.device), noise.to(batch.x0)
