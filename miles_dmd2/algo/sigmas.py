"""Sigma laws: timestep shift (SD3, arXiv 2403.03206, eq. 23), the student's grid, the score sigma (DMD2 section 4)."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from miles_dmd2.algo.checks import check_sigma, work_dtype

SigmaLaw = Literal["uniform", "logit_normal"]
SIGMA_LAWS: tuple[str, ...] = get_args(SigmaLaw)


def shift_sigma(u: Tensor, shift: float) -> Tensor:
    """shift u / (1 + (shift - 1) u), any shape: maps [0, 1] onto itself, towards noise for shift > 1.

    Shifts compose by multiplication, so 1 / shift is the inverse. In fp32 these are the operations, and the bits, of
    diffusers' FlowMatchEulerDiscreteScheduler. ValueError: u outside [0, 1], shift not a finite number above 0.
    """
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"shift must be a finite number > 0, got {shift}")
    u = u.to(work_dtype(u=u))
    check_sigma(u)
    return shift * u / (1 + (shift - 1) * u)


def sigma_grid(num_steps: int, shift: float) -> Tensor:
    """The student's grid: linspace(1, 1/N, N) through the shift, then the terminal 0; `[N + 1]` fp32 on the CPU.

    N steps are N forwards and N + 1 points. Bit-equal to the scheduler above after
    `set_timesteps(sigmas=numpy.linspace(1, 1 / N, N))`. ValueError: num_steps < 1 or a bad shift.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    hop = (1 / num_steps - 1) / max(num_steps - 1, 1)
    uniform = torch.tensor([1 + index * hop for index in range(num_steps)], dtype=torch.float32)
    return torch.cat([shift_sigma(uniform, shift), torch.zeros(1)])


def logit_normal(uniform: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """sigmoid(mean + std z), z the normal quantile of `uniform`, any shape: the logit-normal law (SD3, eq. 19).

    ValueError: std not a finite number above 0, mean not finite.
    """
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ValueError(f"the logit-normal law takes a finite mean and a finite std > 0, got {mean} and {std}")
    uniform = uniform.to(work_dtype(uniform=uniform))
    return torch.sigmoid(mean + std * torch.special.ndtri(uniform))


def sample_score_sigma(
    uniform: Tensor,
    lo: float,
    hi: float,
    shift: float = 1.0,
    *,
    law: SigmaLaw = "uniform",
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
) -> Tensor:
    """The noise levels at which critic and teacher see the student's samples, `[batch]`; one law for loss and scores.

    u is `uniform` itself or, for law "logit_normal", `logit_normal` of it. Then sigma = lo + (hi - lo) u, then the
    shift, then a clamp to [lo, hi]. uniform: draws in [0, 1), `[batch]` (randomness is passed in). With the uniform law
    and shift > 1 the clamp puts the mass 1 - (shift_{1/shift}(hi) - lo) / (hi - lo) on hi itself. ValueError: uniform
    outside [0, 1], not 0 <= lo < hi <= 1, an unknown law.
    """
    if not 0 <= lo < hi <= 1:
        raise ValueError(f"the score sigma range must satisfy 0 <= lo < hi <= 1, got lo={lo} and hi={hi}")
    if law not in SIGMA_LAWS:
        raise ValueError(f"law must be one of {SIGMA_LAWS}, got {law!r}")
    uniform = uniform.to(work_dtype(uniform=uniform))
    if not bool(((uniform >= 0) & (uniform <= 1)).all()):
        raise ValueError(f"uniform must be in [0, 1), got min {uniform.min().item()} and max {uniform.max().item()}")
    u = uniform if law == "uniform" else logit_normal(uniform, logit_mean, logit_std)
    return shift_sigma(lo + (hi - lo) * u, shift).clamp(lo, hi)
