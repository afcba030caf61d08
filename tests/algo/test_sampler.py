"""Backward simulation: where a rollout starts and stops, its standard deviations, who keeps a gradient."""

import math

import pytest
import torch
from algo_mutations import Algo, assert_caught, assert_each_has_a_mutation, mutation, true_algo
from closed_forms import Gaussian, per_sample, randn
from torch.testing import assert_close

GRID = torch.tensor([1.0, 0.9375, 0.8333333, 0.625, 0.0], dtype=torch.float64)


class Recorder:
    """A velocity that keeps its calls; nonlinear, so that a wrong order, sigma or input shows."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        self.calls.append((x.clone(), sigma.clone()))
        return torch.sin(3 * x) + per_sample(sigma, x) ** 2


def check_stop_step(algo: Algo) -> None:
    """Stop step k: k + 1 forwards at sigmas[0..k], x_k by k Euler hops written out, x0 = x_k - sigma_k v (1.1, 1.2)."""
    noise = randn(3, 2, 5)
    for k in range(4):
        velocity = Recorder()
        x_k, x0 = algo.rollout(velocity, noise, GRID, k)
        x, reference = noise, Recorder()
        for step in range(k):
            x = x + (GRID[step + 1] - GRID[step]) * reference(x, GRID[step].expand(3))
        assert len(velocity.calls) == k + 1
        assert torch.equal(torch.stack([sigma for _, sigma in velocity.calls]), GRID[: k + 1, None].expand(-1, 3))
        assert_close(x_k, x, rtol=0, atol=1e-14)
        assert torch.equal(velocity.calls[-1][0], x_k)
        assert_close(x0, x - GRID[k] * reference(x, GRID[k].expand(3)), rtol=0, atol=1e-14)


def check_start(algo: Algo) -> None:
    """A rollout starts at sigmas[0] times the noise, bitwise: for k = 0, for one step, for sigmas[0] = .999."""
    noise = randn(2, 6, dtype=torch.float32)
    for grid in (GRID.float(), torch.tensor([0.999, 0.0]), torch.tensor([0.999, 0.74925, 0.4995, 0.24975, 0.0])):
        x_0, _ = algo.rollout(Recorder(), noise, grid, 0)
        assert torch.equal(x_0, grid[0] * noise)


ROLLOUT_STDS = {  # data std, grid -> std of an exact denoiser's sample (5.4)
    (1.0, (12.0, 4)): 0.238911,
    (1.0, (5.0, 4)): 0.479320,
    (1.0, (1.0, 4)): 0.720000,
    (2.0, (12.0, 4)): 0.848430,
    (2.0, (5.0, 4)): 1.298790,
    (2.0, (1.0, 4)): 1.362160,
}


def check_rollout_std(algo: Algo) -> None:
    """The teacher as its own few-step student: hops are linear, so two samples, +1 and -1, give the std (5.4)."""
    noise = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)

    def std(data: Gaussian, grid: torch.Tensor) -> float:
        _, x0 = algo.rollout(data.velocity, noise, grid, len(grid) - 2)
        assert math.isclose(x0.mean().item(), 0.3, abs_tol=1e-6)
        return float(x0.std(correction=0))

    for (tau, (shift, steps)), golden in ROLLOUT_STDS.items():
        assert math.isclose(std(Gaussian(0.3, tau), algo.sigma_grid(steps, shift).double()), golden, abs_tol=6e-6)
    for tau, golden in ((1.0, 0.584270), (2.0, 1.296130)):
        grid = torch.tensor([1, 0.757, 0.522, 0], dtype=torch.float64)
        assert math.isclose(std(Gaussian(0.3, tau), grid), golden, abs_tol=6e-6)
    many = algo.sigma_grid(400, 3.0).double()
    assert math.isclose(std(Gaussian(0.3, 1.6), many), 1.6, rel_tol=1e-2)


def check_input_std_at_the_solution(algo: Algo) -> None:
    """A solved student, x0 = tau noise: the input of step k has std sigma_k + (1 - sigma_k) tau with ODE hops (5.4)."""
    tau, noise = 0.6, torch.tensor([[1.0], [-1.0]], dtype=torch.float64)

    def student(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        s = per_sample(sigma, x)
        return (x - tau * x / (s + (1 - s) * tau)) / s

    for k, golden in enumerate((1.0, 0.975, 0.933333, 0.85)):
        x_k, x0 = algo.rollout(student, noise, algo.sigma_grid(4, 5.0).double(), k)
        assert_close(x_k, golden * noise, rtol=0, atol=1e-6)
        assert_close(x0, tau * noise, rtol=0, atol=1e-6)


def check_hop(algo: Algo) -> None:
    """A hop is (sigma'/sigma) x + (1 - sigma'/sigma) x0, and the hop to the terminal 0 is x0, bitwise (5.10)."""
    x, velocity = randn(3, 4), randn(3, 4, seed=1)
    sigma, sigma_next = torch.tensor([1.0, 0.8, 0.3]).double(), torch.tensor([0.9, 0.2, 0.0]).double()
    ratio = (sigma_next / sigma)[:, None]
    x0 = x - sigma[:, None] * velocity
    assert_close(algo.euler_step(x, velocity, sigma, sigma_next), ratio * x + (1 - ratio) * x0, rtol=0, atol=1e-14)
    clean = algo.euler_step(x, velocity, sigma, torch.zeros(3).double())
    assert torch.equal(clean, algo.x0_from_velocity(x, velocity, sigma))


def check_per_sample_stops(algo: Algo) -> None:
    """One stop step per sample is, row by row, one rollout each, in as few forwards as one can (6 no. 5)."""
    noise, stops = randn(5, 3), [2, 0, 3, 0, 2]
    seen = []

    def velocity(x: torch.Tensor, sigma: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows.tolist())
        return torch.sin(3 * x) + per_sample(sigma, x) ** 2 + rows[:, None]

    x_k, x0 = algo.rollout_rows(velocity, noise, GRID, torch.tensor(stops))
    assert seen == [[0, 1, 2, 3, 4], [0, 2, 4], [0, 2, 4], [2]]
    for row, stop in enumerate(stops):
        one = algo.rollout(
            lambda x, s, row=row: torch.sin(3 * x) + s[:, None] ** 2 + row, noise[row : row + 1], GRID, stop
        )
        assert_close((x_k[row], x0[row]), (one[0][0], one[1][0]), rtol=0, atol=1e-14)
    by_list = algo.rollout(Recorder(), noise, GRID, stops)
    assert_close(by_list, algo.rollout(Recorder(), noise, GRID, torch.tensor(stops, dtype=torch.int32)), rtol=0, atol=0)


def check_gradient_isolation(algo: Algo) -> None:
    """Gradient at the stop step only, never into the hops or the noise (section 4 no. 29 d)."""
    noise = randn(3, 4).requires_grad_()
    weights = torch.full((4,), 0.3, dtype=torch.float64, requires_grad=True)  # one for each step of GRID
    sigma_of_step = GRID[:4]

    grad_modes = []

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        grad_modes.append(torch.is_grad_enabled())
        step = (sigma[:, None] == sigma_of_step).double().argmax(1)
        return weights[step][:, None] * x

    x_k, x0 = algo.rollout(velocity, noise, GRID, 2)
    assert not x_k.requires_grad
    assert not x0.requires_grad
    for stops in (2, [2, 2, 2], [0, 2, 2], [2, 0, 3]):
        x_k, x0 = algo.rollout(velocity, noise, GRID, stops, grad_last=True)
        assert not x_k.requires_grad
        assert x0.requires_grad
        (gradient,) = torch.autograd.grad(x0.sum(), weights)
        expected = torch.zeros(4, dtype=torch.float64)
        for row, stop in enumerate([stops] * 3 if isinstance(stops, int) else stops):
            expected[stop] -= GRID[stop] * x_k[row].sum()
        assert_close(gradient, expected, rtol=0, atol=1e-14)
    grad_modes.clear()
    algo.rollout(velocity, noise, GRID, 2, grad_last=True)
    algo.rollout(velocity, noise, GRID, 2)
    with torch.no_grad():
        assert not algo.rollout(velocity, noise, GRID, 2, grad_last=True)[1].requires_grad
    assert grad_modes == [False, False, True] + 6 * [False]  # a hop's forward keeps no activations


def check_sde_hop(algo: Algo) -> None:
    """x' = (1 - s') x0 + s' noise, each hop and each sample with noise of its own (DMD2 section 4.5)."""
    noise, hops = randn(3, 2, 5), randn(3, 3, 2, 5, seed=1)
    for k in range(4):
        velocity, reference = Recorder(), Recorder()
        x_k, x0 = algo.rollout(velocity, noise, GRID, k, hop_noise=hops)
        x = noise
        for step in range(k):
            clean = x - GRID[step] * reference(x, GRID[step].expand(3))
            x = (1 - GRID[step + 1]) * clean + GRID[step + 1] * hops[step]
        assert len(velocity.calls) == k + 1
        assert_close(x_k, x, rtol=0, atol=1e-14)
        assert_close(x0, x - GRID[k] * reference(x, GRID[k].expand(3)), rtol=0, atol=1e-14)
    stops = [2, 0, 3]
    x_k, x0 = algo.rollout(Recorder(), noise, GRID, stops, hop_noise=hops)
    for row, stop in enumerate(stops):
        at = slice(row, row + 1)
        one = algo.rollout(Recorder(), noise[at], GRID, stop, hop_noise=hops[:, at])
        assert_close((x_k[at], x0[at]), one, rtol=0, atol=1e-14)


