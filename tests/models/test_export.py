"""The scheduler configs of exported students give the student's grid, called as the pipelines call them."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from miles_dmd2.algo import sigma_grid
from miles_dmd2.models.export import plain_call_scheduler, static_shift_scheduler

STEPS, SHIFTS = [1, 2, 3, 4, 8], [0.5, 1.0, 1.7, 3.0, 5.0, 12.0]


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("shift", SHIFTS)
def test_with_sigmas_the_grid_has_its_bits(num_steps: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(static_shift_scheduler(shift))
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=0.5)
    assert torch.equal(scheduler.sigmas, sigma_grid(num_steps, shift))


@pytest.mark.parametrize("num_steps", [*STEPS, 50])
@pytest.mark.parametrize("shift", SHIFTS)
def test_with_the_number_of_steps_alone_it_has_its_values(num_steps: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(plain_call_scheduler(num_steps, shift))
    scheduler.set_timesteps(num_steps)
    torch.testing.assert_close(scheduler.sigmas, sigma_grid(num_steps, shift), rtol=0, atol=2e-7)
    assert torch.equal(scheduler.timesteps, 1000 * scheduler.sigmas[:-1])


def test_a_grid_that_no_config_gives_is_refused() -> None:
    with pytest.raises(ValueError, match="no scheduler config gives 1000 steps with shift 100: lower one of them"):
        plain_call_scheduler(1000, 100.0)
