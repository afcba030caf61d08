"""Sigma laws: golden grids, diffusers' scheduler bit for bit, the shift's group law, score sigma quantiles."""

import math
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
import torch
from algo_mutations import Algo, assert_caught, assert_each_has_a_mutation, mutation, true_algo
from closed_forms import midpoints
from torch.testing import assert_close

GRIDS = {  # (num_steps, shift) -> points before the terminal 0
    (1, 1.0): (1.0,),
    (1, 12.0): (1.0,),
    (2, 3.0): (1.0, 0.75),
    (4, 1.0): (1.0, 0.75, 0.5, 0.25),
    (4, 5.0): (1.0, 0.9375, 0.8333333, 0.625),
    (4, 12.0): (1.0, 0.9729730, 0.9230769, 0.8),  # MiniMax H3
}


def check_grid_golden(algo: Algo) -> None:
    """N forwards, N + 1 points, terminal 0; by hand and by exact fractions (DMD2.md 1.3)."""
    for (num_steps, shift), points in GRIDS.items():
        grid = algo.sigma_grid(num_steps, shift)
        assert grid.shape == (num_steps + 1,)
        assert grid.dtype == torch.float32
        assert grid[-1] == 0
        assert_close(grid[:-1], torch.tensor(points), rtol=0, atol=6e-8)
    for num_steps, shift in ((8, 12), (7, 3), (50, 5)):
        fractions = [Fraction(n, num_steps) for n in range(num_steps, 0, -1)]
        exact = [float(shift * u / (1 + (shift - 1) * u)) for u in fractions]
        grid = algo.sigma_grid(num_steps, float(shift))
        assert_close(grid, torch.tensor([*exact, 0.0]), rtol=3e-7, atol=0)
        assert (grid.diff() < 0).all()


def check_grid_is_the_schedulers(algo: Algo) -> None:
    """Engine, trainer and eval may each build the grid: equal means equal bits (DMD2.md section 4, number 26)."""
    diffusers = pytest.importorskip("diffusers")
    for shift in (1.0, 3.0, 5.0, 12.0, 2.4, 1.15, 0.5):
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
        for num_steps in (1, 2, 3, 4, 5, 8, 50):
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps))
            assert torch.equal(algo.sigma_grid(num_steps, shift), scheduler.sigmas)


def check_shift_group(algo: Algo) -> None:
    """shift_a of shift_b is shift_ab, 1/a is the inverse, 0, 1 and the order stay; 12 un-shifted by 2.4 is 5."""
    u = torch.linspace(0, 1, 101, dtype=torch.float64)
    for a in (0.5, 1.0, 3.0, 12.0):
        shifted = algo.shift_sigma(u, a)
        expected = torch.tensor([a * v / (a * v + 1 - v) for v in u.tolist()], dtype=torch.float64)
        assert_close(shifted, expected, rtol=0, atol=1e-14)
        assert_close(algo.shift_sigma(shifted, 1 / a), u, rtol=0, atol=1e-14)
        assert_close(algo.shift_sigma(shifted, 5.0), algo.shift_sigma(u, 5.0 * a), rtol=0, atol=1e-14)
        assert shifted[0] == 0
        assert abs(shifted[-1] - 1) < 1e-15
        assert (shifted.diff() > 0).all()
    assert torch.equal(algo.shift_sigma(u.float(), 1.0), u.float())
    assert_close(algo.shift_sigma(algo.shift_sigma(u, 12.0), 1 / 2.4), algo.shift_sigma(u, 5.0), rtol=0, atol=1e-14)


SCORE_LAWS = [
    (0.02, 0.98, 1.0),
    (0.02, 0.98, 5.0),
    (0.001, 0.999, 5.0),
    (0.02, 0.98, 12.0),
    (0.02, 0.98, 0.4),
    (0, 1, 8.0),
]