SDE_STDS = {  # grid -> std of an exact denoiser's sample of N(.3, 1) with SDE hops (5.4)
    "shift 12": 0.235340,
    "shift 5": 0.444100,
    "shift 1": 0.557430,
    "published": 0.515450,
}


def impulses(sources: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Initial noise `[sources, 1]` and hop noise `[sources - 1, sources, 1]`, one source of 1 per row.

    Hops are linear, so the variance of a sample is the sum of the squared responses.
    """
    rows = torch.eye(sources, dtype=torch.float64)
    return rows[0].unsqueeze(1), rows[1:].unsqueeze(2)


def check_sde_std(algo: Algo) -> None:
    grids = {f"shift {k}": algo.sigma_grid(4, float(k)).double() for k in (12, 5, 1)}
    grids["published"] = torch.tensor([1, 0.757, 0.522, 0], dtype=torch.float64)
    for name, golden in SDE_STDS.items():
        grid = grids[name]
        noise, hops = impulses(len(grid) - 1)
        _, x0 = algo.rollout(Gaussian(0.0, 1.0).velocity, noise, grid, len(grid) - 2, hop_noise=hops)
        assert math.isclose(x0.square().sum().sqrt().item(), golden, abs_tol=6e-6), name


def check_sde_input_std_at_the_solution(algo: Algo) -> None:
    """Where each step's x0 is N(0, tau^2), inputs have the spread of noised data, sqrt(D), unlike with ODE hops."""
    tau = 0.6

    def student(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        s = per_sample(sigma, x)
        return (x - tau * x / ((1 - s) ** 2 * tau**2 + s**2).sqrt()) / s

    for k, golden in enumerate((1.0, 0.9382, 0.8393, 0.6643)):
        noise, hops = impulses(4)
        x_k, _ = algo.rollout(student, noise, algo.sigma_grid(4, 5.0).double(), k, hop_noise=hops)
        assert math.isclose(x_k.square().sum().sqrt().item(), golden, abs_tol=6e-5), k


def check_sde_gradient_isolation(algo: Algo) -> None:
    """As with ODE hops: of the weights that each step uses, only the stop step's get a gradient."""
    noise, hops = randn(3, 4), randn(3, 3, 4, seed=1)
    weights = torch.full((4,), 0.3, dtype=torch.float64, requires_grad=True)

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return weights[(sigma[:, None] == GRID[:4]).double().argmax(1)][:, None] * x

    for stops in ([2, 2, 2], [0, 3, 2]):
        x_k, x0 = algo.rollout(velocity, noise, GRID, stops, hop_noise=hops, grad_last=True)
        assert not x_k.requires_grad
        (gradient,) = torch.autograd.grad(x0.sum(), weights)
        expected = torch.zeros(4, dtype=torch.float64)
        for row, stop in enumerate(stops):
            expected[stop] -= GRID[stop] * x_k[row].sum()
        assert_close(gradient, expected, rtol=0, atol=1e-14)


def check_forward_noise(algo: Algo) -> None:
    """x_k = (1 - sigma_k) x_real + sigma_k noise per sample, one forward there, x0 = x_k - sigma_k v."""
    x_real, noise, stops = randn(4, 6), randn(4, 6, seed=1), [2, 0, 3, 1]
    velocity, reference = Recorder(), Recorder()
    x_k, x0 = algo.forward_noise(velocity, x_real, noise, GRID, stops)
    assert len(velocity.calls) == 1
    for row, k in enumerate(stops):
        x = (1 - GRID[k]) * x_real[row] + GRID[k] * noise[row]
        assert_close(x_k[row], x, rtol=0, atol=1e-14)
        clean = x - GRID[k] * reference(x[None], GRID[k][None])[0]
        assert_close(x0[row], clean, rtol=0, atol=1e-14)


def check_forward_noise_std(algo: Algo) -> None:
    """Noised data of std tau has std sqrt(D): that of a right SDE student's inputs, and not of an ODE one's (5.4)."""
    tau = 0.6
    x_real = tau * torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    noise = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for k, (golden, ode) in enumerate(((1.0, 1.0), (0.9382, 0.975), (0.8393, 0.9333), (0.6643, 0.85))):
        x_k, _ = algo.forward_noise(Recorder(), x_real, noise, algo.sigma_grid(4, 5.0).double(), k)
        std = x_k.square().sum().sqrt().item()
        assert math.isclose(std, golden, abs_tol=6e-5), k
        assert k == 0 or abs(std - ode) > 0.03


def check_no_randomness(algo: Algo) -> None:
    """ODE hops draw nothing: the same bits under another global seed (section 4 no. 39)."""
    noise = randn(3, 4)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = algo.rollout(Recorder(), noise, GRID, 3)
        torch.manual_seed(2)
        second = algo.rollout(Recorder(), noise, GRID, 3)
    assert torch.equal(torch.cat(first), torch.cat(second))


def plain(stop=lambda k: k, hop="ode", start=True, extra=0, detach=True, to=lambda step: step + 1, freeze=True):
    """The rollout in its plainest form, with a knob for each mistake."""

    def rollout_rows(velocity_fn, noise, sigmas, stop_step, hop_noise=None, grad_last=False):
        stops = (
            torch.as_tensor(stop_step).expand(len(noise)) if isinstance(stop_step, int) else torch.as_tensor(stop_step)
        )
        stops = torch.tensor([stop(int(k)) for k in stops])
        x = (sigmas[0] if start else 1.0) * (noise.detach() if detach else noise)
        x_k, x0 = [None] * len(x), [None] * len(x)
        generator = torch.Generator().manual_seed(5) if hop == "sde" else None
        for step in range(min(int(stops.max()) + 1 + extra, len(sigmas) - 1)):
            rows = (stops + extra >= step).nonzero()[:, 0] if freeze else torch.arange(len(x))
            sigma = sigmas[step].expand(len(rows))
            stopping = bool((stops[rows] == step).any())
            with torch.set_grad_enabled(torch.is_grad_enabled() and grad_last and (stopping or not detach)):
                v = velocity_fn(x[rows], sigma, rows)
                clean = x[rows] - per_sample(sigma, v) * v
            s_next = sigmas[to(step)] if to(step) < len(sigmas) else sigmas[-1]
            if hop_noise is not None and hop == "ode":
                clean_before = clean.detach() if detach else clean
                moved = (1 - s_next) * clean_before + s_next * hop_noise[min(step, len(hop_noise) - 1)][rows]
            elif hop == "ode":
                moved = x[rows] + (s_next - sigmas[step]) * (v.detach() if detach else v)
            else:
                fresh = torch.randn(v.shape, generator=generator, dtype=v.dtype)
                moved = (1 - s_next) * clean.detach() + s_next * fresh
            for place, row in enumerate(rows.tolist()):
                if stops[row] == step:
                    x_k[row], x0[row] = x[row], clean[place]
            x = x.index_copy(0, rows, moved)
        return torch.stack(x_k), torch.stack(x0)

    def rollout(velocity_fn, noise, sigmas, stop_step, hop_noise=None, grad_last=False):
        return rollout_rows(
            lambda x, sigma, rows: velocity_fn(x, sigma), noise, sigmas, stop_step, hop_noise, grad_last
        )

    return {"rollout": rollout, "rollout_rows": rollout_rows}


def _always_with_grad(velocity_fn):
    def with_grad(x, sigma):
        with torch.enable_grad():
            return velocity_fn(x, sigma)

    return with_grad


def _x0_at(result, sigma, sigma_next):
    x_k, x0 = result
    return x_k, x_k + (x0 - x_k) * sigma_next / sigma


CHECKS = [
    check_stop_step,
    check_start,
    check_rollout_std,
    check_input_std_at_the_solution,
    check_hop,
    check_per_sample_stops,
    check_gradient_isolation,
    check_sde_hop,
    check_sde_std,
    check_sde_input_std_at_the_solution,
    check_sde_gradient_isolation,
    check_forward_noise,
    check_forward_noise_std,
    check_no_randomness,
]
EARLIER = plain(stop=lambda k: max(k - 1, 0))
LATER = plain(stop=lambda k: min(k + 1, 3))
SDE = plain(hop="sde")


def with_hops(change):
    """The rollout given other hop noise than it was: a function of (noise, hop_noise)."""

    def rollout(velocity_fn, noise, sigmas, stop_step, hop_noise=None, grad_last=False):
        changed = change(noise, hop_noise)
        return true_algo().rollout(velocity_fn, noise, sigmas, stop_step, hop_noise=changed, grad_last=grad_last)

    return {"rollout": rollout}


IGNORED = with_hops(lambda noise, hops: None)
ONE_NOISE = with_hops(lambda noise, hops: hops[:1].expand_as(hops))
INITIAL = with_hops(lambda noise, hops: noise.expand_as(hops))
ROLLED = with_hops(lambda noise, hops: hops.roll(1, 1))
MUTATIONS = [
    mutation(check_sde_hop, "option_parsed_and_ignored", **IGNORED),
    mutation(check_sde_hop, "one_noise_for_all_hops", **ONE_NOISE),
    mutation(check_sde_hop, "the_initial_noise_again", **INITIAL),
    mutation(check_sde_hop, "noise_of_another_sample", **ROLLED),
    mutation(check_sde_hop, "hop_skips_a_point", **plain(to=lambda step: step + 2)),
    mutation(check_sde_std, "option_parsed_and_ignored", **IGNORED),
    mutation(check_sde_std, "the_initial_noise_again", **INITIAL),
    mutation(check_sde_std, "one_noise_for_all_hops", **ONE_NOISE),
    mutation(check_sde_std, "last_step_skipped", **EARLIER),
    mutation(check_sde_input_std_at_the_solution, "option_parsed_and_ignored", **IGNORED),
    mutation(check_sde_input_std_at_the_solution, "the_initial_noise_again", **INITIAL),
    mutation(check_sde_input_std_at_the_solution, "one_step_late", **LATER),
    mutation(
        check_forward_noise,
        "one_sigma_for_the_batch",
        forward_noise=lambda f, x, e, s, k: true_algo().forward_noise(f, x, e, s, k[0]),
    ),
    mutation(
        check_forward_noise,
        "backward_simulation_instead",
        forward_noise=lambda f, x, e, s, k: true_algo().rollout(f, e, s, k),
    ),
    mutation(
        check_forward_noise,
        "next_sigma",
        forward_noise=lambda f, x, e, s, k: true_algo().forward_noise(f, x, e, s, [min(i + 1, 3) for i in k]),
    ),
    mutation(
        check_forward_noise_std,
        "missing_1_minus_sigma",
        forward_noise=lambda f, x, e, s, k: (x + s[k] * e, x),
    ),
    mutation(
        check_forward_noise_std,
        "data_and_noise_swapped",
        forward_noise=lambda f, x, e, s, k: true_algo().forward_noise(f, e, x, s, k),
    ),
    mutation(check_sde_gradient_isolation, "through_the_hops", **plain(detach=False)),
    mutation(check_sde_gradient_isolation, "one_step_early", **EARLIER),
    mutation(check_stop_step, "one_step_early", **EARLIER),
    mutation(check_stop_step, "one_step_late", **LATER),
    mutation(check_stop_step, "always_all_steps", **plain(stop=lambda k: 3)),
    mutation(check_stop_step, "one_forward_too_many", **plain(extra=1)),
    mutation(check_stop_step, "hop_skips_a_point", **plain(to=lambda step: step + 2)),
    mutation(check_stop_step, "hop_with_fresh_noise", **SDE),
    mutation(
        check_stop_step,
        "x0_with_the_next_sigma",
        rollout=lambda f, e, s, k: _x0_at(true_algo().rollout(f, e, s, k), s[k], s[k + 1]),
    ),
    mutation(check_start, "sigma_0_forgotten", **plain(start=False)),
    mutation(check_start, "input_of_the_last_step", **plain(stop=lambda k: 1)),
    mutation(check_rollout_std, "hop_with_fresh_noise", **SDE),
    mutation(check_rollout_std, "shift_forgotten", sigma_grid=lambda n, k: true_algo().sigma_grid(n, 1.0)),
    mutation(check_rollout_std, "last_step_skipped", **EARLIER),
    mutation(
        check_rollout_std,
        "velocity_data_ward",
        rollout=lambda f, e, s, k: true_algo().rollout(lambda *a: -f(*a), e, s, k),
    ),
    mutation(check_input_std_at_the_solution, "hop_with_fresh_noise", **SDE),
    mutation(check_input_std_at_the_solution, "one_step_early", **EARLIER),
    mutation(
        check_input_std_at_the_solution,
        "inputs_are_noised_data",  # the mismatch that backward simulation is there to remove
        rollout=lambda f, e, s, k: (true_algo().add_noise(0.6 * randn(2, 1), e, s[k].expand(2)), 0.6 * e),
    ),
    mutation(check_hop, "sign", euler_step=lambda x, v, s, t: x + (s - t)[:, None] * v),
    mutation(check_hop, "from_x0", euler_step=lambda x, v, s, t: x - s[:, None] * v + t[:, None] * x),
    mutation(check_hop, "terminal_kept_away", euler_step=lambda x, v, s, t: x + (t.clamp(min=1e-3) - s)[:, None] * v),
    mutation(check_per_sample_stops, "rows_keep_moving", rollout_rows=plain(freeze=False)["rollout_rows"]),
    mutation(check_per_sample_stops, "all_to_the_latest", rollout_rows=plain(stop=lambda k: 3)["rollout_rows"]),
    mutation(check_per_sample_stops, "hop_with_fresh_noise", **SDE),
    mutation(check_gradient_isolation, "through_the_hops", **plain(detach=False)),
    mutation(check_gradient_isolation, "one_step_early", **EARLIER),
    mutation(
        check_gradient_isolation,
        "activations_of_the_hops_kept",
        rollout=lambda f, e, s, k, grad_last=False: true_algo().rollout(
            _always_with_grad(f), e, s, k, grad_last=grad_last
        ),
    ),
    mutation(
        check_gradient_isolation,
        "none_at_all",
        rollout=lambda f, e, s, k, grad_last=False: true_algo().rollout(f, e, s, k),
    ),
    mutation(
        check_no_randomness,
        "hop_with_fresh_noise_of_the_global_rng",
        rollout=lambda f, e, s, k: true_algo().rollout(f, s[0] * torch.randn_like(e), s, k),
    ),
]


@pytest.mark.parametrize("check", CHECKS)
def test_closed_form(check):
    check(true_algo())


@pytest.mark.parametrize("check", CHECKS)
def test_plain_version_agrees(check):
    """The plain rollout that the mutations are made of is right when it has no mistake in it."""
    check(true_algo(**plain()))


@pytest.mark.parametrize(("check", "changes"), MUTATIONS)
def test_mutation_is_caught(check, changes):
    assert_caught(check, changes)


def test_each_check_has_a_mutation():
    assert_each_has_a_mutation(CHECKS, MUTATIONS)
