"""What differs between model families, behind one interface.

Outside an adapter there is one convention: sigma in [0, 1], velocity = noise - x0, latents `[batch, *latent]`,
fp32 between adapter calls. An adapter owns loading, timestep scaling, velocity sign, latent packing, how prompts become
conditioning and how conditioning becomes forward arguments, and the names of special modules.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, get_args

import torch
from torch import Tensor, nn

from miles_dmd2.algo import normal_stream
from miles_dmd2.config.headers import read_component
from miles_dmd2.models.export import StudentSampling
from miles_dmd2.models.serving import ServingFormat
from miles_dmd2.types import Conditioning, SampleType

VISUAL = "visual"


@dataclass
class Components:
    """The loaded parts an engine needs beside the transformer: prompts in, pixels out."""

    text_encoder: nn.Module
    tokenizer: object
    vae: nn.Module

    def modules(self) -> tuple[nn.Module, ...]:
        return (self.text_encoder, self.vae)


@dataclass(frozen=True, slots=True)
class LatentPart:
    """A stream of a latent that holds several: its name, and how many of the flat latent's values it has."""

    name: str
    size: int


class ModelAdapter(ABC):
    """One model family at one canvas size. Constructing it reads JSON configs only; weights come with `load_*`."""

    family: ClassVar[str]
    pipeline_classes: ClassVar[tuple[str, ...]]  # `_class_name` values of model_index.json that this adapter serves
    makes_clips: ClassVar[bool] = False
    fewest_decoded_frames: ClassVar[int] = 1
    embedded: ClassVar[bool] = True  # whether the local engine can generate with it
    guidance_distilled: ClassVar[bool] = False  # the network is guided by itself: classifier-free guidance is refused
    sample_types: ClassVar[tuple[SampleType, ...]] = get_args(SampleType)
    one_by_one: ClassVar[bool] = False  # each sample of a batch is a forward of its own

    def __init__(self, checkpoint: Path, height: int, width: int, num_frames: int = 1) -> None:
        """ValueError: more than one frame from a family of single pictures."""
        if num_frames != 1 and not self.makes_clips:
            raise ValueError(
                f"--diffusion-num-frames {num_frames}: {self.family} makes single pictures; leave it out, or use 1"
            )
        self.checkpoint = checkpoint
        self.height = height
        self.width = width
        self.num_frames = num_frames

    @classmethod
    def default_size(cls, checkpoint: Path) -> tuple[int, int]:
        """(height, width) for a run that names none. ValueError, unless the family knows one."""
        raise ValueError(f"{cls.family} has no default size: give --diffusion-height and --diffusion-width")

    @classmethod
    def frames_of(cls, seconds: float) -> int:
        """Frames of a clip of so many seconds. ValueError, unless the family has a frame rate of its own."""
        raise ValueError(
            f"--diffusion-duration {seconds:g}: {cls.family} has no frame rate of its own; give --diffusion-num-frames"
        )

    @classmethod
    def default_frames(cls, checkpoint: Path) -> int:
        """Frames for a run that names none. ValueError, unless the family knows a number."""
        if cls.makes_clips:
            raise ValueError(f"{cls.family} has no default length: give --diffusion-num-frames")
        return 1

    @property
    @abstractmethod
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample's latent as trainer and engine pass it around (packed, if the family packs)."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about this canvas before a run starts."""
        if self.makes_clips:
            return (f"clips of {self.num_frames} frames, {self.width} x {self.height}",)
        return (f"pictures of {self.width} x {self.height}",)

    @property
    def parts(self) -> tuple[LatentPart, ...]:
        """The streams of a latent, the picture first. With several, `latent_shape` is one axis, all parts in a row."""
        return (LatentPart(VISUAL, math.prod(self.latent_shape)),)

    def part_sigmas(self, sigma: Tensor) -> tuple[Tensor, ...]:
        """Each part's noise level, any shape, where the picture's is sigma: what the network was trained with."""
        return (sigma,)

    def spread(self, sigmas: Sequence[Tensor]) -> Tensor:
        """The parts' levels, each `[batch]`, as `algo` takes them: `[batch]` of one part, else `[batch, *latent]`."""
        if len(sigmas) == 1:
            return sigmas[0]
        return torch.cat([s.unsqueeze(1).expand(-1, part.size) for s, part in zip(sigmas, self.parts, strict=True)], 1)

    @property
    def serving(self) -> ServingFormat:
        """This family on an SGLang server. ValueError, unless it has been brought up there."""
        raise ValueError(f"{self.family} cannot be served by SGLang yet: use --rollout-engine local")

    @abstractmethod
    def initial_noise(self, seed: int) -> Tensor:
        """fp32 `[*latent]`: the first draw of a CPU generator with this seed, in the engine's layout, then packed."""

    def hop_noise(self, seed: int, hops: int) -> Tensor:
        """fp32 `[hops, *latent]` of the SDE's hops: the draws of the sample's generator after its initial noise.

        So does SGLang's rollout, which draws them in the layout of the latents that it steps (`latent_shape`).
        """
        return normal_stream(seed, self.latent_shape, 1 + hops)[1:]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the trained weights, from the headers of the checkpoint's files."""
        return {weight.name: weight.shape for weight in read_component(self.checkpoint / "transformer")}

    @abstractmethod
    def load_transformer(self, dtype: torch.dtype = torch.float32) -> nn.Module: ...

    @abstractmethod
    def load_components(self, dtype: torch.dtype = torch.float32) -> Components: ...

    @abstractmethod
    def encode_prompts(self, components: Components, prompts: Sequence[str]) -> list[Conditioning]: ...

    @abstractmethod
    def decode(self, components: Components, latents: Tensor) -> Tensor:
        """latents `[batch, *latent]` -> fp32 in [0, 1] `[batch, frames, height, width, 3]`."""

    def encode(self, components: Components, pixels: Tensor) -> Tensor:
        """uint8 `[batch, frames, height, width, 3]` -> latents fp32 `[batch, *latent]` on the CPU; `decode` undoes it.

        The posterior's mode, normalised. ValueError: pixels of another shape or dtype, or a family that cannot: only
        --dmd2-student-input forward_noise needs it.
        """
        raise ValueError(f"{self.family} cannot encode pictures: use --dmd2-student-input backward_simulation")

    def planes_of(self, components: Components, pixels: Tensor) -> Tensor:
        """Pixels of this canvas for the VAE: `[batch, 3, frames, height, width]` in [-1, 1], on its device and in its
        dtype. ValueError: another shape, or not uint8.
        """
        shape = (self.num_frames, self.height, self.width, 3)
        if pixels.dtype != torch.uint8 or pixels.shape[1:] != shape:
            wanted = f"[batch, {', '.join(map(str, shape))}]"
            raise ValueError(f"pixels must be uint8 {wanted}, got {pixels.dtype} {list(pixels.shape)}")
        parameter = next(components.vae.parameters())
        return (pixels.permute(0, 4, 1, 2, 3).to(parameter.device) / 127.5 - 1).to(parameter.dtype)

    @abstractmethod
    def collate(self, conds: Sequence[Conditioning]) -> dict[str, Tensor]:
        """Conditioning of several samples as batched tensors (padded and masked where lengths differ)."""

    @abstractmethod
    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        """The network's velocity, fp32 `[batch, *latent]`, for x fp32 `[batch, *latent]`, sigma as `spread` gives it.

        With several parts sigma may be `[batch]` too, the picture's: the others are then those of `part_sigmas`.
        """

    @abstractmethod
    def probe_conditioning(self) -> Conditioning:
        """A fixed conditioning of one sample, made without the text encoder (for `Probe`)."""

    @abstractmethod
    def time_embedding(self, transformer: nn.Module) -> nn.Module:
        """The inner module whose output `[batch, dim]` the critic's stop-step embedding is added to."""

    @abstractmethod
    def shard_units(self, transformer: nn.Module) -> list[nn.Module]:
        """Modules that FSDP2 gathers one at a time (the repeated blocks); the root is added by the trainer."""

    def fp32_units(self, transformer: nn.Module) -> list[nn.Module]:
        """Modules that compute in fp32 whatever the forward's dtype, as the family's own pipelines load them."""
        return []

    @abstractmethod
    def idle_parameters(self, transformer: nn.Module) -> dict[str, str]:
        """Parameters that never get a useful gradient, name -> "none" or "zero": kept out of every optimizer."""

    def head_of(self, part: str) -> tuple[str, ...]:
        """Parameters that only this part's velocity depends on: their gradient is 0 without a loss on it."""
        return ()

    def check_sampling(self, sampling: StudentSampling) -> None:
        """ValueError: `export_pipeline` could not write a student with this grid. Most families take any."""
        return

    @abstractmethod
    def export_pipeline(self, weights: Mapping[str, Tensor], sampling: StudentSampling, directory: Path) -> None:
        """Write a diffusers pipeline: this checkpoint with these transformer weights and the student's sampling.

        Called with `num_inference_steps=sampling.num_steps` and what student.json says beside it, it is the student; a
        grid of its own has to be given too: student.json's sigmas without the terminal 0. ValueError: the directory
        exists, or the weights do not fit.
        """

    def check_inputs(self, x: Tensor, sigma: Tensor, rows: int) -> None:
        """ValueError unless x, sigma and the conditioning, of `rows` samples, are what `velocity` takes."""
        shapes = (x.shape[:1],) if len(self.parts) == 1 else (x.shape[:1], x.shape)
        if x.shape[1:] != self.latent_shape or sigma.shape not in shapes or rows != x.shape[0]:
            raise ValueError(
                f"velocity takes x [batch, {', '.join(map(str, self.latent_shape))}], sigma [batch] and conditioning "
                f"of [batch] samples, got {list(x.shape)}, {list(sigma.shape)} and {rows} samples"
            )


