"""One transformer of one role on this rank: prepared, sharded, counted, and guarded while asleep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.offload import Entry, Residence, own_storage
from miles_dmd2.training.distributed import Ranks
from miles_dmd2.training.sharding import local, shard

logger = logging.getLogger(__name__)


class Network:
    """`trained` are the parameters with a role in the loss, in the model's own names; a frozen network has none.

    Always in eval mode: teacher, critic, student and engine must compute the same function of the same weights, and
    dropout would draw from the global generator.
    """

    def __init__(
        self,
        role: str,
        adapter: ModelAdapter,
        module: nn.Module,
        ranks: Ranks,
        *,
        trainable: bool,
        forward_dtype: torch.dtype = torch.float32,
        master_dtype: torch.dtype = torch.float32,
        silent: Mapping[str, str] = MappingProxyType({}),
        gradient_checkpointing: bool = False,
        before_sharding: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """Takes the module over. `silent`: parameters, beside the idle ones, whose gradient is 0 in this run.
        `before_sharding` may add parameters to it.
        """
        self.role = role
        self.module = module.eval().requires_grad_(trainable)  # on the CPU: `shard` moves one unit at a time
        if next(module.parameters()).dtype != master_dtype:
            module.to(master_dtype)
        self.forwards = 0  # samples that went through a forward
        self._adapter = adapter
        if gradient_checkpointing:
            cast(Any, module).enable_gradient_checkpointing()  # diffusers' own
        if trainable:
            self._freeze_idle({**adapter.idle_parameters(module), **silent})
        if before_sharding is not None:
            before_sharding(module)
        self._units = adapter.shard_units(module)
        shard(
            module,
            self._units,
            ranks,
            forward_dtype=forward_dtype,
            master_dtype=master_dtype,
            fp32_units=adapter.fp32_units(module),
        )
        own_storage(module)
        self.trained = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def velocity(self, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        self.forwards += x.shape[0]
        return self._adapter.velocity(self.module, x, sigma, cond)

    def entries(self) -> list[Entry]:
        """Every tensor that the network holds on the device. What never changes is frozen: all, or the buffers."""
        parameters = [
            Entry(f"{self.role}/{name}", local(p), frozen=not self.trained)
            for name, p in self.module.named_parameters()
        ]
        buffers = [
            Entry(f"{self.role} buffer/{name}", local(b), frozen=True) for name, b in self.module.named_buffers()
        ]
        return parameters + buffers

    def refuse_while_asleep(self, residence: Residence) -> None:
        """Forwards raise instead of reading freed memory."""

        def guard(_module: nn.Module, _inputs: object) -> None:
            residence.require_awake(f"a forward of the {self.role}")

        for module in (self.module, *self._units):
            module.register_forward_pre_hook(guard, prepend=True)

    def _freeze_idle(self, idle: Mapping[str, str]) -> None:
        """Keep parameters without a useful gradient out of the optimizer: weight decay would shrink them."""
        for name, gradient in idle.items():
            self.module.get_parameter(name).requires_grad_(False)
            logger.info("%s: %s stays as it is (its gradient is %s)", self.role, name, gradient)
