"""MiniMax H3 in the HTTP process: the one family whose canvas comes in `extra_sampling_params`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

from miles_dmd2.engines.sglang_plugin import protocol

CONFIG = "MiniMaxH3PipelineConfig"
EXTRA = {"task", "conditions", "target"}
TARGET = {"short_edge", "aspect_ratio", "duration_seconds"}


def served(server_args: Any) -> bool:
    return any(base.__name__ == CONFIG for base in type(server_args.pipeline_config).__mro__)


def add_hooks() -> None:
    for target, (hook, kind) in HOOKS.items():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()


def extra_problem(request: Any) -> str | None:
    """What is wrong with the canvas of a request that uses our fields; SGLang ignores what it does not know."""
    extra = request.extra_sampling_params
    where = "extra_sampling_params"
    if not isinstance(extra, dict) or extra.keys() != EXTRA:
        found = sorted(extra) if isinstance(extra, dict) else extra
        return f"{where} of a MiniMax H3 rollout must have {sorted(EXTRA)}, got {found}"
    if extra["task"] != "t2va" or extra["conditions"] != []:
        return (
            f"{where}: rollouts are of task 't2va' without conditions, got {extra['task']!r}, {extra['conditions']!r}"
        )
    target = extra["target"]
    if not isinstance(target, dict) or target.keys() != TARGET:
        found = sorted(target) if isinstance(target, dict) else target
        return f"{where}.target must have {sorted(TARGET)}, got {found}"
    ignored = (
        "width",
        "height",
        "num_frames",
        "fps",
        "guidance_scale",
        "true_cfg_scale",
        "negative_prompt",
        "image_path",
    )
    given = [name for name in ignored if getattr(request, name) is not None]
    if given:
        return f"{', '.join(given)}: not of MiniMax H3, whose canvas is {where}.target"
    if request.rollout and request.rollout_sde_type != "ode" and request.rollout_noise_level != 0:
        return f"rollout_sde_type must be 'ode' for MiniMax H3, got {request.rollout_sde_type!r}"
    return None


def checked(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """AROUND `build_request_extra`: a bad canvas is 422 and says why, SGLang's answer is a bare 500; and a request of
    ours may ask for clips shorter than SGLang's 4 s.

    Nothing awaits in between, so that no other request sees the limit lifted.
    """
    if protocol.KEY not in (self.diffusers_kwargs or {}):
        return original(self, **kwargs)
    from fastapi import HTTPException
    from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3 import request_validation

    shortest = request_validation.MINIMAX_H3_MIN_DURATION_SECONDS
    request_validation.MINIMAX_H3_MIN_DURATION_SECONDS = 0.0
    try:
        return original(self, **kwargs)
    except ValueError as error:
        raise HTTPException(status_code=422, detail=str(error)) from error
    finally:
        request_validation.MINIMAX_H3_MIN_DURATION_SECONDS = shortest


HOOKS: dict[str, tuple[Callable[..., Any], HookType]] = {
    "sglang.multimodal_gen.configs.sample.minimax_h3.MiniMaxH3SamplingParams.build_request_extra": (
        checked,
        HookType.AROUND,
    ),
}