def one_record_each(prompts: Sequence[str], encode: Callable[[str], Conditioning]) -> list[Conditioning]:
    """Each prompt encoded by itself, so that no record depends on the batch; equal prompts share one record."""
    found = {prompt: encode(prompt) for prompt in dict.fromkeys(prompts)}
    return [found[prompt] for prompt in prompts]


def stack_rows(conds: Sequence[Conditioning], name: str, shape: tuple[int, ...]) -> Tensor:
    """Field `name` of several samples, `[batch, *shape]`. ValueError: none, or another shape."""
    if not conds:
        raise ValueError("collate needs the conditioning of at least one sample")
    rows = [cond[name] for cond in conds]
    for row in rows:
        if row.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(row.shape)}")
    return torch.stack(rows)


def one_width(conds: Sequence[Conditioning], name: str, width: int) -> list[Tensor]:
    """Field `name` of several samples, each `[L, width]` of any length L >= 1. ValueError: none, or another shape."""
    if not conds:
        raise ValueError("collate needs the conditioning of at least one sample")
    rows = [cond[name] for cond in conds]
    for row in rows:
        if row.ndim != 2 or row.shape[1] != width or not len(row):
            raise ValueError(f"{name} must be [L, {width}] with L >= 1, got {list(row.shape)}")
    return rows


def pad_rows(conds: Sequence[Conditioning], name: str, width: int) -> tuple[Tensor, Tensor | None]:
    """Field `name`, rows `[L, width]` of any length L >= 1: `[batch, L, width]`, and a bool mask `[batch, L]` where
    lengths differ. ValueError: none, or rows of another shape.
    """
    rows = one_width(conds, name, width)
    lengths = [len(row) for row in rows]
    if len(set(lengths)) == 1:
        return torch.stack(rows), None
    longest = torch.arange(max(lengths), device=rows[0].device)
    mask = longest < torch.tensor(lengths, device=longest.device).unsqueeze(1)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), mask
