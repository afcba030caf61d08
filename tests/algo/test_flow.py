"""Parameterization: x_sigma, x0, noise and velocity are one triangle; the score of known data; guidance."""

import pytest
import torch
from algo_mutations import Algo, assert_caught, assert_each_has_a_mutation, mutation, true_algo
from closed_forms import Gaussian, Mixture, per_sample, rand, randn
from torch.testing import assert_close

SHAPES = [(5,), (4, 4), (3, 2, 5), (2, 3, 2, 4, 3)]


def check_triangle(algo: Algo) -> None:
    """Each corner from absolute formulas, sample by sample: a round trip would pass with a wrong pair."""
    for seed, shape in enumerate(SHAPES):
        x0, noise, sigma = (
            randn(*shape, seed=seed),
            randn(*shape, seed=seed + 100),
            0.05 + 0.9 * rand(shape[0], seed=seed),
        )
        x = torch.stack([(1 - s) * a + s * b for s, a, b in zip(sigma.tolist(), x0, noise, strict=True)])
        velocity = noise - x0
        assert_close(algo.add_noise(x0, noise, sigma), x, rtol=0, atol=1e-14)
        assert_close(algo.x0_from_velocity(x, velocity, sigma), x0, rtol=0, atol=1e-14)
        assert_close(algo.noise_from_velocity(x, velocity, sigma), noise, rtol=0, atol=1e-14)
        assert_close(algo.velocity_from_x0(x, x0, sigma), velocity, rtol=0, atol=1e-13)


def check_ends(algo: Algo) -> None:
    """sigma 0 is the data and sigma 1 the noise, bitwise, in fp32 too."""
    x0, noise = randn(4, 3, dtype=torch.float32), randn(4, 3, seed=1, dtype=torch.float32)
    assert torch.equal(algo.add_noise(x0, noise, torch.zeros(4)), x0)
    assert torch.equal(algo.add_noise(x0, noise, torch.ones(4)), noise)
    assert torch.equal(algo.x0_from_velocity(x0, noise, torch.zeros(4)), x0)
    assert torch.equal(algo.noise_from_velocity(noise, x0, torch.ones(4)), noise)


def check_gaussian_score(algo: Algo) -> None:
    """score = -(x - (1 - s) mean) / D, and E[x0 | x] = (x + s^2 score) / (1 - s), E[noise | x] = -s score (5.1)."""
    data, sigma, x = Gaussian(0.3, 1.6), torch.linspace(0.1, 0.9, 9, dtype=torch.float64), randn(9, 50)
    s = per_sample(sigma, x)
    score = -(x - (1 - s) * data.mean) / data.noised_variance(s)
    velocity = (s - (1 - s) * data.std**2) / data.noised_variance(s) * (x - (1 - s) * data.mean) - data.mean
    assert_close(algo.x0_from_velocity(x, velocity, sigma), (x + s**2 * score) / (1 - s), rtol=0, atol=1e-12)
    assert_close(algo.noise_from_velocity(x, velocity, sigma), -s * score, rtol=0, atol=1e-12)
    assert_close(algo.velocity_from_x0(x, data.x0(x, sigma), sigma), velocity, rtol=0, atol=1e-12)


MIXTURE = Mixture(
    torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
    torch.tensor([[2.0, 0.0], [-1.0, 1.0], [0.0, -2.0]], dtype=torch.float64),
    0.4,
)
MIXTURE_X0 = {0.1: (0.412501, -0.209398), 0.5: (1.111973, -0.258756), 0.9: (0.769517, -0.133889)}


