"""Named full tensors on their way from a trainer to an engine or a file: their checksum and what is wrong with them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 in hex over the names in sorted order: name, dtype, shape and raw bytes of each tensor.

    Independent of the mapping's order, of device and of strides; sensitive to everything else, the sign of a zero
    included. Tensors must be full (no DTensor).
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu", copy=True).contiguous()  # copy: numpy() forbids resizing for good
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def mismatch(expected: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor]) -> str | None:
    """What differs in names or shapes, in words; None if nothing does."""
    missing = sorted(expected.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - expected.keys())
    if missing or unexpected:
        parts = [
            f"{len(names)} {what}: {_some(names)}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        return "names differ, " + "; ".join(parts)
    wrong = [
        f"{name} has {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if tuple(tensors[name].shape) != tuple(shape)
    ]
    return f"{len(wrong)} wrong shapes: {_some(wrong)}" if wrong else None


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The names that are not floating point, or hold a NaN or an infinity, in words; None if there are none."""
    wrong = [name for name, value in tensors.items() if not value.is_floating_point()]
    if wrong:
        return f"{len(wrong)} are not floating point: {_some(wrong)}"
    wrong = [name for name, value in tensors.items() if not bool(torch.isfinite(value).all())]
    return f"{len(wrong)} are not finite: {_some(wrong)}" if wrong else None


def safetensors_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a component's safetensors files, from their headers. ValueError if there are none."""
    from safetensors import safe_open

    files = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
    if not files:
        raise ValueError(f"{directory} has no .safetensors file; other weight formats are not read")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    return shapes


def read_tensor(directory: Path, name: str) -> Tensor:
    """One tensor of a component's safetensors files. ValueError if none has it."""
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_tensor(name).clone()
    raise ValueError(f"no .safetensors file in {directory} has {name}")


def _some(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
