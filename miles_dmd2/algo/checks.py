"""Shapes, dtypes and ranges, checked in one place: every error names the argument and says its value."""

import torch
from torch import Tensor

SIGMA_ROUNDING = 1e-6
"""How far above 1 a sigma may be: in fp32 k / (1 + (k - 1)) is up to 1 + 1e-6 for a shift k that is no integer."""


def work_dtype(**tensors: Tensor) -> torch.dtype:
    """fp64 if any of the tensors is fp64, else fp32. ValueError for a tensor that is not floating point."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be a float tensor, got {tensor.dtype}")
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors.values()) else torch.float32


def check_sigma(sigma: Tensor) -> None:
    """ValueError unless every value is in [0, 1] (NaN is not). Reads one bool back from the device."""
    if not bool(((sigma >= 0) & (sigma <= 1 + SIGMA_ROUNDING)).all()):
        raise ValueError(f"sigma must be in [0, 1], got min {sigma.min().item():.9g} and max {sigma.max().item():.9g}")


def aligned(sigma: Tensor | None = None, **latents: Tensor) -> list[Tensor]:
    """The latents, all `[batch, *latent]`, in the working dtype, then sigma, if given, so that it broadcasts with them.

    sigma: `[batch]`, or `[batch, *latent]` where a latent has parts at levels of their own. ValueError: shapes that
    differ, an empty batch, integer tensors, sigma of another shape or outside [0, 1].
    """
    (name, first), *others = latents.items()
    if first.ndim == 0 or first.numel() == 0:
        raise ValueError(f"{name} must be [batch, *latent] and not empty, got shape {list(first.shape)}")
    for other_name, other in others:
        if other.shape != first.shape:
            raise ValueError(f"{other_name} has shape {list(other.shape)}, but {name} has {list(first.shape)}")
    dtype = work_dtype(**latents) if sigma is None else work_dtype(sigma=sigma, **latents)
    values = [latent.to(dtype) for latent in latents.values()]
    if sigma is not None:
        if sigma.shape not in (first.shape[:1], first.shape):
            raise ValueError(
                f"sigma must be one per sample, [{first.shape[0]}], or one per element, got shape {list(sigma.shape)}"
            )
        check_sigma(sigma)
        values.append(sigma.to(first.device, dtype).view(*sigma.shape, *(1,) * (first.ndim - sigma.ndim)))
    return values
