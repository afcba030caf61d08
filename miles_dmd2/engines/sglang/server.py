"""Life of SGLang diffusion servers: start, identity, death, stop, restart. Requests are another module's matter.

A `ManagedServer` is a process group: the HTTP process, which the kernel kills when this process dies, and its workers,
which follow it. It is ready when it answers with the id that this very start gave it: no left-over server on the same
port passes for it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang.environment import server_environment, write_plugin
from miles_dmd2.engines.sglang.process import Ports, free_ports, get, has_ended, members_of, spawn, temporary_files

START_TRIES = 3  # when a port is taken between our look and the server's bind, which is half a minute later
_TERM_SECONDS = 10.0  # SIGTERM waits for the running request, however long
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.25
_POLL_ANSWER_SECONDS = 2.0  # of a poll, which comes again
_ANSWER_SECONDS = 10.0
_TAIL_BYTES = 64 * 1024

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|port \d+ is (?:unavailable|not available)", re.IGNORECASE)
# The server would go on after these, without what a run needs of it. A text encoder of transformers' own class is no
# such thing: it gives the same embeddings, and on a CPU Qwen's has no other.
_FATAL = (
    (re.compile(r"customized ((?!text_encoder)\w+), falling back to native"), "it runs the library's class for {}"),
    (re.compile(r"(falling back to diffusers) backend", re.IGNORECASE), "it has no pipeline of its own for this model"),
    (re.compile(r"Failed to (\w+) diffusion plugin:? miles_dmd2"), "it could not {} this project's plugin"),
)

logger = logging.getLogger(__name__)


class Server(Protocol):
    """A server as its client sees it."""

    @property
    def url(self) -> str:
        """http://HOST:PORT; another one after a restart."""

    @property
    def launch_id(self) -> str | None:
        """What its plugin must answer; None: started by others, nothing to compare."""

    @property
    def managed(self) -> bool:
        """Whether `restart` is possible."""

    @property
    def shared_device(self) -> str | None:
        """The CUDA device that it shares with its client's process, by torch's name there; None: none."""
        return None

    def restart(self) -> None:
        """End what is left of it and start it again, with a new url and launch_id. EngineError with the log's tail."""

    def stop(self) -> None:
        """Leave nothing of it; `restart` starts it again. EngineError where `managed` is false."""

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log, without colours; "" where there is none."""


class ExternalServer(Server):
    """A server that someone else started (--rollout-engine-url)."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    @property
    def url(self) -> str:
        return self._url

    @property
    def launch_id(self) -> str | None:
        return None

    @property
    def managed(self) -> bool:
        return False

    def restart(self) -> None:
        raise EngineError(f"SGLang server {self._url} was not started by this run: restart it where it was started")

    def stop(self) -> None:
        raise EngineError(f"SGLang server {self._url} was not started by this run: stop it where it was started")

    def tail(self, lines: int = 20) -> str:
        return ""


@dataclass(frozen=True)
class SGLangLaunch:
    """How to start a server.

    python: of the engine's environment. model: a diffusers directory. model_id: the family's name at SGLang.
    arguments: further flags of the server, word by word. log: takes its stdout and stderr, appended. start_timeout:
    seconds until it is ready. environment: further variables of the server. threads: its OMP_NUM_THREADS (None: SGLang
    chooses).
    """

    python: Path
    model: Path
    model_id: str
    arguments: tuple[str, ...]
    log: Path
    host: str = "127.0.0.1"  # the ports of its scheduler and broker unpickle what they receive from anyone
    start_timeout: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None

    def command(self, ports: Ports) -> list[str]:
        own = {
            "--model-path": self.model.absolute(),
            "--model-id": self.model_id,
            "--host": self.host,
            "--port": ports.http,
            "--scheduler-port": ports.scheduler,
            "--master-port": ports.master,
        }
        words = [str(word) for pair in own.items() for word in pair]
        launch = [str(self.python.absolute()), "-m", "miles_dmd2.engines.sglang_plugin.launch", str(os.getpid()), "--"]
        # Without --strict-ports an occupied port moves silently; without --sleep-on-idle an idle server burns a core.
        return [*launch, *words, "--strict-ports", "--sleep-on-idle", *self.arguments]


