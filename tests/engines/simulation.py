"""Backward simulation as a trainer relies on it, for every engine: beside `EngineContract`, over the same harness.

A DiffSynth-Studio user's pull request asks for these of any implementation: real data have no part in the student's
own rollout, the steps before the trained one get no gradient, and the hop is the one that was chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from miles_dmd2.algo import normal
from miles_dmd2.engines.base import RolloutEngine
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.training import ActorTrainer, OptimizerSettings, Ranks, TrainerSettings
from miles_dmd2.training.sharding import full
from miles_dmd2.training.trainer import Trainer
from miles_dmd2.types import RolloutSample, ScoreRow
from tests.engines.contract import GRID, Harness, real_latents

Another = Callable[[Tensor], RolloutEngine]  # an engine like the harness's, with these real latents
Gradients = dict[str, Tensor]
SCALE = 100.0


def direction(sample: RolloutSample) -> Tensor:
    """Where a made-up critic and teacher push the student: known, and another for each sample."""
    return normal(9000 + sample.sample_id, sample.x0.shape)


def score(sample: RolloutSample) -> ScoreRow:
    """x0 - x0_real is 1 everywhere, so the normalizer is 1 and the DMD gradient is the direction."""
    x0_real = sample.x0 - 1.0
    return ScoreRow(x0_real, x0_real + direction(sample), 0.5)


def by_the_trainer(
    harness: Harness, ranks: Ranks, samples: Sequence[RolloutSample], monkeypatch: pytest.MonkeyPatch
) -> tuple[Gradients, dict[str, float]]:
    """The gradient that the actor would step with, and its metrics. The weights stay as they are."""
    found: Gradients = {}

    def keep(trainer: Trainer, *_: object) -> bool:
        found.update({name: full(p.grad).clone() for name, p in trainer.network.trained.items() if p.grad is not None})
        return True

    monkeypatch.setattr(Trainer, "_update", keep)
    settings = TrainerSettings("actor", 0, OptimizerSettings(lr=1e-3), micro_batch_size=2)
    actor = ActorTrainer(settings, harness.adapter, harness.adapter.load_transformer(), ranks)
    ids = tuple(sample.sample_id for sample in samples)
    metrics = actor.train(0, (ids,), samples, [{sample.sample_id: score(sample) for sample in samples}])
    return found, metrics


def by_hand(harness: Harness, samples: Sequence[RolloutSample], names: Sequence[str], *, through: bool) -> Gradients:
    """The same gradient in float64 from the noise on, by Euler hops; `through`: also through the hops, wrongly."""
    module: nn.Module = harness.student(0).double().requires_grad_(True)
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        cond = in_float64(harness.adapter.collate([sample.cond]))
        x = harness.adapter.initial_noise(sample.seed).double()[None]
        for step in range(sample.stop_step + 1):
            here, after = (harness.level(sigma).double() for sigma in GRID[step : step + 2])
            with torch.set_grad_enabled(through or step == sample.stop_step):
                sigma = torch.tensor([GRID[step]], dtype=torch.float64)
                velocity = harness.adapter.velocity(module, x, sigma, cond)
            x0, x = x - here * velocity, x + (after - here) * velocity
        total = total + (x0[0] * direction(sample).double()).mean() / len(samples)
    total.backward()
    gradients = {name: module.get_parameter(name).grad for name in names}
    return {name: torch.zeros(()) if g is None else g for name, g in gradients.items()}


def in_float64(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def relative(found: Gradients, expected: Gradients) -> float:
    """|found - expected| / |expected| over all parameters."""
    assert found.keys() == expected.keys()
    off = sum(float((found[name].double() - expected[name]).square().sum()) for name in expected)
    return (off / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5


WAYS = ("ode", "sde", "real latents")


def beside_the_local_engine(harness: Harness, way: str) -> tuple[Tensor, Tensor]:
    """x_k and x0 of both engines, from the noise on: the same seeds, prompts and moved weights, at every stop step."""
    local = LocalEngine(harness.adapter, real_latents=real_latents(harness.adapter))
    requests = harness.requests(0, 1, 2, 3)
    if way == "sde":
        requests = [dataclasses.replace(request, sample_type="sde") for request in requests]
    elif way == "real latents":
        requests = [dataclasses.replace(request, real_latent=i % 3) for i, request in enumerate(requests)]
    made = []
    for engine in (harness.engine, local):
        engine.load_weights(*harness.weights(1))
        samples = engine.generate(requests)
        made.append(torch.stack([torch.stack([sample.x_k, sample.x0]) for sample in samples]))
    local.close()
    harness.load(0)
    return made[0], made[1]


class SimulationContract:
    @pytest.fixture
    def another(self) -> Another:
        raise NotImplementedError

    def test_the_steps_before_the_trained_one_get_no_gradient(
        self, harness: Harness, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The actor's gradient on the engine's samples is that of the stop step alone; and both compute one x0."""
        harness.engine.wake()
        harness.load(0)
        samples = harness.engine.generate(harness.requests(0, 1, 2, 3))
        found, metrics = by_the_trainer(harness, ranks, samples, monkeypatch)
        assert metrics["x0_mean_abs_diff_max"] < harness.same
        alone, through = (by_hand(harness, samples, list(found), through=through) for through in (False, True))
        assert relative(found, alone) < 1e-4
        assert relative(found, through) > 1e-2, "mutation: a gradient through the hops"

    @pytest.mark.parametrize("sample_type", ["ode", "sde"])
    def test_real_data_have_no_part_in_a_rollout(self, harness: Harness, another: Another, sample_type: str) -> None:
        """0 -> 100: a rollout keeps its bits; a noised real latent moves by (1 - sigma_k) 100."""
        found = {}
        for value in (0.0, SCALE):
            engine = another(torch.full((2, *harness.adapter.latent_shape), value))
            engine.load_weights(*harness.weights(0))
            simulated = [dataclasses.replace(r, sample_type=sample_type) for r in harness.requests(0, 1, 2, 3)]
            noised = [dataclasses.replace(r, sample_id=50 + r.sample_id, real_latent=1) for r in simulated]
            before = engine.forward_count
            found[value] = engine.generate([*simulated, *noised])
            assert engine.forward_count - before == (1 + 2 + 3 + 4) + 4, "k + 1 each, and one each"
            engine.close()
        for before, after in zip(found[0.0][:4], found[SCALE][:4], strict=True):
            assert torch.equal(before.x_k, after.x_k)
            assert torch.equal(before.x0, after.x0)
        for k, (before, after) in enumerate(zip(found[0.0][4:], found[SCALE][4:], strict=True)):
            moved = SCALE * (1 - harness.level(GRID[k])).expand_as(after.x_k)
            torch.testing.assert_close(after.x_k - before.x_k, moved, rtol=1e-5, atol=2e-5)
        assert torch.equal(found[0.0][4].x_k, found[0.0][0].x_k), "at sigma 1 both start from the noise alone"