def score_cdf(sigma: float, lo: float, hi: float, shift: float) -> float:
    """P(score sigma <= sigma): 0 below lo, 1 from hi on, and in between the un-shifted place in [lo, hi]."""
    if sigma < lo or sigma >= hi:
        return float(sigma >= hi)
    u = sigma / (sigma + shift * (1 - sigma))
    return min(max((u - lo) / (hi - lo), 0.0), 1.0)


def check_score_sigma_quantiles(algo: Algo) -> None:
    """The whole distribution, with the masses that the clamp puts on the ends (DMD2.md 1.8)."""
    draws = 20000
    for lo, hi, shift in SCORE_LAWS:
        sigma = algo.sample_score_sigma(midpoints(draws), lo, hi, shift)
        assert sigma.shape == (draws,)
        assert lo <= sigma.min()
        assert sigma.max() <= hi
        for level in [*np.linspace(0.0, 1.0, 41).tolist(), lo, hi - 1e-9, hi]:
            assert abs((sigma <= level).double().mean().item() - score_cdf(level, lo, hi, shift)) < 1.5 / draws, level
    at_hi = (algo.sample_score_sigma(midpoints(draws), 0.02, 0.98, 12.0) == 0.98).double().mean().item()
    assert math.isclose(at_hi, 1 - (0.98 / (12 - 11 * 0.98) - 0.02) / 0.96, abs_tol=1e-4)  # .1839


def check_logit_normal_quantiles(algo: Algo) -> None:
    """P(sigma <= level) = Phi((logit(place) - mean) / std), place the un-shifted level in [lo, hi] (SD3, eq. 19)."""
    draws = 20000
    for lo, hi, shift in SCORE_LAWS:
        for mean, std in ((0.0, 1.0), (-0.8, 1.2), (0.5, 0.4)):
            sigma = algo.sample_score_sigma(
                midpoints(draws), lo, hi, shift, law="logit_normal", logit_mean=mean, logit_std=std
            )
            for level in np.linspace(0.01, 0.99, 25).tolist():
                place = score_cdf(level, lo, hi, shift)
                expected = place
                if 0 < place < 1:
                    expected = NormalDist(mean, std).cdf(math.log(place / (1 - place)))
                assert abs((sigma <= level).double().mean().item() - expected) < 1.5 / draws, (level, mean)


def shifted(u, k):
    return k * u / (1 + (k - 1) * u)


def linspace_grid(points, shift):
    return torch.cat([shifted(torch.tensor(points, dtype=torch.float32), shift), torch.zeros(1)])


