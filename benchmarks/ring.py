"""Points of the plane on a ring of Gaussians: exact teacher, small network, adapter, and how far samples are from it.

The data are an equal mixture of N(centre_k, std^2 I), so the teacher's velocity is known in closed form and is used as
it is: no figure of a student depends on how well a teacher was trained. Students and critics are one small network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from miles_dmd2.algo import initial_noise
from miles_dmd2.models.base import Components, ModelAdapter
from miles_dmd2.models.export import StudentSampling
from miles_dmd2.types import Conditioning

PROMPT = "a point of the ring"
FREQUENCIES = 16
PIECE = 512  # samples whose distances to all others are in memory at once


@dataclass(frozen=True, slots=True)
class Ring:
    """An equal mixture of `modes` Gaussians of deviation `std` on a circle. By default every coordinate has variance
    radius^2 / 2 + std^2 = 1, as the latents of a diffusion model have.
    """

    modes: int = 8
    radius: float = 1.4
    std: float = 0.14

    @property
    def centres(self) -> Tensor:
        """fp64 `[modes, 2]`."""
        angles = 2 * math.pi * torch.arange(self.modes, dtype=torch.float64) / self.modes
        return self.radius * torch.stack([angles.cos(), angles.sin()], dim=1)

    def samples(self, count: int, seed: int) -> Tensor:
        """fp32 `[count, 2]`."""
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(self.modes, (count,), generator=generator)
        return self.centres.float()[chosen] + self.std * torch.randn(count, 2, generator=generator)


class ExactVelocity(nn.Module):
    """E[noise - x0 | x_sigma] of the ring, a frozen network without a fitted number in it.

    With D = (1 - s)^2 std^2 + s^2, gamma_k(x) = softmax_k(-|x - (1 - s) c_k|^2 / 2D) and u_k = x - (1 - s) c_k:
    E[x0] = sum gamma_k (c_k + (1 - s) std^2 / D u_k), E[noise] = sum gamma_k s / D u_k.
    """

    def __init__(self, ring: Ring, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.std = ring.std
        self.centres = nn.Parameter(ring.centres.to(dtype))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """x `[batch, 2]`, sigma `[batch]` in [0, 1] -> `[batch, 2]`."""
        s = sigma.view(-1, 1, 1).to(x)
        variance = (1 - s).square() * self.std**2 + s.square()
        away = x.unsqueeze(1) - (1 - s) * self.centres
        gamma = (-away.square().sum(-1, keepdim=True) / (2 * variance)).softmax(1)
        of_mode = (s - (1 - s) * self.std**2) / variance * away - self.centres
        return (gamma * of_mode).sum(1)


class TimeEmbedding(nn.Module):
    """sigma `[batch]` -> `[batch, width]`; a critic that is told the stop step has its embedding added here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * FREQUENCIES, width)
        scales = 0.5 * math.pi * 1.35 ** torch.arange(FREQUENCIES)
        self.scales: Tensor
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, sigma: Tensor) -> Tensor:
        angles = sigma.unsqueeze(1) * self.scales
        return self.linear(torch.cat([angles.cos(), angles.sin()], dim=1))


