"""A step that was not finite, computed again from what `bad_batch` kept, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from miles_dmd2.config.lora import Lora
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.training.actor import ActorTrainer
from miles_dmd2.training.bad_batch import BadBatch, check_base, read_bad_batch
from miles_dmd2.training.critic import CriticTrainer
from miles_dmd2.training.distributed import Ranks
from miles_dmd2.training.optimizer import OptimizerSettings
from miles_dmd2.training.scoring import ScoreSigma
from miles_dmd2.training.trainer import StepReport, TrainerSettings


def replay(directory: Path, adapter: ModelAdapter, ranks: Ranks) -> StepReport:
    """The step's losses by sample and its gradient norm, with the weights, draws and micro-batches that it had.

    ValueError: not a complete bad batch, or of another model than the adapter's.
    """
    bad = read_bad_batch(directory)
    facts = bad.facts
    check_base(facts, adapter.checkpoint)
    window = [sample.sample_id for sample in bad.samples]
    trainer = build(bad, adapter, ranks)
    trainer.load(directory, facts["counters"], facts["world_size"])
    if isinstance(trainer, CriticTrainer):
        trainer.train(facts["rollout_id"], [window], bad.samples, score=False)
    else:
        trainer.train(facts["rollout_id"], [window], bad.samples, [bad.scores])
    assert trainer.last_step is not None
    return trainer.last_step


def build(bad: BadBatch, adapter: ModelAdapter, ranks: Ranks) -> CriticTrainer | ActorTrainer:
    """The trainer that the step was of, with a fresh network: `load` gives it its weights."""
    facts = bad.facts
    settings, own = trainer_settings(facts, len(bad.samples)), dict(facts["own"])
    if facts["role"] == "actor":
        return ActorTrainer(settings, adapter, adapter.load_transformer(), ranks, **own)
    own["score_sigma"] = ScoreSigma(**own["score_sigma"])
    teacher = adapter.load_transformer() if settings.lora is None else None
    return CriticTrainer(settings, adapter, adapter.load_transformer(), teacher, ranks, **own)


def trainer_settings(facts: Mapping[str, Any], window: int) -> TrainerSettings:
    kept = facts["settings"]
    optimizer = OptimizerSettings(**kept["optimizer"])
    lora = kept["lora"]
    return TrainerSettings(
        name=kept["name"],
        seed=kept["seed"],
        optimizer=replace(optimizer, max_skipped_steps=2**31),  # a replayed step may be skipped as well
        micro_batch_size=kept["micro_batch_size"] or window // facts["world_size"],
        forward_dtype=getattr(torch, kept["forward_dtype"]),
        master_dtype=getattr(torch, kept["master_dtype"]),
        lora=None if lora is None else Lora(lora["rank"], lora["alpha"], tuple(lora["target_modules"])),
    )
