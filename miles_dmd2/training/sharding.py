"""FSDP2 around one transformer, and the full tensors behind the shards.

On one rank without mixed precision the module stays plain: FSDP2's hooks cost a small model 15-25% of a forward and
backward there, and a second copy of the weights while they are gathered. The plain module is also what the sharded
one is tested against, to 1e-12 in fp64.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from miles_dmd2.models.weights import mismatch
from miles_dmd2.training.distributed import Ranks


def shard(
    module: nn.Module,
    units: Sequence[nn.Module],
    ranks: Ranks,
    *,
    forward_dtype: torch.dtype = torch.float32,
    master_dtype: torch.dtype = torch.float32,
    fp32_units: Sequence[nn.Module] = (),
) -> None:
    """Move to the device and shard in place: `units` are gathered one at a time, the rest with the root.

    A unit is on the device whole only while it is cut, so a model larger than a device can start. Gradients are reduced
    in master dtype.

    Each unit and the root are resharded after forward, so that no full copy outlives a forward without gradient, and
    FSDP casts no inputs: the adapter knows which of them must keep their precision. `fp32_units` are units too,
    gathered in master dtype.
    """
    if ranks.world_size == 1 and forward_dtype == master_dtype:
        module.to(ranks.device)
        return
    # A warning against in-place operations on the output; adapters convert it to fp32 and nobody writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    exact = MixedPrecisionPolicy(reduce_dtype=master_dtype, cast_forward_inputs=False)
    mixed = exact if forward_dtype == master_dtype else replace(exact, param_dtype=forward_dtype)
    for policy, part in ((exact, fp32_units), (mixed, (*units, module))):
        for unit in part:
            fully_shard(unit, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=policy)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient, sharing its storage, outside autograd."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def row_range(tensor: Tensor) -> tuple[int, int]:
    """(first row, rows of all ranks) of this rank's part: FSDP2 cuts the first dimension as `torch.chunk` does."""
    total = len(tensor) if tensor.ndim else 1
    if not isinstance(tensor, DTensor):
        return 0, total
    mesh = tensor.device_mesh
    size = -(-total // mesh.size())
    return min(mesh.get_local_rank() * size, total), total


def full(tensor: Tensor) -> Tensor:
    """The whole tensor. On sharded tensors a collective: every rank calls it, in the same order."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def full_parameters(module: nn.Module, keep: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, full parameter) one at a time, so that no more than one full tensor is on the device.

    `keep` False (the ranks other than 0): takes part in the collectives, yields nothing.
    """
    for name, parameter in module.named_parameters():
        tensor = full(parameter)
        if keep:
            yield name, tensor


@torch.no_grad()
def load_full(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set every parameter from full tensors; each rank cuts its own part, without communication.

    ValueError: names or shapes that differ from the module's parameters.
    """
    parameters = dict(module.named_parameters())
    if problem := mismatch({name: parameter.shape for name, parameter in parameters.items()}, tensors):
        raise ValueError(f"these tensors are not the module's parameters: {problem}")
    for name, parameter in parameters.items():
        value = tensors[name]
        if isinstance(parameter, DTensor):
            value = value.to(parameter.device, parameter.dtype).contiguous()
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(value)
