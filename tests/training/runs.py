"""Whole training runs of the toy, as plain functions of the ranks: called here, and sent to rank processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from miles_dmd2.config.clock import EVERY_ROLLOUT, StudentClock
from miles_dmd2.config.lora import Lora
from miles_dmd2.observability.declared import without_machine
from miles_dmd2.training import ActorTrainer, CriticTrainer, OptimizerSettings, Ranks, TrainerSettings, wanted_ids
from miles_dmd2.training.batching import TrainInputHook
from miles_dmd2.training.scoring import Guidance, ScoreSigma
from miles_dmd2.training.sharding import full
from miles_dmd2.types import RolloutSample
from tests.training.toy import GRID, LABELS, ToyAdapter, make_sample, make_windows

NUM_STEPS = len(GRID) - 1


@dataclass(frozen=True)
class Setup:
    """`nan_sample`: the id of a sample whose x0 is NaN."""

    windows: int = 3
    window: int = 8
    micro: int | None = None
    dtype: torch.dtype = torch.float64
    forward_dtype: torch.dtype | None = None
    told: bool = True
    lr: float = 1e-2
    schedule: str = "constant"
    total_updates: int = 1
    clip: float = 1.0
    decay: float = 0.9
    seed: int = 3
    space: str = "velocity"
    max_skipped: int = 3
    nan_sample: int | None = None
    hook: TrainInputHook | None = None
    max_drift: float | None = None
    normalizer: str = "sample"
    normalizer_eps: float = 1e-6
    scoring: str = "fused"
    law: str = "uniform"
    sigma: Mapping[str, float] = field(default_factory=dict)  # what else ScoreSigma takes
    optimizer: Mapping[str, float] = field(default_factory=dict)  # what else OptimizerSettings takes
    part_weight: float = 1.0
    guidance: float = 1.0
    ema_start: int = 0
    clock: StudentClock = EVERY_ROLLOUT
    critic_lora: Lora | None = None
    student_lora: Lora | None = None


# One option of the algorithm each, away from its default; test_equality.py holds them against the schema.
OPTIONS: dict[str, dict[str, Any]] = {
    "batch normalizer": {"normalizer": "batch"},
    "large eps": {"normalizer_eps": 2.0},
    "original scoring": {"scoring": "original"},
    "logit-normal sigma": {"law": "logit_normal"},
    "guided teacher": {"guidance": 3.0},
    "a step on every second rollout": {"clock": StudentClock(0, 2)},
    "critic alone at first": {"clock": StudentClock(1, 1)},
    "x0 space": {"space": "x0"},
    "eps space": {"space": "eps"},
    "plain critic": {"told": False},
    "shifted sigma": {"sigma": {"shift": 3.0}},
    "narrow sigma": {"sigma": {"lo": 0.2, "hi": 0.7}},
    "another logit-normal": {"law": "logit_normal", "sigma": {"logit_mean": 1.0, "logit_std": 0.5}},
    "part weight": {"part_weight": 2.0, "optimizer": {"eps": 1e-2}},
    "another decay": {"decay": 0.5},
    "a late average": {"ema_start": 2},
    "another rate": {"lr": 2e-2},
    "linear rate": {"schedule": "linear", "total_updates": 9},
    "cosine rate": {"schedule": "cosine", "total_updates": 9},
    "warm-up": {"optimizer": {"warmup_updates": 2}},
    "other moments": {"optimizer": {"beta1": 0.5, "beta2": 0.9, "eps": 1e-2}},
    "weight decay": {"optimizer": {"weight_decay": 0.5}},
    "clipping": {"clip": 0.05},  # below every norm, while the default is above them
    "two windows": {"windows": 2},
    "adapter of the student": {"student_lora": Lora(2, 2)},
    "adapter of the critic": {"critic_lora": Lora(2, 2)},
    "another alpha": {"student_lora": Lora(2, 3)},
    "named targets": {"student_lora": Lora(2, 2, ("inner",))},
}
UNCOND = {"label": torch.full((LABELS,), 0.25)}


def settings(setup: Setup, name: str) -> TrainerSettings:
    return TrainerSettings(
        name=name,
        seed=setup.seed,
        optimizer=OptimizerSettings(
            lr=setup.lr,
            schedule=setup.schedule,
            total_updates=setup.total_updates,
            clip_grad=setup.clip,
            max_skipped_steps=setup.max_skipped,
            **setup.optimizer,
        ),
        micro_batch_size=setup.micro,
        forward_dtype=setup.forward_dtype or setup.dtype,
        master_dtype=setup.dtype,
        train_input_hook=setup.hook,
        lora=setup.critic_lora if name == "critic" else setup.student_lora,
    )


def make_critic(ranks: Ranks, setup: Setup, adapter: ToyAdapter | None = None) -> CriticTrainer:
    adapter = adapter or ToyAdapter()
    return CriticTrainer(
        settings(setup, "critic"),
        adapter,
        adapter.load_transformer(),
        adapter.load_transformer() if setup.critic_lora is None else None,
        ranks,
        score_sigma=ScoreSigma(law=setup.law, **setup.sigma),
        loss_space=setup.space,
        scoring=setup.scoring,
        guidance=None if setup.guidance == 1 else Guidance(setup.guidance, UNCOND),
        told_stop_steps=NUM_STEPS if setup.told else None,
        part_weights={"visual": setup.part_weight},
    )


def make_actor(ranks: Ranks, setup: Setup, adapter: ToyAdapter | None = None) -> ActorTrainer:
    adapter = adapter or ToyAdapter()
    return ActorTrainer(
        settings(setup, "actor"),
        adapter,
        adapter.load_transformer(),
        ranks,
        ema_decay=setup.decay,
        ema_start=setup.ema_start,
        normalizer=setup.normalizer,
        normalizer_eps=setup.normalizer_eps,
        max_x0_drift=setup.max_drift,
        part_weights={"visual": setup.part_weight},
    )


def windows_of(setup: Setup, rollout_id: int) -> tuple[tuple[int, ...], ...]:
    return make_windows(rollout_id, setup.windows, setup.window)


def samples_of(setup: Setup, rollout_id: int, ids: Sequence[int]) -> list[RolloutSample]:
    samples = [make_sample(i, rollout_id=rollout_id) for i in ids]
    return [replace(s, x0=s.x0 * torch.nan) if s.sample_id == setup.nan_sample else s for s in samples]


def one_rollout(
    critic: CriticTrainer, actor: ActorTrainer, setup: Setup, rollout_id: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Critic, hand-over between all ranks, actor; each asleep while the other works."""
    ranks, windows = critic.ranks, windows_of(setup, rollout_id)
    actor.sleep()
    critic.wake()
    ids = wanted_ids(windows, ranks.rank, ranks.world_size)
    due = setup.clock.due(rollout_id)
    critic_metrics, scores = critic.train(rollout_id, windows, samples_of(setup, rollout_id, ids), score=due)
    critic.sleep()
    actor.wake()
    if not due:
        return critic_metrics, {}
    last = windows[-1:]
    ids = wanted_ids(last, ranks.rank, ranks.world_size)
    actor_metrics = actor.train(rollout_id, last, samples_of(setup, rollout_id, ids), ranks.gather(scores))
    return critic_metrics, actor_metrics


def weights(trainer: CriticTrainer | ActorTrainer) -> dict[str, Tensor]:
    """Full parameters by name. A collective."""
    trainer.wake()
    return {name: full(p).clone() for name, p in trainer.network.module.named_parameters()}


@dataclass(frozen=True)
class Run:
    critic: dict[str, Tensor]
    student: dict[str, Tensor]
    exported: dict[str, dict[str, Tensor]]
    metrics: list[dict[str, float]]


def train(ranks: Ranks, setup: Setup, rollouts: int = 3) -> Run:
    critic, actor = make_critic(ranks, setup), make_actor(ranks, setup)
    metrics = []
    for rollout_id in range(rollouts):
        for role, values in zip(("critic", "actor"), one_rollout(critic, actor, setup, rollout_id), strict=True):
            metrics.append(without_machine({f"{role}/{name}": value for name, value in values.items()}))
    exported = {kind: update.payload or {} for kind, update in actor.export_weights().items()}
    return Run(weights(critic), weights(actor), exported, metrics)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest absolute difference; names must agree."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)
