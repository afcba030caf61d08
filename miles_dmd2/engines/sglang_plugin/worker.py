"""The worker: stop at a step, exact x0, an explicit grid, no decode, sleep without CUDA, and what it says of itself."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType
from torch import Tensor

from miles_dmd2.engines.sglang_plugin import h3, kernels, protocol, weights
from miles_dmd2.engines.sglang_plugin.rollout import decode_as_asked, not_reached, ours, report

# What a probe may set on a request beside "x": `name` or `name.index`.
CONDITIONING = (
    *("prompt_embeds", "prompt_embeds_mask", "prompt_attention_mask", "prompt_seq_lens"),
    *("pooled_embeds", "clip_embedding_pos"),
)


def set_grid(original: Callable[..., Any], self: Any, batch: Any, server_args: Any) -> Any:
    """AROUND `TimestepPreparationStage.forward`: the request's grid in place of the scheduler's.

    Set after `set_timesteps`, which would shift the values once more; it runs for each request, so nothing stays.
    """
    result = original(self, batch, server_args)
    state = ours(batch)
    if state is not None and state.sigmas is not None:
        scheduler = batch.scheduler
        scheduler.sigmas = torch.tensor([*state.sigmas, 0.0], dtype=torch.float32, device=batch.timesteps.device)
        scheduler.timesteps = scheduler.sigmas[:-1] * scheduler.config.num_train_timesteps
        batch.timesteps = scheduler.timesteps
    return result


def noise_in_fp32(spec: Any, _self: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Any:
    """AFTER `get_latent_preparation_spec`: the first draw in fp32, whatever the text encoder's dtype is.

    Some families draw in the dtype of the prompt's embedding, and the same seed in bf16 is another noise.
    """
    return dataclasses.replace(spec, dtype=torch.float32) if ours(batch) is not None else spec


def place_probe(self: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE `_prepare_denoising_loop`: the probe's x and conditioning in place of the seed's and the prompt's."""
    state = ours(batch)
    if state is None or not state.probe:
        return
    given = dict(state.probe)
    x = given.pop("x").to(batch.latents.device, torch.float32).unsqueeze(0)
    if x.shape != batch.latents.shape:
        raise ValueError(f"the probe's x is {list(x.shape)}, this request's latent is {list(batch.latents.shape)}")
    batch.latents = x
    for name, value in given.items():
        attribute, _, index = name.partition(".")
        if attribute not in CONDITIONING:
            raise ValueError(f"a probe cannot set {name!r}; it can set {', '.join(CONDITIONING)}")
        current = getattr(batch, attribute)
        if not index:
            setattr(batch, attribute, value.to(current.device, current.dtype))
        elif isinstance(current, list) and int(index) < len(current):
            old = current[int(index)]
            new = value.to(old.device, old.dtype) if isinstance(old, Tensor) else value.tolist()
            setattr(batch, attribute, [*current[: int(index)], new, *current[int(index) + 1 :]])
        else:
            raise ValueError(f"a probe cannot set {name!r}: this request has no such part")


def stop_at_step(original: Callable[..., Any], self: Any, ctx: Any, batch: Any, server_args: Any, **kwargs: Any) -> Any:
    """AROUND `_run_denoising_loop`: the first k + 1 steps; afterwards the latent is x0, for the reply and the decoder.

    The scheduler keeps the whole grid, so that every step is the one of the whole rollout.
    """
    state = ours(batch)
    if state is None:
        return original(self, ctx, batch, server_args, **kwargs)
    if ctx.latents.shape[0] != 1:
        raise ValueError(f"a rollout is one sample, got a batch of {ctx.latents.shape[0]}: start without --batching-*")
    if state.sigmas is not None and not state.probe and state.sigmas[0] != 1:
        ctx.latents = ctx.latents.float() * ctx.scheduler.sigmas[0]
    if state.stop_step is not None:
        ctx.timesteps = ctx.timesteps[: state.stop_step + 1]
    self._miles_dmd2 = state
    try:
        result = original(self, ctx, batch, server_args, **kwargs)
    finally:
        self._miles_dmd2 = None
    if state.stop_step is not None and state.options.get("rollout_stop_output", "x0") == "x0":
        if state.x0 is None:
            raise RuntimeError("the rollout's transition was not called: this model has a denoising loop of its own")
        ctx.latents = state.x0
    return result


