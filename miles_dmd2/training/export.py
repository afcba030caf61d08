"""A trained student on its way to the engines: full tensors in the model's own names, with proof of arrival."""

from __future__ import annotations

import torch

from miles_dmd2.algo import key_seed, normal
from miles_dmd2.config.lora import Lora
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.weights import checksum
from miles_dmd2.training.conditioning import is_stop_step_key
from miles_dmd2.training.distributed import Ranks
from miles_dmd2.training.lora import merged
from miles_dmd2.training.network import Network
from miles_dmd2.training.sharding import full_parameters
from miles_dmd2.types import Probe, WeightKind, WeightUpdate, WeightVersion

PROBE_SIGMA = 0.5


def export(
    network: Network, adapter: ModelAdapter, ranks: Ranks, updates: int, kind: WeightKind, lora: Lora | None = None
) -> WeightUpdate:
    """The weights the network computes with now, on rank 0; the other ranks get an update without tensors.

    With an adapter they are merged in fp32 on the CPU, and the probe is of base and adapter as they are trained.
    """
    first = ranks.rank == 0
    tensors = {
        name: tensor.to("cpu", torch.float32, copy=True)
        for name, tensor in full_parameters(network.module, keep=first)
        if not is_stop_step_key(name)
    }
    if lora is not None:
        tensors = merged(tensors, lora.scale)
    answer = probe(network, adapter, ranks)
    version = WeightVersion(updates, kind)
    return WeightUpdate(version, checksum(tensors) if first else "", answer, tensors if first else None)


@torch.no_grad()
def probe(network: Network, adapter: ModelAdapter, ranks: Ranks) -> Probe:
    """The network's velocity on a fixed input, the same in every run of a family and size."""
    x = normal(key_seed(0, "probe", 0, 1), adapter.latent_shape).unsqueeze(0)
    sigma = torch.full((1,), PROBE_SIGMA)
    cond = adapter.probe_conditioning()
    dtype = next(network.module.parameters()).dtype
    on_device = {name: value.to(ranks.device) for name, value in adapter.collate([cond]).items()}
    velocity = network.velocity(x.to(ranks.device, dtype), sigma.to(ranks.device, dtype), on_device)
    return Probe(x, sigma, cond, velocity.float().cpu())
