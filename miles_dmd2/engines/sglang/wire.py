"""The wire format of an SGLang diffusion server: requests out, replies in.

Parsing is strict: a reply is the answer to the request that was made, in every respect that can be checked, or it is a
`WireError`. Fields of SGLang's own reply that are not read here may be anything. Nothing is unpickled.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang_plugin.protocol import KEY, PROTOCOL
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.loading import eight_bit
from miles_dmd2.types import Conditioning, Probe, RolloutRequest

TIMESTEPS = 1000  # a reply's timesteps are sigma x 1000
PROBE_PROMPT = "probe"  # the server encodes some prompt before the plugin puts the probe's conditioning in its place

_MEDIA = {"uint8": torch.uint8, "fp32": torch.float32}
_REPORT = {"protocol", "client_id", "stop_step", "forwards", "weights", "decoded", "velocity"}  # the plugin's part


class WireError(ValueError):
    """A reply that is not the answer to its request. Another attempt may give a good one."""


class StaleWeightsError(WireError):
    """A good answer by other weights than those loaded last: the server was restarted, or is another one."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One attempt at one request: what is sent, and what the reply must say.

    plugin: False for a stock server, which is asked for the whole rollout with its debug tensors. conditioning: whether
    the prompt's conditioning comes back. weights: digest of the weights that must have answered, None where the server
    has been sent none. probe: run on this input instead. start: begin with this latent in the place of the seed's
    noise; stop step 0 only.
    """

    request: RolloutRequest
    client_id: str
    weights: str | None
    plugin: bool = True
    conditioning: bool = False
    probe: Probe | None = None
    start: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one reply says. x_k, x0: fp32 `[*latent]`; forwards: counted by the server.

    audio: `[channels, samples]` fp32 with its rate in Hz, where the server sends one with the media.
    """

    x_k: Tensor
    x0: Tensor
    forwards: int
    cond: Conditioning | None
    media: Tensor | None
    audio: Tensor | None = None
    audio_sample_rate: int | None = None


# -- requests ------------------------------------------------------------------------------------------------


def rollout_body(ask: Ask, adapter: ModelAdapter) -> dict[str, object]:
    """JSON body of `POST /rollout/generate`. The grid goes without its terminal 0, rounded to fp32."""
    request, stop = ask.request, ask.request.stop_step
    body: dict[str, object] = {
        "prompt": request.prompt,
        "seed": request.seed,
        "generator_device": "cpu",  # the same noise on every device
        **adapter.serving.request_fields(),
        "num_inference_steps": len(request.sigmas) - 1,
        "num_outputs_per_prompt": 1,
        "rollout": True,
        # What SGLang calls sde is another hop. At noise level 1 its cps is x' = (1 - s') x0 + s' noise, from the draws
        # of the sample's generator after its initial noise.
        "rollout_sde_type": "cps" if request.sample_type == "sde" else "ode",
        "rollout_noise_level": 1.0 if request.sample_type == "sde" else 0.0,
        "rollout_log_prob_no_const": True,
        "rollout_debug_mode": not ask.plugin,
        "rollout_return_denoising_env": ask.conditioning,
        "rollout_return_dit_trajectory": True,
        "rollout_return_step_indices": [stop, stop + 1] if ask.plugin else [stop],
        "suppress_logs": True,
    }
    if ask.plugin:
        body["rollout_sigmas"] = _grid(request)[:-1].tolist()
        body["rollout_stop_step"] = stop
        body["rollout_return_generated_output"] = request.decode
        if request.decode:
            body["rollout_video_dtype"] = request.video_dtype
        body["rollout_client_id"] = ask.client_id
        if ask.conditioning:
            body["rollout_conditioning"] = list(adapter.serving.conditioning_names)
        given = {} if ask.start is None else {"x": adapter.serving.start(ask.start)}
        given |= {} if ask.probe is None else adapter.serving.probe(ask.probe)
        if given:
            tensors = {name: value.contiguous() for name, value in given.items()}
            body["rollout_probe"] = base64.b64encode(save(tensors)).decode()
    return body


def probe_request(probe: Probe) -> RolloutRequest:
    """One forward at the probe's sigma."""
    return RolloutRequest(0, PROBE_PROMPT, 0, (float(probe.sigma.reshape(())), 0.0), 0)


# -- replies -------------------------------------------------------------------------------------------------


