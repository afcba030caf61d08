"""The real transformer class, tiny: plain and sharded, in fp32 and bf16."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from miles_dmd2.algo import key_seed, normal
from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.training import ActorTrainer, CriticTrainer, OptimizerSettings, Ranks, TrainerSettings
from miles_dmd2.types import RolloutSample, WeightVersion
from tests.tiny_qwen import SIZE
from tests.training.runs import same_bits, weights
from tests.training.toy import GRID

WINDOW = tuple(range(6))


def make_samples(adapter: QwenImageAdapter) -> list[RolloutSample]:
    width = adapter.probe_conditioning()["prompt_embeds"].shape[1]

    def one(i: int) -> RolloutSample:
        shape = adapter.latent_shape
        x_k, x0 = normal(key_seed(0, "init", 0, i), shape), normal(key_seed(0, "init", 1, i), shape)
        cond = {"prompt_embeds": normal(key_seed(0, "init", 2, i), (5 + i % 2, width))}
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
