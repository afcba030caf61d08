"""Temporary directories, each of one process: what owners that were killed leave is found and removed by others."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from miles_dmd2.config.environment import SESSION_ROOT

LOCK = "owner.lock"


@contextmanager
def private_directory(prefix: str, root: Path = SESSION_ROOT) -> Iterator[Path]:
    """A directory in `root` that this process owns for the length of the block, mode 700, removed at its end. OSError.

    Making it and locking it are two steps. Whoever looks for abandoned ones between them takes the lock first and
    removes the directory: then the lock that this process gets is of a file that is gone, and another is made.
    """
    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        with suppress(FileNotFoundError):
            lock = _take(directory, fcntl.LOCK_EX)
            if lock is not None:
                break
    with lock:
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def abandoned(prefix: str, root: Path = SESSION_ROOT) -> Iterator[Path]:
    """This user's directories whose owners are gone, wherever they were killed; each is ours until the next is asked
    for. One that has lost its lock file has no owner either.

    No other container can fake or take an owner's lock, and the system drops it with the process.
    """
    for directory in root.glob(f"{prefix}*"):
        with suppress(OSError):  # its owner holds it, or it is gone
            there = directory.lstat()
            if stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid():
                lock = _take(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock is not None:
                    with lock:
                        yield directory


def _take(directory: Path, how: int) -> IO[str] | None:
    """The directory's lock; None: while we waited for it, another removed the file. OSError: held, or no directory."""
    lock = (directory / LOCK).open("a")
    try:
        fcntl.flock(lock, how)
        if os.path.samestat(os.fstat(lock.fileno()), (directory / LOCK).stat()):
            return lock
    except BaseException:
        lock.close()
        raise
    lock.close()
    return None
