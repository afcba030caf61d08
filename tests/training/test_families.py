"""The real transformer classes, tiny: a rollout trained and served again; plain and sharded; fp32 and bf16."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from miles_dmd2.algo import key_seed, normal
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.registry import build_adapter
from miles_dmd2.training import ActorTrainer, CriticTrainer, OptimizerSettings, Ranks, TrainerSettings, wanted_ids
from miles_dmd2.types import RolloutSample, WeightVersion
from tests.families import Tiny, adapter, checkpoint, checkpoints, tiny
from tests.training.pool import RankPool
from tests.training.runs import distance, same_bits, weights
from tests.training.toy import GRID

__all__ = ["adapter", "checkpoint", "checkpoints", "tiny"]

WINDOW = tuple(range(6))


def make_samples(adapter: ModelAdapter, prompts: Sequence[str]) -> list[RolloutSample]:
    """Six samples with the prompts' conditioning, and numbers from their ids."""
    conds = adapter.encode_prompts(adapter.load_components(), prompts)

    def one(i: int) -> RolloutSample:
        shape = adapter.latent_shape
        x_k, x0 = normal(key_seed(0, "probe", 0, i), shape), normal(key_seed(0, "probe", 1, i), shape)
        return RolloutSample(i, "", i, i % 4, torch.tensor(GRID), x_k, x0, conds[i % len(conds)], WeightVersion(0))

    return [one(i) for i in WINDOW]


@pytest.mark.parametrize("forward_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_rollout(ranks: Ranks, tiny: Tiny, adapter: ModelAdapter, forward_dtype: torch.dtype) -> None:
    """Gap bitwise zero at the start, then training; idle parameters keep their bits; sleep in between; an engine of the
    same dtype takes the student and its probe.
    """
    settings = TrainerSettings("critic", 0, OptimizerSettings(lr=1e-3), micro_batch_size=4, forward_dtype=forward_dtype)
    load = adapter.load_transformer
    samples = make_samples(adapter, tiny.prompts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        critic = CriticTrainer(settings, adapter, load(), load(), ranks, told_stop_steps=4)
        actor = ActorTrainer(replace(settings, name="actor"), adapter, load(), ranks, ema_decay=0.9)
        actor.sleep()
        before = weights(critic)
        _, scores = critic.train(0, [WINDOW], samples)
        assert all(torch.equal(row.x0_fake, row.x0_real) for row in scores.values())
        _, scores = critic.train(1, [WINDOW], samples)
        critic.sleep()
        actor.wake()
        metrics = actor.train(1, [WINDOW], samples, [scores])
        updates = actor.export_weights()
    assert metrics["dmd_loss"] > 0
    critic.wake()
    after, idle = weights(critic), adapter.idle_parameters(load())
    for name in before:
        assert torch.equal(before[name], after[name]) == (name in idle), name
    assert updates["raw"].payload.keys() == dict(load().named_parameters()).keys()
    assert not same_bits(updates["raw"].payload, updates["ema"].payload)
    engine = LocalEngine(adapter, dtype=forward_dtype)
    engine.load_weights(updates["raw"], updates["raw"].payload)
    assert engine.weight_checksum == updates["raw"].checksum
    engine.close()


def two_rollouts(
    ranks: Ranks, checkpoint: Path, canvas: tuple[int, int, int], prompts: Sequence[str], again: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """In fp32, with an epsilon that keeps AdamW from magnifying rounding; critic and student."""
    adapter = build_adapter(checkpoint, *canvas)
    settings = TrainerSettings(
        "critic",
        0,
        OptimizerSettings(lr=1e-2, beta1=0.0, eps=1e-2),
        micro_batch_size=2,
        gradient_checkpointing=again,
    )
    load = adapter.load_transformer
    critic = CriticTrainer(settings, adapter, load(), load(), ranks, told_stop_steps=4)
    actor = ActorTrainer(settings, adapter, load(), ranks)
    samples = make_samples(adapter, prompts)
    share = [samples[i] for i in wanted_ids([WINDOW], ranks.rank, ranks.world_size)]
    for rollout_id in range(2):
        _, scores = critic.train(rollout_id, [WINDOW], share)
        actor.train(rollout_id, [WINDOW], share, ranks.gather(scores))
    return weights(critic), weights(actor)


def test_two_ranks_are_one_rank_to_fp32_rounding(
    ranks: Ranks, two_ranks: RankPool, tiny: Tiny, adapter: ModelAdapter, checkpoint: Path
) -> None:
    canvas = (*tiny.size, tiny.num_frames)
    alone = two_rollouts(ranks, checkpoint, canvas, tiny.prompts)
    start = dict(adapter.load_transformer().named_parameters())
    assert distance(start, alone[1]) > 5e-5
    for sharded in two_ranks.run(two_rollouts, checkpoint, canvas, tiny.prompts):
        for ours, theirs in zip(sharded, alone, strict=True):
            assert distance(ours, theirs) < 2e-6


def count_call(counted: Counter[str], role: str, *_: object) -> None:
    counted[role] += 1


@pytest.mark.parametrize("forward_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_checkpointing_computes_blocks_again_and_gives_the_same_bits(
    ranks: Ranks, tiny: Tiny, adapter: ModelAdapter, forward_dtype: torch.dtype
) -> None:
    """A block runs twice in a step that trains, once in a forward without gradient; weights and scores are the same."""
    samples = make_samples(adapter, tiny.prompts)
    load = adapter.load_transformer
    trained, calls, found = [], [], []
    for again in (False, True):
        settings = TrainerSettings(
            "critic", 0, OptimizerSettings(lr=1e-3), forward_dtype=forward_dtype, gradient_checkpointing=again
        )
        critic = CriticTrainer(settings, adapter, load(), load(), ranks)
        counted: Counter[str] = Counter()
        for network in (critic.network, critic.teacher):
            (first, *_) = adapter.shard_units(network.module)
            first.register_forward_pre_hook(partial(count_call, counted, network.role))
        _, scores = critic.train(0, [WINDOW], samples)
        trained.append(weights(critic))
        calls.append(counted)
        found.append([row.x0_fake for row in scores.values()])
    assert same_bits(*trained)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert calls[1]["critic"] == 2 * calls[0]["critic"]
    assert calls[1]["teacher"] == calls[0]["teacher"]


def test_gradient_checkpointing_on_two_ranks(two_ranks: RankPool, tiny: Tiny, checkpoint: Path) -> None:
    """FSDP2 gathers a block again for its second forward."""
    canvas = (*tiny.size, tiny.num_frames)
    plain, again = (two_ranks.run(two_rollouts, checkpoint, canvas, tiny.prompts, again) for again in (False, True))
    assert all(same_bits(*pair) for pair in zip(plain[0], again[0], strict=True))