def hop_in_fp32(original: Callable[..., Any], self: Any, ctx: Any, step: Any, batch: Any, server_args: Any) -> Any:
    """AROUND `_run_denoising_step`: x_{k+1} stays fp32; the scheduler casts it to the network's dtype."""
    result = original(self, ctx, step, batch, server_args)
    state = ours(batch)
    if state is not None and state.after is not None:
        ctx.latents = state.after
    return result


def exact_transition(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """AROUND `FlowRolloutController.transition`: velocity in fp32, and x0 = x_k - sigma_k v beside the step."""
    state = ours(kwargs["batch"])
    if state is None:
        return original(self, **kwargs)
    velocity = kwargs["model_output"].float()
    after = original(self, **{**kwargs, "model_output": velocity})
    state.velocity, state.after = velocity, after
    state.x0 = kwargs["sample"] - kwargs["current_sigma"] * velocity
    return after


def count_forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `_predict_noise`: one forward of the network."""
    state = getattr(self, "_miles_dmd2", None)
    if state is not None:
        state.forwards += 1
    return original(self, *args, **kwargs)


def finalize(original: Callable[..., Any], **kwargs: Any) -> None:
    """AROUND `finalize_rollout_if_enabled`: our part of the reply, and the time of the last latent; SGLang says 0."""
    batch = kwargs["batch"]
    state = ours(batch)
    if state is None:
        original(**kwargs)
        return
    if state.stop_step is not None and state.options.get("rollout_stop_output") == "next":
        following = state.stop_step + 1
        if following < len(batch.timesteps):
            kwargs["final_timestep"] = batch.timesteps[following].clone()
    original(**kwargs)
    report(batch, state)


def add_hooks_of_family(self: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE `ComposedPipelineBase.__init__`: a family with stages of its own gets its hooks before they are built."""
    if h3.builds(self):
        h3.add_hooks()


def move_modules(original: Callable[..., Any], self: Any, names: list[str], device: str) -> None:
    """AROUND `_move_modules`: nothing to move is no reason to ask for CUDA, as SGLang does."""
    if names:
        original(self, names, device)


def clear_cache(original: Callable[..., Any], *args: Any) -> None:
    """AROUND `_clear_torch_device_cache`: a CPU has none to clear."""
    from sglang.multimodal_gen.runtime.platforms import current_platform

    if not current_platform.is_cpu():
        original(*args)


def answer(original: Callable[..., Any], self: Any, module_names: list[str] | None = None) -> dict[str, Any]:
    """AROUND `get_weights_checksum`: our own operations beside SGLang's checksums."""
    operation = module_names[0] if module_names else None
    if operation == protocol.CAPABILITIES:
        return {operation: capabilities(self)}
    if operation == protocol.WEIGHTS:
        return {operation: weights.state(_transformer(self))}
    if operation == protocol.BEGIN:
        weights.begin()
        return {operation: {}}
    return original(self, module_names)


def capabilities(worker: Any) -> dict[str, Any]:
    """What this worker is: its hooks, its model, its dtype."""
    from sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload import is_layerwise_offloaded_module

    of_family = h3.applied() if h3.builds(worker.pipeline) else {}
    transformer = _transformer(worker)
    dtypes = {str(parameter.dtype) for parameter in transformer.parameters()}
    return {
        "hooks": {**{target: target in HookRegistry._patched for target in HOOKS}, **of_family},
        "bypassed": h3.bypassed(worker.pipeline) if of_family else _bypassed(worker.pipeline),
        "pipeline": type(worker.pipeline).__name__,
        "model_path": str(worker.server_args.model_path),
        "transformer": type(transformer).__name__,
        "dtype": dtypes.pop() if len(dtypes) == 1 else "mixed",
        "parameters": sum(parameter.numel() for parameter in transformer.parameters()),
        "offloaded": is_layerwise_offloaded_module(transformer),
        "sleeping": worker.is_sleeping(),
        "pid": os.getpid(),
    }


def _transformer(worker: Any) -> torch.nn.Module:
    return worker.pipeline.get_module("transformer")


def _bypassed(pipeline: Any) -> list[str]:
    """Stages of this pipeline whose class overrides a method that we hook, so that the hook never runs."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages.decoding import DecodingStage
    from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage
    from sglang.multimodal_gen.runtime.pipelines_core.stages.latent_preparation import LatentPreparationStage
    from sglang.multimodal_gen.runtime.pipelines_core.stages.timestep_preparation import TimestepPreparationStage

    hooked: dict[type, tuple[str, ...]] = {
        DenoisingStage: ("_run_denoising_loop", "_run_denoising_step", "_prepare_denoising_loop", "_predict_noise"),
        DecodingStage: ("forward",),
        LatentPreparationStage: ("get_latent_preparation_spec",),
        TimestepPreparationStage: ("forward",),
    }
    # A router sends requests without progressive resolution, ours, to its standard stage.
    return not_reached([getattr(stage, "standard_stage", stage) for stage in pipeline.stages], hooked)


_RUNTIME = "sglang.multimodal_gen.runtime."
_STAGES = _RUNTIME + "pipelines_core.stages."
_DENOISING = _STAGES + "denoising.DenoisingStage."
_ROLLOUT = _RUNTIME + "post_training."
_MEMORY = _RUNTIME + "managers.memory_managers.memory_occupation_controller.MemoryOccupationController."
_UPDATER = _ROLLOUT + "weights_updater."
HOOKS: dict[str, tuple[Callable[..., Any], HookType]] = {
    _RUNTIME + "pipelines_core.composed_pipeline_base.ComposedPipelineBase.__init__": (
        add_hooks_of_family,
        HookType.BEFORE,
    ),
    _STAGES + "timestep_preparation.TimestepPreparationStage.forward": (set_grid, HookType.AROUND),
    _STAGES + "latent_preparation.LatentPreparationStage.get_latent_preparation_spec": (noise_in_fp32, HookType.AFTER),
    _DENOISING + "_prepare_denoising_loop": (place_probe, HookType.BEFORE),
    _DENOISING + "_run_denoising_loop": (stop_at_step, HookType.AROUND),
    _DENOISING + "_run_denoising_step": (hop_in_fp32, HookType.AROUND),
    _DENOISING + "_predict_noise": (count_forward, HookType.AROUND),
    _ROLLOUT + "flow_rollout_controller.FlowRolloutController.transition": (exact_transition, HookType.AROUND),
    _ROLLOUT + "rollout_hooks.finalize_rollout_if_enabled": (finalize, HookType.AROUND),
    _STAGES + "decoding.DecodingStage.forward": (decode_as_asked, HookType.AROUND),
    _MEMORY + "_move_modules": (move_modules, HookType.AROUND),
    _MEMORY + "_clear_torch_device_cache": (clear_cache, HookType.AROUND),
    _UPDATER + "_load_weights_into_module": (weights.guard, HookType.AROUND),
    _UPDATER + "WeightsUpdater.update_weights_from_tensor": (weights.in_parts, HookType.AROUND),
    _ROLLOUT + "gpu_worker_post_training_mixin.GPUWorkerPostTrainingMixin.get_weights_checksum": (
        answer,
        HookType.AROUND,
    ),
    **{
        _RUNTIME + f"pipelines_core.lora.pipeline.LoRAPipeline.{name}": (weights.changed_by_lora, HookType.AROUND)
        for name in ("set_lora", "merge_lora_weights", "unmerge_lora_weights")
    },
    _RUNTIME + "layers.layernorm._NormScaleShift.forward_cpu": (kernels.norm_scale_shift, HookType.AROUND),
    _RUNTIME + "layers.layernorm._ScaleResidualNormScaleShift.forward_cpu": (
        kernels.scale_residual_norm_scale_shift,
        HookType.AROUND,
    ),
}
