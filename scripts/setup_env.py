"""Make `.venv`: exactly the packages of requirements/lock.txt, and this tree, editable.

The Makefile calls it before every target that needs Python. It does nothing when the stamp in `.venv` matches the
lock, the Python and the place of the tree; only the tree's own entry is renewed when pyproject.toml changed; anything
else (no stamp, because someone pressed Ctrl-C; another lock; a moved tree) makes `.venv` afresh. The stamp comes last.

Standard library only, and no syntax newer than Python 3.6: an old Python has to get as far as saying that it is old.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Dict

from environments import HERE, Builder, SetupError, base_python, check_python, digest, exclusive

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock.txt"
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
OLDEST, NEWEST = (3, 11), (3, 14)  # every package of the lock has wheels for these
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


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


def make_environment(builder: Builder, torch_index: str) -> None:
    """Everything of the lock into a fresh `.venv`."""
    check_python("miles_dmd2", OLDEST, NEWEST)
    base = base_python(VENV)  # `.venv` may be active, and half-made
    for stamp in VENV.glob(".stamp-*"):
        stamp.unlink()
    builder.say(f"making .venv with {base} (Python {HERE})")
    builder.run("making .venv", [base, "-m", "venv", "--clear", str(VENV)])
    pins = [line.split("#")[0].strip() for line in LOCK.read_text().splitlines()]
    pins = [pin for pin in pins if pin]
    pip = [str(VENV_PYTHON), "-m", "pip", "install"]
    if torch_index:
        torch = next(pin for pin in pins if pin.startswith("torch=="))
        builder.say(f"installing {torch} from {torch_index}")
        builder.run(
            f"installing torch from TORCH_INDEX={torch_index}", [*pip, "--no-deps", "--index-url", torch_index, torch]
        )
    elif sys.platform == "linux":
        builder.say(
            f"torch comes from where pip looks; PyPI has the CUDA build (3 GB). A small one: TORCH_INDEX={CPU_INDEX}"
        )
    builder.say(f"installing {len(pins)} pinned packages; a minute or more (log: {builder.log})")
    builder.run("installing requirements/lock.txt", [*pip, "-r", str(LOCK)])


def install_project(builder: Builder) -> None:
    """This tree, editable; builds with the lock's setuptools, so without the network."""
    pip = [str(VENV_PYTHON), "-m", "pip"]
    builder.run("installing miles_dmd2 itself", [*pip, "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    builder.run("checking the packages against each other", [*pip, "check"])


def setup(builder: Builder, python_chosen: bool, torch_index: str) -> None:
    made_of = read_stamp(python_chosen, torch_index)
    if made_of.get("project") == project_digest():
        builder.say(f".venv is ready (Python {venv_version()})")
        return
    if not made_of:
        make_environment(builder, torch_index)
    install_project(builder)
    made_of = {"torch_index": torch_index or made_of.get("torch_index", ""), "project": project_digest()}
    stamp_path(venv_version()).write_text(json.dumps(made_of) + "\n")
    builder.say(f".venv is ready (Python {venv_version()})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-index", default="", help="package index that torch alone comes from")
    parser.add_argument(
        "--python-chosen", action="store_true", help="the caller named this Python; .venv must be of it"
    )
    args = parser.parse_args()
    builder = Builder(VENV, ".venv", ".venv/setup.log", "2 GB (8 GB with CUDA's torch)", ROOT, sys.stdout)
    try:
        with exclusive(builder, LOCK):
            setup(builder, args.python_chosen, args.torch_index)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; .venv is unfinished, and the next make starts it afresh", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
