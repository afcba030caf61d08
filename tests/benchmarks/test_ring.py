"""The ring's teacher and its measures, against numbers that are known without them."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.ring import ON_MODE, ExactVelocity, Judge, Ring, energy_distance, fitted, mean_distance_within
from tests.algo.closed_forms import Mixture

RING = Ring()
REFERENCE = RING.samples(4096, seed=1)


def test_coordinates_of_the_ring_have_unit_variance() -> None:
    """radius^2 / 2 + std^2 = 0.98 + 0.0196; the fourth moment bounds what 65536 samples leave open at 0.01."""
    assert RING.samples(65536, seed=3).var(0).tolist() == pytest.approx([0.9996, 0.9996], abs=0.01)


@pytest.mark.parametrize("sigma", [0.0, 0.02, 0.3, 0.7, 1.0])
def test_the_exact_teacher_is_the_mixtures_velocity(sigma: float) -> None:
    """Against the tests' own mixture, written one point at a time."""
    mixture = Mixture(torch.full((8,), 1 / 8, dtype=torch.float64), RING.centres, RING.std)
    points = (1 - sigma) * RING.samples(5, seed=4).double() + sigma * torch.tensor([0.3, -0.8], dtype=torch.float64)
    found = ExactVelocity(RING, torch.float64)(points, torch.full((5,), sigma))
    expected = torch.stack([mixture.velocity(point, sigma) for point in points])
    assert torch.allclose(found, expected, atol=1e-6 if sigma in (0.3, 0.7) else 1e-7)  # sigma comes in fp32


def test_energy_distance_of_two_points_each_by_hand() -> None:
    """E|X - Y| = (0 + 10 + 5 + 5) / 4 = 5, within a 5, within b 10: 2 x 5 - 5 - 10."""
    a, b = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.0, 0.0], [6.0, 8.0]])
    assert mean_distance_within(a) == pytest.approx(5)
    assert energy_distance(a, b) == pytest.approx(-5)


def test_energy_distance_of_two_gaussians() -> None:
    """In the plane E|N(0, c^2 I)| = c sqrt(pi / 2), so that of std 1 and 2 is sqrt(pi) (sqrt(10) - 3) = 0.28763."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(6000, 2, generator=generator), 2 * torch.randn(6000, 2, generator=generator)
    assert energy_distance(a, b) == pytest.approx(math.sqrt(math.pi) * (math.sqrt(10) - 3), abs=0.02)


def test_energy_distance_is_unbiased() -> None:
    """Without the n / (n - 1) of distances within, 40 points of the ring would be 0.09 from the ring on average."""
    found = [energy_distance(RING.samples(40, 100 + i), RING.samples(40, 500 + i)) for i in range(200)]
    assert abs(sum(found) / len(found)) < 0.01


def around(distance: float, count: int = 64) -> torch.Tensor:
    """`count` points at this distance from each centre, in all directions."""
    angles = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
    circle = distance * torch.stack([angles.cos(), angles.sin()], dim=1)
    return (RING.centres.unsqueeze(1) + circle).flatten(0, 1).float()


def test_figures_of_points_at_a_known_distance() -> None:
    judge = Judge(RING, REFERENCE)
    median = judge(around(RING.std * math.sqrt(2 * math.log(2))))
    assert median.spread == pytest.approx(1, abs=1e-4)
    assert (median.on_mode, median.weights_tv, median.modes) == (1.0, 0.0, 8)
    assert judge(around(2.99 * RING.std)).on_mode == 1.0
    outside = judge(around(3.01 * RING.std))
    assert (outside.on_mode, outside.modes) == (0.0, 0)


def test_figures_of_a_student_that_lost_modes() -> None:
    """All at one centre: 7/8 of the mass should be elsewhere. At two, 3 to 1: (5/8 + 1/8 + 6/8) / 2 = 6/8."""
    judge, centres = Judge(RING, REFERENCE), RING.centres.float()
    one = judge(centres[:1].expand(80, 2))
    assert (one.modes, one.weights_tv, one.spread) == (1, pytest.approx(7 / 8), 0.0)
    two = judge(torch.cat([centres[:1].expand(60, 2), centres[4:5].expand(20, 2)]))
    assert (two.modes, two.weights_tv) == (2, pytest.approx(6 / 8))
    assert one.energy > two.energy > 0.5


def test_true_samples_are_at_the_zero_of_every_figure() -> None:
    """Within five deviations of 4096 samples: a share's is sqrt(p (1 - p) / n)."""
    found = Judge(RING, REFERENCE)(RING.samples(4096, seed=2))
    assert found.on_mode == pytest.approx(ON_MODE, abs=5 * math.sqrt(ON_MODE * (1 - ON_MODE) / 4096))
    assert found.spread == pytest.approx(1, abs=0.05)
    assert abs(found.energy) < 0.002
    assert found.weights_tv < 0.04
    assert found.modes == 8


def test_samples_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        Judge(RING, REFERENCE)(torch.tensor([[math.nan, 0.0]]))


def test_the_start_is_fitted_to_the_teacher_and_depends_on_the_seed_alone() -> None:
    """A network that says 0 is off by the velocity's own root mean square, 0.80: twenty steps are no better."""
    weights, error = fitted(RING, 32, 2, 600, seed=0)
    again, unfitted = fitted(RING, 32, 2, 20, seed=0)
    same, _ = fitted(RING, 32, 2, 20, seed=0)
    other, _ = fitted(RING, 32, 2, 20, seed=1)
    assert all(torch.equal(value, same[name]) for name, value in again.items())
    assert not torch.equal(again["entry.weight"], other["entry.weight"])
    assert weights.keys() == again.keys()
    assert error < 0.4 < 0.7 < unfitted
