"""One transformer of one role on this rank: prepared, sharded, counted, and guarded while asleep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.offload import Entry, Residence, own_storage
from miles_dmd2.training.conditioning import StopStepConditioning
from miles_dmd2.training.distributed import Ranks
from miles_dmd2.training.lora import without_lora
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
        adapt: Callable[[nn.Module, Collection[str]], None] | None = None,
        before_sharding: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """Takes the module over. `silent`: parameters, beside the idle ones, whose gradient is 0 in this run.
        `adapt` freezes the module and adds an adapter, but to weights of these names; then that is what is trained.
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
        self._has_base = adapt is not None
        if trainable:
            idle = {**adapter.idle_parameters(module), **silent}
            if adapt is None:
                self._freeze_idle(idle)
            else:
                adapt(module, idle.keys())
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
        """Every tensor that the network holds on the device. What never changes is frozen: all, or the base of an
        adapter, or the buffers.
        """
        parameters = [
            Entry(
                f"{self.role}/{name}", local(p), frozen=name not in self.trained if self._has_base else not self.trained
            )
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


class BaseNetwork:
    """The frozen base of a network with an adapter, as a network of its own role: it holds no tensor of its own.

    Its forwards are bit for bit those of the module before anything was added to it: the adapter is off, and so is the
    stop-step embedding.
    """

    def __init__(
        self, role: str, adapter: ModelAdapter, network: Network, conditioning: StopStepConditioning | None
    ) -> None:
        self.role = role
        self.module = network.module
        self.forwards = 0
        self._adapter, self._conditioning = adapter, conditioning

    def velocity(self, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        self.forwards += x.shape[0]
        with ExitStack() as off:
            off.enter_context(without_lora(self.module))
            if self._conditioning is not None:
                off.enter_context(self._conditioning.off())
            return self._adapter.velocity(self.module, x, sigma, cond)

    def entries(self) -> list[Entry]:
        return []

    def refuse_while_asleep(self, residence: Residence) -> None:
        """The network whose base this is refuses for both."""
