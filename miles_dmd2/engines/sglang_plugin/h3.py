"""MiniMax H3 in the worker: its denoising loop and decoder are its own, so the hooks for the other families miss it.

The latent on the wire is flat: the video's rows `[V, 96]`, then the sound's `[2A, 32]`. H3's network says x0 - noise;
the velocity of a reply is noise - x0, as everywhere on the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType
from torch import Tensor

from miles_dmd2.engines.sglang_plugin.rollout import Rollout, decode_as_asked, not_reached, ours, report

PIPELINE = "MiniMaxH3Pipeline"
TIMESTEPS = 1000  # a reply's timesteps are sigma x 1000
TEXT = "encoder_hidden_states"  # all that a probe may set beside "x"
# Of a request's `extra`: what the stages before denoising hand over.
_SIGMAS, _STATE, _TEXTS = "minimax_h3_sigmas", "minimax_h3_denoise_state", "minimax_h3_text_embeddings"


def builds(pipeline: Any) -> bool:
    return any(base.__name__ == PIPELINE for base in type(pipeline).__mro__)


def add_hooks() -> None:
    """Apply the hooks, now: for the other families their targets are not even imported."""
    for target, (hook, kind) in HOOKS.items():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()


def applied() -> dict[str, bool]:
    return {target: target in HookRegistry._patched for target in HOOKS}


def bypassed(pipeline: Any) -> list[str]:
    """As `worker._bypassed`, for this pipeline's stages."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3 import (
        MiniMaxH3DecodingStage,
        MiniMaxH3DenoisingStage,
        MiniMaxH3TimestepPreparationStage,
    )

    hooked: dict[type, tuple[str, ...]] = {
        MiniMaxH3TimestepPreparationStage: ("forward",),
        MiniMaxH3DenoisingStage: ("forward", "_run_full_loop"),
        MiniMaxH3DecodingStage: ("forward", "verify_output"),
    }
    return not_reached(pipeline.stages, hooked)


# -- a rollout ---------------------------------------------------------------------------------------------------


def set_grids(self: Any, batch: Any, server_args: Any) -> None:
    """BEFORE `MiniMaxH3TimestepPreparationStage.forward`: our grids, which it then takes, whatever their length.

    The sound's follows from the video's by the release's shifts, which multiply the odds s / (1 - s). It is computed in
    fp64 from the fp32 values, as the trainer does it. SGLang shifts a uniform fp32 grid once for each; on its own grids
    of up to 100 steps the two differ by at most 4e-7.
    """
    state = ours(batch)
    if state is None or state.sigmas is None:
        return
    scales = self.sigma_shift_scales
    if scales is None:
        raise ValueError("rollout_sigmas: this checkpoint has no sigma_shift_scales in model_index.json")
    ratio = scales["audio"] / scales["video"]
    video = torch.tensor(state.sigmas, dtype=torch.float32)
    exact = video.double()
    audio = (ratio * exact / (1 + (ratio - 1) * exact)).float()
    batch.extra[_SIGMAS] = {"video": [*video.tolist(), 0.0], "audio": [*audio.tolist(), 0.0]}


def run(original: Callable[..., Any], self: Any, batch: Any, server_args: Any) -> None:
    """AROUND `_run_full_loop`: stop step and probe before it; our form of the latents and our report after it."""
    state = ours(batch)
    if state is None:
        original(self, batch, server_args)
        return
    grid, sound = batch.extra[_SIGMAS]["video"], batch.extra[_SIGMAS]["audio"]
    _set_start(batch, state, grid[0], sound[0])
    stop = state.stop_step
    if stop is not None:
        # A last step to sigma 0 ends in x_k + sigma_k v, which is x0. All before it are those of the whole rollout.
        x0 = state.options.get("rollout_stop_output", "x0") == "x0"
        end, tail = (stop + 1, [0.0]) if x0 else (stop + 2, [])
        batch.extra[_SIGMAS] = {"video": grid[:end] + tail, "audio": sound[:end] + tail}
    original(self, batch, server_args)
    _shape_reply(batch, state, grid)
    report(batch, state)


def _set_start(batch: Any, state: Rollout, sigma: float, audio_sigma: float) -> None:
    """The noise at the grid's first level; for a probe its x, and its text in place of the prompt's."""
    start = dict(batch.extra[_STATE])
    video, audio = start["initial_video_rows"], start["initial_audio_rows"]
    given = dict(state.probe)
    if not given:
        if sigma != 1:
            start["initial_video_rows"], start["initial_audio_rows"] = video * sigma, audio * audio_sigma
            batch.extra[_STATE] = start
        return
    x = given.pop("x").float().cpu()
    if x.shape != (video.numel() + audio.numel(),):
        raise ValueError(
            f"the probe's x is {list(x.shape)}, this request's latent is [{video.numel() + audio.numel()}]"
        )
    parts = x.split([video.numel(), audio.numel()])
    start["initial_video_rows"], start["initial_audio_rows"] = parts[0].view_as(video), parts[1].view_as(audio)
    batch.extra[_STATE] = start
    if given.keys() - {TEXT}:
        raise ValueError(f"a probe cannot set {sorted(given.keys() - {TEXT})}; it can set {TEXT}")
    if TEXT in given:
        batch.extra[_TEXTS] = {"positive": _text(given[TEXT], batch.extra[_TEXTS]["positive"])}


