"""One HTTP call to an SGLang server: in time, whole, within a limit, and 200, or an error that says what kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from miles_dmd2.engines.sglang.wire import error_text

MAX_REPLY = 1 << 32  # bytes; one msgpack string can hold no more
KEEP_ALIVE = 3.0  # seconds; the server closes idle connections after 5, and a request may meet that moment


class ServerError(RuntimeError):
    """A call without a good answer."""


class UnreachableError(ServerError):
    """Refused, reset, cut short, 503, or, when `late`, not answered in time."""

    def __init__(self, reason: str, *, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late


class FailedError(ServerError):
    """The server failed on it: 5xx, or an answer that is no answer. Another one may not."""


class RefusedError(ServerError):
    """4xx: the request is wrong, here and on every other server."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Reply:
    content_type: str
    headers: Mapping[str, str]
    body: bytes


class Transport:
    """One session for all servers. No proxies and no .netrc from the environment, no cookies, no redirects."""

    def __init__(self, timeout: float, max_reply: int = MAX_REPLY) -> None:
        """Inside the loop that it belongs to. timeout: seconds for one call, up to the last byte of the reply."""
        self._timeout = timeout
        self._max_reply = max_reply
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    async def call(
        self, url: str, method: str, path: str, payload: object = None, timeout: float | None = None
    ) -> Reply:
        """The reply, if it is 200. ServerError otherwise."""
        data = None if payload is None else await asyncio.to_thread(_json_bytes, payload)
        seconds = self._timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):
                async with self._session.request(
                    method,
                    url + path,
                    data=data,
                    headers={"Content-Type": "application/json"} if data is not None else None,
                    allow_redirects=False,
                ) as response:
                    body = await self._read(response)
        except TimeoutError as error:
            raise UnreachableError(f"{path} took more than {seconds:g} s", late=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(f"{path}: {error!r}") from error
        if response.status == 200:
            return Reply(response.content_type, response.headers, body)
        text = f"{path} answered {response.status}: {error_text(body)}"
        if response.status == 503:
            raise UnreachableError(text)
        raise RefusedError(text, response.status) if 400 <= response.status < 500 else FailedError(text)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for part in response.content.iter_chunked(1 << 20):
            body += part
            if len(body) > self._max_reply:
                response.close()
                raise FailedError(f"{response.url.path}: the reply has more than {self._max_reply} bytes")
        return bytes(body)

    async def close(self) -> None:
        await self._session.close()


def _json_bytes(payload: object) -> bytes:
    return json.dumps(payload, allow_nan=False).encode()
