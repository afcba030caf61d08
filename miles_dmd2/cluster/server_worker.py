"""SGLang servers of a run: a Ray actor on each engine's device owns one, so that none outlives the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray

from miles_dmd2.cluster.failures import introduce, summary_of
from miles_dmd2.cluster.placement import Placement
from miles_dmd2.cluster.process import set_up
from miles_dmd2.cluster.runtime import wait
from miles_dmd2.cluster.settings import EngineSettings, ServerSettings, WorkerSettings
from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang.server import START_TRIES, ManagedServer, Server, SGLangLaunch

_STOP_SECONDS = 30.0  # SIGTERM, SIGKILL and what they take
_ANSWER_SECONDS = 10.0
_THREADS = 4  # of a worker: stop and tail answer while a start waits

logger = logging.getLogger(__name__)


class ServerWorker:
    """A shell around one server, on the device of its engine. Its calls may overlap."""

    def __init__(self, index: int, worker: WorkerSettings, servers: ServerSettings) -> None:
        assert servers.python is not None
        serving = set_up(f"server_{index}", worker).serving
        loopback = index < servers.beside_client
        self._server = ManagedServer(
            SGLangLaunch(
                python=servers.python,
                model=worker.checkpoint,
                model_id=serving.model_id,
                arguments=(*serving.launch_arguments(worker.forward_dtype), *servers.arguments),
                log=worker.log_directory / f"sglang_{index}.log",
                host="127.0.0.1" if loopback else ray.util.get_node_ip_address(),
                start_timeout=servers.start_timeout,
                threads=worker.threads if worker.device == "cpu" else None,
            )
        )

    def start(self) -> None:
        """Returns when the server is ready. EngineError with the reason and the log's tail."""
        self._server.start()

    def address(self) -> tuple[str, str | None]:
        """(url, launch id), of the last start."""
        return self._server.url, self._server.launch_id

    def restart(self) -> tuple[str, str | None]:
        self._server.restart()
        return self.address()

    def alive(self) -> bool:
        return self._server.alive()

    def tail(self, lines: int) -> str:
        return self._server.tail(lines)

    def stop(self) -> None:
        self._server.stop()


class RemoteServer(Server):
    """A worker's server as a client in another process sees it."""

    def __init__(self, worker: Any, name: str, start_timeout: float, *, shared_device: str | None = None) -> None:
        """`worker`: the actor, whose server is up; `name` tells who it is. shared_device: see `Server`.

        EngineError: it does not answer.
        """
        self._worker = worker
        self._name = name
        self._shared_device = shared_device
        self._start_timeout = start_timeout
        self._url, self._launch_id = self._ask("address", _ANSWER_SECONDS)

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
    def shared_device(self) -> str | None:
        return self._shared_device

    def restart(self) -> None:
        self._url, self._launch_id = self._ask("restart", START_TRIES * self._start_timeout + _STOP_SECONDS)

    def stop(self) -> None:
        self._ask("stop", _STOP_SECONDS)

    def tail(self, lines: int = 20) -> str:
        try:
            return str(self._ask("tail", _ANSWER_SECONDS, lines))
        except EngineError as error:
            return f"(not to be read: {error})"

    def _ask(self, method: str, timeout: float, *args: Any) -> Any:
        try:
            return ray.get(getattr(self._worker, method).remote(*args), timeout=timeout)
        except ray.exceptions.RayTaskError as error:
            raise EngineError(str(error.cause or error)) from error
        except ray.exceptions.RayError as error:
            raise EngineError(
                f"{self._name}, the process that keeps the server: {summary_of(str(error)) or repr(error)}"
            ) from error


class ServerGroup:
    """The servers that a run starts itself: none for the local engine, nor for servers that run already."""

    def __init__(self, workers: Sequence[Any], start_timeout: float) -> None:
        self.workers = list(workers)
        self._start_timeout = start_timeout

    @classmethod
    def start(cls, count: int, settings: EngineSettings, placement: Placement) -> ServerGroup:
        """Start the workers, number i on the device of rank i, without waiting: see `build`."""
        servers = settings.servers
        if servers is None or servers.urls:
            return cls([], 0.0)
        shell = ray.remote(ServerWorker)
        workers = [
            shell.options(**placement.options(i), max_concurrency=_THREADS).remote(i, settings.worker, servers)
            for i in range(count)
        ]
        for i, actor in enumerate(workers):
            introduce(actor, f"server_{i}", settings.worker.log_directory)
        return cls(workers, servers.start_timeout)

    def build(self) -> None:
        """Start all servers at once; returns when every one is ready."""
        starts = [worker.start.remote() for worker in self.workers]
        wait(starts, START_TRIES * self._start_timeout + _STOP_SECONDS, "start of the SGLang servers")

    def dispose(self) -> None:
        """Stop all servers at once; with a worker that does not answer in time its server is killed."""
        stops = [worker.stop.remote() for worker in self.workers]
        done, late = ray.wait(stops, num_returns=len(stops), timeout=_STOP_SECONDS) if stops else ([], [])
        for stop in done:
            try:
                ray.get(stop)
            except ray.exceptions.RayError as error:
                logger.warning("a server's worker did not stop it: %s", summary_of(str(error)))
        if late:
            logger.warning("%d servers did not stop within %g s and are killed", len(late), _STOP_SECONDS)
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []
