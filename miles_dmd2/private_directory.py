"""Temporary directories, each of one process: what owners that were killed leave is found and removed by others."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from miles_dmd2.config.environment import SESSION_ROOT


@contextmanager
def private_directory(prefix: str, root: Path = SESSION_ROOT) -> Iterator[Path]:
    """A directory in `root` that this process owns for the length of the block, mode 700, removed at its end. OSError.

    The lock is on the directory itself: a file in it might be taken by a cleaner of old temporary files. Making it and
    locking it are two steps. Whoever looks for abandoned ones between them takes the lock first and removes the
    directory: then the lock that this process gets is of a directory that is gone, and another is made.
    """
    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        with suppress(FileNotFoundError):
            lock = _take(directory, fcntl.LOCK_EX)
            break
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def abandoned(prefix: str, root: Path = SESSION_ROOT) -> Iterator[Path]:
    """This user's directories whose owners are gone, wherever they were killed; each is ours until the next is asked
    for.

    No other container can fake or take an owner's lock, and the system drops it with the process.
    """
    for directory in root.glob(f"{prefix}*"):
        with suppress(OSError):  # its owner holds it, or it is gone, or no directory
            lock = _take(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    yield directory
            finally:
                os.close(lock)


def _take(directory: Path, how: int) -> int:
    """A descriptor that holds the directory's lock. OSError: held by another, no directory, or (FileNotFoundError) gone
    while we waited.
    """
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, how)
        if not os.path.samestat(os.fstat(lock), directory.lstat()):
            raise FileNotFoundError(directory)
    except BaseException:
        os.close(lock)
        raise
    return lock
