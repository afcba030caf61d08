"""Several SGLang servers: who gets which request, retries, and bringing dead servers back.

`Pool` knows which servers are up and keeps them busy. What a request is and what a server needs before it may serve
(handshake, weights, proof) is the engine's business, handed in as functions.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang.handshake import Capabilities, ForwardDtype
from miles_dmd2.engines.sglang.http import FailedError, RefusedError, ServerError, Transport, UnreachableError
from miles_dmd2.engines.sglang.server import Server
from miles_dmd2.engines.sglang.wire import StaleWeightsError, WireError

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT = 10.0  # seconds: /health asks nothing of the worker
# Greatest |velocity - expected| in units of the greatest |expected|. Other kernels than the trainer's: fp32 is measured
# at 5e-7 on two layers and grows with their number; bf16 has 8 bits.
PROBE_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
LATE = 2  # deadlines passed in a row that make a server dead though it says that it is healthy

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SGLangSettings:
    """How the engine treats its servers.

    max_in_flight: requests at a time for one server, which runs one after the other: the second hides the transfer.
    request_timeout: seconds for one call. attempts: for one sample, over all servers. max_restarts: of each server.
    weight_sync: "disk" writes a directory that the servers read (also over /dev/shm), "tensor" sends the weights.
    weight_directory: for "disk"; None is /dev/shm, or the temporary directory where that has no room for two copies.
    verify_every: ask for proof of every parameter at each so-manieth sync; always at the first. require_plugin: refuse
    servers without it.
    """

    max_in_flight: int = 2
    request_timeout: float = 600.0
    attempts: int = 3
    max_restarts: int = 3
    weight_sync: Literal["disk", "tensor"] = "disk"
    weight_directory: Path | None = None
    verify_every: int = 1
    require_plugin: bool = False
    allow_untested_version: bool = False
    forward_dtype: ForwardDtype = "fp32"
    probe_tolerance: float | None = None  # None: by forward_dtype, see PROBE_TOLERANCE
    prompt_cache_size: int = 512

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "attempts", "verify_every", "prompt_cache_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.max_restarts < 0 or not self.request_timeout > 0:
            raise ValueError(
                f"max_restarts must be >= 0 and request_timeout > 0, got {self.max_restarts}, {self.request_timeout}"
            )


# All that a call, a handshake or a proof may raise about a server.
TROUBLE = (EngineError, ServerError, WireError)


class State(enum.Enum):
    """Of a server. UP: takes requests. DOWN: is being looked at and brought back, or has to be. GONE: for good."""

    UP = enum.auto()
    DOWN = enum.auto()
    GONE = enum.auto()


@dataclass(eq=False)
class Link:
    """One server as the client sees it. generation: goes up whenever the server was brought back."""

    server: Server
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(plugin=False))
    state: State = State.DOWN
    reason: str = "never reached"
    generation: int = 0
    late: int = 0
    renewals: int = 0
    restarts: int = 0
    tasks: set[asyncio.Task] = field(default_factory=set)
    restarting: asyncio.Future | None = None

    @property
    def url(self) -> str:
        return self.server.url


@dataclass(eq=False)
class Job(Generic[T]):
    """Something to ask any server. failed: where it went wrong so far, and why."""

    name: str
    work: Callable[[Link, int], Awaitable[T]]  # server, attempt
    failed: list[tuple[Link, str]] = field(default_factory=list)
    done: bool = False
    result: T | None = None

    def get(self) -> T:
        assert self.done
        return self.result  # type: ignore[return-value]


class Pool:
    """The servers, and what is known about them. Used from one task at a time."""

    def __init__(
        self,
        servers: Sequence[Server],
        settings: SGLangSettings,
        transport: Transport,
        prepare: Callable[[Link], Awaitable[None]],
    ) -> None:
        """prepare: all that a server that was just started needs before it may answer; raises one of TROUBLE."""
        self.links = [Link(server) for server in servers]
        self.faults: Counter[str] = Counter(faults=0, retries=0, restarts=0, dropped=0)
        self._settings = settings
        self._transport = transport
        self._prepare = prepare
        self._recoveries: set[asyncio.Task] = set()

    def up(self) -> list[Link]:
        return [link for link in self.links if link.state is State.UP]

    async def start(self) -> None:
        """Prepare all servers. EngineError: one cannot be used, and why."""
        outcomes = await asyncio.gather(*map(self._prepare, self.links), return_exceptions=True)
        for link, outcome in zip(self.links, outcomes, strict=True):
            if isinstance(outcome, TROUBLE):
                raise EngineError(f"the server at {link.url} cannot be used: {outcome}{_log(link)}") from outcome
            if outcome is not None:
                raise outcome
            link.state = State.UP

    # -- many requests ---------------------------------------------------------------------------------------

    async def run(self, jobs: Sequence[Job]) -> None:
        """Do all jobs, first come first served, on the least loaded servers. Results are in the jobs.

        A job that fails is done again, elsewhere if there is another server that is up. A server that fails is brought
        back meanwhile; returns when that is over, so that every server is up or gone. EngineError: a job failed too
        often or was refused, or no server is left.
        """
        waiting, tasks = deque(jobs), dict[asyncio.Task, tuple[Job, Link, int]]()
        try:
            for link in self._in_state(State.DOWN):
                self._begin_recovery(link, None)
            while waiting or tasks:
                self._check_any_left()
                for job, link in self._assign(waiting):
                    task = asyncio.ensure_future(job.work(link, len(job.failed)))
                    link.tasks.add(task)
                    tasks[task] = (job, link, link.generation)
                done, _ = await asyncio.wait({*tasks, *self._recoveries}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task in tasks:
                        job, link, generation = tasks.pop(task)
                        link.tasks.discard(task)
                        if not self._settle(task, job, link, generation):
                            waiting.appendleft(job)
                    else:
                        self._recoveries.discard(task)
                        task.result()
            while self._recoveries:
                done, self._recoveries = await asyncio.wait(self._recoveries)
                for task in done:
                    task.result()
        finally:
            await self._abandon(tasks)

    def _assign(self, waiting: deque[Job]) -> Iterator[tuple[Job, Link]]:
        """Jobs that can start now, taken out of `waiting` from its front, each with its server."""
        skipped: list[Job] = []
        while waiting and any(self._has_room(link) for link in self.up()):
            job = waiting.popleft()
            tried = [link for link, _ in job.failed]
            elsewhere = [link for link in self.up() if link not in tried]
            free = [link for link in elsewhere or self.up() if self._has_room(link)]
            if free:
                yield job, min(free, key=lambda link: len(link.tasks))
            else:
                skipped.append(job)
        waiting.extendleft(reversed(skipped))

    def _has_room(self, link: Link) -> bool:
        return len(link.tasks) < self._settings.max_in_flight

    def _settle(self, task: asyncio.Task, job: Job, link: Link, generation: int) -> bool:
        """Whether the job is done. If not, it has to be done again."""
        error = UnreachableError(f"cut off: {link.reason}") if task.cancelled() else task.exception()
        if error is None:
            job.result, job.done = task.result(), True
            link.late = 0
            return True
        if isinstance(error, RefusedError):
            raise EngineError(f"{job.name}: {link.url} refused the request: {error}") from error
        if not isinstance(error, (ServerError, WireError)):
            raise error
        logger.warning("%s, attempt %d at %s: %s", job.name, len(job.failed) + 1, link.url, error)
        self.faults["faults"] += 1
        job.failed.append((link, f"{link.url}: {error}"))
        if generation == link.generation:
            if isinstance(error, UnreachableError) and error.late and link.state is State.UP:
                link.late += 1  # once for all that waited for the same stall
            if isinstance(error, (ServerError, StaleWeightsError)) and link.state is State.UP:
                self._begin_recovery(link, error)
        if len(job.failed) >= self._settings.attempts:
            reasons = "; ".join(f"{i}. {reason}" for i, (_, reason) in enumerate(job.failed, 1))
            raise EngineError(f"{job.name} failed {len(job.failed)} times: {reasons}") from error
        self.faults["retries"] += 1
        return False

    async def _abandon(self, tasks: Mapping[asyncio.Task, tuple[Job, Link, int]]) -> None:
        """After a failure: nothing of this run goes on. The servers finish what they have; nobody reads it."""
        for task, (_, link, _) in tasks.items():
            task.cancel()
            link.tasks.discard(task)
        for task in self._recoveries:
            task.cancel()
        await asyncio.gather(*tasks, *self._recoveries, return_exceptions=True)
        self._recoveries.clear()

    # -- one call to every server ----------------------------------------------------------------------------

    async def each(self, operation: Callable[[Link], Awaitable[None]]) -> dict[Link, Exception]:
        """Run it on every server that is up. Returns the failures of those that answered; the others are down after."""
        links = self.up()
        outcomes = await asyncio.gather(*(self._one(link, operation) for link in links), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, TROUBLE):
                raise outcome
        return {link: error for link, error in zip(links, outcomes, strict=True) if isinstance(error, Exception)}

    async def _one(self, link: Link, operation: Callable[[Link], Awaitable[None]]) -> None:
        """Once more after a connection that broke on a healthy server: every operation may be repeated."""
        for last in (False, True):
            try:
                await operation(link)
                return
            except (UnreachableError, FailedError) as error:
                late = isinstance(error, UnreachableError) and error.late
                if late or not await self._healthy(link) or (last and isinstance(error, UnreachableError)):
                    link.state, link.reason = State.DOWN, str(error)
                    logger.warning("%s is down: %s", link.url, error)
                    return
                if isinstance(error, FailedError):
                    raise

    async def end_unconfirmed(self, what: str) -> None:
        """After `each`, end servers that did not confirm: they may hold the device. EngineError: one is not ours."""
        for link in self._in_state(State.DOWN):
            if link.server.managed:
                logger.warning("%s does not confirm that it has gone to %s: it is ended", link.url, what)
                await asyncio.get_running_loop().run_in_executor(None, link.server.stop)
            elif await self._healthy(link):
                raise EngineError(f"{link.url} does not confirm that it has gone to {what}, and may hold the device")

    async def recover(self) -> None:
        """Bring back what is down. EngineError: no server is left."""
        await asyncio.gather(*(self._recover(link, None) for link in self._in_state(State.DOWN)))
        self._check_any_left()

    # -- dead servers ----------------------------------------------------------------------------------------

    async def _healthy(self, link: Link) -> bool:
        try:
            await self._transport.call(link.url, "GET", "/health", timeout=HEALTH_TIMEOUT)
        except ServerError as error:
            link.reason = str(error)
            return False
        return True

    def _begin_recovery(self, link: Link, error: Exception | None) -> None:
        link.state = State.DOWN
        self._recoveries.add(asyncio.ensure_future(self._recover(link, error)))

    async def _recover(self, link: Link, error: Exception | None) -> None:
        """Find out whether the server serves on; if not, bring it back, or give it up. Interrupted, it stays down."""
        if error is not None:
            link.reason = str(error)
        if not await self._serves_on(link, error):
            for task in link.tasks:
                task.cancel()
            while not await self._restart(link):
                if not self._may_restart(link):
                    self._give_up(link)
                    return
        link.state = State.UP

    async def _serves_on(self, link: Link, error: Exception | None) -> bool:
        if not await self._healthy(link):
            return False
        if isinstance(error, ServerError):
            return link.late < LATE
        # Other weights than ours, or down for a reason that may be over: it has to be prepared again.
        link.renewals += 1
        if link.renewals > self._settings.max_restarts:
            return False
        return await self._prepared(link)

    async def _restart(self, link: Link) -> bool:
        """Whether one attempt to start it again brought it back."""
        if link.restarting is None:
            if not self._may_restart(link):
                return False
            link.restarts += 1
            self.faults["restarts"] += 1
            logger.warning("%s is dead (%s): starting it again", link.url, link.reason)
            # A thread cannot be interrupted: if this task is, the next one waits for the same start.
            link.restarting = asyncio.get_running_loop().run_in_executor(None, link.server.restart)
        try:
            await asyncio.shield(link.restarting)
        except (EngineError, OSError) as error:
            link.reason = f"cannot be started again: {error}"
            return False
        finally:
            if link.restarting is not None and link.restarting.done():
                link.restarting = None
        return await self._prepared(link)

    def _may_restart(self, link: Link) -> bool:
        return link.server.managed and link.restarts < self._settings.max_restarts

    async def _prepared(self, link: Link) -> bool:
        link.generation += 1
        link.late = 0
        try:
            await self._prepare(link)
        except TROUBLE as error:
            link.reason = str(error)
            return False
        return True

    def _give_up(self, link: Link) -> None:
        link.state = State.GONE
        self.faults["dropped"] += 1
        logger.warning("%s is dropped after %d restarts: %s", link.url, link.restarts, link.reason)

    def _in_state(self, state: State) -> list[Link]:
        return [link for link in self.links if link.state is state]

    def _check_any_left(self) -> None:
        if all(link.state is State.GONE for link in self.links):
            each = "".join(f"\n{link.url}: {link.reason}{_log(link)}" for link in self.links)
            raise EngineError(f"all {len(self.links)} rollout engines are dead:{each}")


def _log(link: Link) -> str:
    tail = link.server.tail().strip()
    return f"\nits log ends with:\n{tail}" if tail and tail not in link.reason else ""
