"""Adapters on the real transformer classes, tiny: which layers, a rollout trained, served, and loaded by diffusers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from miles_dmd2.cli.checks import outline
from miles_dmd2.config.lora import Lora, lora_layers
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.minimax_h3 import MiniMaxH3Adapter
from miles_dmd2.models.minimax_h3_weights import to_native
from miles_dmd2.models.registry import build_adapter
from miles_dmd2.models.weights import mismatch, safetensors_shapes
from miles_dmd2.training import ActorTrainer, CriticTrainer, OptimizerSettings, Ranks, TrainerSettings, wanted_ids
from miles_dmd2.training.batching import collate
from miles_dmd2.training.lora import as_diffusers, model_name
from miles_dmd2.training.sharding import full, load_full
from miles_dmd2.types import RolloutSample
from tests.families import Tiny, adapter, checkpoint, checkpoints, tiny
from tests.tiny_h3 import h3_checkpoint
from tests.tiny_qwen import PROMPTS, SIZE
from tests.training.pool import RankPool
from tests.training.runs import distance, same_bits, weights
from tests.training.test_families import make_samples
from tests.training.test_parts import h3, h3_sample

__all__ = ["adapter", "checkpoint", "checkpoints", "h3", "h3_checkpoint", "tiny"]

LORA = Lora(2, 4)
SETTINGS = TrainerSettings("critic", 0, OptimizerSettings(lr=1e-2), lora=LORA)


def test_all_linear_is_each_linear_layer_of_the_blocks(adapter: ModelAdapter) -> None:
    """By the names in the checkpoint's headers, which is all that a plan has, and by the module's own units."""
    module = adapter.load_transformer()
    names = {id(part): name for name, part in module.named_modules()}
    parts = [part for unit in adapter.shard_units(module) for part in unit.modules() if isinstance(part, nn.Linear)]
    found = lora_layers(adapter.weight_shapes(), LORA)
    assert found == {names[id(part)]: (part.out_features, part.in_features) for part in parts}
    assert len(found) > 3


def test_idle_layers_are_known_by_the_names_alone(adapter: ModelAdapter) -> None:
    """An adapter over them is refused before a weight is read."""
    shapes, module = adapter.weight_shapes(), adapter.load_transformer()
    found = outline(shapes)
    assert {name: tuple(p.shape) for name, p in found.named_parameters()} == shapes
    assert all(p.is_meta for p in found.parameters())
    assert adapter.idle_parameters(found) == adapter.idle_parameters(module)


def two_rollouts(
    adapter: ModelAdapter, ranks: Ranks, settings: TrainerSettings, samples: list[RolloutSample], told: int | None = 4
) -> tuple[CriticTrainer, ActorTrainer]:
    """No gap before the first update, an adapter that is trained after it; both awake."""
    load, window = adapter.load_transformer, tuple(sample.sample_id for sample in samples)
    critic = CriticTrainer(settings, adapter, load(), None, ranks, told_stop_steps=told)
    actor = ActorTrainer(replace(settings, name="actor"), adapter, load(), ranks, ema_decay=0.5)
    for rollout_id in range(2):
        _, scores = critic.train(rollout_id, [window], samples)
        gaps = [torch.equal(row.x0_fake, row.x0_real) for row in scores.values()]
        assert not any(gaps) if rollout_id else all(gaps)
        actor.train(rollout_id, [window], samples, [scores])
    return critic, actor


def check_teacher(critic: CriticTrainer, alone: CriticTrainer, samples: list[RolloutSample]) -> None:
    """The base of a trained critic, and a teacher of its own, at a batch of the dtype that they compute in."""
    batch = collate(critic.adapter, samples[:2], torch.device("cpu"), torch.float32)
    sigma = critic.adapter.spread(critic.adapter.part_sigmas(torch.tensor([0.3, 0.8])))
    with torch.no_grad():
        found, wanted = (one.teacher.velocity(batch.x0, sigma, batch.cond) for one in (critic, alone))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("forward_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_rollouts(ranks: Ranks, tiny: Tiny, adapter: ModelAdapter, forward_dtype: torch.dtype) -> None:
    """The teacher keeps its bits, an engine takes the merged student and its probe, nothing warns; diffusers loads the
    adapter on its own model.
    """
    settings = replace(SETTINGS, forward_dtype=forward_dtype)
    load, samples = adapter.load_transformer, make_samples(adapter, tiny.prompts)[:2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        critic, actor = two_rollouts(adapter, ranks, settings, samples)
        updates = actor.export_weights()
    check_teacher(critic, CriticTrainer(replace(settings, lora=None), adapter, load(), load(), ranks), samples)
    start, idle = dict(load().named_parameters()), adapter.idle_parameters(load())
    for trainer in (critic, actor):
        now = {
            model_name(name): value for name, value in weights(trainer).items() if name not in trainer.network.trained
        }
        assert same_bits(now, start)
    layers = {name.partition(".lora_")[0] for name in actor.network.trained}
    assert layers == {name for name in lora_layers(adapter.weight_shapes(), LORA) if f"{name}.weight" not in idle}
    payload = updates["raw"].payload
    assert payload is not None
    moved = {name.removesuffix(".weight") for name in start if not torch.equal(payload[name], start[name])}
    assert moved == layers
    engine = LocalEngine(adapter, dtype=forward_dtype)
    for update in updates.values():
        engine.load_weights(update, update.payload)
    engine.close()
    check_diffusers(actor, payload, samples)


def check_diffusers(actor: ActorTrainer, payload: Mapping[str, Tensor], samples: list[RolloutSample]) -> None:
    """`load_lora_adapter` gives the velocity of the merged weights, to rounding in fp32."""
    adapter = actor.adapter
    whole, adapted, base = (adapter.load_transformer() for _ in range(3))
    load_full(whole, payload)
    trained = {name: full(value).clone() for name, value in actor.network.trained.items()}
    adapted.load_lora_adapter(as_diffusers(trained, LORA.scale), prefix="transformer")
    batch = collate(adapter, samples, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        found = [
            adapter.velocity(one, batch.x0, torch.tensor([0.3, 0.8]), batch.cond) for one in (whole, adapted, base)
        ]
    scale = found[0].abs().max()
    assert (found[1] - found[0]).abs().max() < 1e-5 * scale
    assert (found[2] - found[0]).abs().max() > 1e-3 * scale


def test_gradient_checkpointing_gives_the_same_bits(ranks: Ranks, tiny_qwen: Path) -> None:
    """Though no input of a block needs a gradient there."""
    adapter = build_adapter(tiny_qwen, SIZE, SIZE)
    samples = make_samples(adapter, PROMPTS)[:2]
    plain, again = (
        two_rollouts(adapter, ranks, replace(SETTINGS, gradient_checkpointing=checkpointing), samples)
        for checkpointing in (False, True)
    )
    for one, other in zip(plain, again, strict=True):
        assert same_bits(weights(one), weights(other))


def student_of(ranks: Ranks, checkpoint: Path, forward_dtype: torch.dtype) -> dict[str, Tensor]:
    """Merged weights of a student after two rollouts, on rank 0; the critic's base has a plain teacher's bits."""
    adapter = build_adapter(checkpoint, SIZE, SIZE)
    optimizer = OptimizerSettings(lr=1e-2, beta1=0.0, eps=1e-5)  # so that AdamW does not magnify rounding
    settings = replace(SETTINGS, optimizer=optimizer, forward_dtype=forward_dtype, gradient_checkpointing=True)
    load, samples = adapter.load_transformer, make_samples(adapter, PROMPTS)[:4]
    critic = CriticTrainer(settings, adapter, load(), None, ranks, told_stop_steps=4)
    actor = ActorTrainer(replace(settings, name="actor"), adapter, load(), ranks)
    share = [samples[i] for i in wanted_ids([range(4)], ranks.rank, ranks.world_size)]
    for rollout_id in range(2):
        _, scores = critic.train(rollout_id, [range(4)], share)
        actor.train(rollout_id, [range(4)], share, ranks.gather(scores))
    payload = actor.export_weights(["raw"])["raw"].payload
    check_teacher(critic, CriticTrainer(replace(settings, lora=None), adapter, load(), load(), ranks), samples)
    return dict(payload or {})


@pytest.mark.parametrize(("forward_dtype", "rounding"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)], ids=str)
def test_two_ranks_are_one_rank_to_rounding(
    ranks: Ranks, two_ranks: RankPool, tiny_qwen: Path, forward_dtype: torch.dtype, rounding: float
) -> None:
    alone, start = student_of(ranks, tiny_qwen, forward_dtype), load_start(tiny_qwen)
    sharded, _ = two_ranks.run(student_of, tiny_qwen, forward_dtype)
    moved = distance(alone, start)
    assert moved > 5e-4
    assert distance(sharded, alone) < rounding * moved


def load_start(checkpoint: Path) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in build_adapter(checkpoint, SIZE, SIZE).load_transformer().named_parameters()}


@pytest.mark.parametrize("forward_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_h3(h3: MiniMaxH3Adapter, ranks: Ranks, forward_dtype: torch.dtype) -> None:
    """Trained in diffusers' layout; the merged student goes back into the released one."""
    settings = replace(SETTINGS, micro_batch_size=1, forward_dtype=forward_dtype)
    load, samples = h3.load_transformer, [h3_sample(h3, i) for i in range(2)]
    critic, actor = two_rollouts(h3, ranks, settings, samples)
    check_teacher(critic, CriticTrainer(replace(settings, lora=None), h3, load(), load(), ranks), samples)
    payload = actor.export_weights(["raw"])["raw"].payload
    assert payload is not None
    start = dict(load().named_parameters())
    moved = {name.removesuffix(".weight") for name in start if not torch.equal(payload[name], start[name])}
    assert moved == set(lora_layers(h3.weight_shapes(), LORA))
    assert mismatch(safetensors_shapes(h3.checkpoint / "transformer"), to_native(payload, h3.config)) is None