def _text(states: Tensor, prompt: dict[str, Any]) -> dict[str, Any]:
    """The record of an encoded prompt, of these states: in their dtype, the network casts."""
    width = prompt["hidden_states"].shape[-1]
    if states.ndim != 2 or not len(states) or states.shape[1] != width:
        raise ValueError(f"the probe's {TEXT} must be [L, {width}], got {list(states.shape)}")
    tags = prompt["text_token_tags"].reshape(-1)[:1].expand(len(states)).clone()  # t2va: all are text
    return {
        "hidden_states": states.to(prompt["hidden_states"].device),
        "text_len": len(states),
        "text_token_tags": tags,
    }


def follow(original: Callable[..., Any], **kwargs: Any) -> Any:
    """AROUND `minimax_h3_denoise_loop`: counts forwards, and keeps the sound's rows of every step, as SGLang keeps the
    video's."""
    context = kwargs.get("rollout_ctx")
    state = None if context is None else ours(context.batch)
    if state is None:
        return original(**kwargs)
    forward, told = kwargs["model_forward"], kwargs["on_step"]
    state.audio = [_kept(kwargs["initial_audio_rows"])]

    def counted(model: Any, given: dict[str, Any], step: int) -> tuple[Tensor, Tensor]:
        state.forwards += 1
        video, audio = forward(model, given, step)
        if state.probe:  # copied: the loop computes in place of it
            state.velocity = -torch.cat([video.float().flatten(), audio.float().flatten()]).unsqueeze(0)
        return video, audio

    def kept(step: int, video: Tensor, audio: Tensor) -> None:
        state.audio.append(_kept(audio))
        told(step, video, audio)

    return original(**{**kwargs, "model_forward": counted, "on_step": kept})


def _kept(rows: Tensor) -> Tensor:
    return rows.detach().to("cpu", torch.float32, copy=True)


def _shape_reply(batch: Any, state: Rollout, grid: list[float]) -> None:
    """Flat latents of both parts at the steps that were asked for; the conditioning only if it was."""
    data, asked = batch.rollout_trajectory_data, batch.sampling_params
    video = data.dit_trajectory.latents[0].flatten(1)
    latents = torch.cat([video, torch.stack(state.audio).flatten(1)], dim=1)
    levels = torch.tensor(batch.extra[_SIGMAS]["video"], dtype=torch.float32)
    steps = asked.rollout_return_step_indices
    if steps is None:
        steps = list(range(len(latents)))
    if not all(0 <= step < len(latents) for step in steps):
        raise ValueError(f"rollout_return_step_indices {steps}: this rollout has the steps 0 to {len(latents) - 1}")
    trajectory = data.dit_trajectory
    trajectory.latents = latents[steps].unsqueeze(0)
    trajectory.timesteps = TIMESTEPS * levels[steps]
    trajectory.sigmas = torch.tensor(grid, dtype=torch.float32)
    if not asked.rollout_return_dit_trajectory:
        data.dit_trajectory = None
    if not asked.rollout_return_denoising_env:
        data.denoising_env = None


def verify_decoded(original: Callable[..., Any], self: Any, batch: Any, server_args: Any) -> Any:
    """AROUND the decoder's `verify_output`: nothing to verify where nothing was decoded."""
    if isinstance(batch.output, np.ndarray) and batch.output.dtype == object:
        from sglang.multimodal_gen.runtime.pipelines_core.stages.validators import VerificationResult

        return VerificationResult()
    return original(self, batch, server_args)


# -- what the model is built of ----------------------------------------------------------------------------------


def in_asked_dtype(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `MiniMaxH3DiTModel.__init__`: fp32 for --dit-precision fp32, which SGLang ignores for this model.

    Its dtype is a constant of the module, read wherever it is used. On a CPU only: elsewhere the same constant chooses
    fused kernels that are written for bf16.
    """
    from sglang.multimodal_gen.runtime.models.dits import minimax_h3
    from sglang.multimodal_gen.runtime.platforms import current_platform
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    if get_global_server_args().pipeline_config.dit_precision == "fp32":
        if not current_platform.is_cpu():
            raise ValueError("--dit-precision fp32: SGLang's kernels for MiniMax H3 are for bf16, except on a CPU")
        minimax_h3._BF16_DTYPE = torch.float32
        minimax_h3._norm.__kwdefaults__["dtype"] = torch.float32
    original(self, *args, **kwargs)


def without_cuda_kernels(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND the text encoder's `__init__`: on a CPU its rotary embedding would import vLLM's kernels."""
    from sglang.multimodal_gen.runtime.platforms import current_platform

    if current_platform.is_cpu():
        from sglang.srt.layers.rotary_embedding import base

        base._is_cpu = True
    original(self, *args, **kwargs)


_RUNTIME = "sglang.multimodal_gen.runtime."
_H3 = _RUNTIME + "pipelines_core.stages.model_specific_stages.minimax_h3."
HOOKS: dict[str, tuple[Callable[..., Any], HookType]] = {
    _H3 + "stages.timestep_preparation.MiniMaxH3TimestepPreparationStage.forward": (set_grids, HookType.BEFORE),
    _H3 + "stages.denoising.MiniMaxH3DenoisingStage._run_full_loop": (run, HookType.AROUND),
    _H3 + "denoise_loop.minimax_h3_denoise_loop": (follow, HookType.AROUND),
    _H3 + "stages.decoding.MiniMaxH3DecodingStage.forward": (decode_as_asked, HookType.AROUND),
    _H3 + "stages.decoding.MiniMaxH3DecodingStage.verify_output": (verify_decoded, HookType.AROUND),
    _RUNTIME + "models.dits.minimax_h3.MiniMaxH3DiTModel.__init__": (in_asked_dtype, HookType.AROUND),
    _RUNTIME + "models.encoders.minimax_h3_qwen3vl.MiniMaxH3Qwen3VLEncoder.__init__": (
        without_cuda_kernels,
        HookType.AROUND,
    ),
}
