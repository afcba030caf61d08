"""What a server's life needs of the operating system: ports, a process that dies with us, its group, small GETs."""

from __future__ import annotations

import http.client
import queue
import random
import select
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from miles_dmd2.engines.base import EngineError
from miles_dmd2.private_directory import abandoned, private_directory

# Every second one, because a server takes pairs. Below what Linux hands out, above what Ray's workers take.
_PORTS = range(20_000, 30_000, 2)
_PREFIX = "md2-sglang-"


@dataclass(frozen=True)
class Ports:
    http: int  # and http + 1, which the server's broker takes
    scheduler: int
    master: int


def free_ports() -> Ports:
    """Ports that are free on every address now, as the server will look for them; all four differ.

    None that the kernel hands out by itself, to port 0 or to outgoing connections: the server binds half a minute
    later, and on a busy machine two starts of three lost such a port meanwhile.
    """
    found: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):  # not the generator that a run has seeded
            try:
                for half in (port, port + 1):
                    held.enter_context(socket.socket()).bind(("", half))  # never listens
            except OSError:
                continue
            found.append(port)
            if len(found) == 3:
                return Ports(*found)
    raise EngineError(f"found no three pairs of free ports from {_PORTS[0]} to {_PORTS[-1] + 1}")


def temporary_files() -> AbstractContextManager[Path]:
    """A directory for one server's temporary files, in /tmp because a path of a socket in it may have 107 bytes.

    Those whose owners were killed are removed on the way.
    """
    for left in abandoned(_PREFIX):
        shutil.rmtree(left, ignore_errors=True)
    return private_directory(_PREFIX)


def spawn(command: list[str], environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """Start it from a thread that lives as long as the child: for the kernel a parent is the thread that forked."""
    started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()

    def own() -> None:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            started.put(error)
            return
        started.put(process)
        process.wait()

    threading.Thread(target=own, name="sglang-server", daemon=True).start()
    answer = started.get()
    if isinstance(answer, OSError):
        raise answer
    return answer


def members_of(group: int) -> list[int]:
    """Processes of a group that still hold anything.

    One whose main thread has ended is a zombie by name, and holds its ports until its last other thread is gone.
    """
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()  # from the third on, see proc(5)
            state, process_group, threads = fields[0], int(fields[2]), int(fields[17])
            if process_group == group and (state not in "ZX" or threads > 1):
                members.append(int(stat.parent.name))
    return members


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def get(url: str, timeout: float) -> tuple[int | None, bytes]:
    """Status and body (its first MB); None where nobody answers. A proxy is no way to one's own host."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as reply:
            return reply.status, reply.read(1 << 20)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(1 << 20)
    except (OSError, http.client.HTTPException):  # refused, timed out, or not HTTP
        return None, b""
