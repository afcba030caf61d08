"""The critic group's rank: keeps the critic at the student's score, and scores the last window against the teacher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from miles_dmd2.algo import CriticSpace, critic_loss, x0_from_velocity
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.observability.declared import reductions
from miles_dmd2.training.batching import MicroBatch, Windows, wanted_ids
from miles_dmd2.training.conditioning import StopStepConditioning
from miles_dmd2.training.distributed import Ranks
from miles_dmd2.training.metrics import Reduction
from miles_dmd2.training.network import BaseNetwork, Network
from miles_dmd2.training.parts import PICTURE_ALONE, TrainedPart
from miles_dmd2.training.scoring import (
    CRITIC_STEP,
    PUBLISHED_SCORE_SIGMA,
    SCORING_PASS,
    DrawPurposes,
    Guidance,
    GuidedTeacher,
    Noised,
    ScoreSigma,
    Scoring,
    noised,
)
from miles_dmd2.training.trainer import Trainer, TrainerSettings
from miles_dmd2.types import Role, RolloutSample, ScoreRow


class CriticTrainer(Trainer):
    """Trainable critic and frozen teacher in one process (DMD2, arXiv 2405.14867, sections 3 and 4.2)."""

    role: ClassVar[Role] = "critic"
    network_role: ClassVar[str] = "critic"
    metric_names: ClassVar[Mapping[str, Reduction]] = reductions("critic")
    metric_names_per_step: ClassVar[Mapping[str, Reduction]] = reductions("critic", per_step=True)

    def __init__(
        self,
        settings: TrainerSettings,
        adapter: ModelAdapter,
        critic: nn.Module,
        teacher: nn.Module | None,
        ranks: Ranks,
        *,
        score_sigma: ScoreSigma = PUBLISHED_SCORE_SIGMA,
        loss_space: CriticSpace = "velocity",
        scoring: Scoring = "fused",
        guidance: Guidance | None = None,
        told_stop_steps: int | None = None,
        part_weights: Mapping[str, float] = PICTURE_ALONE,
    ) -> None:
        """Takes the modules over. `teacher`: None with `settings.lora`, then the base of the critic's adapter is both.
        `score_sigma`: the law of noise levels. `guidance` of the teacher, None for none.
        `part_weights`: of the losses of the latent's parts.
        `told_stop_steps`: the student's number of steps N if the critic is told the stop step of a sample, None for the
        plain critic. ValueError: critic and teacher are one module, a teacher that is missing or one too many, unknown
        scoring.
        """
        if critic is teacher:
            raise ValueError("critic and teacher must be two modules: one of them trains")
        if (teacher is None) != (settings.lora is not None):
            raise ValueError("a critic with an adapter has its base as the teacher, any other needs a teacher")
        if scoring not in get_args(Scoring):
            raise ValueError(f"scoring must be one of {get_args(Scoring)}, got {scoring!r}")
        self.conditioning: StopStepConditioning | None = None

        def add_conditioning(module: nn.Module) -> None:
            if told_stop_steps is not None:
                self.conditioning = StopStepConditioning(adapter, module, told_stop_steps)

        def frozen(trained: Network) -> Network | BaseNetwork:
            if teacher is None:
                return BaseNetwork("teacher", adapter, trained, self.conditioning)
            return Network(
                "teacher",
                adapter,
                teacher,
                ranks,
                trainable=False,
                forward_dtype=settings.forward_dtype,
                master_dtype=settings.master_dtype,
            )

        super().__init__(
            settings,
            adapter,
            critic,
            ranks,
            part_weights=part_weights,
            frozen=frozen,
            before_sharding=add_conditioning,
        )
        _, self.teacher = self._networks
        self._guided_teacher = GuidedTeacher(self.teacher, adapter, guidance)
        self.score_sigma, self.loss_space, self.scoring = score_sigma, loss_space, scoring
        self.told_stop_steps = told_stop_steps

    def train(
        self, rollout_id: int, windows: Windows, samples: Iterable[RolloutSample], *, score: bool = True
    ) -> tuple[dict[str, float], dict[int, ScoreRow]]:
        """One critic step per window, in order; metrics over all ranks, and scores of this rank's part of the last.

        Without `score`, for a rollout on which the student takes no step, no scores: the teacher does not run.
        `samples` are those of `wanted_ids(windows, rank, world_size)`, in any order. A collective.
        """
        batches, metrics = self._prepare(rollout_id, windows, samples)
        scores: dict[int, ScoreRow] = {}
        taken = 0
        for index, window in enumerate(windows):
            scored = score and index == len(windows) - 1
            pending, losses = metrics.fresh(), []
            for batch in batches[index]:
                at, velocity, loss = self._step_forward(rollout_id, batch, window)
                losses.append(loss)
                if scored:
                    if self.scoring == "original":
                        at, velocity = self._scoring_pass(rollout_id, batch)
                    scores |= self._score(batch, at, velocity)
                pending.add_per_step("critic_loss", loss, batch.stop_steps)
            ids = [i for batch in batches[index] for i in batch.ids]
            if self._update(losses, ids, window, pending):
                metrics.extend(pending)
                taken += 1
        return self._reduce(metrics, skipped=len(windows) - taken, planned=self._planned(windows, score)), scores

    def _planned(self, windows: Windows, score: bool) -> int:
        """Forwards of this rank, in samples: one each to train on, and of the last window those that score it."""
        trained, scored = (
            len(wanted_ids(part, self.ranks.rank, self.ranks.world_size)) for part in (windows, windows[-1:])
        )
        each = self._guided_teacher.forwards_per_sample + (self.scoring == "original")
        return trained + (scored * each if score else 0)

    def _step_forward(self, rollout_id: int, batch: MicroBatch, window: Sequence[int]) -> tuple[Noised, Tensor, Tensor]:
        """Forward and backward of one micro-batch: where, the critic's velocity there, per-sample losses `[batch]`."""
        at = self._noised(rollout_id, batch, CRITIC_STEP)
        with self._told(batch):
            velocity = self.network.velocity(at.x, at.sigma, batch.cond)
            losses = [part.weight * self._part_loss(part, velocity, at, batch.x0) for part in self.parts]
            loss = torch.stack(losses).sum(0)
            self._backward(loss, window)
        return at, velocity.detach(), loss.detach()

    def _part_loss(self, part: TrainedPart, velocity: Tensor, at: Noised, x0: Tensor) -> Tensor:
        """`[batch]`."""
        values = (part.of(value) for value in (velocity, at.x, at.sigma, at.noise, x0))
        return critic_loss(*values, space=self.loss_space, reduction="sample")

    def _own_facts(self) -> dict[str, Any]:
        """Of a training step; scoring and guidance have no part in it."""
        return {
            "score_sigma": asdict(self.score_sigma),
            "loss_space": self.loss_space,
            "told_stop_steps": self.told_stop_steps,
            "part_weights": {part.name: part.weight for part in self.parts},
        }

    @torch.no_grad()
    def _scoring_pass(self, rollout_id: int, batch: MicroBatch) -> tuple[Noised, Tensor]:
        """A forward of its own at a draw of its own, before the last update: x0_fake is independent of that update.

        The expectation of the scores is that of the fused ones, which reuse the training forward (DMD2.md 1.9).
        """
        at = self._noised(rollout_id, batch, SCORING_PASS)
        with self._told(batch):
            return at, self.network.velocity(at.x, at.sigma, batch.cond)

    def _score(self, batch: MicroBatch, at: Noised, velocity: Tensor) -> dict[int, ScoreRow]:
        """Teacher and critic at the same (x_sigma, sigma) in the same micro-batch: critic == teacher has no gap at all.

        `velocity` is the critic's at that point, before the last update (DMD2 algorithm 1).
        """
        x0_fake = x0_from_velocity(at.x, velocity, at.sigma).cpu()
        x0_real = self._guided_teacher.x0(at, batch.cond).cpu()
        rows = zip(batch.ids, x0_real, x0_fake, at.level.tolist(), strict=True)
        return {i: ScoreRow(real, fake, level) for i, real, fake, level in rows}

    def _noised(self, rollout_id: int, batch: MicroBatch, purposes: DrawPurposes) -> Noised:
        return noised(batch, self.adapter, self.score_sigma, self.settings.seed, purposes, rollout_id)

    def _told(self, batch: MicroBatch) -> AbstractContextManager[None]:
        return self.conditioning.told(batch.stop_steps) if self.conditioning else nullcontext()