def parse_rollout(body: bytes, ask: Ask, adapter: ModelAdapter) -> Answer:
    """WireError: anything that is not as asked. EngineError: a stock server whose grid is not the request's."""
    reply = _open(body, ask)
    x_k, x0 = _cut(reply, ask, adapter) if not ask.plugin else _stopped(reply, ask, adapter)
    forwards = ask.request.stop_step + 1 if ask.plugin else len(ask.request.sigmas) - 1
    if ask.plugin and not ask.conditioning and reply.get("denoising_env") is not None:
        raise WireError("denoising_env was not asked for")
    cond = _conditioning(reply, ask, adapter) if ask.conditioning else None
    return Answer(x_k, x0, forwards, cond, _media(reply, ask, adapter), *_audio(reply, ask, adapter))


def parse_conditioning(body: bytes, ask: Ask, adapter: ModelAdapter) -> Conditioning:
    """The conditioning alone, of a reply whose sample is of no interest."""
    return _conditioning(_open(body, ask, any_weights=True), ask, adapter)


def parse_probe(body: bytes, ask: Ask, adapter: ModelAdapter) -> Tensor:
    """The probe's velocity `[1, *latent]` fp32. It may be anything but of another shape: see `base.check_probe`."""
    reply = _open(body, ask)
    velocity = _tensor(reply[KEY]["velocity"], "velocity")
    return _latent(velocity, "velocity", adapter, finite=False).unsqueeze(0)


def _open(body: bytes, ask: Ask, *, any_weights: bool = False) -> dict[str, Any]:
    """The one response in the body, after all that it says about which request it answers."""
    try:
        replies = msgpack.unpackb(body, raw=False, object_pairs_hook=_unique)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not msgpack: {error!r}") from error
    if not isinstance(replies, list) or not all(isinstance(reply, dict) for reply in replies):
        raise WireError(f"expected a list of responses, got {type(replies).__name__}")
    if len(replies) != 1:
        raise WireError(f"expected 1 response, got {len(replies)}")
    (reply,) = replies
    _expect(reply.get("prompt"), ask.request.prompt, "prompt")
    _expect(reply.get("seed"), ask.request.seed, "seed")
    if not ask.plugin:
        return dict(reply)
    report = read_map(reply.get(KEY), KEY)
    if report.keys() != _REPORT:
        raise WireError(f"{KEY} must have {sorted(_REPORT)}, got {sorted(report)}")
    _expect(report["protocol"], PROTOCOL, "protocol")
    _expect(report["client_id"], ask.client_id, "client_id")
    _expect(report["stop_step"], ask.request.stop_step, "stop_step")
    _expect(report["forwards"], ask.request.stop_step + 1, "forwards")
    _expect(report["decoded"], ask.request.decode, "decoded")
    if report["weights"] != ask.weights and not any_weights:
        raise StaleWeightsError(f"answered by weights {_short(report['weights'])}, loaded are {_short(ask.weights)}")
    return dict(reply)


def _stopped(reply: dict[str, Any], ask: Ask, adapter: ModelAdapter) -> tuple[Tensor, Tensor]:
    """x_k and x0 of a plugin's reply, which stopped where it was told to."""
    trajectory, grid = read_map(reply.get("dit_trajectory"), "dit_trajectory"), _grid(ask.request)
    if not _same_bits(_tensor(trajectory.get("sigmas"), "sigmas"), grid):
        raise WireError("sigmas are not the request's grid, bit for bit")
    _check_timesteps(trajectory, [ask.request.sigmas[ask.request.stop_step], 0.0])
    x_k, x0 = (
        _latent(latent, name, adapter) for latent, name in zip(_steps(trajectory, 2), ("x_k", "x0"), strict=True)
    )
    if ask.start is not None and not torch.equal(x_k, ask.start):
        raise WireError("x_k is not the latent that was sent")
    if ask.start is None and ask.request.stop_step == 0:
        first = adapter.spread(adapter.part_sigmas(grid[:1]))[0]
        if not torch.equal(x_k, first * adapter.initial_noise(ask.request.seed)):
            raise WireError("x_k of step 0 is not the noise of its seed at the first sigma")
    return x_k, x0


