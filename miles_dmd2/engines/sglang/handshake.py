"""What a running SGLang diffusion server must be, by what it says of itself when a run first meets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang.environment import TESTED, is_tested
from miles_dmd2.engines.sglang.wire import WireError, read_map
from miles_dmd2.engines.sglang_plugin.protocol import PROTOCOL

ForwardDtype = Literal["fp32", "bf16"]
# What the plugin says about the transformer's parameters -> the forward dtype; bf16 models keep some in fp32.
_DTYPES: Mapping[str, ForwardDtype] = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "mixed": "bf16"}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the handshake learned. all_bf16: every parameter of the transformer is bf16, so sending more is waste.

    parameters: of the transformer, as the worker counts them.
    """

    plugin: bool
    all_bf16: bool = False
    sleeping: bool = False
    parameters: int | None = None


def read_capabilities(
    value: object, pipelines: Sequence[str], launch_id: str | None, forward_dtype: ForwardDtype, allow_untested: bool
) -> Capabilities:
    """The answer of `GET /miles_dmd2/capabilities`. EngineError: a server that must not be used, and why."""
    try:
        answer = read_map(value, "capabilities")
        worker = read_map(answer.get("worker"), "worker")
        missing = {"protocol", "sglang", "launch_id", "hooks"} - answer.keys()
        missing |= {"hooks", "bypassed", "pipeline", "dtype", "offloaded", "sleeping"} - worker.keys()
        if missing:
            raise WireError(f"{sorted(missing)} missing")
        hooks = {
            "HTTP process": read_map(answer["hooks"], "hooks"),
            "worker": read_map(worker["hooks"], "worker.hooks"),
        }
    except WireError as error:
        raise EngineError(f"its capabilities cannot be read: {error}") from error
    if answer["protocol"] != PROTOCOL:
        raise EngineError(f"its plugin speaks protocol {answer['protocol']!r}, this trainer {PROTOCOL}: same version?")
    if launch_id is not None and answer["launch_id"] != launch_id:
        raise EngineError(f"another server answers: launch {answer['launch_id']!r}, started was {launch_id!r}")
    check_reported_version(answer["sglang"], allow_untested)
    failed = [f"{name} ({where})" for where, found in hooks.items() for name, on in found.items() if on is not True]
    failed += [f"all ({where})" for where, found in hooks.items() if not found]
    if failed:
        raise EngineError(f"{len(failed)} hooks of the plugin did not apply: {', '.join(failed)}")
    if worker["bypassed"] != []:
        raise EngineError(f"{worker['pipeline']} goes around the plugin's hooks, with {worker['bypassed']}")
    if worker["offloaded"] is not False:
        raise EngineError(
            "it offloads layers of the transformer, which can then be neither updated nor put to sleep: start it with "
            "--dit-layerwise-offload false, on a device that holds the model"
        )
    if worker["pipeline"] not in pipelines:
        raise EngineError(f"it serves a {worker['pipeline']!r}, this model needs one of {list(pipelines)}")
    if _DTYPES.get(worker["dtype"]) != forward_dtype:
        raise EngineError(f"its transformer is {worker['dtype']!r}, the run computes in {forward_dtype}")
    parameters = worker.get("parameters")
    all_bf16, sleeping = worker["dtype"] == "torch.bfloat16", worker["sleeping"] is True
    return Capabilities(True, all_bf16, sleeping, parameters if type(parameters) is int else None)


def check_reported_version(version: object, allow_untested: bool) -> None:
    """EngineError: a version of SGLang outside the tested range, which was not allowed."""
    if not allow_untested and not (isinstance(version, str) and is_tested(version)):
        raise EngineError(
            f"it is SGLang {version!r}, tested are {TESTED}: install one of these, or give "
            "--sglang-allow-untested-version"
        )