CHECKS = [
    check_grid_golden,
    check_grid_is_the_schedulers,
    check_shift_group,
    check_score_sigma_quantiles,
    check_logit_normal_quantiles,
]
MUTATIONS = [
    mutation(check_grid_golden, "terminal_missing", sigma_grid=lambda n, k: true_algo().sigma_grid(n, k)[:-1]),
    mutation(check_grid_golden, "points_for_forwards", sigma_grid=lambda n, k: shifted(torch.linspace(1, 0, n), k)),
    mutation(check_grid_golden, "shift_inverted", sigma_grid=lambda n, k: true_algo().sigma_grid(n, 1 / k)),
    mutation(check_grid_golden, "shift_forgotten", sigma_grid=lambda n, k: true_algo().sigma_grid(n, 1.0)),
    mutation(check_grid_golden, "shift_twice", sigma_grid=lambda n, k: true_algo().sigma_grid(n, k * k)),
    mutation(check_grid_golden, "ascending", sigma_grid=lambda n, k: true_algo().sigma_grid(n, k).flip(0)),
    mutation(
        check_grid_golden, "starts_at_999", sigma_grid=lambda n, k: linspace_grid(np.linspace(0.999, 1 / n, n), k)
    ),
    mutation(
        check_grid_golden,
        "integer_clock",
        sigma_grid=lambda n, k: (true_algo().sigma_grid(n, k) * 1000).round() / 1000,
    ),
    mutation(
        check_grid_is_the_schedulers,
        "shifted_in_fp64",
        sigma_grid=lambda n, k: torch.cat([shifted(torch.tensor(np.linspace(1, 1 / n, n)), k).float(), torch.zeros(1)]),
    ),
    mutation(check_shift_group, "inverted", shift_sigma=lambda u, k: shifted(u, 1 / k)),
    mutation(check_shift_group, "exponential", shift_sigma=lambda u, k: shifted(u, math.exp(k))),
    mutation(check_shift_group, "linear", shift_sigma=lambda u, k: (k * u).clamp(max=1)),
    mutation(
        check_logit_normal_quantiles,
        "uniform",
        sample_score_sigma=lambda *a, law, logit_mean, logit_std: true_algo().sample_score_sigma(*a),
    ),
    mutation(
        check_logit_normal_quantiles,
        "mean_and_std_forgotten",
        sample_score_sigma=lambda *a, law, logit_mean, logit_std: true_algo().sample_score_sigma(*a, law=law),
    ),
    mutation(
        check_logit_normal_quantiles,
        "mean_with_the_other_sign",
        sample_score_sigma=lambda *a, logit_mean, **k: true_algo().sample_score_sigma(*a, logit_mean=-logit_mean, **k),
    ),
    mutation(
        check_logit_normal_quantiles,
        "shift_inside_the_sigmoid_only",
        sample_score_sigma=lambda u, lo, hi, k, **law: true_algo().sample_score_sigma(u, lo, hi, 1.0, **law),
    ),
    mutation(
        check_score_sigma_quantiles, "clamp_missing", sample_score_sigma=lambda u, a, b, k: shifted(a + (b - a) * u, k)
    ),
    mutation(
        check_score_sigma_quantiles,
        "shift_then_rescale",
        sample_score_sigma=lambda u, a, b, k: a + (b - a) * shifted(u, k),
    ),
    mutation(
        check_score_sigma_quantiles, "not_rescaled", sample_score_sigma=lambda u, a, b, k: shifted(u, k).clamp(a, b)
    ),
    mutation(
        check_score_sigma_quantiles,
        "shift_inverted",
        sample_score_sigma=lambda u, a, b, k: shifted(a + (b - a) * u, 1 / k).clamp(a, b),
    ),
    mutation(
        check_score_sigma_quantiles,
        "clamped_before_the_shift",
        sample_score_sigma=lambda u, a, b, k: shifted((a + (b - a) * u).clamp(a, b), k),
    ),
    mutation(
        check_score_sigma_quantiles,
        "thousandths",
        sample_score_sigma=lambda u, a, b, k: (true_algo().sample_score_sigma(u, a, b, k) * 1000).round() / 1000,
    ),
]


@pytest.mark.parametrize("check", CHECKS)
def test_closed_form(check):
    check(true_algo())


@pytest.mark.parametrize(("check", "changes"), MUTATIONS)
def test_mutation_is_caught(check, changes):
    assert_caught(check, changes)


def test_each_check_has_a_mutation():
    assert_each_has_a_mutation(CHECKS, MUTATIONS)


def test_a_rounded_base_grid_is_another_grid():
    """FastH3's 999/749/500/250 through shift 12 is 1.4e-4 off ours: why a sample carries the grid that was used."""
    base = torch.tensor([0.999, 0.749, 0.5, 0.25], dtype=torch.float64)
    difference = (true_algo().shift_sigma(base, 12.0) - true_algo().sigma_grid(4, 12.0)[:-1]).abs()
    assert math.isclose(difference.max().item(), 1.404e-4, abs_tol=1e-7)


def test_fractional_shifts_may_end_a_bit_above_1():
    """Known and allowed, because the bits are the scheduler's: the rest of `algo` accepts such a sigma."""
    algo, noise = true_algo(), torch.ones(1, 3)
    tops = [algo.sigma_grid(1, k / 100) for k in range(1, 2000)]
    assert max(grid[0] for grid in tops) > 1
    for grid in tops:
        algo.rollout(lambda x, sigma: x, noise, grid, 0)
