"""The ranks of one trainer group: rendezvous, process group, and the few collectives that trainers need."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its group. Small reductions go through gloo on the CPU, whatever the working device is."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    def sum(self, values: Sequence[float]) -> list[float]:
        """Elementwise sums over ranks in fp64. Every rank gets the same bits."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def all_true(self, flag: bool) -> bool:
        return bool(self._reduce([float(flag)], dist.ReduceOp.MIN)[0])

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return cast("list[T]", values)

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1 or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op)
        return cast("list[float]", tensor.tolist())


def backend_string(device: str) -> str:
    """On GPUs `cpu:gloo,cuda:nccl`: metrics, and checkpoints while asleep, need gloo beside NCCL.

    On CPUs gloo alone: torch's CUDA build, which is what PyPI has for Linux, has NCCL on hosts without a GPU too, and
    it refuses to start there.
    """
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


def open_rendezvous(host: str, world_size: int, timeout_s: float = 180.0) -> dist.TCPStore:
    """Rank 0 listens on `host` alone, on a port that the system chooses (`.port`), for the others' `join_rendezvous`.

    The socket is bound here, because TCPStore by itself listens on every interface.
    """
    listener = socket.create_server((host, 0), backlog=world_size)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_rendezvous(host: str, port: int, world_size: int, timeout_s: float = 180.0) -> dist.TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)


def init_ranks(
    rank: int = 0,
    world_size: int = 1,
    *,
    store: dist.Store | None = None,
    device: str = "cpu",
    timeout_s: float = 3600.0,
) -> Ranks:
    """Join the default process group, or reuse it if this process is already that rank of it.

    One rank needs no `store`. `timeout_s` bounds every collective. ValueError: bad rank, several ranks without a
    store, or the process is already another rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, world_size), got rank {rank} of {world_size}")
    working = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            have = f"rank {dist.get_rank()} of {dist.get_world_size()}"
            raise ValueError(f"this process is {have} already, cannot become rank {rank} of {world_size}")
    else:
        if store is None:
            if world_size != 1:
                raise ValueError(
                    f"{world_size} ranks need a store: open_rendezvous on rank 0, join_rendezvous elsewhere"
                )
            store = dist.HashStore()
        timeout = timedelta(seconds=timeout_s)
        backend = backend_string(working.type)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    mesh = init_device_mesh(working.type, (world_size,), mesh_dim_names=("shard",))
    return Ranks(rank, world_size, working, mesh)


def leave_ranks() -> None:
    """End this process's membership; safe to call twice."""
    if dist.is_initialized():
        dist.destroy_process_group()
