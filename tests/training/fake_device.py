"""A fake device on the CPU: counts the bytes of every tensor that is alive, whoever holds it.

Two sources, so that nothing depends on the list of the code under test: each storage that a torch operation returned
while the mode was active (also those that only C++ holds, like tensors saved for backward), and each tensor object
that the garbage collector knows.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeDevice(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._before = {storage._cdata for storage in _reachable()}
        self._seen: dict[int, StorageWeakRef] = {}

    def __enter__(self):
        gc.freeze()  # what is there already need not be looked at again and again
        return super().__enter__()

    def __exit__(self, *exception):
        gc.unfreeze()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = _plain(leaf).untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage)
        return result

    def bytes(self, host: Iterable[torch.Tensor] = ()) -> int:
        """Of all storages that came to life since this object did, without those of `host`."""
        alive = {storage._cdata: storage.nbytes() for storage in _reachable()}
        for ref in self._seen.values():
            if not ref.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
                if storage is not None:
                    alive[storage._cdata] = storage.nbytes()
        excluded = self._before | {tensor.untyped_storage()._cdata for tensor in host}
        return sum(size for key, size in alive.items() if key not in excluded)


def _reachable() -> list[torch.UntypedStorage]:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return [_plain(t).untyped_storage() for t in tensors if not t.is_meta]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
