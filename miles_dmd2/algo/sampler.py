"""Backward simulation (DMD2 section 4.5): the student, from noise, up to the step that is trained."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from miles_dmd2.algo.checks import aligned, check_sigma, work_dtype
from miles_dmd2.algo.flow import add_noise, x0_from_velocity


def euler_step(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """x + (sigma_next - sigma) velocity, sigmas `[batch]`: for sigma' = sigma_next, (sigma'/sigma) (x - x0) + x0."""
    _, s = aligned(sigma, x=x)
    x, velocity, s_next = aligned(sigma_next, x=x, velocity=velocity)
    return x + (s_next - s) * velocity


def rollout(
    velocity_fn: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    sigmas: Tensor,
    stop_step: int | Sequence[int] | Tensor,
    *,
    hop_noise: Tensor | None = None,
    grad_last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Start at x = sigmas[0] noise, hop along the grid to step k = stop_step, return (x_k, x0).

    x_k, of noise's shape, is the input of step k, and x0 = x_k - sigma_k v(x_k, sigma_k). velocity_fn(x, sigma), sigma
    `[batch]`, is called k + 1 times. Stop steps, in [0, N), are one int or one per sample; then velocity_fn sees only
    the rows that have not stopped (if it needs to know which: `rollout_rows`). sigmas: `[N + 1]`, decreasing, terminal
    0. Nothing keeps a gradient, unless grad_last: then the forward that gives a sample's x0 follows the caller's grad
    mode, the hops before it never do. stop_step N - 1 is the few-step sampler itself. Hops are Euler steps of the ODE;
    with hop_noise `[hops, batch, *latent]`, hops >= the last stop step, they are the paper's: x0 is noised afresh to
    the next sigma, by hop_noise[j] after step j (SDE). ValueError: shapes, a grid or stop steps that are not as said.
    """
    return rollout_rows(
        lambda x, sigma, rows: velocity_fn(x, sigma),
        noise,
        sigmas,
        stop_step,
        hop_noise=hop_noise,
        grad_last=grad_last,
    )


def forward_noise(
    velocity_fn: Callable[[Tensor, Tensor], Tensor],
    x_real: Tensor,
    noise: Tensor,
    sigmas: Tensor,
    stop_step: int | Sequence[int] | Tensor,
) -> tuple[Tensor, Tensor]:
    """(x_k, x0) with x_k = (1 - sigma_k) x_real + sigma_k noise: data at the student's input, not its own rollout.

    One call of velocity_fn, whatever the stop step. What FastGen and DiffSynth-Studio train on. Its inputs have the
    spread of backward simulation with SDE hops once the student is right, but not that with ODE hops (there x0 goes
    with the noise: sigma + (1 - sigma) std in the place of sqrt((1 - sigma)^2 std^2 + sigma^2)). ValueError: as
    `rollout`, or x_real of another shape.
    """
    _check_grid(sigmas)
    x_real, noise = aligned(x_real=x_real, noise=noise)
    dtype = work_dtype(noise=noise, sigmas=sigmas)
    grid = sigmas.to(noise.device, dtype)
    stops = _stop_steps(stop_step, noise.shape[0], len(grid) - 1).to(noise.device)
    sigma = grid[stops]
    x = add_noise(x_real, noise, sigma)
    return x, x0_from_velocity(x, velocity_fn(x, sigma), sigma)


def rollout_rows(
    velocity_fn: Callable[[Tensor, Tensor, Tensor], Tensor],
    noise: Tensor,
    sigmas: Tensor,
    stop_step: int | Sequence[int] | Tensor,
    *,
    hop_noise: Tensor | None = None,
    grad_last: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rollout` for velocity_fn(x, sigma, rows): rows, int64, are the batch indices that x and sigma belong to."""
    _check_grid(sigmas)
    (noise,) = aligned(noise=noise)
    dtype = work_dtype(noise=noise, sigmas=sigmas)
    grid = sigmas.to(noise.device, dtype)
    stops = _stop_steps(stop_step, noise.shape[0], len(grid) - 1).to(noise.device)
    if hop_noise is not None:
        _check_hop_noise(hop_noise, noise, int(stops.max()))
    x = grid[0] * noise.detach().to(dtype)
    x0 = torch.zeros_like(x)
    for step in range(int(stops.max()) + 1):
        rows = (stops >= step).nonzero(as_tuple=True)[0]
        last = stops[rows] == step
        sigma, sigma_next = grid[step].expand(len(rows)), grid[step + 1].expand(len(rows))
        with torch.set_grad_enabled(grad_last and torch.is_grad_enabled() and bool(last.any())):
            velocity = velocity_fn(x[rows], sigma, rows)
        clean = x0_from_velocity(x[rows], velocity, sigma)
        x0 = x0.index_copy(0, rows[last], clean[last].to(dtype))
        if bool(last.all()):
            continue
        if hop_noise is None:
            going = euler_step(x[rows], velocity.detach(), sigma, sigma_next)
        else:
            going = add_noise(clean.detach(), hop_noise[step][rows].to(clean), sigma_next)
        x = x.index_copy(0, rows[~last], going[~last].to(dtype))
    return x, x0


def _check_hop_noise(hop_noise: Tensor, noise: Tensor, hops: int) -> None:
    if hop_noise.shape[1:] != noise.shape or len(hop_noise) < hops:
        wanted = [f"at least {hops}", *noise.shape]
        raise ValueError(f"hop_noise must be [{', '.join(map(str, wanted))}], got shape {list(hop_noise.shape)}")


def _check_grid(sigmas: Tensor) -> None:
    if sigmas.ndim != 1 or len(sigmas) < 2:
        raise ValueError(f"sigmas must be [N + 1] with N >= 1, got shape {list(sigmas.shape)}")
    check_sigma(sigmas)
    if sigmas[-1] != 0 or not bool((sigmas.diff() < 0).all()):
        raise ValueError(f"sigmas must decrease to a terminal 0, got {sigmas.tolist()}")


def _stop_steps(stop_step: int | Sequence[int] | Tensor, batch: int, num_steps: int) -> Tensor:
    stops = torch.as_tensor(stop_step)
    if stops.dtype == torch.bool or stops.is_floating_point() or stops.is_complex():
        raise ValueError(f"stop_step must be integer, got {stops.dtype}")
    stops = stops.to(torch.int64).expand(batch) if stops.ndim == 0 else stops.to(torch.int64)
    if stops.shape != (batch,):
        raise ValueError(f"stop_step must be one int or one per sample, [{batch}], got shape {list(stops.shape)}")
    if bool((stops < 0).any()) or bool((stops >= num_steps).any()):
        raise ValueError(f"stop_step must be in [0, {num_steps}), got {sorted(set(stops.tolist()))}")
    return stops
