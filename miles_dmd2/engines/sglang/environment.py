"""The engine's own Python: which SGLang it has, and what a server started with it gets to see of this process.

The two environments do not mix: SGLang's pins and the trainer's contradict each other. A server gets its own packages
and, by PYTHONPATH, a folder with nothing but this package and the entry point of the plugin in it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import miles_dmd2

TESTED = ">=0.5.23,<0.5.24"
_OLDEST, _BEFORE = (0, 5, 23), (0, 5, 24)
_REMEDY = "name the Python of an environment with SGLang 0.5.23 (docs/sglang.md)"
_ASK_SECONDS = 60.0

PLUGIN = "miles_dmd2"
ENTRY_POINTS = f"[sglang.multimodal_gen.plugins]\n{PLUGIN} = miles_dmd2.engines.sglang_plugin:register\n"

# Asked of the engine's Python without importing sglang, which takes 10 s.
_QUESTION = """
import importlib.metadata, importlib.util, json, os
def place(name):
    spec = importlib.util.find_spec(name)
    return None if spec is None else list(spec.submodule_search_locations or [])
try:
    version = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    version = None
server = os.path.join("multimodal_gen", "runtime", "launch_server.py")
print(json.dumps({
    "version": version,
    "server": any(os.path.isfile(os.path.join(folder, server)) for folder in place("sglang") or []),
    "missing": [name for name in ("torch", "diffusers", "transformers") if place(name) is None],
}))
"""

# What leads Python or torch out of the engine's environment, or tells it to be a rank of the trainer. Ray sets
# OMP_NUM_THREADS=1 in its actors; without it SGLang chooses by the number of cores.
_MISLEADING = {
    *(
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSTARTUP",
        "PYTHONUSERBASE",
        "__PYVENV_LAUNCHER__",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
    ),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "OMP_NUM_THREADS",
    "SGLANG_CACHE_DIT_ENABLED",  # it skips forwards of the student
}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_version(python: Path, allow_untested: bool, flag: str = "--sglang-python") -> str:
    """SGLang's version in the environment of `python`; ValueError, as a user reads it, if no server can start there.

    allow_untested: of --sglang-allow-untested-version, accept a version outside TESTED.
    """
    where = f"{flag} {python}"
    if not python.is_file():
        raise ValueError(f"{where}: there is no such file; {_REMEDY}")
    if not os.access(python, os.X_OK):
        raise ValueError(f"{where}: is not executable; {_REMEDY}")
    answer = _ask(python, where)
    version = answer["version"]
    if version is None:
        raise ValueError(f"{where}: has no SGLang; {_REMEDY}")
    lacking = answer["missing"] if answer["server"] else ["its folder multimodal_gen"]
    if lacking:
        raise ValueError(
            f"{where}: SGLang {version} lacks its diffusion parts ({', '.join(lacking)}); {_REMEDY}, installed with "
            "the extra `diffusion` or the list requirements/sglang-cpu.txt"
        )
    if not allow_untested and not is_tested(version):
        raise ValueError(
            f"{where}: SGLang {version} is outside the tested range {TESTED}; {_REMEDY}, or say "
            "--sglang-allow-untested-version"
        )
    return str(version)


def _ask(python: Path, where: str) -> dict:
    try:
        done = subprocess.run(
            [python.absolute(), "-c", _QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_SECONDS,
            env=engine_environment(python),
            check=False,
        )
        answer = json.loads(done.stdout)
        if isinstance(answer, dict):
            return answer
        reason = "it does not answer as a Python does"
    except subprocess.TimeoutExpired:
        raise ValueError(f"{where}: does not answer within {_ASK_SECONDS:g} s; {_REMEDY}") from None
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError:  # what it printed is no JSON
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]
    raise ValueError(f"{where}: is not a Python that works ({reason}); {_REMEDY}")


def is_tested(version: str) -> bool:
    """A release (or post-release or local build of one) in the range; a release candidate is none."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?(\+.*)?", version)
    return found is not None and _OLDEST <= tuple(map(int, found.groups()[:3])) < _BEFORE


def write_plugin(folder: Path) -> Path:
    """Make `folder`: a link to this package and the entry point by which SGLang finds the plugin in it."""
    version = miles_dmd2.__version__
    info = folder / f"miles_dmd2-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: miles-dmd2\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "miles_dmd2").symlink_to(Path(miles_dmd2.__file__).resolve().parent, target_is_directory=True)
    return folder


def engine_environment(python: Path) -> dict[str, str]:
    """This process's variables less the misleading ones, as if `python`'s environment were the active one."""
    variables = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    variables["PATH"] = os.pathsep.join([str(python.absolute().parent), variables.get("PATH", os.defpath)])
    variables["PYTHONSAFEPATH"] = "1"  # `-m` would put the current directory before the engine's own packages
    return variables


def server_environment(
    python: Path, plugin: Path, launch_id: str, *, threads: int | None, extra: Mapping[str, str]
) -> dict[str, str]:
    """Variables of a server. `extra` is set last. ValueError: SGLANG_PLUGINS leaves the plugin out."""
    variables = engine_environment(python)
    variables.setdefault("HF_HUB_OFFLINE", "1")  # a wrong path is an error, not a download
    variables["PYTHONUNBUFFERED"] = "1"  # the log must not lag behind
    direct = variables.get("no_proxy") or variables.get("NO_PROXY") or ""
    variables["no_proxy"] = variables["NO_PROXY"] = ",".join([*filter(None, [direct]), *_LOOPBACK])
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    variables.update(extra)
    variables["PYTHONPATH"] = str(plugin)
    variables["MILES_DMD2_LAUNCH_ID"] = launch_id
    allowed = [name.strip() for name in variables.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and PLUGIN not in allowed:
        raise ValueError(
            f"SGLANG_PLUGINS={variables['SGLANG_PLUGINS']}: leaves out the plugin {PLUGIN}; add it, or unset the "
            "variable"
        )
    return variables