class RingNetwork(nn.Module):
    """Velocity of x `[batch, 2]` at sigma `[batch]`: `depth` layers of `width`, each told the time."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.entry = nn.Linear(2, width)
        self.time = TimeEmbedding(width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.exit = nn.Linear(width, 2)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        time = self.time(sigma)
        h = self.entry(x)
        for layer in self.layers:
            h = h + nn.functional.silu(layer(nn.functional.silu(h + time)))
        return self.exit(h)


class RingAdapter(ModelAdapter):
    """The ring as a model family: latents are points `[2]`, the conditioning is empty but for its shape."""

    family = "ring"
    pipeline_classes = ()

    def __init__(self, width: int, depth: int, weights: Mapping[str, Tensor]) -> None:
        """`weights`: of the network that students and critics start from."""
        super().__init__(Path("ring"), 1, 1)
        self._width, self._depth, self._weights = width, depth, weights

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (2,)

    def initial_noise(self, seed: int) -> Tensor:
        return initial_noise(seed, self.latent_shape)

    def load_transformer(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        network = RingNetwork(self._width, self._depth)
        network.load_state_dict(self._weights)
        return network.to(dtype)

    def load_components(self, dtype: torch.dtype = torch.float32) -> Components:
        return Components(nn.Identity(), None, nn.Identity())

    def encode_prompts(self, components: Components, prompts: Sequence[str]) -> list[Conditioning]:
        return [{"empty": torch.zeros(0)} for _ in prompts]

    def decode(self, components: Components, latents: Tensor) -> Tensor:
        raise ValueError("a point of the ring has no picture")

    def collate(self, conds: Sequence[Conditioning]) -> dict[str, Tensor]:
        return {"empty": torch.zeros(len(conds), 0)}

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        self.check_inputs(x, sigma, len(cond["empty"]))
        return transformer(x, sigma)

    def probe_conditioning(self) -> Conditioning:
        return {"empty": torch.zeros(0)}

    def time_embedding(self, transformer: nn.Module) -> nn.Module:
        return transformer.get_submodule("time")

    def shard_units(self, transformer: nn.Module) -> list[nn.Module]:
        return []

    def idle_parameters(self, transformer: nn.Module) -> dict[str, str]:
        return {}

    def export_pipeline(self, weights: Mapping[str, Tensor], sampling: StudentSampling, directory: Path) -> None:
        raise ValueError("the ring is no pipeline")


def fitted(ring: Ring, width: int, depth: int, steps: int, seed: int) -> tuple[dict[str, Tensor], float]:
    """Weights of a network fitted to the exact velocity, and its root mean square error there.

    Where students and critics start: what a pretrained model is in practice. sigma is uniform in [0, 1).
    """
    exact = ExactVelocity(ring)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = RingNetwork(width, depth)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    points = ring.samples(1 << 16, seed)
    error = 0.0
    for step in range(steps):
        x0 = points[torch.randint(len(points), (512,), generator=generator)]
        sigma = torch.rand(len(x0), generator=generator)
        noise = torch.randn(x0.shape, generator=generator)
        x = (1 - sigma).unsqueeze(1) * x0 + sigma.unsqueeze(1) * noise
        with torch.no_grad():
            target = exact(x, sigma)
        loss = (network(x, sigma) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step >= steps - 20:
            error += loss.item() / 20
    return {name: value.detach().clone() for name, value in network.state_dict().items()}, math.sqrt(error)


@dataclass(frozen=True, slots=True)
class Quality:
    """Samples against the ring. In brackets what true samples give in expectation.

    energy: energy distance 2 E|X - Y| - E|X - X'| - E|Y - Y'| to true samples, unbiased (0, and 0 only for the right
    distribution). on_mode: share within 3 std of a centre (ON_MODE). weights_tv: total variation between the shares of
    the nearest centres and equal shares (about sqrt((modes - 1) / (2 pi n))). spread: median distance to the nearest
    centre over that of a right mode, std sqrt(2 ln 2) (1). modes: centres that have at least half their share within
    3 std (all).
    """

    energy: float
    on_mode: float
    weights_tv: float
    spread: float
    modes: int


ON_MODE = 1 - math.exp(-4.5)  # of a Gaussian of the plane, within three deviations


class Judge:
    """`reference`: true samples `[n, 2]` that the energy distance is measured to."""

    def __init__(self, ring: Ring, reference: Tensor) -> None:
        self.ring, self.reference = ring, reference
        self._own = mean_distance_within(reference)

    def __call__(self, samples: Tensor) -> Quality:
        """`[n, 2]`. ValueError: not finite."""
        if not bool(torch.isfinite(samples).all()):
            raise ValueError("samples of the ring are not finite")
        ring = self.ring
        away, nearest = torch.cdist(samples, ring.centres.to(samples)).min(1)
        shares = torch.bincount(nearest, minlength=ring.modes) / len(samples)
        near = away <= 3 * ring.std
        held = torch.bincount(nearest[near], minlength=ring.modes) / len(samples)
        return Quality(
            energy=energy_distance(samples, self.reference, self._own),
            on_mode=near.float().mean().item(),
            weights_tv=0.5 * (shares - 1 / ring.modes).abs().sum().item(),
            spread=away.median().item() / (ring.std * math.sqrt(2 * math.log(2))),
            modes=int((held >= 0.5 / ring.modes).sum()),
        )


def energy_distance(a: Tensor, b: Tensor, within_b: float | None = None) -> float:
    """Unbiased, from independent samples `[n, d]` and `[m, d]`; `within_b`: `mean_distance_within(b)`, if known."""
    own = mean_distance_within(b) if within_b is None else within_b
    return 2 * _sum_of_distances(a, b) / (len(a) * len(b)) - mean_distance_within(a) - own


def mean_distance_within(a: Tensor) -> float:
    """Mean distance of two different samples of `[n, d]`."""
    itself = sum(torch.cdist(part, part).diagonal().sum(dtype=torch.float64).item() for part in a.split(PIECE))
    return (_sum_of_distances(a, a) - itself) / (len(a) * (len(a) - 1))


def _sum_of_distances(a: Tensor, b: Tensor) -> float:
    """In pieces, so that no matrix of all distances is held."""
    return sum(torch.cdist(part, b).sum(dtype=torch.float64).item() for part in a.split(PIECE))
