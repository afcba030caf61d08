"""Real latents with their prompts, encoded once: one safetensors file that says which VAE made it and proves itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from miles_dmd2.config.errors import ConfigError, show

_FORMAT = "miles_dmd2 latents 1"
_WHAT = "a file that recipes/digits/latents.py or scripts/encode_latents.py wrote"


@dataclass(frozen=True, slots=True)
class LatentFile:
    """latents: fp32 `[n, *latent]` as the model family's trainer sees them; prompts: one each; vae: its SHA-256."""

    latents: Tensor
    prompts: tuple[str, ...]
    vae: str

    def rows(self) -> dict[str, list[int]]:
        """Prompt -> the rows that show it."""
        found: dict[str, list[int]] = {}
        for row, prompt in enumerate(self.prompts):
            found.setdefault(prompt, []).append(row)
        return found

    def digest(self) -> str:
        """SHA-256 in hex of all of it."""
        head = json.dumps([list(self.latents.shape), self.prompts, self.vae])
        return hashlib.sha256(head.encode() + self.latents.contiguous().numpy().tobytes()).hexdigest()


def write_latents(path: Path, content: LatentFile) -> None:
    """ValueError: the file exists, or a latent without its prompt, not fp32, not finite."""
    latents, prompts = content.latents, content.prompts
    if path.exists():
        raise ValueError(f"{path} exists already; give another path")
    if latents.dtype != torch.float32 or len(latents) != len(prompts) or not prompts:
        raise ValueError(
            f"want fp32 latents with a prompt each, got {list(latents.shape)} {latents.dtype}, {len(prompts)}"
        )
    if not bool(torch.isfinite(latents).all()):
        raise ValueError("latents are not finite")
    metadata = {"format": _FORMAT, "prompts": json.dumps(prompts), "vae": content.vae, "sha256": content.digest()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"latents": latents.contiguous()}, path, metadata=metadata)


def read_latents(path: Path, flag: str = "--dmd2-latents") -> LatentFile:
    """ConfigError: no such file, not one of these, what `write_latents` would not have written, or another content
    than its hash says.
    """
    if not path.is_file():
        raise ConfigError(f"{flag} {show(path)}: no such file; give {_WHAT}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            latents = file.get_tensor("latents") if "latents" in file.keys() else None  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{flag} {show(path)}: not readable as safetensors ({error}); give {_WHAT}") from None
    if metadata.get("format") != _FORMAT or latents is None:
        raise ConfigError(f"{flag} {show(path)}: holds no latents of the format {_FORMAT}; give {_WHAT}")
    fault = _fault(latents)
    if fault is not None:
        raise ConfigError(f"{flag} {show(path)}: {fault}; encode it again")
    content = LatentFile(latents, _prompts(metadata, f"{flag} {show(path)}"), metadata.get("vae", ""))
    if len(content.prompts) != len(latents):
        raise ConfigError(
            f"{flag} {show(path)}: has {len(latents)} latents and {len(content.prompts)} prompts; encode it again"
        )
    if content.digest() != metadata.get("sha256"):
        raise ConfigError(f"{flag} {show(path)}: its content is not what its hash says; encode it again")
    return content


def _fault(latents: Tensor) -> str | None:
    if latents.dtype != torch.float32 or latents.ndim < 2:
        return f"holds {list(latents.shape)} values of {latents.dtype}, not fp32 latents [n, ...]"
    return None if bool(torch.isfinite(latents).all()) else "holds latents that are not finite"


def _prompts(metadata: Mapping[str, str], where: str) -> tuple[str, ...]:
    try:
        prompts = json.loads(metadata["prompts"])
    except (KeyError, ValueError, RecursionError):
        prompts = None
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError(f"{where}: names no list of prompts in its metadata; encode it again")
    return tuple(prompts)


def check_latents(path: Path, content: LatentFile, prompts: Sequence[str], shape: tuple[int, ...], vae: str) -> None:
    """ConfigError unless every prompt has a latent of this shape, of this VAE."""
    where = f"--dmd2-latents {show(path)}"
    if tuple(content.latents.shape[1:]) != shape:
        raise ConfigError(
            f"{where}: latents are {list(content.latents.shape[1:])}, this run's are {list(shape)}; encode at the size "
            "of --diffusion-height and --diffusion-width"
        )
    if content.vae != vae:
        raise ConfigError(f"{where}: another VAE than that of --hf-checkpoint made them; encode them with this one")
    missing = sorted(set(prompts) - set(content.prompts))
    if missing:
        raise ConfigError(f"{where}: no latent for {len(missing)} of the prompts ({show(missing[0])}); leave them out")
