"""A rank's shards as one safetensors file: tensors only, scalars belong in the manifest. Re-read before it counts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def rank_file(name: str, rank: int, world_size: int) -> str:
    """Path of a rank's file below the checkpoint directory."""
    return f"{name}/rank_{rank:05d}_of_{world_size:05d}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write, flush to disk, read back and compare bit for bit; returns the file's SHA-256 in hex."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(held, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with safe_open(path, framework="pt") as written:
        for name, tensor in held.items():
            if not _same_bits(written.get_tensor(name), tensor):
                raise OSError(f"{path}: {name} reads back differently from what was written")
    return digest


@torch.no_grad()
def read_tensors(path: Path, into: Mapping[str, Tensor]) -> None:
    """Copy a file's tensors into `into`, all or nothing.

    ValueError: no such file (then what is there instead), or other names, shapes or dtypes.
    """
    if not path.is_file():
        there = sorted(other.name for other in path.parent.glob("*.safetensors"))
        raise ValueError(f"no {path.name} in {path.parent} (there: {there}); resume needs the same number of ranks")
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if names != into.keys():
            missing, extra = sorted(into.keys() - names)[:3], sorted(names - into.keys())[:3]
            raise ValueError(f"{path}: names differ from this run's; missing {missing}, unexpected {extra}")
        values = {name: file.get_tensor(name) for name in into}
    for name, tensor in into.items():
        found, wanted = values[name], tensor
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"{path}: {name} is {list(found.shape)} {found.dtype}, this run has {list(wanted.shape)} {wanted.dtype}"
            )
    for name, tensor in into.items():
        tensor.copy_(values[name])


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
