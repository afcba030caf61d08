"""How a run's student is sampled, from its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_dmd2.config import Config, ConfigError
from miles_dmd2.data.requests import explicit_grid, grid

if TYPE_CHECKING:
    from miles_dmd2.models.base import ModelAdapter
    from miles_dmd2.models.export import StudentSampling


def student_grid(config: Config) -> tuple[float, ...]:
    """The student's sigmas `[N+1]`, exact in fp32: the same for rollouts, evals and export."""
    own = config.explicit_sigmas
    return explicit_grid(own) if own else grid(config.num_steps, config.rollout.diffusion_flow_shift)


def student_sampling(config: Config) -> StudentSampling:
    from miles_dmd2.models.export import StudentSampling

    shift = None if config.explicit_sigmas else config.rollout.diffusion_flow_shift
    return StudentSampling(student_grid(config), shift, config.algorithm.dmd2_student_sample_type)


def check_student(config: Config, adapter: ModelAdapter) -> None:
    """ConfigError: a student with this grid could not be written as a pipeline."""
    sampling = student_sampling(config)
    try:
        adapter.check_sampling(sampling)
    except ValueError as error:
        raise ConfigError(
            f"--diffusion-num-steps {sampling.num_steps} with --diffusion-flow-shift {sampling.shift:g}: the student "
            f"could not be exported, {adapter.family}'s pipeline is called with the number of steps alone and {error}"
        ) from error
