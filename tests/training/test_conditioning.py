"""The critic is told the stop step: nothing at first, then what it learns, and only where it was told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from miles_dmd2.training import Ranks
from miles_dmd2.training.conditioning import KEY, StopStepConditioning, is_stop_step_key
from tests.training.runs import Setup, make_critic, same_bits, samples_of, weights, windows_of
from tests.training.toy import LABELS, LATENT, WIDTH, ToyAdapter

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