class _PortTaken(Exception):
    """Someone else has a port of this start."""


class ManagedServer(Server):
    """A server that this process owns: nothing is left of it after `stop`, nor after this process's death.

    `start` tries again with other ports when one is taken. Methods may be called from several threads; `stop` ends a
    `start` that is still waiting.
    """

    def __init__(self, launch: SGLangLaunch) -> None:
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._worker: int | None = None  # a pidfd: it cannot come to mean another process
        self._files = ExitStack()  # on disk, of the server that runs
        self._url = ""
        self._launch_id: str | None = None
        self._log_start = 0
        self._starts = 0
        self._lock = threading.RLock()
        self._stopping = threading.Event()

    @property
    def url(self) -> str:
        return self._url

    @property
    def launch_id(self) -> str | None:
        return self._launch_id

    @property
    def managed(self) -> bool:
        return True

    @property
    def pid(self) -> int | None:
        """Of the HTTP process, which leads the process group; None while there is none."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> ManagedServer:
        return self if self._process is not None else self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> ManagedServer:
        """Returns when it is ready; else EngineError with the reason and the log's tail, and nothing is left."""
        with self._lock:
            if self._process is not None:
                raise EngineError(f"SGLang server {self._url} has been started already")
            atexit.register(self.stop)
            tries = 0
            try:
                while True:
                    tries += 1
                    try:
                        self._spawn(free_ports())
                        self._wait_until_ready()
                        return self
                    except _PortTaken as error:
                        if tries == START_TRIES:
                            raise EngineError(f"{error}\n({tries} tries, each with other ports)") from None
                        logger.warning("%s; trying other ports", str(error).partition("; log ")[0])
                        self._end()
            except BaseException:  # interrupted, too
                self._end()
                raise

    def restart(self) -> None:
        with self._lock:
            self._end()
            self.start()

    def stop(self) -> None:
        """SIGTERM, 10 s later SIGKILL to the whole group. May be repeated. EngineError if a process survives that."""
        self._stopping.set()
        with self._lock:
            try:
                self._end()
            finally:
                self._stopping.clear()
            atexit.unregister(self.stop)

    def alive(self) -> bool:
        """Whether it would take a request: the process, its worker and the HTTP side all are there."""
        process, worker = self._process, self._worker
        if process is None or process.poll() is not None or (worker is not None and has_ended(worker)):
            return False
        return get(f"{self._url}/health", _ANSWER_SECONDS)[0] == 200

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self._log_text(_TAIL_BYTES).splitlines()[-lines:])

    def _spawn(self, ports: Ports) -> None:
        launch = self._launch
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the user's choice; we connect to loopback
        host = everywhere.get(launch.host, launch.host)
        self._url = f"http://[{host}]:{ports.http}" if ":" in host else f"http://{host}:{ports.http}"
        self._launch_id = secrets.token_hex(8)
        folder = self._files.enter_context(temporary_files())
        plugin, temporary = folder / "plugin", folder / "t"
        write_plugin(plugin)
        temporary.mkdir()
        environment = server_environment(
            launch.python,
            plugin,
            self._launch_id,
            threads=launch.threads,
            extra={"TMPDIR": str(temporary), **launch.environment},
        )
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        self._starts += 1
        with launch.log.open("ab") as log:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"\n=== miles_dmd2: start {self._starts} of this server, {when}, {self._url}, {ports}\n".encode())
            self._log_start = log.tell()
            log.flush()
            try:
                self._process = spawn(launch.command(ports), environment, log.fileno())
            except OSError as error:
                raise EngineError(f"cannot start {launch.python}: {error.strerror or error}") from error

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._launch.start_timeout
        while True:
            assert self._process is not None
            code = self._process.poll()
            self._check_log(code)
            ready, answer = self._ask()
            if ready:
                return
            if time.monotonic() > deadline:
                late = f"is not ready after {self._launch.start_timeout:g} s (--start-timeout), {answer}"
                raise EngineError(self._report(late))
            if self._stopping.wait(_POLL_SECONDS):
                raise EngineError(f"SGLang server {self._url} was stopped while it started")

    def _check_log(self, code: int | None) -> None:
        """Raise if the process has ended with `code`, or if its log says that it will not become what it should be."""
        text = self._log_text()
        for pattern, meaning in _FATAL:
            found = pattern.search(text)
            if found:
                raise EngineError(self._report(f"cannot serve: {meaning.format(found[1])}"))
        if code is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            error = _PortTaken if _PORT_TAKEN.search(text) else EngineError
            raise error(self._report(f"{how} before it was ready"))

    def _ask(self) -> tuple[bool, str]:
        """Whether it is up and ours, and what it answered. Raises where waiting would not help."""
        status, body = get(f"{self._url}/health", _POLL_ANSWER_SECONDS)
        if status == 503 and b"broker exited" in body:  # the broker's bind is the one that is not checked before
            raise _PortTaken(self._report("lost its broker: the port after its own was taken"))
        if status == 503 and b"exited" in body:
            raise EngineError(self._report(f"lost a process: {body[:200].decode(errors='replace')}"))
        if status != 200:
            return False, f"GET /health: {status or 'no answer'}"
        status, body = get(f"{self._url}/miles_dmd2/capabilities", _ANSWER_SECONDS)
        if status == 404:
            raise EngineError(self._report("is up without this project's plugin"))
        if status != 200:
            return False, f"GET /miles_dmd2/capabilities: {status or 'no answer'}"
        worker = self._check_identity(body)
        with suppress(OSError):  # just died, or a kernel before Linux 5.3: `alive` will find out by /health
            self._worker = os.pidfd_open(worker)
        return True, ""

    def _check_identity(self, body: bytes) -> int:
        """The worker's process id; _PortTaken if another server answers at our address."""
        try:
            answer = json.loads(body)
            launch_id, worker = answer["launch_id"], answer["worker"]["pid"]
        except (ValueError, KeyError, TypeError):
            launch_id, worker = None, 0
        if launch_id != self._launch_id:
            raise _PortTaken(self._report("is not what answers there: another server has its port"))
        return int(worker)

    def _end(self) -> None:
        """Leave nothing of the current start."""
        process = self._process
        if process is not None:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_TERM_SECONDS)
            self._kill_group(process)
        if self._worker is not None:
            os.close(self._worker)
        self._files.close()
        self._process = self._worker = None

    def _kill_group(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL to whoever is left. EngineError if that does not end them."""
        deadline = time.monotonic() + _KILL_SECONDS
        while left := members_of(process.pid):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise EngineError(self._report(f"does not end, even killed: processes {left}"))
            time.sleep(0.02)
        if self._worker is not None and not has_ended(self._worker):  # it has left the group
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._worker, signal.SIGKILL)
        process.wait(_KILL_SECONDS)

    def _log_text(self, last: int | None = None) -> str:
        """What the current start has logged (its last bytes), without colours; a progress bar's last state only."""
        try:
            with self._launch.log.open("rb") as log:
                begin = 0 if last is None else log.seek(0, os.SEEK_END) - last
                log.seek(max(self._log_start, begin))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        lines = (line.rstrip("\r").rpartition("\r")[2] for line in _ANSI.sub("", text).split("\n"))
        return "\n".join(lines).strip("\n")

    def _report(self, what: str) -> str:
        launch = self._launch
        return f"SGLang server {self._url} for {launch.model} {what}; log {launch.log}, its last lines:\n{self.tail()}"
