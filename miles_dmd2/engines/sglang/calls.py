"""What one SGLang server is asked: its capabilities, a rollout, sleep and wake, new weights and the proof of them."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from miles_dmd2.engines.base import EngineError, check_probe
from miles_dmd2.engines.sglang.handshake import Capabilities, check_reported_version, read_capabilities
from miles_dmd2.engines.sglang.http import FailedError, RefusedError, ServerError, Transport
from miles_dmd2.engines.sglang.pool import PROBE_TOLERANCE, Link, SGLangSettings
from miles_dmd2.engines.sglang.weights import MODULE, Push, bodies, check_checksum, check_parameters, check_report
from miles_dmd2.engines.sglang.wire import (
    Ask,
    WireError,
    parse_json,
    parse_probe,
    probe_request,
    rollout_body,
)
from miles_dmd2.engines.sglang_plugin.protocol import DIGEST_HEADER, body_digest
from miles_dmd2.models.base import ModelAdapter

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Calls:
    """Every call raises a `ServerError`, `WireError` or `EngineError` where the answer is not as it should be."""

    def __init__(self, adapter: ModelAdapter, settings: SGLangSettings, transport: Transport) -> None:
        self._adapter = adapter
        self._settings = settings
        self._transport = transport
        self._tolerance = settings.probe_tolerance or PROBE_TOLERANCE[settings.forward_dtype]
        self._warned = False

    # -- handshake, sleep ------------------------------------------------------------------------------------

    async def shake_hands(self, link: Link) -> Capabilities:
        """EngineError: a server that must not be used. A stock server passes only if its replies can be cut."""
        settings = self._settings
        try:
            answer = await self._json(link, "GET", "/miles_dmd2/capabilities")
        except RefusedError as error:
            if error.status != 404:
                raise
            await self._check_stock(link)
            return Capabilities(plugin=False)
        return read_capabilities(
            answer,
            self._adapter.pipeline_classes,
            link.server.launch_id,
            settings.forward_dtype,
            settings.allow_untested_version,
        )

    async def _check_stock(self, link: Link) -> None:
        if self._settings.require_plugin or link.server.launch_id is not None:
            raise EngineError("it runs without the miles_dmd2 plugin, which this run requires; see docs/sglang.md")
        if not self._adapter.serving.complete_reply:
            raise EngineError(
                f"it runs without the miles_dmd2 plugin, and the replies of {self._adapter.family} are not complete "
                "without it; see docs/sglang.md"
            )
        version = (await self._json(link, "GET", "/server_info")).get("version")
        check_reported_version(version, self._settings.allow_untested_version)

    async def sleep(self, link: Link) -> None:
        await self._switch(link, "/release_memory_occupation", sleeping=True)

    async def wake(self, link: Link) -> None:
        await self._switch(link, "/resume_memory_occupation", sleeping=False)

    async def _switch(self, link: Link, path: str, *, sleeping: bool) -> None:
        answer = await self._json(link, "POST", path, {})
        if answer.get("success") is not True or answer.get("sleeping") is not sleeping:
            raise FailedError(f"{path} answered {answer}")

    # -- rollouts --------------------------------------------------------------------------------------------

    async def ask(self, link: Link, ask: Ask, parse: Callable[[bytes, Ask, ModelAdapter], T]) -> T:
        """One request; its reply is parsed off the loop, after its digest was found to be right."""
        reply = await self._transport.call(link.url, "POST", "/rollout/generate", rollout_body(ask, self._adapter))
        if reply.content_type != "application/msgpack":
            raise WireError(f"the reply is {reply.content_type}, not msgpack")

        def checked() -> T:
            if ask.plugin and reply.headers.get(DIGEST_HEADER) != body_digest(reply.body):
                raise WireError(f"the reply's {len(reply.body)} bytes are not those of its digest")
            return parse(reply.body, ask, self._adapter)

        if not ask.plugin:
            self._warn_once(link, ask, len(reply.body))
        return await asyncio.to_thread(checked)

    def _warn_once(self, link: Link, ask: Ask, size: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s runs without the miles_dmd2 plugin: every sample costs %d forwards instead of its stop step + 1, a "
                "VAE decode, and %d bytes where two latents are %d; nothing proves its weights. See docs/sglang.md",
                link.url,
                len(ask.request.sigmas) - 1,
                size,
                2 * 4 * math.prod(self._adapter.latent_shape),
            )

    # -- weights ---------------------------------------------------------------------------------------------

    async def install(self, link: Link, push: Push, *, verify: bool) -> None:
        """Send, then the proof that the server serves exactly this: the probe, and, to verify, all parameters.

        A stock server proves nothing.
        """
        plugin = link.capabilities.plugin
        if push.directory is not None:
            body: dict[str, object] = {"model_path": str(push.directory), "target_modules": [MODULE]}
            await self._update(link, "/update_weights_from_disk", body)
        else:
            if plugin:
                await self._json(link, "POST", "/miles_dmd2/weights/begin", {})
            for body in bodies(push, link.server.shared_device):
                await self._update(link, "/update_weights_from_tensor", body)
        if plugin:
            if verify:
                check_report(push, await self._json(link, "GET", "/miles_dmd2/weights"))
            if verify and push.predicted is not None:
                check_parameters(push.predicted[1], link.capabilities.parameters)
                answer = await self._json(link, "POST", "/get_weights_checksum", {"module_names": [MODULE]})
                check_checksum(push, answer)
            check_probe(push.update, await self._probe(link, push), self._tolerance)

    async def _update(self, link: Link, path: str, body: dict[str, object]) -> None:
        answer = await self._json(link, "POST", path, body)
        if answer.get("success") is not True:
            raise RefusedError(f"{path} answered {answer}")

    async def _probe(self, link: Link, push: Push) -> Tensor:
        """The velocity that the server computes at the probe's input. A reply that is garbled is asked for again."""
        probe = push.update.probe
        for attempt in range(self._settings.attempts):
            ask = Ask(probe_request(probe), f"probe.{secrets.token_hex(8)}", push.digest, probe=probe)
            try:
                return await self.ask(link, ask, parse_probe)
            except WireError:
                if attempt == self._settings.attempts - 1:
                    raise
            except (EngineError, ServerError):
                raise
            except Exception as error:  # of the family's format, for another family's probe
                raise EngineError(f"cannot run its probe: {error!r}") from error
        raise AssertionError("unreachable")

    # -- JSON ------------------------------------------------------------------------------------------------

    async def _json(self, link: Link, method: str, path: str, payload: object = None) -> dict[str, Any]:
        reply = await self._transport.call(link.url, method, path, payload)
        answer = parse_json(reply.body)
        if not isinstance(answer, dict):
            raise WireError(f"{path} answered {type(answer).__name__}, not a JSON object")
        return answer
