"""The paper: parameterization, sigma laws, DMD gradient, losses, few-step sampler, keyed draws. torch and stdlib only.

One convention: sigma in [0, 1], one per sample (`[batch]`); latents `[batch, *latent]`;
x_sigma = (1 - sigma) x0 + sigma noise; velocity = noise - x0. Any float dtype comes in; the arithmetic and the
results are fp32, or fp64 if an input is fp64. Sources: DMD2 (arXiv 2405.14867), DMD (2311.18828), rectified flow
(2209.03003), SD3 (2403.03206) for the shift.
"""

from miles_dmd2.algo.dmd import (
    CRITIC_SPACES,
    CriticSpace,
    Reduction,
    critic_loss,
    dmd_gradient,
    flow_matching_loss,
    mean_abs_difference,
    student_loss,
)
from miles_dmd2.algo.draws import (
    PURPOSES,
    Purpose,
    eval_seed,
    initial_noise,
    integer,
    key_seed,
    normal,
    normal_batch,
    normal_stream,
    sample_seed,
    uniform,
    uniform_batch,
)
from miles_dmd2.algo.flow import add_noise, guide, noise_from_velocity, velocity_from_x0, x0_from_velocity
from miles_dmd2.algo.sampler import euler_step, forward_noise, rollout, rollout_rows
from miles_dmd2.algo.sigmas import SIGMA_LAWS, SigmaLaw, logit_normal, sample_score_sigma, shift_sigma, sigma_grid

__all__ = [
    "CRITIC_SPACES",
    "PURPOSES",
    "SIGMA_LAWS",
    "CriticSpace",
    "Purpose",
    "Reduction",
    "SigmaLaw",
    "add_noise",
    "critic_loss",
    "dmd_gradient",
    "euler_step",
    "eval_seed",
    "flow_matching_loss",
    "forward_noise",
    "guide",
    "initial_noise",
    "integer",
    "key_seed",
    "logit_normal",
    "mean_abs_difference",
    "noise_from_velocity",
    "normal",
    "normal_batch",
    "normal_stream",
    "rollout",
    "rollout_rows",
    "sample_score_sigma",
    "sample_seed",
    "shift_sigma",
    "sigma_grid",
    "student_loss",
    "uniform",
    "uniform_batch",
    "velocity_from_x0",
    "x0_from_velocity",
]
