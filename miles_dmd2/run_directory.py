"""The directory of a run: one run at a time writes to it."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from miles_dmd2.config.errors import ConfigError, show

LOCK = ".in_use"


@contextmanager
def in_use(directories: Iterable[tuple[str, Path]]) -> Iterator[None]:
    """Hold (flag, directory) pairs for the length of the block; the system lets go of them when the process dies.

    ConfigError: another run holds one of them.
    """
    held: set[Path] = set()
    with ExitStack() as stack:
        for flag, directory in directories:
            if directory.resolve() not in held:
                held.add(directory.resolve())
                stack.enter_context(_held(flag, directory))
        yield


@contextmanager
def _held(flag: str, directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise ConfigError(
                f"{flag} {show(directory)}: is in use by {owner}; wait for that run to end, or give another directory"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
        file.truncate(0)  # the file stays: removing it while another run opens it would let two hold the directory
