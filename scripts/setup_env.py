"""Make `.venv`: exactly the packages of requirements/lock.txt, and this tree, editable.

The Makefile calls it before every target that needs Python. It does nothing when the stamp in `.venv` matches the
lock, the Python and the place of the tree; only the tree's own entry is renewed when pyproject.toml changed; anything
else (no stamp, because someone pressed Ctrl-C; another lock; a moved tree) makes `.venv` afresh. The stamp comes last.

Standard library only, and no syntax newer than Python 3.6: an old Python has to get as far as saying that it is old.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO, Dict, List

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock.txt"
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
HERE = "{}.{}.{}".format(*sys.version_info)
OLDEST, NEWEST = (3, 11), (3, 14)  # every package of the lock has wheels for these
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

FAILURES = (  # what pip's log says -> what to tell; the first that matches
    (r"No space left on device", "the disk is full: the environment needs 2 GB (8 GB with CUDA's torch)"),
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


def say(text: str) -> None:
    print("setup: " + text, flush=True)


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def venv_version() -> str:
    """The Python version of `.venv`, "" where there is none that runs."""
    config = VENV / "pyvenv.cfg"
    if not (config.is_file() and os.access(str(VENV_PYTHON), os.X_OK)):
        return ""
    found = re.search(r"^version\s*=\s*(\S+)", config.read_text(), re.MULTILINE)
    return found.group(1) if found else ""


def stamp_path(version: str) -> Path:
    """The tree's place is part of the key, because a virtual environment cannot be moved."""
    return VENV / (".stamp-" + digest(LOCK.read_bytes(), version.encode(), os.fsencode(str(ROOT))))


def project_digest() -> str:
    return digest((ROOT / "pyproject.toml").read_bytes(), (ROOT / "miles_dmd2" / "__init__.py").read_bytes())


def read_stamp(python_chosen: bool, torch_index: str) -> Dict[str, str]:
    """What the environment was made of; {} if it is not the one that is asked for."""
    version = venv_version()
    stamp = stamp_path(version)
    if not version or not stamp.is_file():
        return {}
    if python_chosen and not version.startswith("{}.{}.".format(*sys.version_info)):
        return {}
    made_of: Dict[str, str] = json.loads(stamp.read_text())
    return {} if torch_index and made_of["torch_index"] != torch_index else made_of


def check_python() -> None:
    """Refuse a Python that the lock is not for, or one that cannot make environments."""
    here = f"{sys.executable} is Python {HERE}"
    bounds = "{}.{} to {}.{}".format(*OLDEST + NEWEST)
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        raise SetupError(f"{here}, and miles_dmd2 needs {bounds}. {other_python()}")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        package = "python{}.{}-venv".format(*sys.version_info)
        raise SetupError(
            f"{here}, without its module {error.name}: on Debian and Ubuntu, apt install {package}"
        ) from None


def other_python() -> str:
    """Name a Python of this machine that would do, or say how to get one."""
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        name = f"python3.{minor}"
        if shutil.which(name):
            quiet = subprocess.DEVNULL
            try:
                subprocess.check_call([name, "-c", "import ensurepip, venv"], stdout=quiet, stderr=quiet)
                return f"This machine has one that does: say PYTHON={name} after make"
            except (OSError, subprocess.CalledProcessError):
                pass
    return "Install one (your system's package, or python.org) and say PYTHON=/path/to/it after make"


def environment() -> Dict[str, str]:
    """The caller's environment less what would lead pip or Python out of `.venv`."""
    leaks = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")
    clean = {name: value for name, value in os.environ.items() if name not in leaks}
    clean.update(PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    return clean


def run(step: str, command: List[str]) -> None:
    """Run one step; its output goes to the log, and its last line to a terminal. A failure is explained."""
    wide = shutil.get_terminal_size().columns - 1
    lines: List[str] = []
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        errors="replace",
        cwd=str(ROOT),
        env=environment(),
    )
    try:
        for line in process.stdout or ():
            lines.append(line)
            if sys.stdout.isatty() and line.strip():
                print("\r\033[K" + f"       {line.strip()}"[:wide], end="", flush=True)
        code = process.wait()
    finally:
        if sys.stdout.isatty():
            print("\r\033[K", end="", flush=True)
        if process.poll() is None:
            process.terminate()
            process.wait()
        if VENV.is_dir():
            with LOG.open("a") as log:
                log.write("$ {}\n{}\n".format(" ".join(command), "".join(lines)))
    if code:
        raise SetupError(f"{step} failed: {explain(lines)}. Log: {LOG.relative_to(ROOT)}. Then say the same again")


def explain(lines: List[str]) -> str:
    text = "".join(lines)
    for pattern, meaning in FAILURES:
        if re.search(pattern, text):
            return meaning
    errors = [line.strip() for line in lines if "error" in line.lower()] or [line.strip() for line in lines] or ["?"]
    return errors[-1].rstrip(".")


def make_environment(torch_index: str) -> None:
    """Everything of the lock into a fresh `.venv`."""
    check_python()
    base = getattr(sys, "_base_executable", None) or sys.executable
    if VENV in Path(base).parents:  # `.venv` is active, and half-made: it cannot make itself
        base = os.path.realpath(base)
    for stamp in VENV.glob(".stamp-*"):
        stamp.unlink()
    say(f"making .venv with {base} (Python {HERE})")
    run("making .venv", [base, "-m", "venv", "--clear", str(VENV)])
    pins = [line.split("#")[0].strip() for line in LOCK.read_text().splitlines()]
    pins = [pin for pin in pins if pin]
    pip = [str(VENV_PYTHON), "-m", "pip", "install"]
    if torch_index:
        torch = next(pin for pin in pins if pin.startswith("torch=="))
        say(f"installing {torch} from {torch_index}")
        run(f"installing torch from TORCH_INDEX={torch_index}", [*pip, "--no-deps", "--index-url", torch_index, torch])
    elif sys.platform == "linux":
        say(f"torch comes from where pip looks; PyPI has the CUDA build (3 GB). A small one: TORCH_INDEX={CPU_INDEX}")
    say(f"installing {len(pins)} pinned packages; a minute or more (log: {LOG.relative_to(ROOT)})")
    run("installing requirements/lock.txt", [*pip, "-r", str(LOCK)])


def install_project() -> None:
    """This tree, editable; builds with the lock's setuptools, so without the network."""
    pip = [str(VENV_PYTHON), "-m", "pip"]
    run("installing miles_dmd2 itself", [*pip, "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    run("checking the packages against each other", [*pip, "check"])


def exclusive() -> IO[str]:
    """Let one set-up run at a time; the returned file holds the lock until it is closed."""
    held = LOCK.open()
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("another make is setting up .venv; waiting for it")
        fcntl.flock(held, fcntl.LOCK_EX)
    return held


def setup(python_chosen: bool, torch_index: str) -> None:
    made_of = read_stamp(python_chosen, torch_index)
    if made_of.get("project") == project_digest():
        say(f".venv is ready (Python {venv_version()})")
        return
    if not made_of:
        make_environment(torch_index)
    install_project()
    made_of = {"torch_index": torch_index or made_of.get("torch_index", ""), "project": project_digest()}
    stamp_path(venv_version()).write_text(json.dumps(made_of) + "\n")
    say(f".venv is ready (Python {venv_version()})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-index", default="", help="package index that torch alone comes from")
    parser.add_argument(
        "--python-chosen", action="store_true", help="the caller named this Python; .venv must be of it"
    )
    args = parser.parse_args()
    try:
        with exclusive():
            setup(args.python_chosen, args.torch_index)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; .venv is unfinished, and the next make starts it afresh", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
