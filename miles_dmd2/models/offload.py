"""Sleep and wake: one list of tensors is what is offloaded, restored and checkpointed.

Asleep, every listed tensor's bytes are in host memory and its storage on the working device has size zero; tensors
keep identity, shape and strides, so FSDP's parameters, moments and averages stay as they are, and waking restores
every bit. FSDP2 keeps a parameter's shard in a private 1-D tensor, of which the public local tensor is a view:
resizing their common storage moves both (guarded by a test). Reading a tensor's values while asleep reads no memory
of its own: the owner must refuse work (`require_awake`). Trainers and the local engine share this module.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Allocate = Callable[[int, torch.device], Tensor]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the state. `frozen`: never changes after loading, so its host copy is made once; no checkpoint."""

    name: str
    tensor: Tensor
    frozen: bool = False


@dataclass(slots=True)
class _Slot:
    storage: torch.UntypedStorage
    frozen: bool
    host: Tensor | None = None  # uint8, kept for the next cycle


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """uint8 host memory for copies from and to `device`: pinned for CUDA."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class Residence:
    """Where a state's bytes live: on the working device (awake) or in host memory (asleep)."""

    def __init__(self, entries: Sequence[Entry], allocate: Allocate = host_buffer) -> None:
        """ValueError: two entries of one name, or a storage that cannot be resized (a view of a mapped file)."""
        self.entries = {entry.name: entry for entry in entries}
        if len(self.entries) != len(entries):
            raise ValueError("two entries of the state have the same name")
        self._allocate = allocate
        self._slots = _slots(entries)
        self.awake = True

    def require_awake(self, what: str) -> None:
        if not self.awake:
            raise RuntimeError(f"{what} while asleep: call wake() first")

    def sleep(self) -> None:
        """Idempotent. Copies out what may have changed since the last time, then frees the device's memory."""
        if not self.awake:
            return
        for slot in self._slots.values():
            if slot.host is None:
                slot.host = self._allocate(slot.storage.nbytes(), slot.storage.device)
            elif slot.frozen:
                continue
            slot.host.untyped_storage().copy_(slot.storage, non_blocking=True)
        self._finish_copies()
        for slot in self._slots.values():
            slot.storage.resize_(0)
        self.awake = False
        if self._cuda():
            gc.collect()
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Idempotent. Every byte is back on the device when this returns."""
        if self.awake:
            return
        for slot in self._slots.values():
            assert slot.host is not None
            slot.storage.resize_(slot.host.numel())
            slot.storage.copy_(slot.host.untyped_storage(), non_blocking=True)
        self._finish_copies()
        self.awake = True

    def view(self, name: str) -> Tensor:
        """The tensor's current values without moving anything: itself when awake, its host copy when asleep."""
        tensor = self.entries[name].tensor
        if self.awake or tensor.numel() == 0:
            return tensor
        host = self._slots[tensor.untyped_storage()._cdata].host
        assert host is not None
        values = torch.empty(0, dtype=tensor.dtype)
        return values.set_(host.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def _cuda(self) -> bool:
        return any(slot.storage.device.type == "cuda" for slot in self._slots.values())

    def _finish_copies(self) -> None:
        if self._cuda():
            torch.cuda.synchronize()


def _slots(entries: Sequence[Entry]) -> dict[int, _Slot]:
    """Storage -> slot, each storage once (ties, views); frozen only if all that lives in it is."""
    slots: dict[int, _Slot] = {}
    for entry in entries:
        storage = entry.tensor.untyped_storage()
        if not storage.resizable():
            raise ValueError(f"{entry.name} cannot leave the device: its storage cannot be resized")
        slot = slots.setdefault(storage._cdata, _Slot(storage, frozen=True))
        slot.frozen = slot.frozen and entry.frozen
    return slots


def module_entries(prefix: str, module: nn.Module, frozen: bool = False) -> list[Entry]:
    """Parameters and buffers of a module, by prefixed name."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [Entry(f"{prefix}.{name}", tensor.detach(), frozen) for name, tensor in tensors]


def held_bytes(*modules: nn.Module) -> int:
    """Bytes of parameters and buffers on their working device, shared storages once; 0 while asleep."""
    storages = (tensor.untyped_storage() for module in modules for tensor in _tensors(module))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@torch.no_grad()
def own_storage(module: nn.Module) -> None:
    """Give every parameter and buffer a storage of its own that can be resized.

    Loading from safetensors without a change of dtype leaves them as views of a mapped file, which cannot shrink and
    whose values change when somebody writes the file. `numpy()` also makes a storage unresizable for good.
    """
    for tensor in _tensors(module):
        storage = tensor.untyped_storage()
        if not storage.resizable() or storage.nbytes() != tensor.nbytes:
            tensor.data = tensor.data.clone(memory_format=torch.preserve_format)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
