"""Two normalisations whose CPU kernels the public wheel of SGLang does not bring, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def norm_scale_shift(original: Callable[..., Any], self: Any, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """AROUND `_NormScaleShift.forward_cpu`: norm(x) (1 + scale) + shift."""
    if hasattr(torch.ops.sgl_kernel, "fused_norm_scale_shift_cpu"):
        return original(self, x, shift, scale)
    return _modulate(self.norm(x), shift, scale).to(x.dtype)


def scale_residual_norm_scale_shift(
    original: Callable[..., Any],
    self: Any,
    residual: Tensor,
    x: Tensor,
    gate: Tensor | int,
    shift: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """AROUND `_ScaleResidualNormScaleShift.forward_cpu`: r = residual + gate x; norm(r) (1 + scale) + shift, and r."""
    if hasattr(torch.ops.sgl_kernel, "fused_scale_residual_norm_scale_shift_cpu"):
        return original(self, residual, x, gate, shift, scale)
    total = residual + (x * _per_token(gate, x) if isinstance(gate, Tensor) else gate * x)
    return _modulate(self.norm(total), shift, scale).to(x.dtype), total


def _modulate(normed: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return normed * (1 + _per_token(scale, normed)) + _per_token(shift, normed)


def _per_token(value: Tensor, x: Tensor) -> Tensor:
    """Per frame `[batch, frames, 1, dim]` to per token of x `[batch, tokens, dim]`; others broadcast as they are."""
    if value.dim() != 4:
        return value
    frames = value.shape[1]
    return value.expand(value.shape[0], frames, x.shape[1] // frames, value.shape[-1]).flatten(1, 2)