def _cut(reply: dict[str, Any], ask: Ask, adapter: ModelAdapter) -> tuple[Tensor, Tensor]:
    """x_k and x0 out of a stock server's whole rollout.

    The velocity is the debug tensor of step k: exact whatever the transformer's dtype, and x0 has the bits that the
    plugin would send. (x_{k+1} - x_k) / (sigma_{k+1} - sigma_k) would carry the rounding of x_{k+1}, amplified.
    """
    stop, grid = ask.request.stop_step, _grid(ask.request)
    trajectory = read_map(reply.get("dit_trajectory"), "dit_trajectory")
    sigmas = _tensor(trajectory.get("sigmas"), "sigmas")
    if not _same_bits(sigmas, grid):
        raise EngineError(
            f"a server without the miles_dmd2 plugin samples on its own grid {sigmas.tolist()}, the student's is "
            f"{grid.tolist()}: install the plugin, or give the served pipeline a scheduler with this static shift"
        )
    _check_timesteps(trajectory, [ask.request.sigmas[stop]])
    (x_k,) = _steps(trajectory, 1)
    debug = read_map(reply.get("rollout_debug_tensors"), "rollout_debug_tensors")
    velocities = _tensor(debug.get("rollout_model_outputs"), "rollout_model_outputs")
    if velocities.ndim < 1 or len(velocities) != len(grid) - 1:
        raise WireError(f"rollout_model_outputs must hold {len(grid) - 1} steps, has shape {list(velocities.shape)}")
    x_k, velocity = _latent(x_k, "x_k", adapter), _latent(velocities[stop].float(), "velocity", adapter)
    return x_k, x_k - grid[stop] * velocity


def _steps(trajectory: dict[str, Any], count: int) -> Tensor:
    latents = _tensor(trajectory.get("latents"), "latents")
    if latents.dtype != torch.float32 or latents.ndim < 1 or len(latents) != count:
        raise WireError(f"latents must be float32 of {count} steps, got {latents.dtype} {list(latents.shape)}")
    return latents


def _check_timesteps(trajectory: dict[str, Any], sigmas: Sequence[float]) -> None:
    """The steps that came back are those asked for: their timesteps belong to these sigmas."""
    timesteps = _tensor(trajectory.get("timesteps"), "timesteps")
    expected = [TIMESTEPS * sigma for sigma in sigmas]
    found = timesteps.flatten().tolist()
    near = len(found) == len(expected) and all(
        math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-3) for a, b in zip(found, expected, strict=True)
    )
    if not near:
        raise WireError(f"timesteps are {found}, the steps asked for are at {expected}")


def _conditioning(reply: dict[str, Any], ask: Ask, adapter: ModelAdapter) -> Conditioning:
    environment = read_map(reply.get("denoising_env"), "denoising_env")
    found = read_map(environment.get("pos_cond_kwargs"), "pos_cond_kwargs")
    names = adapter.serving.conditioning_names
    if not set(names) <= found.keys() or (ask.plugin and found.keys() != set(names)):
        raise WireError(f"pos_cond_kwargs must have {sorted(names)}, got {_keys(found)}")
    try:
        record = adapter.serving.conditioning({name: _tree(found[name], name) for name in names})
    except ValueError as error:
        raise WireError(f"conditioning: {error}") from error
    bad = [name for name, value in record.items() if not bool(torch.isfinite(value).all())]
    if bad:
        raise WireError(f"conditioning {sorted(bad)} is not finite")
    return {name: _own(value) for name, value in record.items()}


def _media(reply: dict[str, Any], ask: Ask, adapter: ModelAdapter) -> Tensor | None:
    output = reply.get("generated_output")
    if not ask.request.decode:
        if output is not None and ask.plugin:
            raise WireError("generated_output was not asked for")
        return None
    tensor = _tensor(output, "generated_output")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise WireError("generated_output is not finite")
    try:
        media = adapter.serving.media(tensor)
    except ValueError as error:
        raise WireError(f"generated_output: {error}") from error
    if ask.request.video_dtype == "uint8":
        media = eight_bit(media)  # a server that does not round sends what its VAE made
    wanted = _MEDIA[ask.request.video_dtype]
    if media.dtype != wanted or media.ndim != 4 or media.shape[1:] != (adapter.height, adapter.width, 3):
        raise WireError(
            f"generated_output must become {wanted} [frames, {adapter.height}, {adapter.width}, 3], "
            f"got {media.dtype} {list(media.shape)}"
        )
    return _own(media)


