"""The HTTP process: strict request fields, limits, our part of a reply, a digest of every reply, our own routes."""

from __future__ import annotations

import base64
import binascii
import math
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

from pydantic import ConfigDict, model_validator
from sglang.multimodal_gen.runtime.entrypoints.post_training import io_struct
from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType
from sglang.multimodal_gen.runtime.server_args import get_global_server_args

from miles_dmd2.engines.sglang_plugin import h3_http, protocol

# The engine accepts any size: 16384 x 16384 x 81 took 13.8 GB before it could be stopped.
MAX_SIDE = 8192
MAX_PIXELS = 2**30  # over all frames
MAX_STEPS = 1000
MAX_PROMPT = 32768
MAX_PROBE = 2**28
OURS = (
    *(
        "rollout_stop_step",
        "rollout_stop_output",
        "rollout_sigmas",
        "rollout_return_generated_output",
        "rollout_video_dtype",
    ),
    *("rollout_conditioning", "rollout_client_id", "rollout_probe"),
)


class RolloutRequest(io_struct.RolloutRequest):
    """SGLang's rollout request with our fields. Unknown names and wrong types are 422, also in the fields it had.

    rollout_sigmas: the grid without its terminal 0; the stop step needs it. rollout_stop_step k: stop after the forward
    at step k. rollout_stop_output: the last returned latent is x0 = x_k - sigma_k v, or x_{k+1}.
    rollout_return_generated_output: false skips the VAE. rollout_video_dtype: of what it makes; uint8 is rounded here,
    which is a quarter of fp32 on the wire. rollout_conditioning: names of the conditioning to return.
    rollout_client_id: echoed. rollout_probe: base64 of safetensors with "x" and conditioning in place of the prompt's.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    rollout_stop_step: int | None = None
    rollout_stop_output: Literal["x0", "next"] = "x0"
    rollout_sigmas: list[float] | None = None
    rollout_return_generated_output: bool = True
    rollout_video_dtype: Literal["uint8", "fp32"] = "fp32"
    rollout_conditioning: list[str] | None = None
    rollout_client_id: str | None = None
    rollout_probe: str | None = None

    @model_validator(mode="after")
    def _served_as_asked(self) -> RolloutRequest:
        for problem in (_size_problem(self), _grid_problem(self), _option_problem(self)):
            if problem is not None:
                raise ValueError(problem)
        return self


class RolloutResponse(io_struct.RolloutResponse):
    """SGLang's response with what the worker's hooks say about this sample, and its sound.

    generated_audio: `[channels, samples]` of families that decode it, with its rate in Hz.
    """

    generated_audio: dict[str, Any] | None = None
    audio_sample_rate: int | None = None
    miles_dmd2: dict[str, Any] | None = None


def _size_problem(request: RolloutRequest) -> str | None:
    for name in ("width", "height", "num_frames", "num_inference_steps"):
        value = getattr(request, name)
        limit = MAX_STEPS if name == "num_inference_steps" else MAX_SIDE
        if value is not None and not 1 <= value <= limit:
            return f"{name} must be in [1, {limit}], got {value}"
    pixels = (request.width or 1) * (request.height or 1) * (request.num_frames or 1)
    if pixels > MAX_PIXELS:
        return f"width x height x num_frames is {pixels}, more than {MAX_PIXELS}"
    for name in ("prompt", "negative_prompt"):
        if len(getattr(request, name) or "") > MAX_PROMPT:
            return f"{name} is longer than {MAX_PROMPT} characters"
    if len(request.rollout_client_id or "") > 64:
        return "rollout_client_id is longer than 64 characters"
    if len(request.rollout_probe or "") > MAX_PROBE:
        return f"rollout_probe is larger than {MAX_PROBE} bytes"
    return None


def _grid_problem(request: RolloutRequest) -> str | None:
    grid, stop = request.rollout_sigmas, request.rollout_stop_step
    if grid is None:
        return None if stop is None else "rollout_stop_step needs rollout_sigmas"
    if not 1 <= len(grid) <= MAX_STEPS:
        return f"rollout_sigmas must have 1 to {MAX_STEPS} values, got {len(grid)}"
    whole = [*grid, 0.0]
    if not all(map(math.isfinite, whole)) or grid[0] > 1 or not all(a > b for a, b in pairwise(whole)):
        return "rollout_sigmas must be finite, at most 1, and decrease to a terminal 0 that is left out"
    if request.num_inference_steps != len(grid):
        return (
            f"num_inference_steps must be {len(grid)}, the number of rollout_sigmas, got {request.num_inference_steps}"
        )
    if stop is not None and not 0 <= stop < len(grid):
        return f"rollout_stop_step must be in [0, {len(grid)}), got {stop}"
    return None


def _option_problem(request: RolloutRequest) -> str | None:
    if request.seed is None:
        return "seed is missing"  # SGLang fails on it after the rollout, when it builds the response
    used = [name for name in OURS if name in request.model_fields_set]
    if protocol.KEY in ((request.extra_sampling_params or {}).get("diffusers_kwargs") or {}):
        return f"diffusers_kwargs.{protocol.KEY} is set by this server; use the rollout_* fields"
    if used and h3_http.served(get_global_server_args()):
        problem = h3_http.extra_problem(request)
        if problem is not None:
            return problem
    elif used and request.extra_sampling_params:  # among them are modes with a denoising loop of their own
        return f"extra_sampling_params cannot be combined with {', '.join(used)}"
    if not request.rollout:
        return f"{', '.join(used)}: only with rollout" if used else None
    outputs = request.num_outputs_per_prompt
    if used and outputs not in (None, 1):  # a batch shares one noise stream per step, and two families fail on it
        return f"num_outputs_per_prompt must be 1 with {', '.join(used)}, got {outputs}"
    if request.rollout_probe is not None:
        if request.rollout_stop_step != 0:
            return "rollout_probe needs rollout_stop_step 0"
        try:
            base64.b64decode(request.rollout_probe, validate=True)
        except binascii.Error as error:
            return f"rollout_probe is not base64: {error}"
    return None


def move_fields(sampling: dict[str, Any], request: RolloutRequest) -> dict[str, Any]:
    """AFTER `_build_sampling_kwargs`: our fields into `diffusers_kwargs`, which travels to the worker untouched."""
    ours = {name: getattr(request, name) for name in OURS if name in request.model_fields_set}
    if request.rollout and ours:
        nested = dict(sampling.get("diffusers_kwargs") or {})
        sampling["diffusers_kwargs"] = {**nested, protocol.KEY: ours}
    return sampling


def add_report(responses: list[RolloutResponse], *args: Any, **kwargs: Any) -> list[RolloutResponse]:
    """AFTER `_build_response`: what the worker reports about its sample, and the sound, which SGLang leaves out."""
    from sglang.multimodal_gen.runtime.entrypoints.post_training.utils import _maybe_serialize

    result = kwargs["result"] if "result" in kwargs else args[4]
    report = getattr(result.rollout_trajectory_data, protocol.KEY, None)
    for index, response in enumerate(responses):
        response.miles_dmd2 = _maybe_serialize(report)
        if result.audio is not None:
            response.generated_audio = _maybe_serialize(result.audio[index])
            response.audio_sample_rate = result.audio_sample_rate
    return responses


class ReplyDigest:
    """ASGI middleware: a digest of the whole body as a header of each rollout reply."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/rollout/"):
            await self.app(scope, receive, send)
            return
        start: dict[str, Any] = {}
        parts: list[bytes] = []

        async def hold(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            parts.append(message.get("body", b""))
            if message.get("more_body"):
                return
            body = b"".join(parts)
            header = (protocol.DIGEST_HEADER.lower().encode(), protocol.body_digest(body).encode())
            await send({**start, "headers": [*start["headers"], header]})
            await send({"type": "http.response.body", "body": body})

        await self.app(scope, receive, hold)


def add_routes(app: Any, server_args: Any, **_kwargs: Any) -> Any:
    """AFTER `create_app`: our routes, the digest of replies, and the hooks of a family that has its own."""
    from fastapi import APIRouter, HTTPException
    from sglang.multimodal_gen.runtime.scheduler_client import async_scheduler_client
    from sglang.version import __version__

    hooks = HOOKS
    if h3_http.served(server_args):
        h3_http.add_hooks()
        hooks = {**HOOKS, **h3_http.HOOKS}
    router = APIRouter(prefix="/miles_dmd2")

    async def of_worker(operation: str) -> dict[str, Any]:
        answer = await async_scheduler_client.forward(io_struct.GetWeightsChecksumReqInput(module_names=[operation]))
        found = (answer.output or {}).get(operation)
        if not isinstance(found, dict):  # SGLang's own answer to an unknown module: our hook is not there
            raise HTTPException(status_code=501, detail=f"the worker does not answer {operation}: {answer.output}")
        return found

    @router.get("/capabilities")
    async def capabilities() -> dict[str, Any]:
        return {
            "protocol": protocol.PROTOCOL,
            "version": protocol.VERSION,
            "sglang": __version__,
            "launch_id": os.environ.get(protocol.LAUNCH_ID),
            "hooks": applied(hooks),
            "worker": await of_worker(protocol.CAPABILITIES),
        }

    @router.get("/weights")
    async def weights() -> dict[str, Any]:
        return await of_worker(protocol.WEIGHTS)

    @router.post("/weights/begin")
    async def begin() -> dict[str, Any]:
        return await of_worker(protocol.BEGIN)

    app.include_router(router)
    app.add_middleware(ReplyDigest)
    return app


def applied(hooks: dict[str, tuple[Callable[..., Any], HookType]]) -> dict[str, bool]:
    """Which of our hooks SGLang put in place in this process."""
    return {target: target in HookRegistry._patched for target in hooks}


_ENTRY = "sglang.multimodal_gen.runtime.entrypoints."
HOOKS: dict[str, tuple[Callable[..., Any], HookType]] = {
    _ENTRY + "post_training.io_struct.RolloutRequest": (RolloutRequest, HookType.REPLACE),
    _ENTRY + "post_training.io_struct.RolloutResponse": (RolloutResponse, HookType.REPLACE),
    _ENTRY + "post_training.rollout_api._build_sampling_kwargs": (move_fields, HookType.AFTER),
    _ENTRY + "post_training.rollout_api._build_response": (add_report, HookType.AFTER),
    _ENTRY + "http_server.create_app": (add_routes, HookType.AFTER),
}
