"""Logger, phase timer and the sink protocol. Layer 0: stdlib only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

logger = logging.getLogger("miles_dmd2")


class RunError(RuntimeError):
    """A process of the run failed or did not answer. The message names it and the phase."""


class Sink(Protocol):
    """Receives what a run reports. A sink never stops a run: see `SinkGroup`."""

    def phase(self, rollout_id: int, name: str) -> None:
        """The run enters a phase ("generate", "critic", "actor", "sync", "eval", "save")."""

    def metrics(self, rollout_id: int, values: Mapping[str, float]) -> None:
        """Figures of one finished rollout. Keys are `<source>/<metric>`."""

    def close(self) -> None: ...


class SinkGroup:
    """Several sinks as one. One that raises is reported once and left out from then on."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = list(sinks)

    def start(self, name: str, make: Callable[[], Sink]) -> None:
        """One more, of a service that may not be there: then it is left out from the start."""
        try:
            self._sinks.append(make())
        except Exception as error:
            logger.warning("%s does not log: %r", name, error)

    def phase(self, rollout_id: int, name: str) -> None:
        self._each("phase", rollout_id, name)

    def metrics(self, rollout_id: int, values: Mapping[str, float]) -> None:
        self._each("metrics", rollout_id, values)

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *args: object) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, method)(*args)
            except Exception as error:  # a full disk or a dead logging service must not cost a training run
                self._sinks.remove(sink)
                logger.warning("%s stopped logging after an error in %s: %r", type(sink).__name__, method, error)


class PhaseClock:
    """Wall seconds per phase, announced to a sink as they begin."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._seconds: dict[str, float] = {}
        self._running: tuple[str, float] | None = None  # phase, and since when it is counted

    @contextmanager
    def __call__(self, rollout_id: int, name: str) -> Iterator[None]:
        self._sink.phase(rollout_id, name)
        self._running = (name, time.perf_counter())
        try:
            yield
        finally:
            self._count()
            self._running = None

    def take(self) -> dict[str, float]:
        """Seconds since the last call, as metrics `time/<phase>`, and forget them; of a phase that runs, so far."""
        self._count()
        taken = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken

    def _count(self) -> None:
        if self._running is not None:
            name, since = self._running
            now = time.perf_counter()
            self._seconds[name] = self._seconds.get(name, 0.0) + now - since
            self._running = (name, now)


def throughput(samples: int, seconds: Mapping[str, float], phases: Sequence[str]) -> dict[str, float]:
    """Samples per second of generating alone, and of all `phases`, from what `PhaseClock.take` returned."""
    of = {"generated_per_second": ("generate",), "samples_per_second": phases}
    totals = {name: sum(seconds.get(f"time/{phase}", 0.0) for phase in parts) for name, parts in of.items()}
    return {f"throughput/{name}": samples / total for name, total in totals.items() if total > 0}