def check_mixture(algo: Algo) -> None:
    """Three Gaussians in the plane, seen at x = (.3, -.2): golden posterior means (5.8)."""
    x = torch.tensor([0.3, -0.2], dtype=torch.float64)
    for sigma, golden in MIXTURE_X0.items():
        s, velocity = torch.tensor([sigma], dtype=torch.float64), MIXTURE.velocity(x, sigma)
        x0 = algo.x0_from_velocity(x[None], velocity[None], s)[0]
        assert_close(x0, torch.tensor(golden, dtype=torch.float64), rtol=0, atol=6e-7)
        assert_close(algo.velocity_from_x0(x[None], x0[None], s)[0], velocity, rtol=0, atol=1e-12)


def check_guidance(algo: Algo) -> None:
    """Standard convention, the same in x0, velocity and noise; scale 1 is cond bitwise, scale 0 is uncond (1.6)."""
    x, uncond, cond = randn(3, 7), randn(3, 7, seed=1), randn(3, 7, seed=2)
    sigma = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    guided = algo.guide(uncond, cond, 4.0)
    assert_close(guided, uncond + 4.0 * (cond - uncond), rtol=0, atol=1e-13)
    assert_close(guided, cond + 3.0 * (cond - uncond), rtol=0, atol=1e-13)
    assert torch.equal(algo.guide(uncond, cond, 1.0), cond)
    assert_close(algo.guide(uncond, cond, 0.0), uncond, rtol=0, atol=1e-13)
    for convert in (algo.x0_from_velocity, algo.noise_from_velocity):
        other = algo.guide(convert(x, uncond, sigma), convert(x, cond, sigma), 4.0)
        assert_close(other, convert(x, guided, sigma), rtol=0, atol=1e-13)


def check_precision(algo: Algo) -> None:
    """bf16 latents come in, fp32 arithmetic goes on: no error beyond that of the inputs, and sigma is never rounded."""
    x0, velocity = 0.5 * randn(16, 512), randn(16, 512, seed=1)
    sigma = torch.full((16,), 36 / 37, dtype=torch.float32)
    x, v = (x0 + 0.9 * velocity).bfloat16(), velocity.bfloat16()
    exact = x.double() - sigma.double()[:, None] * v.double()
    converted = algo.x0_from_velocity(x, v, sigma)
    assert converted.dtype == torch.float32
    assert (converted - exact).abs().mean() < 1e-7
    assert algo.x0_from_velocity(x, v.double(), sigma).dtype == torch.float64
    assert algo.add_noise(x, v, sigma.double()).dtype == torch.float64
    for function in (algo.add_noise, algo.noise_from_velocity, algo.velocity_from_x0):
        assert function(x, v, sigma).dtype == torch.float32


CHECKS = [check_triangle, check_ends, check_gaussian_score, check_mixture, check_guidance, check_precision]


def s_(sigma, like):
    return per_sample(sigma.to(like.dtype), like)


