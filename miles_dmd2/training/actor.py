"""The actor group's rank: one DMD step of the student per rollout, its average, and its weights for the engines."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from miles_dmd2.algo import dmd_gradient, mean_abs_difference, student_loss, x0_from_velocity
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.observability.declared import reductions
from miles_dmd2.training.batching import MicroBatch, Windows, merge_scores, wanted_ids
from miles_dmd2.training.distributed import Ranks
from miles_dmd2.training.export import export
from miles_dmd2.training.metrics import MetricBuffer, Reduction, per_step
from miles_dmd2.training.parts import PICTURE_ALONE, TrainedPart
from miles_dmd2.training.trainer import Trainer, TrainerSettings
from miles_dmd2.types import Role, RolloutSample, ScoreBatch, ScoreRow, WeightKind, WeightUpdate

OF_A_PART = (
    "dmd2_score_gap_abs_mean",
    "dmd2_teacher_dist_abs_mean",
    "dmd2_grad_abs_mean",
    "dmd2_x0_mean",
    "dmd2_x0_std",
)
DRIFT = "x0_mean_abs_diff"
WORST = f"{DRIFT}_max"  # of one sample
ONE_SAMPLE = 4  # times the limit that a single sample may reach: one of a wrong server drowns in a window's mean
Normalizer = Literal["sample", "batch"]


class DriftError(RuntimeError):
    """Engine and trainer compute different x0 from the same x_k: what is trained is not what generated."""


class ActorTrainer(Trainer):
    """The student (DMD2, arXiv 2405.14867, equation 2 and section 4.5)."""

    role: ClassVar[Role] = "actor"
    network_role: ClassVar[str] = "student"
    metric_names: ClassVar[Mapping[str, Reduction]] = reductions("actor")
    metric_names_per_step: ClassVar[Mapping[str, Reduction]] = reductions("actor", per_step=True)

    def __init__(
        self,
        settings: TrainerSettings,
        adapter: ModelAdapter,
        student: nn.Module,
        ranks: Ranks,
        *,
        ema_decay: float = 0.0,
        ema_start: int = 0,
        normalizer: Normalizer = "sample",
        normalizer_eps: float = 1e-6,
        max_x0_drift: float | None = None,
        part_weights: Mapping[str, float] = PICTURE_ALONE,
    ) -> None:
        """Takes the module over. `ema_decay` 0 keeps no average, which begins after `ema_start` updates.

        `normalizer`: mean |x0 - x0_real| of each sample, or one for the window. Where it is below `normalizer_eps`, its
        floor, a sample has no direction: it is degenerate, and counted. `max_x0_drift`: greatest mean |x0 - the
        engine's x0| of a window that is trained on; None does not look. `part_weights`: of the losses of the latent's
        parts, each with a normalizer of its own.
        """
        super().__init__(
            settings, adapter, student, ranks, part_weights=part_weights, ema_decay=ema_decay, ema_start=ema_start
        )
        self.normalizer, self.normalizer_eps = normalizer, normalizer_eps
        self._max_x0_drift = max_x0_drift

    def train(
        self,
        rollout_id: int,
        windows: Windows,
        samples: Iterable[RolloutSample],
        external: Iterable[ScoreBatch],
    ) -> dict[str, float]:
        """One student step on the one window given; `external` is what every rank of the critic group handed over.

        Each rank gets the scores of the whole window, however the critic's ranks share them, and its own samples
        (`wanted_ids(windows, rank, world_size)`). A collective. ValueError: not one window, or sample ids that are
        missing, doubled or not asked for, in the samples or in the scores. DriftError, on every rank and before the
        step: the engine's x0 are further than `max_x0_drift` from the trainer's.
        """
        if len(windows) != 1:
            raise ValueError(f"the actor takes one step, on the last window; got {len(windows)} windows")
        (window,) = windows
        scores = merge_scores(external, window)
        (batches,), metrics = self._prepare(rollout_id, windows, samples)
        assert self._inputs is not None
        self._inputs.scores = scores
        pending = metrics.fresh()
        of_window = self._window_normalizers(batches, scores, window) if self.normalizer == "batch" else None
        losses = [self._step_forward(batch, scores, window, pending, of_window) for batch in batches]
        self._check_drift(rollout_id, pending)
        ids = [i for batch in batches for i in batch.ids]
        taken = self._update(losses, ids, window, pending)
        if taken:
            metrics.extend(pending)
        planned = len(wanted_ids(windows, self.ranks.rank, self.ranks.world_size))
        return self._reduce(metrics, skipped=int(not taken), planned=planned)

    def _check_drift(self, rollout_id: int, metrics: MetricBuffer) -> None:
        """A figure that is not finite is left to the step's own check, which skips it. A collective."""
        if self._max_x0_drift is None:
            return
        reduced = metrics.reduce(self.ranks)
        drift, worst = reduced[DRIFT], reduced[WORST]
        if not self._max_x0_drift < max(drift, worst / ONE_SAMPLE) < math.inf:
            return
        prefix = f"{DRIFT}_step"
        steps = {int(name.removeprefix(prefix)): value for name, value in reduced.items() if name.startswith(prefix)}
        listed = ", ".join(f"{steps[step]:.3g} at stop step {step}" for step in sorted(steps))
        raise DriftError(
            f"engine and trainer disagree on rollout {rollout_id}: mean |x0 - x0 of the engine| is {drift:.3g} "
            f"({listed}), {worst:.3g} in the worst sample; --max-x0-drift is {self._max_x0_drift:g}, and {ONE_SAMPLE} "
            "times that for one sample; the engine may run another dtype, serve other "
            "weights or have used another conditioning; the step was not taken"
        )

    def export_weights(self, kinds: Collection[WeightKind] = ("raw", "ema")) -> dict[WeightKind, WeightUpdate]:
        """Full fp32 weights on the CPU, raw and averaged (when kept), each with checksum and probe. A collective.

        On ranks other than 0 the updates hold no tensors (payload None, checksum "").
        """
        self.residence.require_awake(f"{self.settings.name}.export_weights")
        updates: dict[WeightKind, WeightUpdate] = {}
        lora = self.settings.lora
        if "raw" in kinds:
            updates["raw"] = export(self.network, self.adapter, self.ranks, self.updates, "raw", lora)
        if "ema" in kinds and self.ema is not None:
            with self.ema.swapped_in():
                updates["ema"] = export(self.network, self.adapter, self.ranks, self.updates, "ema", lora)
        return updates

    def _own_facts(self) -> dict[str, Any]:
        return {
            "ema_decay": self.ema.decay if self.ema else 0.0,
            "ema_start": self.ema.start if self.ema else 0,
            "normalizer": self.normalizer,
            "normalizer_eps": self.normalizer_eps,
            "part_weights": {part.name: part.weight for part in self.parts},
        }

    def _metrics(self, num_steps: int) -> MetricBuffer:
        """The picture's figures under their plain names; those of other trained parts beside them."""
        metrics = super()._metrics(num_steps)
        for part in self.parts:
            for name in OF_A_PART:
                if part.metric(name) != name:
                    metrics.declare(per_step(part.metric(name), self.metric_names_per_step[name], num_steps))
        return metrics

    def _step_forward(
        self,
        batch: MicroBatch,
        scores: Mapping[int, ScoreRow],
        window: Sequence[int],
        metrics: MetricBuffer,
        of_window: Sequence[float] | None,
    ) -> Tensor:
        """Forward and backward of one micro-batch: x0 again, now with gradient; per-sample losses `[batch]`."""
        sigma = self.adapter.spread(self.adapter.part_sigmas(batch.sigmas[batch.stop_steps]))
        velocity = self.network.velocity(batch.x_k, sigma, batch.cond)
        x0 = x0_from_velocity(batch.x_k, velocity, sigma)
        x0_real = torch.stack([scores[i].x0_real for i in batch.ids]).to(x0)
        x0_fake = torch.stack([scores[i].x0_fake for i in batch.ids]).to(x0)
        losses, degenerate = [], []
        for index, part in enumerate(self.parts):
            values = part.of(x0), part.of(x0_real), part.of(x0_fake)
            own = None if of_window is None else of_window[index]
            of_part, normalizer = self._part_loss(part, *values, own, batch.stop_steps, metrics)
            losses.append(part.weight * of_part)
            degenerate.append(normalizer < self.normalizer_eps)
        loss = torch.stack(losses).sum(0)
        metrics.add("dmd2_degenerate_samples", torch.stack(degenerate).any(0))
        self._backward(loss, window)
        drift = mean_abs_difference(x0, batch.x0)
        metrics.add_per_step("dmd_loss", loss, batch.stop_steps)
        metrics.add_per_step(DRIFT, drift, batch.stop_steps)
        metrics.add(WORST, drift)
        return loss.detach()

    def _part_loss(
        self,
        part: TrainedPart,
        x0: Tensor,
        x0_real: Tensor,
        x0_fake: Tensor,
        of_window: float | None,
        stop_steps: Tensor,
        metrics: MetricBuffer,
    ) -> tuple[Tensor, Tensor]:
        """Loss and normalizer, each `[batch]`; adds the part's figures."""
        distance = mean_abs_difference(x0, x0_real)
        normalizer = distance if of_window is None else torch.full_like(distance, of_window)
        gradient = dmd_gradient(x0.detach(), x0_real, x0_fake, eps=self.normalizer_eps, normalizer=normalizer)
        for name, values in {
            "dmd2_score_gap_abs_mean": mean_abs_difference(x0_fake, x0_real),
            "dmd2_teacher_dist_abs_mean": distance,
            "dmd2_grad_abs_mean": gradient.abs().flatten(1).mean(1),
            "dmd2_x0_mean": x0.detach().flatten(1).mean(1),
            "dmd2_x0_std": x0.detach().flatten(1),
        }.items():
            metrics.add_per_step(part.metric(name), values, stop_steps)
        return student_loss(x0, gradient, reduction="sample"), normalizer

    def _window_normalizers(
        self, batches: Sequence[MicroBatch], scores: Mapping[int, ScoreRow], window: Sequence[int]
    ) -> list[float]:
        """mean |x0 - x0_real| of each part over the window, whatever its cut. A collective.

        It has to be known before the first backward, so x0 is the rollout's: the one that teacher and critic scored.
        """
        totals = [0.0] * len(self.parts)
        for batch in batches:
            x0_real = torch.stack([scores[i].x0_real for i in batch.ids]).to(batch.x0)
            for index, part in enumerate(self.parts):
                distance = mean_abs_difference(part.of(batch.x0), part.of(x0_real))
                totals[index] += distance.double().sum().item()
        return [total / len(window) for total in self.ranks.sum(totals)]
