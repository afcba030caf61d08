"""Rectified flow (arXiv 2209.03003, eq. 1): x_sigma = (1 - sigma) x0 + sigma noise, d x_sigma / d sigma = noise - x0.

Latents are `[batch, *latent]`; sigma, in [0, 1], is `[batch]`, or `[batch, *latent]` where parts of a latent have
levels of their own; results are fp32 (fp64 if an input is). A ValueError says which argument has a wrong shape, dtype
or range.
"""

from torch import Tensor

from miles_dmd2.algo.checks import aligned


def add_noise(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """x_sigma = (1 - sigma) x0 + sigma noise: the point at level sigma on the straight line from data to noise."""
    x0, noise, s = aligned(sigma, x0=x0, noise=noise)
    return (1 - s) * x0 + s * noise


def x0_from_velocity(x: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """x0 = x_sigma - sigma v: the clean prediction of a network that predicts v = noise - x0."""
    x, velocity, s = aligned(sigma, x=x, velocity=velocity)
    return x - s * velocity


def noise_from_velocity(x: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """noise = x_sigma + (1 - sigma) v: the noise prediction of the same network."""
    x, velocity, s = aligned(sigma, x=x, velocity=velocity)
    return x + (1 - s) * velocity


def velocity_from_x0(x: Tensor, x0: Tensor, sigma: Tensor) -> Tensor:
    """v = (x_sigma - x0) / sigma. ValueError at sigma 0, where x_sigma says nothing about the velocity."""
    x, x0, s = aligned(sigma, x=x, x0=x0)
    if not bool((s > 0).all()):
        raise ValueError(f"velocity_from_x0 divides by sigma, so sigma must be > 0, got {s.min().item():.9g}")
    return (x - x0) / s


def guide(uncond: Tensor, cond: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance, standard convention: uncond + scale (cond - uncond).

    Written from cond, so that scale 1 returns cond bitwise (then skip the uncond forward). The other convention in
    use, cond + w' (cond - uncond), is w' = scale - 1. At a fixed (x_sigma, sigma) guiding x0, velocity or noise is
    the same thing.
    """
    uncond, cond = aligned(uncond=uncond, cond=cond)
    return cond + (scale - 1) * (cond - uncond)
