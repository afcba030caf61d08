"""A run of diffusers' own pipeline, with everything that went into and came out of its network."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_dmd2.algo import rollout
from miles_dmd2.models.base import Components, ModelAdapter
from tests.families import Tiny


@dataclass
class Run:
    """Per step: the forward's arguments, the latent, the velocity that the scheduler was given, the timestep. Then the
    final latent and the pictures, uint8 `[batch, frames, height, width, 3]`.
    """

    inputs: list[dict[str, Any]] = field(default_factory=list)
    latents: list[Tensor] = field(default_factory=list)
    velocities: list[Tensor] = field(default_factory=list)
    timesteps: list[float] = field(default_factory=list)
    final: Tensor = field(default_factory=lambda: torch.empty(0))
    pictures: np.ndarray = field(default_factory=lambda: np.empty(0))

    @property
    def sigmas(self) -> Tensor:
        return torch.tensor(self.timesteps) / 1000


def run(
    pipeline: Any, tiny: Tiny, prompts: Sequence[str], seeds: Sequence[int], num_steps: int, call: Mapping[str, Any]
) -> Run:
    record = Run()
    pipeline.set_progress_bar_config(disable=True)
    handle = pipeline.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: record.inputs.append(arguments(module, args, kwargs)), with_kwargs=True
    )
    step = pipeline.scheduler.step

    def recording(velocity: Tensor, timestep: Tensor, latent: Tensor, **options: Any) -> Any:
        record.velocities.append(velocity)
        record.latents.append(latent)
        record.timesteps.append(float(timestep))
        result = step(velocity, timestep, latent, **options)
        record.final = result[0]
        return result

    pipeline.scheduler.step = recording
    try:
        shown = pipeline(
            prompt=list(prompts),
            num_inference_steps=num_steps,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type="np",
            return_dict=False,
            **{**canvas(tiny), **call},
        )[0]
    finally:
        handle.remove()
        del pipeline.scheduler.step
    pictures = (np.asarray(shown) * 255).round().astype(np.uint8)
    record.pictures = pictures if pictures.ndim == 5 else pictures[:, None]
    return record


def canvas(tiny: Tiny) -> dict[str, int]:
    height, width = tiny.size
    frames = {"num_frames": tiny.num_frames} if tiny.num_frames > 1 else {}
    return {"height": height, "width": width, **frames}


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a forward by name, whether they came by name or by place; a list of them as one by one."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    named = {**bound, **bound.pop("kwargs", {})}
    found: dict[str, Any] = {}
    for name, value in named.items():
        parts = {f"{name}.{i}": part for i, part in enumerate(value)} if isinstance(value, list) else {name: value}
        found.update({key: part for key, part in parts.items() if isinstance(part, Tensor)})
    return found


def sample(
    adapter: ModelAdapter,
    components: Components,
    prompts: Sequence[str],
    seeds: Sequence[int],
    grid: Tensor,
    hop_noise: Tensor | None = None,
) -> Tensor:
    """The few-step sampler with the adapter alone: x0 of the last step, `[batch, *latent]`; SDE with hop_noise."""
    transformer = adapter.load_transformer()
    cond = adapter.collate(adapter.encode_prompts(components, prompts))
    noise = torch.stack([adapter.initial_noise(seed) for seed in seeds])
    with torch.no_grad():
        _, x0 = rollout(
            lambda x, sigma: adapter.velocity(transformer, x, sigma, cond),
            noise,
            grid,
            len(grid) - 2,
            hop_noise=hop_noise,
        )
    return x0
