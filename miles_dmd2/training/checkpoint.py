"""A rank's shards as one safetensors file: tensors only, scalars belong in the manifest. Re-read before it counts.

Trained tensors are sharded along their first dimension (`sharding.py`), so the ranks' parts in rank order are the
whole, and another number of ranks reads the rows that are its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def rank_file(name: str, rank: int, world_size: int) -> str:
    """Path of a rank's file below the checkpoint directory."""
    return f"{name}/rank_{rank:05d}_of_{world_size:05d}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write, flush to disk, read back and compare bit for bit; returns the file's SHA-256 in hex. OSError: a full disk,
    or other bits on it than were written.
    """
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_file(path, held)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with safe_open(path, framework="pt") as written:
        for name, tensor in held.items():
            if not _same_bits(written.get_tensor(name), tensor):
                raise OSError(f"{path}: {name} reads back differently from what was written")
    return digest


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Contiguous CPU tensors as safetensors. OSError: the system would not write them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:  # it has no class of its own for what the system says
        raise OSError(f"cannot write {path} ({sum(t.nbytes for t in tensors.values())} bytes): {error}") from error


@torch.no_grad()
def read_tensors(files: Sequence[Path], into: Mapping[str, Tensor], rows: Mapping[str, tuple[int, int]]) -> None:
    """Copy what the ranks wrote to `files` (in rank order) into `into`, this rank's rows of it; all or nothing.

    `rows`: of each tensor that is sharded, (first row of this rank, rows of all ranks).
    ValueError: a file that is missing, or other names, shapes or dtypes than this run's.
    """
    for path in files:
        if not path.is_file():
            there = sorted(other.name for other in path.parent.glob("*.safetensors"))
            raise ValueError(f"no {path.name} in {path.parent} (there: {there})")
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(path, framework="pt")) for path in files]
        for path, file in zip(files, opened, strict=True):
            names = set(file.keys())
            if names != into.keys():
                missing, extra = sorted(into.keys() - names)[:3], sorted(names - into.keys())[:3]
                raise ValueError(f"{path}: names differ from this run's; missing {missing}, unexpected {extra}")
        values = {
            name: _own_rows([file.get_slice(name) for file in opened], rows.get(name), t) for name, t in into.items()
        }
    for name, wanted in into.items():
        found = values[name]
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"{files[0].parent}: {name} is {list(found.shape)} {found.dtype}, this run has {list(wanted.shape)} "
                f"{wanted.dtype}"
            )
    for name, tensor in into.items():
        tensor.copy_(values[name])


def read_whole(files: Sequence[Path], prefix: str) -> dict[str, Tensor]:
    """Full tensors on the CPU from what the ranks wrote to `files` (in rank order): of names that begin with `prefix`,
    without it. ValueError: a file that is no safetensors, or of other names than the first.
    """
    with ExitStack() as stack:
        try:
            opened = [stack.enter_context(safe_open(path, framework="pt")) for path in files]
        except SafetensorError as error:
            raise ValueError(f"{files[0].parent}: {error}") from error
        names = [name for name in opened[0].keys() if name.startswith(prefix)]  # noqa: SIM118
        for path, file in zip(files, opened, strict=True):
            if lacking := sorted(set(names) - set(file.keys())):
                raise ValueError(f"{path}: has no {lacking[0]}")
        return {name.removeprefix(prefix): _joined([file.get_slice(name) for file in opened]) for name in names}


def _joined(parts: Sequence[Any]) -> Tensor:
    return parts[0][...] if len(parts) == 1 else torch.cat([part[...] for part in parts])


def _own_rows(parts: Sequence[Any], rows: tuple[int, int] | None, wanted: Tensor) -> Tensor:
    """Of a tensor in `parts` (slices of open files) the rows of this rank, or as it is where that cannot be cut."""
    if len(parts) == 1 and rows is None:
        return parts[0][...]
    sizes = [part.get_shape()[0] for part in parts]
    first, total = rows or (0, sum(sizes))
    if sum(sizes) != total:
        return torch.cat([part[...] for part in parts])  # of another model: its shape says so
    last = first + len(wanted)
    taken, start = [], 0
    for part, size in zip(parts, sizes, strict=True):
        low, high = max(first - start, 0), min(last - start, size)
        if low < high:
            taken.append(part[low:high])
        start += size
    return torch.cat(taken) if taken else parts[0][0:0]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
