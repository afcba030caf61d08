"""LoRA by peft: an adapter on a network's frozen base, the base without it, and the two merged for engines and files.

The base's parameters never change: copies of them are merged. Names here are the module's, where a layer with an
adapter has its own weight as `<layer>.base_layer.weight`; outside of this module a base has the model's own names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import get_args

import torch
from torch import Tensor, nn

from miles_dmd2.algo import key_seed
from miles_dmd2.config.lora import Lora, lora_layers
from miles_dmd2.types import Role

logger = logging.getLogger(__name__)
_ROLES: tuple[str, ...] = get_args(Role)
_BASE = ".base_layer."
_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?P<factor>[AB])\.[a-z]+\.weight")


def add_lora(module: nn.Module, lora: Lora, role: Role, seed: int, untrained: Collection[str]) -> None:
    """Freeze `module`, on the CPU, and put an adapter into it; call before sharding.

    B starts at 0, so the network computes what it did, and A as peft draws it, from a key of seed and role: the same on
    every rank. `untrained`: names of weights that get no adapter, because no gradient comes to them. ValueError: as
    `lora_layers`, or a layer that is not linear.
    """
    from peft import LoraConfig, inject_adapter_in_model

    module.requires_grad_(False)
    layers = lora_layers({name: tuple(p.shape) for name, p in module.named_parameters()}, lora, untrained)
    for layer in layers:
        if type(module.get_submodule(layer)) is not nn.Linear:
            raise ValueError(f"--lora-target-modules: {layer} is no linear layer; name those that are")
    names = "|".join(re.escape(layer) for layer in layers)  # a pattern: names in a list also match as endings
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=f"({names})", bias="none")
    with torch.random.fork_rng(devices=[]):  # of the CPU, where the parameters are made; others are left alone
        torch.default_generator.manual_seed(key_seed(seed, "lora_init", 0, _ROLES.index(role)))
        inject_adapter_in_model(config, module, adapter_name=role)
    module.eval()
    logger.info("%s: %s: %d layers", role, lora, len(layers))


@contextmanager
def without_lora(module: nn.Module) -> Iterator[None]:
    """Forwards inside the block are the base's, bit for bit.

    peft's own switch also stops the adapter's parameters from requiring gradients, which FSDP2 reads once and for all.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def model_name(name: str) -> str:
    """Of a parameter of the base, as the model without an adapter has it."""
    return name.replace(_BASE, ".")


@torch.no_grad()
def merged(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Base and adapter, full tensors by either's names, as one model's weights: W + scale * B A, in their own dtype.

    Takes the tensors over: the base's are written to, so that no second copy of a large model is made. ValueError: a
    factor without the other, or without its layer.
    """
    factors = _factors(tensors)
    weights = {model_name(name): value for name, value in tensors.items() if not _FACTOR.fullmatch(name)}
    for layer, (a, b) in factors.items():
        if f"{layer}.weight" not in weights:
            raise ValueError(f"the adapter is over {layer}, which the base has not")
        weights[f"{layer}.weight"].addmm_(b, a, alpha=scale)
    return weights


def as_diffusers(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """An adapter as diffusers' `load_lora_weights` reads it. The scale is in B, so no loader has to know alpha."""
    found: dict[str, Tensor] = {}
    for layer, (a, b) in _factors(tensors).items():
        found[f"transformer.{layer}.lora_A.weight"] = a
        found[f"transformer.{layer}.lora_B.weight"] = scale * b
    return found


def _factors(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer -> its A and B."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if match := _FACTOR.fullmatch(name):
            found.setdefault(match["layer"], {})[match["factor"]] = value
    for layer, pair in found.items():
        if len(pair) != 2:
            raise ValueError(f"the adapter of {layer} has {' and '.join(sorted(pair))} only, and needs A and B")
    return {layer: (pair["A"], pair["B"]) for layer, pair in found.items()}
