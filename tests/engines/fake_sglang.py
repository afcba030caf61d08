"""A server in this process that speaks the wire format of SGLang and its plugin, over the project's own tiny model.

Written from the format's description, with its own packing and hashing, so that client and fake cannot agree on an
error. It takes one rollout at a time, in the order of arrival. What goes wrong is scripted, one `Fault` per request.
"""

import asyncio
import base64
import copy
import hashlib
import io
import pickle
import secrets
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import torch
from aiohttp import web
from safetensors.torch import load, load_file, save
from torch import Tensor, nn

from miles_dmd2.algo import sigma_grid
from miles_dmd2.engines.base import EngineError
from miles_dmd2.models.base import Components, ModelAdapter

STOCK_SHIFT = 3.0  # of the scheduler that a server without the plugin samples with
STOCK_FIELDS = {
    *("prompt", "seed", "generator_device", "width", "height", "num_inference_steps", "num_outputs_per_prompt"),
    *("guidance_scale", "true_cfg_scale", "rollout", "rollout_sde_type", "rollout_noise_level", "suppress_logs"),
    *("rollout_log_prob_no_const", "rollout_debug_mode", "rollout_return_denoising_env"),
    *("rollout_return_dit_trajectory", "rollout_return_step_indices"),
}
PLUGIN_FIELDS = {
    *("rollout_sigmas", "rollout_stop_step", "rollout_stop_output", "rollout_return_generated_output"),
    *("rollout_conditioning", "rollout_client_id", "rollout_probe", "rollout_video_dtype"),
}
PICKLED = {  # what SGLang's allow-list has for tensors by value
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("collections", "OrderedDict"),
}


@dataclass
class Fault:
    """What happens to one rollout request.

    edit: changes the reply before it is packed. body: changes its bytes, before the digest if `sealed`. action: "drop"
    (closes the connection), "truncate", "hang" (until the server stops), "die" (the server is gone), "sicken" (dies,
    but its HTTP process answers 503). status: answer this. pause: seconds before the reply.
    """

    edit: Callable[[dict[str, Any]], object] | None = None
    body: Callable[[bytes], bytes] | None = None
    sealed: bool = False
    action: str | None = None
    status: int | None = None
    pause: float = 0.0


def packed(tensor: Tensor) -> dict[str, object]:
    return {
        "__tensor__": True,
        "data": save({"t": tensor.contiguous()}),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
    }


def digest_of(tensor: Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).clone().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype}\0{list(tensor.shape)}\0".encode() + raw).hexdigest()


@cache
def loaded(adapter: ModelAdapter) -> tuple[Components, nn.Module, dict[str, Tensor]]:
    """Text encoder and VAE, the checkpoint's transformer, and a place for embeddings: the same for all servers."""
    return adapter.load_components(), adapter.load_transformer().requires_grad_(False), {}


