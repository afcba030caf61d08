"""The scheduler configs of exported students give the student's grid, called as the pipelines call them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from miles_dmd2.algo import sigma_grid
from miles_dmd2.models.export import StudentSampling, flow_match_scheduler, plain_call_scheduler
from miles_dmd2.types import SampleType

OWN = tuple(torch.tensor([0.999, 0.9, 0.4, 0.0]).tolist())
STEPS, SHIFTS = [1, 2, 3, 4, 8], [0.5, 1.0, 1.7, 3.0, 5.0, 12.0]


def sampling(num_steps: int, shift: float) -> StudentSampling:
    return StudentSampling(tuple(sigma_grid(num_steps, shift).tolist()), shift)


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("shift", SHIFTS)
def test_with_sigmas_the_grid_has_its_bits(num_steps: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(flow_match_scheduler(sampling(num_steps, shift)))
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=0.5)
    assert torch.equal(scheduler.sigmas, sigma_grid(num_steps, shift))


@pytest.mark.parametrize("num_steps", [*STEPS, 50])
@pytest.mark.parametrize("shift", SHIFTS)
def test_with_the_number_of_steps_alone_it_has_its_values(num_steps: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(plain_call_scheduler(sampling(num_steps, shift)))
    scheduler.set_timesteps(num_steps)
    torch.testing.assert_close(scheduler.sigmas, sigma_grid(num_steps, shift), rtol=0, atol=2e-7)
    assert torch.equal(scheduler.timesteps, 1000 * scheduler.sigmas[:-1])


def test_a_grid_that_no_config_gives_is_refused() -> None:
    with pytest.raises(ValueError, match="no scheduler config gives 1000 steps with shift 100: lower one of them"):
        plain_call_scheduler(sampling(1000, 100.0))


@pytest.mark.parametrize("config", [flow_match_scheduler, plain_call_scheduler])
def test_a_grid_of_its_own_is_taken_as_it_is(config: Callable[[StudentSampling], dict[str, Any]]) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config(StudentSampling(OWN, None)))
    scheduler.set_timesteps(sigmas=list(OWN[:-1]), mu=0.5)
    assert scheduler.sigmas.tolist() == list(OWN)


@pytest.mark.parametrize("config", [flow_match_scheduler, plain_call_scheduler])
@pytest.mark.parametrize("shift", [None, 3.0])
@pytest.mark.parametrize("sample_type", ["ode", "sde"])
def test_an_sde_student_hops_stochastically(
    config: Callable[[StudentSampling], dict[str, Any]], shift: float | None, sample_type: SampleType
) -> None:
    found = config(StudentSampling(sampling(4, 3.0).sigmas, shift, sample_type))
    assert found["stochastic_sampling"] is (sample_type == "sde")