def _audio(reply: dict[str, Any], ask: Ask, adapter: ModelAdapter) -> tuple[Tensor | None, int | None]:
    """The sound of decoded media and its rate; both None where the server sends none."""
    output, rate = reply.get("generated_audio"), reply.get("audio_sample_rate")
    if output is None and rate is None:
        return None, None
    if not ask.request.decode and ask.plugin:
        raise WireError("generated_audio was not asked for")
    if type(rate) is not int or rate < 1:
        raise WireError(f"audio_sample_rate must be a positive whole number beside generated_audio, got {rate!r}")
    tensor = _tensor(output, "generated_audio")
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        raise WireError(f"generated_audio must be finite floating point, got {tensor.dtype}")
    try:
        return _own(adapter.serving.sound(tensor, rate)), rate
    except ValueError as error:
        raise WireError(f"generated_audio: {error}") from error


# -- answers of other routes ------------------------------------------------------------------------------------


def parse_json(body: bytes) -> object:
    """WireError: not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error


def error_text(body: bytes) -> str:
    """What a server says in an answer that is not 2xx, at most 2000 characters."""
    text = body.decode(errors="replace")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        found = [answer[key] for key in ("detail", "error", "message") if answer.get(key)]
        text = str(found[0]) if found else text
    return text[:2000].strip() or "no reason given"


# -- pieces --------------------------------------------------------------------------------------------------


def _grid(request: RolloutRequest) -> Tensor:
    return torch.tensor(request.sigmas, dtype=torch.float32)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


def _tensor(value: object, where: str) -> Tensor:
    """One tensor, exactly as large and of the type that it says."""
    if not isinstance(value, dict) or value.keys() != {"__tensor__", "data", "shape", "dtype"}:
        raise WireError(f"{where} must be a tensor, got {_keys(value)}")
    if value["__tensor__"] is not True or not isinstance(value["data"], bytes):
        raise WireError(f"{where} must be a tensor of bytes, got {type(value['data']).__name__}")
    try:
        loaded = load(value["data"])
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise WireError(f"{where}: not safetensors: {error}") from error
    if loaded.keys() != {"t"}:
        raise WireError(f"{where}: expected the one tensor 't', got {sorted(loaded)}")
    tensor = loaded["t"]
    if [str(tensor.dtype), list(tensor.shape)] != [value["dtype"], value["shape"]]:
        raise WireError(
            f"{where} is said to be {value['dtype']} {value['shape']}, but is {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor


def _tree(value: object, where: str) -> object:
    """Tensors in lists and maps, and plain values, as they were before the server packed them."""
    if isinstance(value, dict) and "__tensor__" in value:
        return _tensor(value, where)
    if isinstance(value, dict):
        return {key: _tree(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_tree(item, f"{where}[{i}]") for i, item in enumerate(value)]
    return value


def _latent(tensor: Tensor, where: str, adapter: ModelAdapter, *, finite: bool = True) -> Tensor:
    try:
        latent = adapter.serving.latent(tensor)
    except ValueError as error:
        raise WireError(f"{where}: {error}") from error
    if latent.dtype != torch.float32 or latent.shape != adapter.latent_shape:
        raise WireError(f"{where} must be float32 {adapter.latent_shape}, got {latent.dtype} {tuple(latent.shape)}")
    if finite and not bool(torch.isfinite(latent).all()):
        raise WireError(f"{where} is not finite")
    return _own(latent)


def _own(tensor: Tensor) -> Tensor:
    """Contiguous, with a storage of its own: a view would be sent on with all that is behind it."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _expect(found: object, expected: object, where: str) -> None:
    if type(found) is not type(expected) or found != expected:
        raise WireError(f"{where} is {found!r}, expected {expected!r}")


def read_map(value: object, where: str) -> dict[str, Any]:
    """WireError: not a map."""
    if not isinstance(value, dict):
        raise WireError(f"{where} must be a map, got {_keys(value)}")
    return value


def _unique(pairs: list[tuple[object, object]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise WireError(f"a key occurs twice among {[key for key, _ in pairs]}")
    return found


def _keys(value: object) -> str:
    return str(sorted(map(str, value))) if isinstance(value, dict) else type(value).__name__


def _short(digest: object) -> str:
    return f"{digest[:16]}..." if isinstance(digest, str) else "that nobody named"
