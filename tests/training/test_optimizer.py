"""AdamW on shards, learning rates and norms against torch's own and against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from miles_dmd2.training import OptimizerSettings, Ranks
from miles_dmd2.training.optimizer import AdamW, clip_gradients, gradient_norm, learning_rate
from miles_dmd2.training.sharding import full
from tests.training.pool import RankPool
from tests.training.runs import Setup, make_actor

BASE = OptimizerSettings(lr=0.1, total_updates=10)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [0.1] * 12),
        ("constant", 4, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1]),
        ("linear", 0, [0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.0, 0.0]),
        ("linear", 2, [0.05, 0.1, 0.1, 0.0875]),
        ("cosine", 0, [0.05 * (1 + math.cos(math.pi * u / 10)) for u in range(11)]),
        ("cosine", 10, [0.01 * (u + 1) for u in range(10)]),
    ],
)
def test_learning_rates(schedule: str, warmup: int, expected: list[float]) -> None:
    settings = replace(BASE, schedule=schedule, warmup_updates=warmup)
    assert [learning_rate(settings, u) for u in range(len(expected))] == pytest.approx(expected, abs=1e-15)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="'exponential'"):
        learning_rate(replace(BASE, schedule="exponential"), 0)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_it_is_torch_s_adamw_bit_for_bit(beta1: float) -> None:
    settings = replace(BASE, schedule="linear", beta1=beta1, beta2=0.99, weight_decay=0.1)
    ours, theirs = nn.Linear(3, 4), nn.Linear(3, 4)
    theirs.load_state_dict(ours.state_dict())
    mine = AdamW(dict(ours.named_parameters()), settings)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.1, betas=(beta1, 0.99), weight_decay=0.1, fused=True)
    for updates in range(5):
        for module in (ours, theirs):
            module.zero_grad()
            module(torch.full((2, 3), 1.0 + updates)).square().sum().backward()
        reference.param_groups[0]["lr"] = learning_rate(settings, updates)
        reference.step()
        mine.step(updates)
        assert torch.equal(ours.weight, theirs.weight)
        assert torch.equal(ours.bias, theirs.bias)


def test_it_is_the_formula_in_fp64() -> None:
    settings = replace(BASE, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.5)
    parameter = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = AdamW({"p": parameter}, settings)
    p, m, v = 2.0, 0.0, 0.0
    for t, gradient in enumerate((1.0, -3.0, 0.5), start=1):
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        assert optimizer.step(t - 1) == 0.1
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
        p -= 0.1 * 0.5 * p
        p -= 0.1 * (m / (1 - 0.8**t)) / (math.sqrt(v / (1 - 0.9**t)) + 1e-3)
        assert parameter.item() == pytest.approx(p, rel=1e-12)


def test_a_parameter_without_gradient_keeps_its_bits() -> None:
    module = nn.Linear(2, 2)
    bias = module.bias.detach().clone()
    optimizer = AdamW(dict(module.named_parameters()), BASE)
    module.weight.grad = torch.ones(2, 2)
    optimizer.step(0)
    assert torch.equal(module.bias, bias)
    optimizer.zero_grad()
    assert module.weight.grad is None


def test_norm_and_clip_are_those_of_torch(ranks: Ranks) -> None:
    gradients = [torch.randn(3, 4), torch.randn(5), torch.zeros(0)]
    norm = gradient_norm(gradients, ranks)
    assert norm == pytest.approx(torch.cat([g.reshape(-1) for g in gradients]).norm().item())
    untouched = [g.clone() for g in gradients]
    clip_gradients(gradients, norm, 0.0)
    clip_gradients(gradients, norm, norm * 2)
    assert all(torch.equal(a, b) for a, b in zip(gradients, untouched, strict=True))
    clip_gradients(gradients, norm, 0.5)
    assert gradient_norm(gradients, ranks) == pytest.approx(0.5)


def norms(ranks: Ranks) -> tuple[float, float]:
    """The norm as logged, and of the gathered gradient, after a backward on sharded parameters."""
    actor = make_actor(ranks, Setup())
    x = torch.ones(2, *actor.adapter.latent_shape, dtype=torch.float64) * (1 + ranks.rank)
    label = torch.eye(4, dtype=torch.float64)[:2]
    actor.network.module(x, torch.full((2,), 0.5), label).square().sum().backward()
    whole = torch.cat([full(p.grad).reshape(-1) for p in actor.network.trained.values()])
    return gradient_norm(list(actor.optimizer.gradients().values()), ranks), whole.norm().item()


def test_the_norm_of_sharded_gradients_is_that_of_the_whole(two_ranks: RankPool) -> None:
    """Not too low by sqrt(shards), and the same on both ranks."""
    results = two_ranks.run(norms)
    assert results[0][0] == results[1][0]
    for logged, whole in results:
        assert logged == pytest.approx(whole, rel=1e-12)


def test_no_step_is_taken_with_an_infinite_gradient_though_the_loss_is_finite(ranks: Ranks) -> None:
    from tests.training.test_actor import SETUP, state, train_actor

    actor = make_actor(ranks, SETUP)
    before = state(actor)
    next(iter(actor.network.trained.values())).register_hook(lambda gradient: gradient * torch.inf)
    metrics = train_actor(actor)
    assert metrics["skipped_steps"] == 1
    assert all(torch.equal(value, before[name]) for name, value in state(actor).items())
