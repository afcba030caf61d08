"""Distribution matching: the student's gradient and loss, and the critic's loss. Latents are `[batch, *latent]`.

Losses take `reduction`: "mean" is the batch mean, "sample" the `[batch]` means over all other dimensions, whose mean
it is; micro-batches that sum "sample" losses over the batch size of the whole step therefore give the gradient of one
large batch.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from miles_dmd2.algo.checks import aligned
from miles_dmd2.algo.flow import noise_from_velocity, x0_from_velocity

CriticSpace = Literal["velocity", "x0", "eps"]
Reduction = Literal["mean", "sample"]
CRITIC_SPACES: tuple[str, ...] = get_args(CriticSpace)


def _per_sample_mean(values: Tensor) -> Tensor:
    return values.reshape(values.shape[0], -1).mean(dim=1)


def _reduce(values: Tensor, reduction: Reduction) -> Tensor:
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction must be one of {get_args(Reduction)}, got {reduction!r}")
    per_sample = _per_sample_mean(values)
    return per_sample if reduction == "sample" else per_sample.mean()


@torch.no_grad()
def mean_abs_difference(a: Tensor, b: Tensor) -> Tensor:
    """mean |a - b| over all but the batch dimension, `[batch]`, without gradient.

    Of (x0, x0_real): the DMD normalizer before its floor, the distance to the teacher. Of (x0_fake, x0_real): the
    score gap.
    """
    a, b = aligned(a=a, b=b)
    return _per_sample_mean((a - b).abs())


@torch.no_grad()
def dmd_gradient(
    x0: Tensor, x0_real: Tensor, x0_fake: Tensor, *, eps: float = 1e-6, normalizer: Tensor | None = None
) -> Tensor:
    """(x0_fake - x0_real) / max(N, eps), what descent *subtracts* from x0 (DMD eq. 7, 8).

    x0: the student's clean prediction; x0_real, x0_fake: teacher's and critic's from the same noised x0, at any
    sigma < 1. N = mean |x0 - x0_real| per sample, so the gradient does not depend on the cut into micro-batches; it is
    invariant to rescaling the latents. `normalizer`, one number `[]` or one per sample `[batch]`, replaces N: that of
    a whole batch has to be taken over all its micro-batches beforehand. Detached. A sample whose N is below eps is
    degenerate: count it with `N < eps`. A non-finite input stays non-finite: the trainer checks and skips, nothing is
    hidden here. ValueError: shapes, eps <= 0.
    """
    if not eps > 0:
        raise ValueError(f"eps must be > 0, got {eps}")
    x0, x0_real, x0_fake = aligned(x0=x0, x0_real=x0_real, x0_fake=x0_fake)
    of_each = mean_abs_difference(x0, x0_real) if normalizer is None else normalizer.to(x0).expand(x0.shape[0])
    return (x0_fake - x0_real) / of_each.clamp(min=eps).view(-1, *(1,) * (x0.ndim - 1))


def student_loss(x0: Tensor, gradient: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """0.5 mean (x0 - sg[x0 - gradient])^2, sg = stop-gradient (DMD algorithm 2).

    So dL/dx0 = gradient / numel and L = 0.5 mean gradient^2. Computed as x0 - sg[x0] + sg[gradient], which keeps a
    gradient that is small beside x0 from being rounded away.
    """
    x0, gradient = aligned(x0=x0, gradient=gradient)
    return _reduce(0.5 * (x0 - x0.detach() + gradient.detach()).square(), reduction)


def flow_matching_loss(velocity: Tensor, noise: Tensor, x0: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """mean (velocity - (noise - x0))^2 (rectified flow, eq. 1); noise and x0 are targets without gradient."""
    velocity, noise, x0 = aligned(velocity=velocity, noise=noise, x0=x0)
    return _reduce((velocity - (noise - x0).detach()).square(), reduction)


def critic_loss(
    velocity: Tensor,
    x_sigma: Tensor,
    sigma: Tensor,
    noise: Tensor,
    x0: Tensor,
    *,
    space: CriticSpace = "velocity",
    reduction: Reduction = "mean",
) -> Tensor:
    """Denoising loss that keeps the critic at the student's score (DMD eq. 6, DMD2 section 4.2).

    velocity: the critic's at x_sigma = add_noise(x0, noise, sigma), x0 the student's sample (detached here). With L_v
    the loss in "velocity", a sample's loss is sigma^2 L_v in "x0" and (1 - sigma)^2 L_v in "eps": the space is a
    weight over sigma. ValueError: unknown space or reduction, shapes, sigma outside [0, 1].
    """
    if space == "velocity":
        aligned(sigma, x_sigma=x_sigma, velocity=velocity)
        return flow_matching_loss(velocity, noise, x0, reduction=reduction)
    if space == "x0":
        prediction, target = aligned(x0_prediction=x0_from_velocity(x_sigma.detach(), velocity, sigma), x0=x0)
    elif space == "eps":
        prediction, target = aligned(
            noise_prediction=noise_from_velocity(x_sigma.detach(), velocity, sigma), noise=noise
        )
    else:
        raise ValueError(f"space must be one of {CRITIC_SPACES}, got {space!r}")
    return _reduce((prediction - target.detach()).square(), reduction)
