"""The DMD gradient, the student's and the critic's loss, against sums written out and known distributions."""

import math

import pytest
import torch
from algo_mutations import Algo, assert_caught, assert_each_has_a_mutation, mutation, true_algo
from closed_forms import Gaussian, gap_moments, midpoints, normal_lattice, potential, quadrature, rand, randn
from torch.testing import assert_close

SPACES = ("velocity", "x0", "eps")


def latents(seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Student's, teacher's and critic's x0, samples of different magnitude."""
    scale = torch.tensor([0.1, 1.0, 3.0, 10.0], dtype=dtype).view(4, 1, 1, 1)
    return tuple(scale * randn(4, 3, 2, 5, seed=seed + i, dtype=dtype) for i in range(3))  # type: ignore[return-value]


def check_gradient(algo: Algo) -> None:
    """(x0_fake - x0_real) / mean |x0 - x0_real|, one mean per sample, element by element; detached."""
    x0, real, fake = latents(0)
    gradient = algo.dmd_gradient(x0.requires_grad_(), real, fake)
    assert not gradient.requires_grad
    for got, g, r, f in zip(gradient, x0.detach(), real, fake, strict=True):
        pairs = list(zip(g.flatten().tolist(), r.flatten().tolist(), strict=True))
        normalizer = sum(abs(a - b) for a, b in pairs) / len(pairs)
        expected = [(a - b) / normalizer for a, b in zip(f.flatten().tolist(), r.flatten().tolist(), strict=True)]
        assert_close(got.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def check_given_normalizer(algo: Algo) -> None:
    """One number for the batch, or one per sample, in the place of the samples' own; eps is its floor."""
    x0, real, fake = latents(12)
    of_each = (x0 - real).abs().flatten(1).mean(1)
    one = of_each.mean()
    for normalizer, divisor in ((one, one.expand(4)), (of_each.flip(0), of_each.flip(0)), (one * 0, torch.ones(4))):
        gradient = algo.dmd_gradient(x0, real, fake, eps=1.0, normalizer=normalizer)
        assert_close(gradient, (fake - real) / divisor.clamp(min=1.0).view(4, 1, 1, 1), rtol=1e-12, atol=0)
    assert torch.equal(algo.dmd_gradient(x0, real, fake, normalizer=of_each), algo.dmd_gradient(x0, real, fake))


def check_gradient_invariances(algo: Algo) -> None:
    """Scale-free (bitwise for a power of two), blind to a common constant, additive over micro-batches (5.10)."""
    x0, real, fake = latents(3, torch.float32)
    gradient = algo.dmd_gradient(x0, real, fake)
    assert torch.equal(algo.dmd_gradient(8 * x0, 8 * real, 8 * fake), gradient)
    shifted = algo.dmd_gradient(x0.double() + 5, real.double() + 5, fake.double() + 5)
    assert_close(shifted, algo.dmd_gradient(x0.double(), real.double(), fake.double()), rtol=0, atol=1e-13)
    for size in (1, 2):
        parts = [
            algo.dmd_gradient(*part) for part in zip(x0.split(size), real.split(size), fake.split(size), strict=True)
        ]
        assert torch.equal(torch.cat(parts), gradient)


def check_degenerate_samples(algo: Algo) -> None:
    """x0 == x0_real: no gap gives 0, a gap is finite, the others do not notice, NaN is not hidden (1.5, 4 no. 20)."""
    x0, real, fake = latents(6)
    expected = algo.dmd_gradient(x0, real, fake)
    real[0], fake[0] = x0[0], x0[0]
    real[1] = x0[1] - 5e-7
    fake[1] = real[1] + 1e-3
    gradient = algo.dmd_gradient(x0, real, fake)
    assert torch.equal(gradient[0], torch.zeros_like(gradient[0]))
    assert_close(gradient[1], torch.full_like(gradient[1], 1e-3 / 1e-6), rtol=1e-6, atol=0)
    assert torch.equal(gradient[2:], expected[2:])
    assert (algo.mean_abs_difference(x0, real) < 1e-6).tolist() == [True, True, False, False]
    fake[3, 0, 0, 0] = math.nan
    assert algo.dmd_gradient(x0, real, fake)[3].isnan().any()
    assert torch.equal(algo.dmd_gradient(x0, real, fake)[2], expected[2])


def score(algo: Algo, x0, noise, sigma, teacher, critic):
    """What the trainers do: both networks see the same noised *student* sample. Returns (x0_real, x0_fake)."""
    x = algo.add_noise(x0, noise, sigma)
    x_teacher = algo.teacher_input(x, noise, sigma)
    real = algo.x0_from_velocity(x_teacher, teacher.velocity(x_teacher, sigma), sigma)
    return real, algo.x0_from_velocity(x, critic.velocity(x, sigma), sigma)


def check_critic_equal_to_teacher(algo: Algo) -> None:
    """A critic that is the teacher gives gap, loss and student gradient of exactly zero, in fp32 (5.5)."""
    teacher = Gaussian(0.3, 0.7)
    parameter = torch.tensor(1.7, requires_grad=True)
    noise, sigma = randn(6, 40, dtype=torch.float32), torch.linspace(0.02, 0.98, 6)
    x0 = parameter * randn(6, 40, seed=1, dtype=torch.float32) - 0.5
    real, fake = score(algo, x0.detach(), noise, sigma, teacher, teacher)
    gradient = algo.dmd_gradient(x0, algo.guide(real + 1, real, 1.0), fake)
    loss = algo.student_loss(x0, gradient)
    loss.backward()
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert loss.item() == 0
    assert parameter.grad is not None
    assert parameter.grad.item() == 0


def check_guided_gap_is_pure_augmentation(algo: Algo) -> None:
    """Critic == conditional teacher, scale w: gradient = -(w - 1) (x0_cond - x0_uncond) / N (1.6, 5.5)."""
    x0, cond, uncond = latents(9)
    guided = uncond + 4.5 * (cond - uncond)
    gradient = algo.dmd_gradient(x0, algo.guide(uncond, cond, 4.5), cond)
    normalizer = (x0 - guided).abs().mean((1, 2, 3), keepdim=True)
    assert_close(gradient, -3.5 * (cond - uncond) / normalizer, rtol=1e-10, atol=1e-12)


def check_student_loss(algo: Algo) -> None:
    """L = mean gradient^2 / 2 and dL/dx0 = gradient / numel; "sample" gives the micro-batches of the same step."""
    x0, gradient = randn(4, 3, 7).requires_grad_(), randn(4, 3, 7, seed=1).requires_grad_()
    loss = algo.student_loss(x0, gradient)
    loss.backward()
    assert_close(loss.item(), sum(value**2 for value in gradient.flatten().tolist()) / 2 / 84, rtol=1e-14, atol=0)
    assert_close(x0.grad, gradient.detach() / 84, rtol=1e-14, atol=0)
    assert gradient.grad is None
    whole, x0.grad = x0.grad, None
    for rows in (slice(0, 1), slice(1, 4)):
        (algo.student_loss(x0[rows], gradient[rows], reduction="sample").sum() / 4).backward()
    assert_close(x0.grad, whole, rtol=1e-14, atol=0)
    assert_close(algo.student_loss(x0, gradient, reduction="sample").mean(), loss, rtol=1e-14, atol=0)


def check_student_loss_keeps_small_gradients(algo: Algo) -> None:
    """fp32: 1e-5 beside latents of 1000 is below half a unit of the last place, and still arrives."""
    x0 = (1000 + randn(2, 8, dtype=torch.float32)).requires_grad_()
    gradient = 1e-5 * randn(2, 8, seed=1, dtype=torch.float32)
    algo.student_loss(x0, gradient).backward()
    assert_close(x0.grad, gradient / 16, rtol=1e-6, atol=0)


def check_critic_spaces(algo: Algo) -> None:
    """L_x0 = sigma^2 L_v and L_eps = (1 - sigma)^2 L_v per sample, L_v written out; only velocity has a gradient."""
    x0, noise, velocity = (randn(5, 3, 4, seed=seed).requires_grad_() for seed in range(3))
    sigma = torch.tensor([0.0, 0.2, 0.5, 0.9, 1.0], dtype=torch.float64)
    x = algo.add_noise(x0, noise, sigma)
    rows = zip(velocity.flatten(1).tolist(), noise.flatten(1).tolist(), x0.flatten(1).tolist(), strict=True)
    l_v = torch.tensor(
        [sum((v - (e - d)) ** 2 for v, e, d in zip(*row, strict=True)) / 12 for row in rows], dtype=torch.float64
    )
    weights = {"velocity": torch.ones_like(sigma), "x0": sigma**2, "eps": (1 - sigma) ** 2}
    for space in SPACES:
        per_sample = algo.critic_loss(velocity, x, sigma, noise, x0, space=space, reduction="sample")
        assert_close(per_sample, weights[space] * l_v, rtol=1e-12, atol=1e-14)
        mean = algo.critic_loss(velocity, x, sigma, noise, x0, space=space)
        assert_close(mean, per_sample.mean(), rtol=1e-14, atol=0)
        gradients = torch.autograd.grad(mean, [velocity, noise, x0], allow_unused=True)
        error = (velocity - (noise - x0)).detach() * weights[space].view(-1, 1, 1)
        assert_close(gradients[0], 2 * error / 60, rtol=1e-12, atol=1e-14)
        assert gradients[1:] == (None, None)
    assert_close(algo.critic_loss(velocity, x, sigma, noise, x0), l_v.mean(), rtol=1e-12, atol=0)
    assert_close(algo.flow_matching_loss(velocity, noise, x0), l_v.mean(), rtol=1e-12, atol=0)


def critic_loss_expectation(algo: Algo, data: Gaussian, critic: Gaussian, sigma: float, space: str) -> float:
    """E[loss] exactly: the nodes of a quadrature are the samples of a batch."""
    z, noise, weights = quadrature()
    x0, sigmas = data.mean + data.std * z, torch.full((len(z),), sigma, dtype=torch.float64)
    x = algo.add_noise(x0, noise, sigmas)
    loss = algo.critic_loss(critic.velocity(x, sigmas), x, sigmas, noise, x0, space=space, reduction="sample")
    return float(weights @ loss)


def check_loss_floors(algo: Algo) -> None:
    """The best critic of Gaussian data leaves std^2/D, by sigma^2 or (1 - sigma)^2; any other leaves more (5.1)."""
    for std in (0.5, 1.0, 2.0):
        data = Gaussian(0.3, std)
        for sigma in (0.2, 0.5, 0.9):
            for space in SPACES:
                floor = data.floor(space, sigma)
                assert math.isclose(critic_loss_expectation(algo, data, data, sigma, space), floor, rel_tol=1e-10)
                for other in (Gaussian(0.8, std), Gaussian(0.3, 1.1 * std)):
                    assert critic_loss_expectation(algo, data, other, sigma, space) > floor * 1.0001


FLOOR_AVERAGES = {  # over uniform sigma; std -> velocity, x0, eps
    0.5: (math.pi / 4, 0.161204, 0.355184),
    1.0: (math.pi / 2, 0.5, 0.5),
    2.0: (math.pi, 1.420736, 0.644816),
}
SHIFTED_FLOOR_AVERAGES = {  # (std, shift) -> velocity; std 1 alone cannot tell shift from 1 / shift: D is symmetric
    (1.0, 3.0): 1.492821,
    (1.0, 5.0): 1.419149,
    (1.0, 8.0): 1.345136,
    (1.0, 12.0): 1.283138,
    (0.5, 5.0): 0.493152,
    (2.0, 5.0): 4.093334,
}


def check_loss_floor_averages(algo: Algo) -> None:
    """Averaged over the score sigma: pi std / 2 for uniform sigma, golden values for shifts (5.1)."""
    z, noise, weights = quadrature(3)
    sigma = midpoints(2000)

    def average(std: float, space: str, shift: float) -> float:
        data, sigmas = Gaussian(0.0, std), algo.sample_score_sigma(sigma, 0.0, 1.0, shift).repeat_interleave(len(z))
        x0, eps = std * z.repeat(len(sigma), 1), noise.repeat(len(sigma), 1)
        x = algo.add_noise(x0, eps, sigmas)
        loss = algo.critic_loss(data.velocity(x, sigmas), x, sigmas, eps, x0, space=space, reduction="sample")
        return float(loss @ weights.repeat(len(sigma))) / len(sigma)

    for std, averages in FLOOR_AVERAGES.items():
        for space, golden in zip(SPACES, averages, strict=True):
            assert math.isclose(average(std, space, 1.0), golden, abs_tol=2e-6)
    for (std, shift), golden in SHIFTED_FLOOR_AVERAGES.items():
        assert math.isclose(average(std, "velocity", shift), golden, abs_tol=2e-5)


GAPS = {  # sigma -> mean, std, abs_mean, distance, times_z of student N(-.5, 1.6^2), teacher N(.3, 1)
    0.1: (-0.00975610, 0.01186168, 0.01249652, 0.08928620, 0.01183318),
    0.5: (-0.40000000, 0.41339917, 0.47324301, 0.81938756, 0.35056180),
}


def check_gap_moments(algo: Algo) -> None:
    """The golden table of 5.2 through add_noise, x0_from_velocity, the normalizer and the gradient."""
    student, teacher = Gaussian(-0.5, 1.6), Gaussian(0.3, 1.0)
    z, noise = normal_lattice(500)
    x0 = (student.mean + student.std * z)[None]
    for sigma, golden in GAPS.items():
        for value, name in zip(golden, ("mean", "std", "abs_mean", "distance", "times_z"), strict=True):
            assert math.isclose(gap_moments(student, teacher, sigma)[name], value, abs_tol=6e-9), name
        s = torch.tensor([sigma], dtype=torch.float64)
        real, fake = score(algo, x0, noise[None], s, teacher, student)
        distance, abs_mean = algo.mean_abs_difference(x0, real), algo.mean_abs_difference(fake, real)
        gap = algo.dmd_gradient(x0, real, fake) * distance
        measured = (gap.mean(), gap.std(correction=0), abs_mean, distance, (gap[0] * z).mean())
        for value, expected in zip(measured, golden, strict=True):
            assert math.isclose(value.item(), expected, rel_tol=1e-3)


def expected_gap(algo: Algo, m: float, r: float, sigma: float, teacher: Gaussian) -> tuple[float, float]:
    """(E gap, E gap z) of an exact critic, exactly, without the normalizer: the pull on the student's mean and std."""
    z, noise, weights = quadrature()
    student, s = Gaussian(m, r), torch.full((len(z),), sigma, dtype=torch.float64)
    x0 = m + r * z
    real, fake = score(algo, x0, noise, s, teacher, student)
    gap = (algo.dmd_gradient(x0, real, fake) * algo.mean_abs_difference(x0, real)[:, None])[:, 0]
    return float(weights @ gap), float(weights @ (gap * z[:, 0]))


def check_gap_is_a_gradient(algo: Algo) -> None:
    """It is the gradient of (sigma/(1-sigma))^2 KL: zero at the target and only there, and std 0 repels (5.2)."""
    teacher = Gaussian(0.3, 0.8)
    for sigma in (0.1, 0.5, 0.9):
        assert_close(expected_gap(algo, 0.3, 0.8, sigma, teacher), (0.0, 0.0), rtol=0, atol=1e-14)
        for m, r in ((-0.5, 1.6), (1.0, 0.2)):
            point = torch.tensor([m, r], dtype=torch.float64, requires_grad=True)
            (gradient,) = torch.autograd.grad(potential(point[0], point[1], teacher, sigma), point)
            assert_close(expected_gap(algo, m, r, sigma, teacher), tuple(gradient.tolist()), rtol=1e-9, atol=1e-12)
        assert expected_gap(algo, 0.3, 0.01, sigma, teacher)[1] < 0


def check_guidance_fixed_point(algo: Algo) -> None:
    """Equal spreads: the student comes to rest at uncond + w (cond - uncond), std unchanged, for every sigma (5.3)."""
    cond, uncond, w = Gaussian(1.0, 0.7), Gaussian(-0.5, 0.7), 3.0
    z, noise, _ = quadrature()
    student = Gaussian(-0.5 + w * 1.5, 0.7)
    x0 = student.mean + student.std * z
    for sigma in (0.1, 0.5, 0.9):
        s = torch.full((len(z),), sigma, dtype=torch.float64)
        real_cond, fake = score(algo, x0, noise, s, cond, student)
        real_uncond, _ = score(algo, x0, noise, s, uncond, student)
        guided = algo.guide(real_uncond, real_cond, w)
        assert_close(fake - guided, torch.zeros_like(fake), rtol=0, atol=1e-13)
        assert_close(algo.dmd_gradient(x0 + 1, guided, fake), torch.zeros_like(fake), rtol=0, atol=1e-12)


CHECKS = [
    check_gradient,
    check_given_normalizer,
    check_gradient_invariances,
    check_degenerate_samples,
    check_critic_equal_to_teacher,
    check_guided_gap_is_pure_augmentation,
    check_student_loss,
    check_student_loss_keeps_small_gradients,
    check_critic_spaces,
    check_loss_floors,
    check_loss_floor_averages,
    check_gap_moments,
    check_gap_is_a_gradient,
    check_guidance_fixed_point,
]


def gradient_over(normalizer):
    """A DMD gradient with another normalizer: a function of (x0, x0_real, x0_fake)."""
    return lambda x0, real, fake: ((fake - real) / normalizer(x0, real, fake)).detach()


def per_sample_abs(a, b):
    return (a - b).abs().flatten(1).mean(1).view(-1, *(1,) * (a.ndim - 1)).detach()


def reduced(values, reduction):
    per_sample = values.flatten(1).mean(1)
    return per_sample if reduction == "sample" else per_sample.mean()


def student_loss_like(per_element, reduce=reduced):
    return lambda x0, gradient, reduction="mean": reduce(per_element(x0, gradient), reduction)


def critic_loss_like(prediction_error):
    """A critic loss from `error(velocity, x, sigma, noise, x0, space)`."""

    def loss(velocity, x, sigma, noise, x0, space="velocity", reduction="mean"):
        s = sigma.view(-1, *(1,) * (x.ndim - 1))
        return reduced(prediction_error(velocity, x, s, noise.detach(), x0.detach(), space).square(), reduction)

    return loss


def correct_error(v, x, s, noise, x0, space):
    return {"velocity": v - (noise - x0), "x0": s * (v - (noise - x0)), "eps": (1 - s) * (v - (noise - x0))}[space]


def replaced(space, error):
    return critic_loss_like(
        lambda v, x, s, e, d, sp: error(v, x, s, e, d) if sp == space else correct_error(v, x, s, e, d, sp)
    )


def attached_critic_loss(velocity, x, sigma, noise, x0, space="velocity", reduction="mean"):
    s = sigma.view(-1, *(1,) * (x.ndim - 1))
    return reduced(correct_error(velocity, x, s, noise, x0, space).square(), reduction)


SIGN = {"dmd_gradient": lambda x0, real, fake: -true_algo().dmd_gradient(x0, real, fake)}
WHOLE_BATCH = {"dmd_gradient": gradient_over(lambda g, r, f: (g - r).abs().mean())}
NO_FLOOR = {"dmd_gradient": gradient_over(lambda g, r, f: per_sample_abs(g, r))}
NO_NORMALIZER = {"dmd_gradient": gradient_over(lambda g, r, f: 1.0)}
DATA_WARD = {"x0_from_velocity": lambda x, v, s: x + s.view(-1, *(1,) * (x.ndim - 1)) * v}
NO_1_MINUS_SIGMA = {"add_noise": lambda x0, e, s: x0 + s.view(-1, *(1,) * (x0.ndim - 1)) * e}
NOISED_REAL = {  # the teacher is shown noised data, from its own distribution, instead of the student's sample
    "teacher_input": lambda x, e, s: true_algo().add_noise(0.3 + randn(*x.shape, seed=7, dtype=x.dtype), e, s)
}
OTHER_NOISE = {"teacher_input": lambda x, e, s: x + s.view(-1, *(1,) * (x.ndim - 1)) * (e.flip(0).flip(-1) - e)}
MUTATIONS = [
    mutation(check_gradient, "sign", **SIGN),
    mutation(check_gradient, "whole_batch_normalizer", **WHOLE_BATCH),
    mutation(check_gradient, "mean_over_the_batch", dmd_gradient=gradient_over(lambda g, r, f: (g - r).abs().mean(0))),
    mutation(
        check_gradient,
        "normalizer_per_channel",
        dmd_gradient=gradient_over(lambda g, r, f: (g - r).abs().mean((2, 3), True)),
    ),
    mutation(
        check_gradient, "normalizer_from_critic", dmd_gradient=gradient_over(lambda g, r, f: per_sample_abs(g, f))
    ),
    mutation(check_gradient, "normalizer_from_gap", dmd_gradient=gradient_over(lambda g, r, f: per_sample_abs(f, r))),
    mutation(
        check_gradient,
        "normalizer_squared",
        dmd_gradient=gradient_over(lambda g, r, f: (g - r).square().mean((1, 2, 3), True).sqrt()),
    ),
    mutation(check_gradient, "no_normalizer", **NO_NORMALIZER),
    mutation(
        check_gradient,
        "not_detached",
        dmd_gradient=lambda g, r, f: (f - r) / (g - r).abs().mean((1, 2, 3), keepdim=True),
    ),
    mutation(check_gradient, "towards_the_critic", dmd_gradient=lambda g, r, f: true_algo().dmd_gradient(g, r, g)),
    mutation(
        check_given_normalizer,
        "ignored",
        dmd_gradient=lambda g, r, f, eps=1e-6, normalizer=None: true_algo().dmd_gradient(g, r, f, eps=eps),
    ),
    mutation(
        check_given_normalizer,
        "no_floor",
        dmd_gradient=lambda g, r, f, eps=1e-6, normalizer=None: true_algo().dmd_gradient(
            g, r, f, eps=1e-6, normalizer=normalizer
        ),
    ),
    mutation(
        check_given_normalizer,
        "floor_added",
        dmd_gradient=lambda g, r, f, eps=1e-6, normalizer=None: true_algo().dmd_gradient(
            g, r, f, normalizer=per_sample_abs(g, r).flatten() if normalizer is None else normalizer + eps
        ),
    ),
    mutation(check_gradient_invariances, "whole_batch_normalizer", **WHOLE_BATCH),
    mutation(check_gradient_invariances, "no_normalizer", **NO_NORMALIZER),
    mutation(
        check_gradient_invariances, "large_eps", dmd_gradient=gradient_over(lambda g, r, f: per_sample_abs(g, r) + 1e-2)
    ),
    mutation(
        check_gradient_invariances,
        "normalizer_of_x0",
        dmd_gradient=gradient_over(lambda g, r, f: per_sample_abs(g, torch.zeros_like(g))),
    ),
    mutation(check_degenerate_samples, "no_floor", **NO_FLOOR),
    mutation(
        check_degenerate_samples,
        "nan_to_num_for_a_floor",
        dmd_gradient=lambda g, r, f: ((f - r) / per_sample_abs(g, r)).nan_to_num(),
    ),
    mutation(
        check_degenerate_samples,
        "nan_hidden",
        dmd_gradient=lambda g, r, f: true_algo().dmd_gradient(g, r, f).nan_to_num(),
    ),
    mutation(check_degenerate_samples, "whole_batch_normalizer", **WHOLE_BATCH),
    mutation(check_critic_equal_to_teacher, "noised_real_input", **NOISED_REAL),
    mutation(check_critic_equal_to_teacher, "teacher_has_its_own_noise", **OTHER_NOISE),
    mutation(check_critic_equal_to_teacher, "guidance_only_nearly_1", guide=lambda u, c, w: u + w * (c - u)),
    mutation(check_critic_equal_to_teacher, "guidance_offset", guide=lambda u, c, w: c + w * (c - u)),
    mutation(check_guided_gap_is_pure_augmentation, "offset_convention", guide=lambda u, c, w: c + w * (c - u)),
    mutation(check_guided_gap_is_pure_augmentation, "sign", **SIGN),
    mutation(check_student_loss, "no_half", student_loss=student_loss_like(lambda x, g: (x - (x - g).detach()) ** 2)),
    mutation(
        check_student_loss, "sign", student_loss=student_loss_like(lambda x, g: 0.5 * (x - (x + g).detach()) ** 2)
    ),
    mutation(
        check_student_loss,
        "sum",
        student_loss=student_loss_like(lambda x, g: 0.5 * (x - (x - g).detach()) ** 2, lambda values, _: values.sum()),
    ),
    mutation(
        check_student_loss, "nothing_detached", student_loss=student_loss_like(lambda x, g: 0.5 * (x - (x - g)) ** 2)
    ),
    mutation(
        check_student_loss,
        "gradient_attached",
        student_loss=student_loss_like(lambda x, g: 0.5 * (x - x.detach() + g) ** 2),
    ),
    mutation(check_student_loss, "gradient_as_loss", student_loss=student_loss_like(lambda x, g: x * g.detach())),
    mutation(
        check_student_loss_keeps_small_gradients,
        "textbook_rounding",
        student_loss=student_loss_like(lambda x, g: 0.5 * (x - (x - g).detach()) ** 2),
    ),
    mutation(
        check_student_loss_keeps_small_gradients,
        "in_bf16",
        student_loss=lambda x, g: true_algo().student_loss(x, g.bfloat16()),
    ),
    mutation(check_critic_spaces, "data_ward", critic_loss=replaced("velocity", lambda v, x, s, e, d: v - (d - e))),
    mutation(check_critic_spaces, "x0_unweighted", critic_loss=replaced("x0", lambda v, x, s, e, d: v - (e - d))),
    mutation(
        check_critic_spaces, "x0_weight_sigma", critic_loss=replaced("x0", lambda v, x, s, e, d: s.sqrt() * (v - e + d))
    ),
    mutation(check_critic_spaces, "x0_against_x", critic_loss=replaced("x0", lambda v, x, s, e, d: x - s * v - x)),
    mutation(
        check_critic_spaces, "eps_misses_1_minus_sigma", critic_loss=replaced("eps", lambda v, x, s, e, d: x + v - e)
    ),
    mutation(
        check_critic_spaces,
        "eps_divides",
        critic_loss=replaced("eps", lambda v, x, s, e, d: (v - e + d) / (1 - s).clamp(min=1e-3)),
    ),
    mutation(
        check_critic_spaces,
        "x0_and_eps_swapped",
        critic_loss=replaced("x0", lambda v, x, s, e, d: (1 - s) * (v - e + d)),
    ),
    mutation(check_critic_spaces, "trains_the_student", critic_loss=attached_critic_loss),
    mutation(check_critic_spaces, "half", critic_loss=critic_loss_like(lambda *a: correct_error(*a) * math.sqrt(0.5))),
    mutation(
        check_critic_spaces,
        "default_space",
        critic_loss=lambda *a, space="x0", **k: true_algo().critic_loss(*a, space=space, **k),
    ),
    mutation(
        check_loss_floors, "data_ward_target", critic_loss=replaced("velocity", lambda v, x, s, e, d: v - (d - e))
    ),
    mutation(check_loss_floors, "leaks_the_target", critic_loss=critic_loss_like(lambda *a: 0.9 * correct_error(*a))),
    mutation(check_loss_floors, "missing_1_minus_sigma", **NO_1_MINUS_SIGMA),
    mutation(
        check_loss_floors, "eps_misses_1_minus_sigma", critic_loss=replaced("eps", lambda v, x, s, e, d: x + v - e)
    ),
    mutation(check_loss_floors, "x0_unweighted", critic_loss=replaced("x0", lambda v, x, s, e, d: v - (e - d))),
    mutation(
        check_loss_floor_averages,
        "shift_inverted",
        sample_score_sigma=lambda u, lo, hi, k: true_algo().sample_score_sigma(u, lo, hi, 1 / k),
    ),
    mutation(
        check_loss_floor_averages, "sigma_not_uniform", sample_score_sigma=lambda u, lo, hi, k: (u * u).clamp(lo, hi)
    ),
    mutation(check_loss_floor_averages, "x0_unweighted", critic_loss=replaced("x0", lambda v, x, s, e, d: v - (e - d))),
    mutation(check_gap_moments, "sign", **SIGN),
    mutation(check_gap_moments, "noised_real_input", **NOISED_REAL),
    mutation(check_gap_moments, "teacher_has_its_own_noise", **OTHER_NOISE),
    mutation(check_gap_moments, "missing_1_minus_sigma", **NO_1_MINUS_SIGMA),
    mutation(check_gap_moments, "data_ward", **DATA_WARD),
    mutation(check_gap_moments, "distance_squared", mean_abs_difference=lambda a, b: (a - b).square().mean(1).sqrt()),
    mutation(
        check_gap_moments,
        "x0_by_the_noise_formula",
        x0_from_velocity=lambda x, v, s: true_algo().x0_from_velocity(x, v, s) / (1 - s.view(-1, 1)),
    ),
    mutation(check_gap_is_a_gradient, "sign", **SIGN),
    mutation(check_gap_is_a_gradient, "noised_real_input", **NOISED_REAL),
    mutation(check_gap_is_a_gradient, "missing_1_minus_sigma", **NO_1_MINUS_SIGMA),
    mutation(check_guidance_fixed_point, "offset_convention", guide=lambda u, c, w: c + w * (c - u)),
    mutation(check_guidance_fixed_point, "unguided", guide=lambda u, c, w: c),
    mutation(check_guidance_fixed_point, "noised_real_input", **NOISED_REAL),
]


@pytest.mark.parametrize("check", CHECKS)
def test_closed_form(check):
    check(true_algo())


@pytest.mark.parametrize(("check", "changes"), MUTATIONS)
def test_mutation_is_caught(check, changes):
    assert_caught(check, changes)


def test_each_check_has_a_mutation():
    assert_each_has_a_mutation(CHECKS, MUTATIONS)


def test_one_step_moves_the_student_towards_the_data():
    """The sign, end to end: a student right of the teacher goes left, one left of it goes right (FastVideo#836)."""
    algo, teacher, sigma = true_algo(), Gaussian(0.0, 1.0), 0.1 + 0.8 * rand(64)
    for mean in (2.0, -2.0):
        x0 = (mean + randn(64, 8)).requires_grad_()
        real, fake = score(algo, x0.detach(), randn(64, 8, seed=1), sigma, teacher, Gaussian(mean, 1.0))
        algo.student_loss(x0, algo.dmd_gradient(x0, real, fake)).backward()
        assert x0.grad is not None
        assert (x0.grad * mean > 0).all()


def test_normalizer_is_not_the_micro_batchs():
    """Four samples, two cuts: the whole-tensor normalizer of some implementations depends on the cut (1.5)."""
    x0, real, fake = latents(20)
    whole = gradient_over(lambda g, r, f: (g - r).abs().mean())
    loss = true_algo().student_loss
    once = loss(x0, whole(x0, real, fake))
    twice = (loss(x0[:2], whole(x0[:2], real[:2], fake[:2])) + loss(x0[2:], whole(x0[2:], real[2:], fake[2:]))) / 2
    assert not math.isclose(once.item(), twice.item(), rel_tol=1e-3)