MUTATIONS = [
    mutation(check_triangle, "add_noise_swapped", add_noise=lambda x0, e, s: s_(s, x0) * x0 + (1 - s_(s, x0)) * e),
    mutation(check_triangle, "add_noise_misses_1_minus_sigma", add_noise=lambda x0, e, s: x0 + s_(s, x0) * e),
    mutation(
        check_triangle,
        "add_noise_variance_preserving",
        add_noise=lambda x0, e, s: (1 - s_(s, x0) ** 2).sqrt() * x0 + s_(s, x0) * e,
    ),
    mutation(
        check_triangle,
        "sigma_over_the_last_dimension",
        add_noise=lambda x0, e, s: (1 - s) * x0 + s * e if x0.shape[-1] == len(s) else true_algo().add_noise(x0, e, s),
    ),
    mutation(
        check_triangle,
        "one_sigma_for_the_batch",
        add_noise=lambda x0, e, s: true_algo().add_noise(x0, e, s[:1].expand(len(s))),
    ),
    mutation(check_triangle, "velocity_data_ward", x0_from_velocity=lambda x, v, s: x + s_(s, x) * v),
    mutation(
        check_triangle, "x0_by_the_noise_formula", x0_from_velocity=lambda x, v, s: (x - s_(s, x) * v) / (1 - s_(s, x))
    ),
    mutation(check_triangle, "noise_misses_1_minus_sigma", noise_from_velocity=lambda x, v, s: x + v),
    mutation(check_triangle, "noise_by_the_x0_formula", noise_from_velocity=lambda x, v, s: x - s_(s, x) * v),
    mutation(check_triangle, "velocity_sign", velocity_from_x0=lambda x, x0, s: (x0 - x) / s_(s, x)),
    mutation(check_triangle, "velocity_undivided", velocity_from_x0=lambda x, x0, s: x - x0),
    mutation(
        check_ends, "sigma_clipped", add_noise=lambda x0, e, s: true_algo().add_noise(x0, e, s.clamp(1e-3, 0.999))
    ),
    mutation(check_ends, "x0_plus_eps", x0_from_velocity=lambda x, v, s: x - (s_(s, x) + 1e-5) * v),
    mutation(check_gaussian_score, "velocity_data_ward", x0_from_velocity=lambda x, v, s: x + s_(s, x) * v),
    mutation(check_gaussian_score, "noise_misses_1_minus_sigma", noise_from_velocity=lambda x, v, s: x + v),
    mutation(check_gaussian_score, "velocity_sign", velocity_from_x0=lambda x, x0, s: (x0 - x) / s_(s, x)),
    mutation(
        check_mixture, "x0_by_the_noise_formula", x0_from_velocity=lambda x, v, s: (x - s_(s, x) * v) / (1 - s_(s, x))
    ),
    mutation(check_mixture, "velocity_data_ward", x0_from_velocity=lambda x, v, s: x + s_(s, x) * v),
    mutation(check_guidance, "offset_convention", guide=lambda u, c, w: c + w * (c - u)),
    mutation(check_guidance, "swapped", guide=lambda u, c, w: c + w * (u - c)),
    mutation(check_guidance, "scale_1_only_nearly", guide=lambda u, c, w: u + w * (c - u)),
    mutation(
        check_guidance, "renormalised", guide=lambda u, c, w: (u + w * (c - u)) * c.norm() / (u + w * (c - u)).norm()
    ),
    mutation(
        check_precision,
        "in_bf16",
        x0_from_velocity=lambda x, v, s: (x - s.to(x.dtype)[:, None] * v.to(x.dtype)).float(),
    ),
    mutation(
        check_precision,
        "sigma_in_bf16",
        x0_from_velocity=lambda x, v, s: true_algo().x0_from_velocity(x, v, s.bfloat16().float()),
    ),
    mutation(check_precision, "always_fp32", add_noise=lambda x0, e, s: true_algo().add_noise(x0, e, s).float()),
]


@pytest.mark.parametrize("check", CHECKS)
def test_closed_form(check):
    check(true_algo())


@pytest.mark.parametrize(("check", "changes"), MUTATIONS)
def test_mutation_is_caught(check, changes):
    assert_caught(check, changes)


def test_each_check_has_a_mutation():
    assert_each_has_a_mutation(CHECKS, MUTATIONS)


def test_bf16_arithmetic_would_cost_what_the_notes_say():
    """About 1e-3 in bf16 arithmetic, the last bit in fp32 (5.10): why the arithmetic is fp32."""
    x0, noise = 0.5 * randn(64, 4096), randn(64, 4096, seed=1)
    for sigma, error in ((0.1, 8e-4), (0.9, 2.3e-3)):
        x, v = (1 - sigma) * x0 + sigma * noise, noise - x0
        in_bf16 = x.bfloat16() - torch.tensor(sigma).bfloat16() * v.bfloat16()
        assert 0.5 * error < (in_bf16 - x0).abs().mean() < 2 * error
        in_fp32 = true_algo().x0_from_velocity(x.float(), v.float(), torch.full((64,), sigma))
        assert (in_fp32 - x0).abs().mean() < 1e-7
