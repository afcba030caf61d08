"""Ctrl-C and SIGTERM: the first asks a run to save what it has and stop, the second ends it at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A request arrives as KeyboardInterrupt: at once, or at the end of a `deferred` block."""

    def __init__(self) -> None:
        self.requested = False
        self.insisted = False
        self._deferred = False

    def receive(self) -> None:
        """One signal. KeyboardInterrupt unless it is the first one and the work in progress is deferred."""
        if self.requested:
            self.insisted = True
            raise KeyboardInterrupt
        self.requested = True
        if not self._deferred:
            raise KeyboardInterrupt
        _say("stopping when this rollout is trained and saved; once more stops at once")

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Work that leaves a state which can be saved only at its end: a first request waits for that."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.requested:
            raise KeyboardInterrupt

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals of this process reach `receive` for the length of the block."""

        def handle(_signal: int, _frame: object) -> None:
            self.receive()

        before = {number: signal.signal(number, handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _say(text: str) -> None:
    """From a signal handler, which may have interrupted a print."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{text}\n".encode())
