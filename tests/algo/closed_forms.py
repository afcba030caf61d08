"""What the tests know beforehand, in float64 and independent of `algo` (DMD2.md section 5)."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def per_sample(sigma: Tensor, like: Tensor) -> Tensor:
    return sigma.reshape(-1, *(1,) * (like.ndim - 1))


@dataclass(frozen=True)
class Gaussian:
    """Data N(mean, std^2) in every dimension; `mean` and `std` may be tensors of the latent shape (5.1)."""

    mean: float | Tensor
    std: float | Tensor

    def noised_variance(self, sigma: float | Tensor) -> float | Tensor:
        """D(sigma, std^2)."""
        return (1 - sigma) ** 2 * self.std**2 + sigma**2

    def x0(self, x: Tensor, sigma: Tensor) -> Tensor:
        """E[x0 | x_sigma = x]."""
        s = per_sample(sigma, x)
        return self.mean + (1 - s) * self.std**2 / self.noised_variance(s) * (x - (1 - s) * self.mean)

    def noise(self, x: Tensor, sigma: Tensor) -> Tensor:
        """E[noise | x_sigma = x]."""
        s = per_sample(sigma, x)
        return s / self.noised_variance(s) * (x - (1 - s) * self.mean)

    def velocity(self, x: Tensor, sigma: Tensor) -> Tensor:
        """E[noise - x0 | x_sigma = x], the best velocity, finite at sigma 0 too."""
        return self.noise(x, sigma) - self.x0(x, sigma)

    def floor(self, space: str, sigma: float) -> float:
        """The smallest critic loss that there is at this sigma."""
        weight = {"velocity": 1.0, "x0": sigma**2, "eps": (1 - sigma) ** 2}[space]
        return float(weight * self.std**2 / self.noised_variance(sigma))


@dataclass(frozen=True)
class Mixture:
    """Data sum_k weight_k N(mean_k, std^2 I) (5.8)."""

    weights: Tensor
    means: Tensor
    std: float

    def _responsibilities(self, x: Tensor, sigma: float) -> tuple[Tensor, Tensor, float]:
        variance = (1 - sigma) ** 2 * self.std**2 + sigma**2
        centred = x - (1 - sigma) * self.means
        return (self.weights.log() - centred.square().sum(1) / (2 * variance)).softmax(0), centred, variance

    def x0(self, x: Tensor, sigma: float) -> Tensor:
        gamma, centred, variance = self._responsibilities(x, sigma)
        return gamma @ (self.means + (1 - sigma) * self.std**2 / variance * centred)

    def velocity(self, x: Tensor, sigma: float) -> Tensor:
        gamma, centred, variance = self._responsibilities(x, sigma)
        return gamma @ (sigma / variance * centred) - self.x0(x, sigma)


def gap_moments(student: Gaussian, teacher: Gaussian, sigma: float) -> dict[str, float]:
    """Moments of x0_fake - x0_real and of x0 - x0_real for an exact critic; x0 = student.mean + student.std z (5.2)."""
    s, m, r, mu, tau = sigma, student.mean, student.std, teacher.mean, teacher.std
    d_r, d_tau = student.noised_variance(s), teacher.noised_variance(s)
    mean = (m - mu) * s**2 / d_tau
    std = (1 - s) * s**2 * abs(r**2 - tau**2) / (math.sqrt(d_r) * d_tau)
    distance_std = s * math.sqrt(s**2 * r**2 + (1 - s) ** 2 * tau**4) / d_tau
    return {
        "mean": mean,
        "std": std,
        "abs_mean": folded_normal_mean(mean, std),
        "distance": folded_normal_mean(mean, distance_std),
        "times_z": (1 - s) ** 2 * s**2 * r * (r**2 - tau**2) / (d_r * d_tau),
    }


def folded_normal_mean(mean: float, std: float) -> float:
    """E|N(mean, std^2)|."""
    scaled = mean / std
    return std * math.sqrt(2 / math.pi) * math.exp(-(scaled**2) / 2) + mean * math.erf(scaled / math.sqrt(2))


def potential(m: Tensor, r: Tensor, teacher: Gaussian, sigma: float) -> Tensor:
    """(sigma / (1 - sigma))^2 KL of noised student and noised teacher; its gradient is the expected gap (5.2)."""
    d_r, d_tau = (1 - sigma) ** 2 * r**2 + sigma**2, teacher.noised_variance(sigma)
    kl = 0.5 * torch.log(d_tau / d_r) + (d_r + (1 - sigma) ** 2 * (m - teacher.mean) ** 2) / (2 * d_tau) - 0.5
    return (sigma / (1 - sigma)) ** 2 * kl


def quadrature(points: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes (z, noise) `[points^2, 1]` of two independent standard normals, and weights: exact for polynomials."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    nodes, weights = torch.tensor(nodes), torch.tensor(weights / weights.sum())
    z, noise = torch.meshgrid(nodes, nodes, indexing="ij")
    return z.reshape(-1, 1), noise.reshape(-1, 1), torch.outer(weights, weights).reshape(-1)


def normal_lattice(points: int) -> tuple[Tensor, Tensor]:
    """`[points^2]` pairs of normals at midpoints of equal probability: an average over them is an integral."""
    nodes = torch.special.ndtri((torch.arange(points, dtype=torch.float64) + 0.5) / points)
    nodes = nodes / nodes.square().mean().sqrt()
    z, noise = torch.meshgrid(nodes, nodes, indexing="ij")
    return z.reshape(-1), noise.reshape(-1)


def midpoints(points: int) -> Tensor:
    return (torch.arange(points, dtype=torch.float64) + 0.5) / points


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
