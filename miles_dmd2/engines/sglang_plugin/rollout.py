"""A request of ours in the worker: its state on the way through the stages, our part of its reply, its decode."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from miles_dmd2.engines.sglang_plugin import protocol, weights


@dataclass
class Rollout:
    """One request of ours on its way through the stages."""

    options: dict[str, Any]
    forwards: int = 0
    x0: Tensor | None = None
    after: Tensor | None = None  # x_{k+1} in fp32, before the scheduler casts it
    velocity: Tensor | None = None
    probe: dict[str, Tensor] = field(default_factory=dict)
    audio: list[Tensor] = field(default_factory=list)  # of families with sound: its rows at every step

    @property
    def stop_step(self) -> int | None:
        return self.options.get("rollout_stop_step")

    @property
    def sigmas(self) -> list[float] | None:
        return self.options.get("rollout_sigmas")


def ours(batch: Any) -> Rollout | None:
    """The request's state; None for a request that uses none of our fields."""
    if not batch.rollout:
        return None
    options = ((batch.extra or {}).get("diffusers_kwargs") or {}).get(protocol.KEY)
    if options is None:
        return None
    state = batch.extra.get(protocol.KEY)
    if state is None:
        state = batch.extra[protocol.KEY] = Rollout(options)
        if options.get("rollout_probe") is not None:
            state.probe = load(base64.b64decode(options["rollout_probe"]))
    return state


def report(batch: Any, state: Rollout) -> None:
    """Our part of the reply; of the conditioning only what was asked for."""
    data = batch.rollout_trajectory_data
    wanted = state.options.get("rollout_conditioning")
    if wanted is not None and data.denoising_env is not None:
        environment = data.denoising_env
        environment.image_kwargs, environment.guidance = None, None
        environment.pos_cond_kwargs = _only(environment.pos_cond_kwargs, wanted)
        if environment.neg_cond_kwargs is not None:
            environment.neg_cond_kwargs = _only(environment.neg_cond_kwargs, wanted)
    data.miles_dmd2 = {
        "protocol": protocol.PROTOCOL,
        "client_id": state.options.get("rollout_client_id"),
        "stop_step": state.stop_step,
        "forwards": state.forwards,
        "weights": weights.served(),
        "decoded": state.options.get("rollout_return_generated_output", True),
        "velocity": state.velocity[0].cpu() if state.probe and state.velocity is not None else None,
    }


def _only(conditioning: dict[str, Any], names: list[str]) -> dict[str, Any]:
    missing = [name for name in names if name not in conditioning]
    if missing:
        raise ValueError(f"rollout_conditioning: this model has no {missing}, only {sorted(conditioning)}")
    return {name: conditioning[name] for name in names}


def not_reached(stages: Sequence[Any], hooked: Mapping[type, tuple[str, ...]]) -> list[str]:
    """Of the hooked methods, class by class: classes that no stage is of, and methods that a stage overrides."""
    absent = [base.__name__ for base in hooked if not any(isinstance(stage, base) for stage in stages)]
    overridden = [
        f"{type(stage).__name__}.{name}"
        for stage in stages
        for base, names in hooked.items()
        if isinstance(stage, base)
        for name in names
        if getattr(type(stage), name) is not getattr(base, name)
    ]
    return absent + overridden


def decode_as_asked(original: Callable[..., Any], self: Any, batch: Any, server_args: Any) -> Any:
    """AROUND `DecodingStage.forward`: no picture where none was asked for, and uint8 where that was.

    The HTTP process takes the batch size from the output and each sample's picture from its elements: an array of
    objects has both, and None becomes null.
    """
    state = ours(batch)
    if state is None or state.options.get("rollout_return_generated_output", True):
        result = original(self, batch, server_args)
        if state is not None and state.options.get("rollout_video_dtype") == "uint8":
            result.output = _eight_bit(result.output)
        return result
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch

    return OutputBatch(
        output=np.full((int(batch.latents.shape[0]),), None, dtype=object),
        rollout_trajectory_data=batch.rollout_trajectory_data,
        metrics=batch.metrics,
        usage=batch.usage,
    )


def _eight_bit(output: Any) -> Any:
    """Pixels in [0, 1] -> the nearest of 256 values; what is none stays, for the client to refuse."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return output
    return (output.float().clamp(0, 1) * 255).round().to(torch.uint8)
