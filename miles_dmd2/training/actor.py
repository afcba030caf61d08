"""The actor group's rank: one DMD step of the student per rollout, its average, and its weights for the engines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from miles_dmd2.algo import dmd_gradient, mean_abs_difference, student_loss, x0_from_velocity
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.training.batching import MicroBatch, Windows, merge_scores
from miles_dmd2.training.distributed import Ranks
from miles_dmd2.training.export import export
from miles_dmd2.training.metrics import MetricBuffer, Reduction
from miles_dmd2.training.trainer import Trainer, TrainerSettings
from miles_dmd2.types import Role, RolloutSample, ScoreBatch, ScoreRow, WeightKind, WeightUpdate

DEGENERATE = 1e-6  # mean |x0 - x0_real| below which the DMD normalizer is its floor: the sample has no direction


class ActorTrainer(Trainer):
    """The student (DMD2, arXiv 2405.14867, equation 2 and section 4.5)."""

    role: ClassVar[Role] = "actor"
    network_role: ClassVar[str] = "student"
    metric_names: ClassVar[Mapping[str, Reduction]] = {"dmd2_degenerate_samples": "sum"}
    metric_names_per_step: ClassVar[Mapping[str, Reduction]] = {
        "dmd_loss": "mean",
        "dmd2_score_gap_abs_mean": "mean",
        "dmd2_teacher_dist_abs_mean": "mean",
        "dmd2_grad_abs_mean": "mean",
        "dmd2_x0_mean": "mean",
        "dmd2_x0_std": "std",
        "x0_mean_abs_diff": "mean",
    }

    def __init__(
        self,
        settings: TrainerSettings,
        adapter: ModelAdapter,
        student: nn.Module,
        ranks: Ranks,
        *,
        ema_decay: float = 0.0,
    ) -> None:
        """Takes the module over. `ema_decay` 0 keeps no average."""
        super().__init__(settings, adapter, student, ranks, ema_decay=ema_decay)

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
        missing, doubled or not asked for, in the samples or in the scores.
        """
        if len(windows) != 1:
            raise ValueError(f"the actor takes one step, on the last window; got {len(windows)} windows")
        (window,) = windows
        scores = merge_scores(external, window)
        (batches,), metrics = self._prepare(rollout_id, windows, samples)
        assert self._inputs is not None
        self._inputs.scores = scores
        pending = metrics.fresh()
        losses = [self._step_forward(batch, scores, window, pending) for batch in batches]
        ids = [i for batch in batches for i in batch.ids]
        taken = self._update(losses, ids, window, pending)
        if taken:
            metrics.extend(pending)
        return self._reduce(metrics, skipped=int(not taken))

    def export_weights(self, kinds: Collection[WeightKind] = ("raw", "ema")) -> dict[WeightKind, WeightUpdate]:
        """Full fp32 weights on the CPU, raw and averaged (when kept), each with checksum and probe. A collective.

        On ranks other than 0 the updates hold no tensors (payload None, checksum "").
        """
        self.residence.require_awake(f"{self.settings.name}.export_weights")
        updates: dict[WeightKind, WeightUpdate] = {}
        if "raw" in kinds:
            updates["raw"] = export(self.network, self.adapter, self.ranks, self.updates, "raw")
        if "ema" in kinds and self.ema is not None:
            with self.ema.swapped_in():
                updates["ema"] = export(self.network, self.adapter, self.ranks, self.updates, "ema")
        return updates

    def _own_facts(self) -> dict[str, Any]:
        return {"ema_decay": self.ema.decay if self.ema else 0.0}

    def _step_forward(
        self, batch: MicroBatch, scores: Mapping[int, ScoreRow], window: Sequence[int], metrics: MetricBuffer
    ) -> Tensor:
        """Forward and backward of one micro-batch: x0 again, now with gradient; per-sample losses `[batch]`."""
        sigma = batch.sigmas[batch.stop_steps]
        velocity = self.network.velocity(batch.x_k, sigma, batch.cond)
        x0 = x0_from_velocity(batch.x_k, velocity, sigma)
        x0_real = torch.stack([scores[i].x0_real for i in batch.ids]).to(x0)
        x0_fake = torch.stack([scores[i].x0_fake for i in batch.ids]).to(x0)
        gradient = dmd_gradient(x0.detach(), x0_real, x0_fake, eps=DEGENERATE)
        loss = student_loss(x0, gradient, reduction="sample")
        self._backward(loss, window)
        with torch.no_grad():
            distance = mean_abs_difference(x0, x0_real)
            for name, values in {
                "dmd_loss": loss,
                "dmd2_score_gap_abs_mean": mean_abs_difference(x0_fake, x0_real),
                "dmd2_teacher_dist_abs_mean": distance,
                "dmd2_grad_abs_mean": gradient.abs().flatten(1).mean(1),
                "dmd2_x0_mean": x0.flatten(1).mean(1),
                "dmd2_x0_std": x0.flatten(1),
                "x0_mean_abs_diff": mean_abs_difference(x0, batch.x0),
            }.items():
                metrics.add_per_step(name, values, batch.stop_steps)
            metrics.add("dmd2_degenerate_samples", distance < DEGENERATE)
        return loss.detach()
