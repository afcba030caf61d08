"""What the scripts that make virtual environments share: which Python will do, steps with a log, failures in one line.

Standard library only, and no syntax newer than Python 3.6: an old Python has to get as far as saying that it is old.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO, Dict, List, Optional, Tuple

HERE = "{}.{}.{}".format(*sys.version_info)
Version = Tuple[int, int]

FAILURES = (  # what pip's log says -> what to tell; the first that matches
    (r"No space left on device", "the disk is full: the environment needs {needs}"),
    (
        r"NewConnectionError|NameResolutionError|name resolution|ConnectionError|ConnectTimeout|ReadTimeout|ProxyError"
        r"|Connection (refused|reset|broken)|SSLError|Network is unreachable",
        "the package index cannot be reached: check the network, the proxy variables and `pip config list`",
    ),
    (
        r"No matching distribution|Could not find a version",
        "pip's index lacks a package for this Python and machine: check the PIP_* variables and `pip config list`",
    ),
)


class SetupError(Exception):
    """A message for the screen."""


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def check_python(what: str, oldest: Version, newest: Version) -> None:
    """Refuse a Python that `what` is not for, or one that cannot make environments."""
    here = f"{sys.executable} is Python {HERE}"
    bounds = "{}.{} to {}.{}".format(*oldest + newest)
    if not oldest <= sys.version_info[:2] <= newest:
        raise SetupError(f"{here}, and {what} needs {bounds}. {other_python(oldest, newest)}")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        package = "python{}.{}-venv".format(*sys.version_info)
        raise SetupError(
            f"{here}, without its module {error.name}: on Debian and Ubuntu, apt install {package}"
        ) from None


def other_python(oldest: Version, newest: Version) -> str:
    """Name a Python of this machine that would do, or say how to get one."""
    for minor in range(newest[1], oldest[1] - 1, -1):
        name = f"python3.{minor}"
        if shutil.which(name):
            quiet = subprocess.DEVNULL
            try:
                subprocess.check_call([name, "-c", "import ensurepip, venv"], stdout=quiet, stderr=quiet)
                return f"This machine has one that does: say PYTHON={name} after make"
            except (OSError, subprocess.CalledProcessError):
                pass
    return "Install one (your system's package, or python.org) and say PYTHON=/path/to/it after make"


def base_python(environment: Path) -> str:
    """The Python that makes `environment`: this one's base, never one that lies in `environment` itself."""
    base: str = getattr(sys, "_base_executable", None) or sys.executable
    return os.path.realpath(base) if environment in Path(base).parents else base


def clean_environment() -> Dict[str, str]:
    """The caller's environment less what would lead pip or Python out of the virtual environment."""
    leaks = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")
    clean = {name: value for name, value in os.environ.items() if name not in leaks}
    clean.update(PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    return clean


def exclusive(builder: "Builder", lock: Path) -> IO[bytes]:
    """Let one set-up run at a time; the returned file holds the lock until it and its copies are closed.

    The builder's steps inherit it: when a set-up is killed, the next one waits for the pip that it left running.
    """
    held = lock.open("rb")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        builder.say(f"another one is setting up {builder.name}; waiting for it")
        fcntl.flock(held, fcntl.LOCK_EX)
    builder.lock = held.fileno()
    return held


class Builder:
    """Runs the steps that make one environment, in `directory`, and tells `screen` about them."""

    def __init__(self, place: Path, name: str, log: str, needs: str, directory: Path, screen: IO[str]) -> None:
        """`log` is the name of the log file as it is shown, relative to `directory`; `needs` the disk space."""
        self.place, self.name, self.log, self.needs = place, name, log, needs
        self.directory, self.screen = directory, screen
        self.lock: Optional[int] = None

    def say(self, text: str) -> None:
        print("setup: " + text, file=self.screen, flush=True)

    def run(self, step: str, command: List[str]) -> None:
        """Run one step; its output goes to the log, its last line to a terminal. SetupError that explains a failure."""
        wide = shutil.get_terminal_size().columns - 1
        lines: List[str] = []
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            errors="replace",
            cwd=str(self.directory),
            env=clean_environment(),
            pass_fds=() if self.lock is None else (self.lock,),
        )
        try:
            for line in process.stdout or ():
                lines.append(line)
                if self.screen.isatty() and line.strip():
                    print("\r\033[K" + f"       {line.strip()}"[:wide], end="", file=self.screen, flush=True)
            code = process.wait()
        finally:
            if self.screen.isatty():
                print("\r\033[K", end="", file=self.screen, flush=True)
            if process.poll() is None:
                process.terminate()
                process.wait()
            if self.place.is_dir():
                with (self.directory / self.log).open("a") as log:
                    log.write("$ {}\n{}\n".format(" ".join(command), "".join(lines)))
        if code:
            raise SetupError(f"{step} failed: {self._explain(lines)}. Log: {self.log}. Then say the same again")

    def _explain(self, lines: List[str]) -> str:
        text = "".join(lines)
        for pattern, meaning in FAILURES:
            if re.search(pattern, text):
                return meaning.format(needs=self.needs)
        errors = [line.strip() for line in lines if "error" in line.lower()]
        errors = errors or [line.strip() for line in lines if line.strip()] or ["it printed nothing"]
        return errors[-1].rstrip(".")
