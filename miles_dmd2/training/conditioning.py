"""The critic is told the stop step: a zero-initialised embedding added to the family's time embedding.

Registered before sharding, so that FSDP gathers it with the unit of the module whose output it is added to. Zero at
the start: the critic is then the plain critic, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from miles_dmd2.models.base import ModelAdapter

KEY = "stop_step_embedding"


def is_stop_step_key(name: str) -> bool:
    """Whether a parameter name is the embedding's, which no exported model may have."""
    return name.rpartition(".")[2] == KEY


class StopStepConditioning:
    """One critic's stop-step embedding `[num_steps, dim]`, and the stop steps of the forward that is running."""

    def __init__(self, adapter: ModelAdapter, critic: nn.Module, num_steps: int) -> None:
        """Adds the parameter and a forward hook to `adapter.time_embedding(critic)`; call before sharding."""
        module = adapter.time_embedding(critic)
        like = next(critic.parameters())
        dim = _output_dim(adapter, critic, module)
        weight = torch.zeros(num_steps, dim, dtype=like.dtype, device=like.device)
        module.register_parameter(KEY, nn.Parameter(weight))
        module.register_forward_hook(self._add)
        self.num_steps = num_steps
        self._steps: Tensor | None = None
        self._off = False

    @contextmanager
    def told(self, stop_steps: Tensor) -> Iterator[None]:
        """Forwards inside the block are of samples with these stop steps, `[batch]` int64."""
        self._steps = stop_steps
        try:
            yield
        finally:
            self._steps = None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Forwards inside the block are of the network without the embedding."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def _add(self, module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        if self._off:
            return output
        if self._steps is None:
            raise RuntimeError("the critic is told the stop step, but this forward was not: use told(stop_steps)")
        # One sample may have several rows, of several clocks.
        if not isinstance(output, Tensor) or output.ndim != 2 or len(self._steps) not in (1, len(output)):
            found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise RuntimeError(f"the time embedding gave {found} for {len(self._steps)} samples, need [batch, dim]")
        weight = module.get_parameter(KEY)
        return output + weight[self._steps].to(output.dtype)


@torch.no_grad()
def _output_dim(adapter: ModelAdapter, critic: nn.Module, module: nn.Module) -> int:
    """Width of the time embedding, from one forward of the adapter's fixed conditioning."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    like = next(critic.parameters())
    x = torch.zeros(1, *adapter.latent_shape, dtype=like.dtype, device=like.device)
    cond = {name: value.to(like.device) for name, value in adapter.collate([adapter.probe_conditioning()]).items()}
    try:
        adapter.velocity(critic, x, torch.full((1,), 0.5, dtype=like.dtype, device=like.device), cond)
    finally:
        handle.remove()
    if len(seen) != 1 or not isinstance(seen[0], Tensor) or seen[0].ndim != 2:
        raise TypeError(f"{type(module).__name__} must return [batch, dim] once per forward to be told the stop step")
    return seen[0].shape[1]