class AllowList(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in PICKLED:
            raise pickle.UnpicklingError(f"blocked: {module}.{name}")
        return super().find_class(module, name)


class Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class Weights:
    """What the worker knows about what was sent to it."""

    received: dict[str, Tensor] = field(default_factory=dict)
    sound: bool = False
    digest: str | None = None


class FakeSGLang:
    """`Server` for the client. plugin: False for a stock server. dtype: what it says its parameters are.

    requests: bodies of the rollouts, in the order of arrival. most_in_flight: of rollouts, at a time.
    """

    def __init__(
        self, adapter: ModelAdapter, *, plugin: bool = True, managed: bool = False, dtype: str = "torch.float32"
    ) -> None:
        self.adapter, self.plugin, self.managed, self.dtype = adapter, plugin, managed, dtype
        self.components, self.checkpoint, self.embeds = loaded(adapter)
        self.version = "0.5.23"
        self.hooks: dict[str, bool] = {"a.hook": True}
        self.worker_hooks: dict[str, bool] = {"b.hook": True}
        self.answer: dict[str, Any] = {}  # put over the capabilities
        self.script: deque[Fault] = deque()
        self.always: Fault | None = None
        self.deaf_to_sleep = False
        self.shared_device: str | None = None
        self.stops = 0
        self.requests: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.in_flight = self.most_in_flight = self.decoded = self.forwards = self.starts = 0
        self.update_fault: Callable[[dict[str, Tensor]], None] | None = None
        self.restart_error: str | None = None
        self.on_restart: Callable[[], object] = lambda: None
        self._runner: web.AppRunner | None = None
        self.launch_id: str | None = None
        self.url = ""
        self._forget()

    # -- life ------------------------------------------------------------------------------------------------

    def start(self) -> "FakeSGLang":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._in_loop(self._start())
        return self

    def restart(self) -> None:
        self.on_restart()
        if self.restart_error is not None:
            raise EngineError(self.restart_error)
        self._in_loop(self._stop())
        self._in_loop(self._start())

    def die(self) -> None:
        """As when both processes are killed: connections are reset, new ones refused."""
        self._in_loop(self._stop())

    def stop(self) -> None:
        """Of `Server`: nothing of it is left, and `restart` starts it again."""
        self.stops += 1
        self._in_loop(self._stop())

    def close(self) -> None:
        self._in_loop(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def tail(self, lines: int = 20) -> str:
        return "last words"

    def _in_loop(self, work: Awaitable[None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)  # type: ignore[arg-type]

    def _forget(self) -> None:
        self.transformer = copy.deepcopy(self.checkpoint)
        self.weights = Weights()
        self.asleep = self.sick = False

    async def _start(self) -> None:
        self.starts += 1
        self.launch_id = f"launch-{secrets.token_hex(4)}" if self.managed else None
        self._forget()
        self._worker = asyncio.Lock()
        self._released = asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/server_info", self._info),
                web.post("/rollout/generate", self._rollout),
                web.post("/update_weights_from_disk", self._from_disk),
                web.post("/update_weights_from_tensor", self._from_tensor),
                web.post("/release_memory_occupation", self._release),
                web.post("/resume_memory_occupation", self._resume),
            ]
        )
        if self.plugin:
            app.add_routes(
                [
                    web.get("/miles_dmd2/capabilities", self._capabilities),
                    web.get("/miles_dmd2/weights", self._report),
                    web.post("/miles_dmd2/weights/begin", self._begin),
                ]
            )
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]

    async def _stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            self._released.set()
            await runner.cleanup()

    # -- control ---------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        self.calls.append("health")
        return web.json_response({"error": "worker exited"} if self.sick else {}, status=503 if self.sick else 200)

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _capabilities(self, request: web.Request) -> web.Response:
        self.calls.append("capabilities")
        worker = {
            "hooks": self.worker_hooks,
            "bypassed": [],
            "pipeline": "QwenImagePipeline",
            "model_path": "somewhere",
            "transformer": "T",
            "dtype": self.dtype,
            "parameters": 1,
            "offloaded": False,
            "sleeping": self.asleep,
            "pid": 1,
        }
        answer = {
            "protocol": 1,
            "version": "1.0",
            "sglang": self.version,
            "launch_id": self.launch_id,
            "hooks": self.hooks,
            "worker": worker,
        }
        worker.update(self.answer.get("worker", {}))
        return web.json_response({**answer, **{k: v for k, v in self.answer.items() if k != "worker"}})

    async def _release(self, request: web.Request) -> web.Response:
        if self.deaf_to_sleep:
            await asyncio.sleep(60)
        if not self.plugin:
            return web.json_response({"success": False, "message": "Found no NVIDIA driver"}, status=500)
        self.asleep = True
        return web.json_response({"success": True, "sleeping": True})

    async def _resume(self, request: web.Request) -> web.Response:
        self.asleep = False
        return web.json_response({"success": True, "sleeping": False})

    # -- weights ---------------------------------------------------------------------------------------------

    def digest(self) -> str | None:
        received = self.weights.received
        if not self.weights.sound or received.keys() != self.transformer.state_dict().keys():
            return None
        if self.weights.digest is None:
            lines = "".join(f"{name} {digest_of(received[name])}\n" for name in sorted(received))
            self.weights.digest = hashlib.sha256(lines.encode()).hexdigest()
        return self.weights.digest

    async def _begin(self, request: web.Request) -> web.Response:
        self.calls.append("begin")
        self.weights = Weights(sound=True)
        return web.json_response({})

    async def _report(self, request: web.Request) -> web.Response:
        self.calls.append("weights")
        held, received = self.transformer.state_dict(), self.weights.received
        wrong = [name for name, value in received.items() if not torch.equal(held[name], value.to(held[name].dtype))]
        missing = sorted(held.keys() - received.keys())
        answer = {
            "digest": None if missing or wrong else self.digest(),
            "tensors": {name: digest_of(value) for name, value in received.items()},
            "missing": missing,
            "wrong": sorted(wrong),
        }
        return web.json_response({**answer, **self.answer.get("report", {})})

    async def _from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append("disk")
        self.updates.append(body)
        (file,) = (Path(body["model_path"]) / "transformer").glob("*.safetensors")
        async with self._worker:
            self.weights.sound = False
            return self._take(Weights(load_file(file), sound=True), partial=False)

    async def _from_tensor(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append("tensor")
        self.updates.append(body)
        (payload,) = body["serialized_named_tensors"]
        named = AllowList(io.BytesIO(base64.b64decode(payload, validate=True))).load()
        async with self._worker:
            return self._take(Weights(dict(named), sound=self.weights.sound), partial=True)

    def _take(self, new: Weights, *, partial: bool) -> web.Response:
        """As the plugin's guard: what does not fit is refused, and changes nothing."""
        held = self.transformer.state_dict()
        problem = None
        if self.asleep:
            return web.json_response({"success": False, "message": "Server is sleeping"}, status=500)
        if unknown := sorted(new.received.keys() - held.keys()):
            problem = f"{len(unknown)} names are unknown: {unknown[0]}"
        elif not partial and (absent := sorted(held.keys() - new.received.keys())):
            problem = f"{len(absent)} parameters are missing: {absent[0]}"
        if problem is not None:
            self.weights.sound = False
            return web.json_response({"success": False, "message": problem}, status=400)
        for name, value in new.received.items():
            held[name].copy_(value)
        kept = self.weights.received if partial else {}
        self.weights = Weights({**kept, **new.received}, new.sound)
        if self.update_fault is not None:
            self.update_fault(held)
        return web.json_response({"success": True, "message": ""})

    # -- rollouts --------------------------------------------------------------------------------------------

    async def _rollout(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        probe = body["prompt"] == "probe"
        fault = Fault() if probe else self.always or (self.script.popleft() if self.script else Fault())
        if not probe:
            self.requests.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            async with self._worker:
                await asyncio.sleep(fault.pause)
                if fault.action == "hang":
                    await self._released.wait()
                return await self._answer(request, body, fault)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], fault: Fault) -> web.StreamResponse:
        if self.sick:
            return web.json_response({"error": "Scheduler worker exited; restart the server."}, status=503)
        if fault.status is not None:
            return web.json_response({"detail": "scripted"}, status=fault.status)
        if fault.action == "die":
            self._dying = asyncio.ensure_future(self._stop())
        if fault.action == "sicken":
            self.sick = True
            return web.json_response({"detail": "Generation failed: Scheduler worker exited"}, status=500)
        if fault.action in ("drop", "die"):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        try:
            reply = await asyncio.to_thread(self.reply_to, body)
        except Refused as error:
            return web.json_response({"detail": str(error)}, status=error.status)
        if fault.edit is not None:
            fault.edit(reply)
        content = msgpack.packb([reply])
        if fault.body is not None and fault.sealed:
            content = fault.body(content)
        headers = {"X-Miles-Dmd2-Digest": hashlib.blake2b(content, digest_size=16).hexdigest()} if self.plugin else {}
        if fault.body is not None and not fault.sealed:
            content = fault.body(content)
        if fault.action == "truncate":
            stream = web.StreamResponse(headers={**headers, "Content-Length": str(len(content))})
            await stream.prepare(request)
            await stream.write(content[: len(content) // 2])
            assert request.transport is not None
            request.transport.close()
            return stream
        return web.Response(body=content, headers=headers, content_type="application/msgpack")

    def reply_to(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._generate(body) if self.plugin else self._generate_stock(body)

    @torch.no_grad()
    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the plugin makes of a request: stop step, grid, x0."""
        if unknown := body.keys() - STOCK_FIELDS - PLUGIN_FIELDS:
            raise Refused(422, f"extra fields: {sorted(unknown)}")
        if self.asleep:
            raise Refused(500, "Server is sleeping")
        stop, sigmas = body["rollout_stop_step"], torch.tensor([*body["rollout_sigmas"], 0.0])
        x, embeds, probe = self._start_of(body)
        if not probe:
            x = sigmas[0] * x
        x_k, x0, velocities = self._sample(x, embeds, sigmas, stop, self._hops_of(body, stop))
        self.forwards += len(velocities)
        decode = body["rollout_return_generated_output"]
        return {
            **self._reply(body, torch.stack([x_k, x0]), [sigmas[stop], torch.tensor(0.0)], sigmas, embeds),
            "generated_output": self._decode(x0, body["rollout_video_dtype"]) if decode else None,
            "miles_dmd2": {
                "protocol": 1,
                "client_id": body.get("rollout_client_id"),
                "stop_step": stop,
                "forwards": len(velocities),
                "weights": self.digest(),
                "decoded": decode,
                "velocity": packed(velocities[-1]) if probe else None,
            },
        }

    @torch.no_grad()
    def _generate_stock(self, body: dict[str, Any]) -> dict[str, Any]:
        """The whole rollout on the scheduler's own grid, decoded, with debug tensors of every step."""
        sigmas = sigma_grid(body["num_inference_steps"], STOCK_SHIFT)
        x, embeds, _ = self._start_of(body)
        last = len(sigmas) - 2
        _, x0, velocities = self._sample(x, embeds, sigmas, last)
        path = [x]
        for k, velocity in enumerate(velocities):
            path.append(path[-1] + (sigmas[k + 1] - sigmas[k]) * velocity)
        steps = body["rollout_return_step_indices"]
        stacked = torch.stack(velocities)
        names = ("rollout_variance_noises", "rollout_prev_sample_means", "rollout_noise_std_devs")
        self.forwards += len(velocities)
        reply = self._reply(body, torch.stack([path[k] for k in steps]), [sigmas[k] for k in steps], sigmas, embeds)
        if body["rollout_debug_mode"]:
            debug = {name: packed(torch.zeros_like(stacked)) for name in names}
            reply["rollout_debug_tensors"] = {**debug, "rollout_model_outputs": packed(stacked)}
        return {**reply, "generated_output": self._decode(x0)}

    def _start_of(self, body: dict[str, Any]) -> tuple[Tensor, Tensor, bool]:
        """x, the prompt's embedding, and whether both are a probe's."""
        if "rollout_probe" in body:
            probe = load(base64.b64decode(body["rollout_probe"]))
            x = probe["x"]
            embeds = probe["prompt_embeds.0"][0] if "prompt_embeds.0" in probe else self._encoded(body["prompt"])
            if tuple(x.shape) != self.adapter.latent_shape:
                raise Refused(500, f"Generation failed: the probe's x is {list(x.shape)}")
            return x, embeds, True
        return self.adapter.initial_noise(body["seed"]), self._encoded(body["prompt"]), False

    def _encoded(self, prompt: str) -> Tensor:
        if prompt not in self.embeds:
            (cond,) = self.adapter.encode_prompts(self.components, [prompt])
            self.embeds[prompt] = cond["prompt_embeds"]
        return self.embeds[prompt]

    def _hops_of(self, body: dict[str, Any], stop: int) -> list[Tensor] | None:
        """Of cps at noise level 1: the draws of the request's generator after the initial noise; None for ode."""
        if body["rollout_sde_type"] == "ode":
            return None
        if (body["rollout_sde_type"], body["rollout_noise_level"]) != ("cps", 1.0):
            raise Refused(500, f"not scripted: {body['rollout_sde_type']} at {body['rollout_noise_level']}")
        generator = torch.Generator().manual_seed(body["seed"])
        torch.randn(self.adapter.latent_shape, generator=generator)
        return [torch.randn(self.adapter.latent_shape, generator=generator) for _ in range(stop)]

    def _sample(
        self, x: Tensor, embeds: Tensor, sigmas: Tensor, stop: int, hops: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        cond = self.adapter.collate([{"prompt_embeds": embeds}])
        velocities = []
        for k in range(stop + 1):
            velocity = self.adapter.velocity(self.transformer, x.unsqueeze(0), sigmas[k].reshape(1), cond)[0]
            velocities.append(velocity)
            if k < stop and hops is None:
                x = x + (sigmas[k + 1] - sigmas[k]) * velocity
            elif k < stop:
                x = (1 - sigmas[k + 1]) * (x - sigmas[k] * velocity) + sigmas[k + 1] * hops[k]
        return x, x - sigmas[stop] * velocities[-1], velocities

    def _decode(self, x0: Tensor, dtype: str = "fp32") -> dict[str, object]:
        self.decoded += 1
        media = self.adapter.decode(self.components, x0.unsqueeze(0))[0].permute(3, 0, 1, 2)
        return packed(media if dtype == "fp32" else (media * 255).round().to(torch.uint8))

    def _reply(
        self, body: dict[str, Any], latents: Tensor, times: list[Tensor], sigmas: Tensor, embeds: Tensor
    ) -> dict[str, Any]:
        """SGLang's own part."""
        conditioning: dict[str, Any] = {
            "encoder_hidden_states": [packed(embeds)],
            "txt_seq_lens": [len(embeds)],
            "img_shapes": [[[1, 2, 2]]],
            "guidance": None,
        }
        wanted = body.get("rollout_conditioning")
        kept = {name: conditioning[name] for name in wanted} if wanted is not None else conditioning
        environment = {"image_kwargs": None, "pos_cond_kwargs": kept, "neg_cond_kwargs": None, "guidance": None}
        return {
            "request_id": secrets.token_hex(8),
            "prompt": body["prompt"],
            "seed": body["seed"],
            "rollout_log_probs": packed(torch.zeros(1)),
            "rollout_debug_tensors": None,
            "denoising_env": environment if body["rollout_return_denoising_env"] else None,
            "dit_trajectory": {
                "latents": packed(latents),
                "timesteps": packed(torch.stack(times) * 1000),
                "sigmas": packed(sigmas),
            },
            "inference_time_s": 0.1,
            "peak_memory_mb": None,
        }


@contextmanager
def running(*servers: FakeSGLang) -> Iterator[tuple[FakeSGLang, ...]]:
    try:
        yield tuple(server.start() for server in servers)
    finally:
        for server in servers:
            server.close()
