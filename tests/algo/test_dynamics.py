"""Where DMD2 goes and how fast: rates, potential, guided fixed points, two time scales, stop steps (5.2 to 5.7).

Expectations are taken exactly, by quadrature over data and noise and a lattice over sigma, so nothing is drawn.
"""

import math
from collections.abc import Callable

import pytest
import torch
from algo_mutations import Algo, assert_caught, assert_each_has_a_mutation, mutation, true_algo
from closed_forms import Gaussian, midpoints, potential, quadrature
from torch import Tensor
from torch.testing import assert_close

Z, NOISE, WEIGHTS = quadrature(6)
NODES = len(Z)


class Expectation:
    """E over z, noise and the score sigma of what `algo` computes; sigmas are `levels` midpoints of its law."""

    def __init__(self, algo: Algo, shift: float = 1.0, levels: int = 60) -> None:
        self.algo = algo
        sigma = algo.sample_score_sigma(midpoints(levels), 0.0, 1.0, shift)
        self.sigma = sigma.repeat_interleave(NODES)
        self.z, self.noise = Z.repeat(levels, 1), NOISE.repeat(levels, 1)
        self.weights = WEIGHTS.repeat(levels) / levels

    def noised(self, x0: Tensor) -> Tensor:
        return self.algo.add_noise(x0, self.noise, self.sigma)

    def x0_of(self, model: Gaussian, x: Tensor) -> Tensor:
        return self.algo.x0_from_velocity(x, model.velocity(x, self.sigma), self.sigma)

    def pull(self, student: Gaussian, critic: Gaussian, x0_real: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """(E gap, E gap z) without the normalizer: what descent subtracts from the student's mean and std."""
        x0 = student.mean + student.std * self.z
        x = self.noised(x0)
        real, fake = x0_real(self.algo.teacher_input(x, self.noise, self.sigma)), self.x0_of(critic, x)
        gap = self.algo.dmd_gradient(x0, real, fake) * self.algo.mean_abs_difference(x0, real)[:, None]
        return float(self.weights @ gap[:, 0]), float(self.weights @ (gap * self.z)[:, 0])


RATES = {
    1.0: (0.5, 0.2146),
    3.0: (0.7208, 0.1755),
    5.0: (0.8017, 0.1409),
    8.0: (0.8602, 0.1084),
    12.0: (0.8989, 0.0831),
}


def check_rates(algo: Algo) -> None:
    """Near the target N(0, 1): dm/dt = -a m, d(r - 1)/dt = -c (r - 1). A large shift learns spread slowly (5.2)."""
    teacher, small = Gaussian(0.0, 1.0), 1e-4
    for shift, (of_mean, of_std) in RATES.items():
        expectation = Expectation(algo, shift, levels=400)

        def real(x: Tensor, expectation: Expectation = expectation) -> Tensor:
            return expectation.x0_of(teacher, x)

        moved, wide = Gaussian(small, 1.0), Gaussian(0.0, 1.0 + small)
        assert math.isclose(expectation.pull(moved, moved, real)[0] / small, of_mean, abs_tol=2e-4), shift
        assert math.isclose(expectation.pull(wide, wide, real)[1] / small, of_std, abs_tol=2e-4), shift


def flow(algo: Algo, start: Gaussian, guided: Callable[[Expectation, Tensor], Tensor], steps: int, lr: float):
    """The student under an exact critic; yields its moments."""
    expectation, m, r = Expectation(algo), start.mean, start.std
    for _ in range(steps):
        student = Gaussian(m, r)
        of_mean, of_std = expectation.pull(student, student, lambda x: guided(expectation, x))
        m, r = m - lr * of_mean, r - lr * of_std
        yield m, r


def check_potential_falls(algo: Algo) -> None:
    """E_sigma (sigma/(1-sigma))^2 KL falls in every step, from far and near, wide and narrow, to zero (5.2)."""
    teacher = Gaussian(0.3, 0.8)
    levels = midpoints(60)

    def value(m: float, r: float) -> float:
        at = (torch.tensor(v, dtype=torch.float64) for v in (m, r))
        m_, r_ = at
        return sum(float(potential(m_, r_, teacher, s)) for s in levels.tolist()) / len(levels)

    for start in (Gaussian(-1.0, 1.6), Gaussian(1.5, 0.1), Gaussian(0.3, 2.0)):
        before, first = value(start.mean, start.std), value(start.mean, start.std)
        for m, r in flow(algo, start, lambda e, x: e.x0_of(teacher, x), steps=60, lr=0.5):
            after = value(m, r)
            assert after < before, (m, r)
            before = after
        assert before < 1e-2 * first


def check_guided_fixed_points(algo: Algo) -> None:
    """m* = mu_u + w (mu_c - mu_u) and r* = tau, reached from afar, for every weight (5.3)."""
    cond, uncond = Gaussian(1.0, 0.7), Gaussian(-0.5, 0.7)
    for w in (0.0, 0.5, 1.0, 2.0, 4.5):

        def guided(expectation: Expectation, x: Tensor, w: float = w) -> Tensor:
            return algo.guide(expectation.x0_of(uncond, x), expectation.x0_of(cond, x), w)

        *_, (m, r) = flow(algo, Gaussian(0.0, 1.2), guided, steps=60, lr=0.9)
        assert math.isclose(m, -0.5 + 1.5 * w, abs_tol=1e-3), w
        assert math.isclose(r, 0.7, abs_tol=5e-3), w


THRESHOLDS = {(0.1, 1): 0.0263, (0.1, 5): 0.1309, (0.3, 5): 0.4185, (0.02, 5): 0.0253}


def sign_changes(algo: Algo, alpha: float, beta: float, steps: int) -> int:
    """Of the student's mean error while it is above 1e-7, critic and student learning their means by SGD (5.6)."""
    expectation, teacher = Expectation(algo, levels=20), Gaussian(0.0, 1.0)
    s = expectation.sigma[::NODES]
    d = (1 - s) ** 2 + s**2
    lr_student, lr_critic = alpha / (s**2 / d).mean().item(), beta / (2 * ((s / d) ** 2).mean().item())
    y, e, changes = 1.0, 1.0, 0
    for _ in range(2000):
        for _ in range(steps * algo.critic_steps // 5):
            mean = torch.tensor(e, dtype=torch.float64, requires_grad=True)
            x0 = y + expectation.z
            x = expectation.noised(x0)
            velocity = Gaussian(mean, 1.0).velocity(x, expectation.sigma)
            loss = algo.critic_loss(velocity, x, expectation.sigma, expectation.noise, x0, reduction="sample")
            (gradient,) = torch.autograd.grad(expectation.weights @ loss, mean)
            e -= lr_critic * gradient.item()
        of_mean, _ = expectation.pull(Gaussian(y, 1.0), Gaussian(e, 1.0), lambda x: expectation.x0_of(teacher, x))
        before, y = y, y - lr_student * of_mean
        changes += before * y < 0
        if max(abs(y), abs(e)) < 1e-7:
            break
    return changes


def check_two_time_scales(algo: Algo) -> None:
    """alpha* = (1 - sqrt q) / (1 + sqrt q), q = (1 - beta)^K: no oscillation below it, oscillation above (5.6)."""
    for (beta, steps), golden in THRESHOLDS.items():
        root = (1 - beta) ** (steps / 2)
        threshold = (1 - root) / (1 + root)
        assert math.isclose(threshold, golden, abs_tol=6e-5)
        assert sign_changes(algo, 0.95 * threshold, beta, steps) == 0, (beta, steps)
        assert sign_changes(algo, 1.05 * threshold, beta, steps) >= 1, (beta, steps)


def stop_steps(algo: Algo, told: bool) -> tuple[Tensor, Tensor]:
    """Means and stds of two stop steps, each N(m_k, r_k^2) as a student of its own, under critics with SGD.

    told: a critic for each step, chosen by `algo.critic_of_step`; else one Gaussian for both.
    """
    expectation, teacher = Expectation(algo, levels=20), Gaussian(0.5, 0.6)
    means, stds = torch.tensor([-1.0, 0.4]).double(), torch.tensor([1.0, 0.3]).double()
    critics = torch.stack([means, stds], 1).clone()
    for _ in range(250):
        for _ in range(algo.critic_steps):
            leaf = critics.clone().requires_grad_()
            losses = []
            for k in range(2):
                mean, std = leaf[algo.critic_of_step(k) if told else 0]
                x0 = means[k] + stds[k] * expectation.z
                x = expectation.noised(x0)
                velocity = Gaussian(mean, std).velocity(x, expectation.sigma)
                loss = algo.critic_loss(velocity, x, expectation.sigma, expectation.noise, x0, reduction="sample")
                losses.append(expectation.weights @ loss)
            (gradient,) = torch.autograd.grad(torch.stack(losses).mean(), leaf)
            critics -= 0.2 * gradient
        pulls = [
            expectation.pull(
                Gaussian(float(means[k]), float(stds[k])),
                Gaussian(*critics[algo.critic_of_step(k) if told else 0].tolist()),
                lambda x: expectation.x0_of(teacher, x),
            )
            for k in range(2)
        ]
        means -= 0.15 * torch.tensor([pull[0] for pull in pulls])
        stds -= 0.15 * torch.tensor([pull[1] for pull in pulls])
    return means, stds


def check_a_shared_critic_matches_the_mixture_only(algo: Algo) -> None:
    """Mean and std of both steps together are the data's; neither step's are (5.7)."""
    means, stds = stop_steps(algo, told=False)
    mixture_std = (stds.square() + means.square()).mean().sub(means.mean() ** 2).sqrt()
    assert math.isclose(means.mean().item(), 0.5, abs_tol=0.02)
    assert math.isclose(mixture_std.item(), 0.6, abs_tol=0.04)
    assert (means - 0.5).abs().min() > 0.15


def check_a_critic_that_is_told_the_step_matches_each(algo: Algo) -> None:
    means, stds = stop_steps(algo, told=True)
    assert_close(means, torch.full((2,), 0.5).double(), rtol=0, atol=0.02)
    assert_close(stds, torch.full((2,), 0.6).double(), rtol=0, atol=0.05)


CHECKS = [
    check_rates,
    check_potential_falls,
    check_guided_fixed_points,
    check_two_time_scales,
    check_a_shared_critic_matches_the_mixture_only,
    check_a_critic_that_is_told_the_step_matches_each,
]
SIGN = {"dmd_gradient": lambda x0, real, fake: -true_algo().dmd_gradient(x0, real, fake)}
NO_1_MINUS_SIGMA = {"add_noise": lambda x0, e, s: x0 + s[:, None] * e}
NOISED_REAL = {"teacher_input": lambda x, e, s: true_algo().add_noise(0.3 + 0.8 * e.flip(0), e, s)}
HALF_LOSS = {"critic_loss": lambda *a, **k: 0.5 * true_algo().critic_loss(*a, **k)}
MUTATIONS = [
    mutation(check_rates, "sign", **SIGN),
    mutation(check_rates, "missing_1_minus_sigma", **NO_1_MINUS_SIGMA),
    mutation(
        check_rates,
        "shift_inverted",
        sample_score_sigma=lambda u, lo, hi, k: true_algo().sample_score_sigma(u, lo, hi, 1 / k),
    ),
    mutation(check_potential_falls, "sign", **SIGN),
    mutation(check_potential_falls, "noised_real_input", **NOISED_REAL),
    mutation(
        check_potential_falls,
        "pulled_to_the_teacher_s_prediction",
        dmd_gradient=lambda x0, real, fake: true_algo().dmd_gradient(x0, real, x0),
    ),
    mutation(check_guided_fixed_points, "offset_convention", guide=lambda u, c, w: c + w * (c - u)),
    mutation(check_guided_fixed_points, "roles_swapped", guide=lambda u, c, w: c + w * (u - c)),
    mutation(check_guided_fixed_points, "unguided", guide=lambda u, c, w: c),
    mutation(check_two_time_scales, "critic_loss_halved", **HALF_LOSS),
    mutation(check_two_time_scales, "one_critic_step_for_five", critic_steps=1),
    mutation(
        check_two_time_scales,
        "student_twice_as_fast",
        dmd_gradient=lambda x0, real, fake: 2 * true_algo().dmd_gradient(x0, real, fake),
    ),
    mutation(check_a_shared_critic_matches_the_mixture_only, "sign", **SIGN),
    mutation(check_a_shared_critic_matches_the_mixture_only, "critic_frozen", critic_steps=0),
    mutation(check_a_critic_that_is_told_the_step_matches_each, "told_nothing", critic_of_step=lambda k: 0),
    mutation(check_a_critic_that_is_told_the_step_matches_each, "critic_frozen", critic_steps=0),
]


@pytest.mark.parametrize("check", CHECKS)
def test_closed_form(check):
    check(true_algo())


@pytest.mark.parametrize(("check", "changes"), MUTATIONS)
def test_mutation_is_caught(check, changes):
    assert_caught(check, changes)


def test_each_check_has_a_mutation():
    assert_each_has_a_mutation(CHECKS, MUTATIONS)
