"""Data sets: files of real latents, and how they fit the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from miles_dmd2.data.latents import LatentFile, write_latents
from miles_dmd2.models.checkpoint import component_digest
from tests.bad_input.bench import Bench, Case, Table, flags

FLAG, ON = "--dmd2-latents", ("--dmd2-student-input", "forward_noise")
SHAPE = (2, 4, 64)  # of two pictures of the tiny pipeline at 32 x 32
PROMPTS = ("the digit one", "the digit two")


def sound(bench: Bench, shape: tuple[int, ...] = SHAPE, prompts: tuple[str, ...] = PROMPTS, vae: str = "") -> Path:
    """What the sound command would take, but for what is given."""
    path = bench.path / "latents.safetensors"
    write_latents(path, LatentFile(torch.zeros(shape), prompts, vae or component_digest(bench.pipeline, "vae")))
    return path


def damaged(damage: Callable[[Path], object], value: str, remedy: str = "encode it again") -> Case:
    def make(bench: Bench) -> list[str]:
        path = sound(bench)
        damage(path)
        return [*ON, FLAG, str(path)]

    return Case(make, FLAG, value, remedy)


def written(change: Callable[[Tensor, dict[str, str]], Tensor]) -> Callable[[Path], None]:
    """Written anew by another program: other tensors or metadata."""

    def damage(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            metadata, latents = dict(file.metadata()), file.get_tensor("latents")
        save_file({"latents": change(latents, metadata)}, path, metadata=metadata)

    return damage


def without(name: str) -> Callable[[Path], None]:
    def change(latents: Tensor, metadata: dict[str, str]) -> Tensor:
        del metadata[name]
        return latents

    return written(change)


def prompts(value: object) -> Callable[[Path], None]:
    def change(latents: Tensor, metadata: dict[str, str]) -> Tensor:
        metadata["prompts"] = json.dumps(value)
        return latents

    return written(change)


def fitting(value: str, remedy: str, **changes: object) -> Case:
    return Case(lambda bench: [*ON, FLAG, str(sound(bench, **changes))], FLAG, value, remedy)  # type: ignore[arg-type]


DATA: Table = {
    "none": flags(f"{' '.join(ON)} {FLAG} nowhere", FLAG, "nowhere: no such file", "scripts/encode_latents.py wrote"),
    "no safetensors": damaged(lambda p: p.write_bytes(b"\x80\x04pickle"), "not readable as safetensors", "give a file"),
    "other tensors": damaged(lambda p: save_file({"x": torch.zeros(1)}, p), "holds no latents of the format", "give"),
    "edited": damaged(written(lambda latents, _: latents + 1), "is not what its hash says"),
    "half precision": damaged(written(lambda latents, _: latents.bfloat16()), "[2, 4, 64] values of torch.bfloat16"),
    "not finite": damaged(written(lambda latents, _: latents / 0), "not finite"),
    "no prompts": damaged(without("prompts"), "no list of prompts"),
    "too few prompts": damaged(prompts(["the digit one"]), "has 2 latents and 1 prompts"),
    "another size": fitting("latents are [16, 64], this run's are [4, 64]", "encode at the size", shape=(2, 16, 64)),
    "another VAE": fitting("another VAE", "encode them with this one", vae="ab" * 32),
    "a prompt without": fitting("1 of the prompts (the digit two)", "leave them out", prompts=("the digit one",) * 2),
    "needed": flags(" ".join(ON), "--dmd2-student-input", "forward_noise", "give --dmd2-latents"),
    "not needed": flags(f"{FLAG} x", FLAG, "is never read", "use forward_noise"),
}
