"""The real transformer class, tiny: plain and sharded, in fp32 and bf16."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from miles_dmd2.algo import key_seed, normal
from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.training import ActorTrainer, CriticTrainer, OptimizerSettings, Ranks, TrainerSettings, wanted_ids
from miles_dmd2.types import RolloutSample, WeightVersion
from tests.tiny_qwen import SIZE
from tests.training.pool import RankPool
from tests.training.runs import distance, same_bits, weights
from tests.training.toy import GRID

WINDOW = tuple(range(6))


def make_samples(adapter: QwenImageAdapter) -> list[RolloutSample]:
    width = adapter.probe_conditioning()["prompt_embeds"].shape[1]

    def one(i: int) -> RolloutSample:
        shape = adapter.latent_shape
        x_k, x0 = normal(key_seed(0, "probe", 0, i), shape), normal(key_seed(0, "probe", 1, i), shape)
        cond = {"prompt_embeds": normal(key_seed(0, "probe", 2, i), (5 + i % 2, width))}
        return RolloutSample(i, "", i, i % 4, torch.tensor(GRID), x_k, x0, cond, WeightVersion(0))

    return [one(i) for i in WINDOW]


@pytest.mark.parametrize("forward_dtype", [torch.float32, torch.bfloat16])
def test_one_rollout(ranks: Ranks, tiny_qwen: Path, forward_dtype: torch.dtype) -> None:
    """Gap bitwise zero at the start, then training; idle parameters keep their bits; sleep in between."""
    adapter = QwenImageAdapter(tiny_qwen, SIZE, SIZE)
    settings = TrainerSettings("critic", 0, OptimizerSettings(lr=1e-3), micro_batch_size=4, forward_dtype=forward_dtype)
    load = adapter.load_transformer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        critic = CriticTrainer(settings, adapter, load(), load(), ranks, told_stop_steps=4)
        actor = ActorTrainer(replace(settings, name="actor"), adapter, load(), ranks, ema_decay=0.9)
        actor.sleep()
        before = weights(critic)
        samples = make_samples(adapter)
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
    assert idle
    for name in before:
        assert torch.equal(before[name], after[name]) == (name in idle), name
    assert updates["raw"].payload.keys() == dict(load().named_parameters()).keys()
    assert not same_bits(updates["raw"].payload, updates["ema"].payload)


def qwen_run(ranks: Ranks, checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Two rollouts in fp32, with an epsilon that keeps AdamW from magnifying rounding; critic and student."""
    adapter = QwenImageAdapter(checkpoint, SIZE, SIZE)
    settings = TrainerSettings("critic", 0, OptimizerSettings(lr=1e-2, beta1=0.0, eps=1e-2), micro_batch_size=2)
    load = adapter.load_transformer
    critic = CriticTrainer(settings, adapter, load(), load(), ranks, told_stop_steps=4)
    actor = ActorTrainer(settings, adapter, load(), ranks)
    samples = make_samples(adapter)
    share = [samples[i] for i in wanted_ids([WINDOW], ranks.rank, ranks.world_size)]
    for rollout_id in range(2):
        _, scores = critic.train(rollout_id, [WINDOW], share)
        actor.train(rollout_id, [WINDOW], share, ranks.gather(scores))
    return weights(critic), weights(actor)


def test_two_ranks_are_one_rank_to_fp32_rounding(ranks: Ranks, two_ranks: RankPool, tiny_qwen: Path) -> None:
    alone = qwen_run(ranks, tiny_qwen)
    start = dict(QwenImageAdapter(tiny_qwen, SIZE, SIZE).load_transformer().named_parameters())
    assert distance(start, alone[1]) > 5e-5
    for sharded in two_ranks.run(qwen_run, tiny_qwen):
        for ours, theirs in zip(sharded, alone, strict=True):
            assert distance(ours, theirs) < 2e-6
