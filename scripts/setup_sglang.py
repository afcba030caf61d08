"""Make the engine's environment for tests on a CPU: requirements/sglang-cpu.txt, then SGLang itself without its pins.

It lies in a cache directory (MILES_DMD2_CACHE, or ~/.cache/miles_dmd2) under a name that is a hash of the pins and the
Python. So it is made once, for all checkouts. Its stamp comes last: without one (Ctrl-C, a full disk) it is made anew.
Environments of other lists stay, and are named: deleting them is up to you.

The path of its Python is all that goes to stdout. Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from environments import HERE, Builder, SetupError, base_python, check_python, digest, exclusive

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "requirements" / "sglang-cpu.txt"
SGLANG = "sglang==0.5.23"
OLDEST, NEWEST = (3, 11), (3, 13)  # SGLang's wheels end there
NEEDED_GB = 8
IMPORT_SERVER = "import sglang.multimodal_gen.runtime.launch_server"


def cache_directory(variables: Mapping[str, str]) -> Path:
    """Where environments are kept. SetupError if no variable tells."""
    if variables.get("MILES_DMD2_CACHE"):
        return Path(variables["MILES_DMD2_CACHE"]).expanduser().absolute()
    if variables.get("XDG_CACHE_HOME"):
        return Path(variables["XDG_CACHE_HOME"]).expanduser().absolute() / "miles_dmd2"
    if variables.get("HOME"):
        return Path(variables["HOME"]).absolute() / ".cache" / "miles_dmd2"
    raise SetupError("there is no HOME: name a directory with 8 GB of space by MILES_DMD2_CACHE")


def place_in(cache: Path) -> Path:
    """Named by the pins, not by the list's comments: a better word there is not worth 6.7 GB."""
    lines = (line.partition("#")[0].strip() for line in LIST.read_text().splitlines())
    pins = "\n".join(sorted(filter(None, lines)))
    return cache / f"sglang-{digest(pins.encode(), SGLANG.encode(), HERE.encode())}"


def python_of(place: Path) -> Path:
    return place / "bin" / "python"


def stamp_of(place: Path) -> Path:
    return place / "complete.json"


def ready(place: Path) -> bool:
    """Complete, and the Python that it was made with is still there."""
    return stamp_of(place).is_file() and os.access(python_of(place), os.X_OK)


def make(builder: Builder) -> None:
    check_python(SGLANG, OLDEST, NEWEST)
    place = builder.place
    free = shutil.disk_usage(place.parent).free / 1e9
    if free < NEEDED_GB:
        raise SetupError(
            f"{place.parent} has {free:.1f} GB of free space and the environment needs {NEEDED_GB} GB: make room, or "
            "name another directory with MILES_DMD2_CACHE"
        )
    base = base_python(place)
    stamp_of(place).unlink(missing_ok=True)
    builder.say(f"making {place} with {base} (Python {HERE})")
    builder.run(f"making {place}", [base, "-m", "venv", "--clear", str(place)])
    pip = [str(python_of(place)), "-m", "pip", "install"]
    builder.say(f"installing {SGLANG} and what it imports, 6.7 GB: minutes (log: {builder.log})")
    builder.run(f"installing {LIST.relative_to(ROOT)}", [*pip, "-r", str(LIST)])
    builder.run(f"installing {SGLANG}", [*pip, "--no-deps", SGLANG])
    builder.run("importing SGLang's server", [str(python_of(place)), "-c", IMPORT_SERVER])
    stamp_of(place).write_text(json.dumps({"bytes": bytes_under(place)}) + "\n")


def bytes_under(place: Path) -> int:
    """Bytes on the disk."""
    files = (Path(folder) / name for folder, _, names in os.walk(place) for name in names)
    return sum(file.lstat().st_blocks * 512 for file in files)


def others(place: Path) -> str:
    """One line about the environments of other lists, "" where there are none."""
    found = []
    for other in sorted(place.parent.glob("sglang-*/")):
        if other != place:
            stamp = stamp_of(other)
            size = f"{json.loads(stamp.read_text())['bytes'] / 1e9:.1f} GB" if stamp.is_file() else "unfinished"
            found.append(f"{other} ({size})")
    return f"no longer used by this checkout, delete at will: {', '.join(found)}" if found else ""


def setup() -> Path:
    """The environment's Python; makes the environment if need be."""
    place = place_in(cache_directory(os.environ))
    builder = Builder(place, str(place), str(place / "setup.log"), f"{NEEDED_GB} GB", ROOT, sys.stderr)
    if not ready(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = place.with_name(f"{place.name}.lock")
        lock.touch()
        with exclusive(builder, lock):
            if not ready(place):  # another set-up may have made it meanwhile
                make(builder)
    builder.say(f"SGLang's environment is ready: {place}")
    unused = others(place)
    if unused:
        builder.say(unused)
    return python_of(place)


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the step that runs is ended too
    try:
        print(setup())
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"setup: {error.filename or 'the cache directory'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; SGLang's environment is unfinished, the next time makes it anew", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
