"""The critic is told the stop step: nothing at first, then what it learns, and only where it was told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from miles_dmd2.algo import add_noise, key_seed, normal
from miles_dmd2.training import Ranks
from miles_dmd2.training.conditioning import KEY, StopStepConditioning, is_stop_step_key
from miles_dmd2.training.scoring import ScoreSigma
from miles_dmd2.types import RolloutSample
from tests.training.runs import Setup, make_critic, same_bits, samples_of, weights, windows_of
from tests.training.toy import LABELS, LATENT, WIDTH, ToyAdapter, make_sample, make_windows

NAME = f"time.{KEY}"


def forward(module: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 18).view(3, *LATENT)
    return module(x, torch.tensor([0.2, 0.5, 0.8]), torch.eye(LABELS)[:3])


def test_it_starts_as_the_plain_critic_bit_for_bit() -> None:
    adapter = ToyAdapter()
    plain, told = adapter.load_transformer(), adapter.load_transformer()
    conditioning = StopStepConditioning(adapter, told, 4)
    with conditioning.told(torch.tensor([0, 3, 1])):
        assert torch.equal(forward(told), forward(plain))
    assert told.get_parameter(NAME).shape == (4, WIDTH)
    assert is_stop_step_key(NAME)
    assert not any(map(is_stop_step_key, dict(plain.named_parameters())))


def test_only_the_rows_of_the_batch_get_a_gradient() -> None:
    adapter = ToyAdapter()
    module = adapter.load_transformer()
    conditioning = StopStepConditioning(adapter, module, 4)
    with conditioning.told(torch.tensor([0, 3, 3])):
        forward(module).sum().backward()
    assert module.get_parameter(NAME).grad.abs().sum(1).gt(0).tolist() == [True, False, False, True]


def test_another_stop_step_is_another_function() -> None:
    adapter = ToyAdapter()
    module = adapter.load_transformer()
    conditioning = StopStepConditioning(adapter, module, 4)
    with torch.no_grad():
        module.get_parameter(NAME)[2] += 1.0
    with conditioning.told(torch.tensor([0, 1, 3])):
        others = forward(module)
    with conditioning.told(torch.tensor([2, 1, 3])):
        changed = forward(module)
    assert not torch.equal(others[0], changed[0])
    assert torch.equal(others[1:], changed[1:])


def test_a_forward_that_was_not_told_is_refused() -> None:
    adapter = ToyAdapter()
    module = adapter.load_transformer()
    conditioning = StopStepConditioning(adapter, module, 4)
    with pytest.raises(RuntimeError, match="this forward was not"):
        forward(module)
    with pytest.raises(RuntimeError, match=r"\[3, 8\] for 2 samples"), conditioning.told(torch.tensor([0, 1])):
        forward(module)
    with pytest.raises(RuntimeError, match="this forward was not"):
        forward(module)


class PairTime(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, sigma: torch.Tensor) -> torch.Tensor:
        return self.inner(sigma)[None].expand(2, -1, -1)


def test_a_module_with_another_kind_of_output_is_refused() -> None:
    module = ToyAdapter().load_transformer()
    adapter = ToyAdapter()
    module.time = PairTime(module.time)
    module.forward = lambda x, sigma, label: module.time(sigma)[0]
    with pytest.raises(TypeError, match=r"PairTime must return \[batch, dim\]"):
        StopStepConditioning(adapter, module, 4)


def test_it_trains_in_the_critic_and_the_plain_critic_has_none(ranks: Ranks) -> None:
    setup = Setup(windows=2)
    critic, plain = make_critic(ranks, setup), make_critic(ranks, Setup(windows=2, told=False))
    windows = windows_of(setup, 0)
    samples = samples_of(setup, 0, [i for window in windows for i in window])
    critic.train(0, windows, samples)
    plain.train(0, windows, samples)
    trained = weights(critic)
    assert trained.pop(NAME).abs().sum(1).gt(0).all()
    assert plain.conditioning is None
    assert not same_bits(trained, weights(plain)), "after the first step the two are different critics"


# -- what it is for: DMD2.md 5.7, by the trainer itself -----------------------------------------------------------

MEANS, STD = (-1.0, 1.0, -1.0, 1.0), 0.3  # of the student's x0 at each stop step


def of_its_step(sample_id: int, rollout_id: int) -> RolloutSample:
    """x0 ~ N(mean of its stop step, STD^2), and nothing but the stop step tells which."""
    like = make_sample(sample_id, rollout_id=rollout_id)
    x0 = MEANS[like.stop_step] + STD * normal(key_seed(7, "order", rollout_id, sample_id), LATENT)
    return replace(like, x0=x0, cond={"label": torch.eye(LABELS)[0]})


def posterior_mean(x: Tensor, s: float, mean: float) -> Tensor:
    """E[x0 | x_s = x] for x0 ~ N(mean, STD^2) (DMD2.md 5.1)."""
    return mean + (1 - s) * STD**2 / ((1 - s) ** 2 * STD**2 + s**2) * (x - (1 - s) * mean)


def of_the_step(x: Tensor, s: float, stop_step: int) -> Tensor:
    return posterior_mean(x, s, MEANS[stop_step])


def of_the_mixture(x: Tensor, s: float, stop_step: int) -> Tensor:
    """Both means are as likely before x is seen (DMD2.md 5.8)."""
    twice = 2 * ((1 - s) ** 2 * STD**2 + s**2)
    low, high = torch.softmax(torch.stack([-(x - (1 - s) * mean).square().sum() / twice for mean in (-1, 1)]), 0)
    return low * posterior_mean(x, s, -1) + high * posterior_mean(x, s, 1)


@pytest.mark.parametrize(
    ("told", "right", "wrong"), [(True, of_the_step, of_the_mixture), (False, of_the_mixture, of_the_step)]
)
def test_told_it_learns_each_step_s_score_and_else_that_of_the_mixture(
    ranks: Ranks,
    told: bool,
    right: Callable[[Tensor, float, int], Tensor],
    wrong: Callable[[Tensor, float, int], Tensor],
) -> None:
    """Two Gaussians at two stop steps: the network's x0_fake is the one closed form or the other."""
    setup = Setup(windows=20, window=64, told=told, lr=2e-2)
    critic = make_critic(ranks, setup)
    critic.score_sigma = ScoreSigma(lo=0.6, hi=0.95)
    for rollout_id in range(12):
        windows = make_windows(rollout_id, setup.windows, setup.window)
        samples = [of_its_step(i, rollout_id) for window in windows for i in window]
        _, scores = critic.train(rollout_id, windows, samples, score=rollout_id == 11)
    off: dict[Callable[[Tensor, float, int], Tensor], list[Tensor]] = {right: [], wrong: []}
    for i, row in scores.items():
        sample, s = of_its_step(i, 11), row.score_sigma
        noise = normal(key_seed(setup.seed, "score_noise", 11, i), LATENT).double()
        x = add_noise(sample.x0.double()[None], noise[None], torch.tensor([s]))[0]
        for law, found in off.items():
            found.append((row.x0_fake - law(x, s, sample.stop_step)).square().mean())
    assert torch.stack(off[right]).mean().sqrt() < 0.35  # measured .14 told, .27 plain
    assert torch.stack(off[wrong]).mean().sqrt() > 0.7  # .85 and .90
