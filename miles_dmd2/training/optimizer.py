"""AdamW on this rank's shards, the learning rate as a function of successful updates, and the gradient's norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from miles_dmd2.training.distributed import Ranks
from miles_dmd2.training.sharding import local

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """`total_updates`: of the whole run, where linear and cosine reach zero. `clip_grad` 0: no clipping."""

    lr: float
    schedule: Schedule = "constant"
    warmup_updates: int = 0
    total_updates: int = 1
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    max_skipped_steps: int = 3


def learning_rate(settings: OptimizerSettings, updates: int) -> float:
    """Of the update that follows `updates` successful ones: linear warm-up from lr / warmup, then the schedule."""
    if updates < settings.warmup_updates:
        return settings.lr * (updates + 1) / settings.warmup_updates
    span = max(1, settings.total_updates - settings.warmup_updates)
    done = min(1.0, (updates - settings.warmup_updates) / span)
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "linear":
        return settings.lr * (1 - done)
    if settings.schedule == "cosine":
        return settings.lr * 0.5 * (1 + math.cos(math.pi * done))
    raise ValueError(f"lr schedule must be one of {get_args(Schedule)}, got {settings.schedule!r}")


class AdamW:
    """Decoupled weight decay (arXiv 1711.05101) by torch's own fused kernel, over local shards.

    Elementwise, so shards need no communication; the number of successful updates is one integer, kept by the
    trainer, from which both bias correction and learning rate follow. Moments exist from the start: the list of
    tensors to offload and to save never changes.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> None:
        self.settings = settings
        self.parameters = dict(parameters)
        self.shards = {name: local(parameter) for name, parameter in self.parameters.items()}
        self.exp_avg = {name: torch.zeros_like(shard) for name, shard in self.shards.items()}
        self.exp_avg_sq = {name: torch.zeros_like(shard) for name, shard in self.shards.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Local gradients of the parameters that have one."""
        return {name: local(p.grad) for name, p in self.parameters.items() if p.grad is not None}

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self, updates: int) -> float:
        """Apply the gradients after `updates` successful steps; returns the learning rate used."""
        lr = learning_rate(self.settings, updates)
        gradients = {name: gradient for name, gradient in self.gradients().items() if gradient.numel()}
        shards = [self.shards[name] for name in gradients]
        device = shards[0].device if shards else None
        adamw(
            shards,
            list(gradients.values()),
            [self.exp_avg[name] for name in gradients],
            [self.exp_avg_sq[name] for name in gradients],
            [],
            list(torch.full((len(shards),), float(updates), device=device).unbind()),
            fused=True,
            amsgrad=False,
            beta1=float(self.settings.beta1),
            beta2=float(self.settings.beta2),
            lr=lr,
            weight_decay=self.settings.weight_decay,
            eps=self.settings.eps,
            maximize=False,
        )
        return lr


def gradient_norm(gradients: Sequence[Tensor], ranks: Ranks) -> float:
    """2-norm over all shards of all ranks. Squares are summed in fp64, so it hardly depends on the layout."""
    squares = [torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in gradients if g.numel()]
    total = torch.stack(squares).sum().item() if squares else 0.0
    return math.sqrt(ranks.sum([total])[0])


@torch.no_grad()
def clip_gradients(gradients: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale to norm `limit` if above it; limit 0 leaves all as it is."""
    if limit and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / norm)
