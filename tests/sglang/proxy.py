"""Between a client and a real server: passes everything on, and spoils the replies to rollouts that a script names."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Awaitable
from dataclasses import dataclass

from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang.server import Server

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


@dataclass(frozen=True)
class Spoil:
    """What happens to one rollout's reply.

    how: "delay" (by `seconds`), "truncate", "drop" (after the server has answered), "lose" (the request does not
    arrive), "double" (the whole reply twice on one connection), "stale" (the reply before this one instead), "flip"
    (one bit, `at` so far into the reply as a share of it, headers included).
    """

    how: str
    at: float = 0.5
    seconds: float = 0.0


class Proxy(Server):
    """`Server` in front of `behind`. dead: connections are closed at once, and it cannot be started again."""

    def __init__(self, behind: Server) -> None:
        self._behind = behind
        self.script: deque[Spoil | None] = deque()
        self.spoilt: Counter[str] = Counter()
        self.rollouts = 0
        self.dead = False
        self._last = b""
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._in_loop(self._listen())
        return self

    def __exit__(self, *exception: object) -> None:
        self._in_loop(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def url(self) -> str:
        return self._url

    @property
    def launch_id(self) -> str | None:
        return self._behind.launch_id

    @property
    def managed(self) -> bool:
        return self._behind.managed

    def restart(self) -> None:
        if self.dead:
            raise EngineError("the proxy is dead")
        self._behind.restart()

    def tail(self, lines: int = 20) -> str:
        return self._behind.tail(lines)

    def _in_loop(self, work: Awaitable[None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)  # type: ignore[arg-type]

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while not self.dead and await self._exchange(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):  # either side has gone: so has the connection
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _exchange(self, reader: Reader, writer: Writer) -> bool:
        """One request and its reply. False: the connection ends here."""
        request = await message(reader)
        spoil = None
        if request.startswith(b"POST /rollout/generate "):
            self.rollouts += 1
            spoil = self.script.popleft() if self.script else None
        if spoil is not None:
            self.spoilt[spoil.how] += 1
            if spoil.how == "lose":
                return False
        reply = await self._ask(request)
        before, self._last = self._last, reply if b"application/msgpack" in reply else self._last
        if spoil is None:
            return await send(writer, reply, go_on=True)
        if spoil.how == "delay":
            await asyncio.sleep(spoil.seconds)
            return await send(writer, reply, go_on=True)
        if spoil.how == "double":
            return await send(writer, reply + reply, go_on=True)
        if spoil.how == "stale":
            return await send(writer, before or reply, go_on=True)
        if spoil.how == "truncate":
            return await send(writer, reply[: int(len(reply) * spoil.at)], go_on=False)
        if spoil.how == "flip":
            place = int(len(reply) * spoil.at)
            return await send(writer, reply[:place] + bytes([reply[place] ^ 1]) + reply[place + 1 :], go_on=False)
        assert spoil.how == "drop", spoil
        return False

    async def _ask(self, request: bytes) -> bytes:
        host, _, port = self._behind.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            await writer.drain()
            return await message(reader)
        finally:
            writer.close()


async def message(reader: Reader) -> bytes:
    """A whole HTTP/1.1 message. Both sides say Content-Length; nothing here is chunked."""
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    assert b"transfer-encoding" not in head.lower(), head
    return head + await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0)


async def send(writer: Writer, content: bytes, *, go_on: bool) -> bool:
    writer.write(content)
    await writer.drain()
    return go_on
