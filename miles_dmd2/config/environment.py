"""What the machine must offer a run, beside devices: open files, disk, a login. Each fault is one `ConfigError`."""

from __future__ import annotations

import netrc
import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

from miles_dmd2.config.errors import ConfigError, show
from miles_dmd2.config.schema import Config

# Measured with Ray 2.60: 128 are enough for six workers, with 64 its node daemon hangs without a word.
FEWEST_OPEN_FILES = 256
SESSION_ROOT = Path("/tmp")  # noqa: S108 - mkdtemp makes private directories in it; paths of sockets are limited to 107 bytes
_SESSION_BYTES = 64 * 2**20  # logs and sockets of Ray
_WANDB_HOST = "api.wandb.ai"
_WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_FP32 = 4
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_environment(config: Config, parameters: int, variables: Mapping[str, str] | None = None) -> None:
    """`parameters`: of one transformer. `variables`: the environment's; default: this process's."""
    _check_open_files()
    _check_disk(config, parameters)
    if config.cluster.ray_address is None:
        _check_session_root()
    if config.run.use_wandb and config.run.wandb_mode == "online":
        _check_wandb_login(os.environ if variables is None else variables)


def host_bytes() -> int:
    """Memory of this machine, or of the container that this process is in if that has less."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:  # no container, or cgroups of version 1
        return installed
    return min(installed, int(limit)) if limit.isdigit() else installed


def checkpoint_bytes(config: Config, parameters: int) -> int:
    """Of one checkpoint: critic and student with two moments each, the average if one is kept, all fp32."""
    copies = 3 + 3 + int(config.keeps_ema)
    return copies * parameters * _FP32


def _check_open_files() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FEWEST_OPEN_FILES:
        raise ConfigError(
            f"ulimit -n {soft}: Ray needs {FEWEST_OPEN_FILES} open files or more; use ulimit -n 65536 in this shell"
        )


def _check_disk(config: Config, parameters: int) -> None:
    path = config.save_dir
    there = path.absolute()
    while not there.exists():
        there = there.parent
    free, needed = shutil.disk_usage(there).free, checkpoint_bytes(config, parameters)
    if free < needed:
        raise ConfigError(
            f"--save {show(path)}: {_gigabytes(free)} are free there, and one checkpoint of this run takes "
            f"{_gigabytes(needed)}; make room, or use another disk"
        )


def _check_session_root() -> None:
    if not os.access(SESSION_ROOT, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{SESSION_ROOT}: is not writable, and Ray keeps its sockets there (their paths must be short); make it "
            "writable, or use --ray-address of a running cluster"
        )
    free = shutil.disk_usage(SESSION_ROOT).free
    if free < _SESSION_BYTES:
        raise ConfigError(
            f"{SESSION_ROOT}: {_gigabytes(free)} are free there, Ray's logs and sockets take "
            f"{_gigabytes(_SESSION_BYTES)}; make room, or use --ray-address of a running cluster"
        )


def _check_wandb_login(variables: Mapping[str, str]) -> None:
    """wandb without a key would ask for one on a terminal that nobody watches."""
    if any(variables.get(name) for name in _WANDB_KEYS):
        return
    home = Path(variables.get("HOME", "~")).expanduser()
    files = [Path(variables["NETRC"])] if variables.get("NETRC") else [home / ".netrc", home / "_netrc"]
    host = variables.get("WANDB_BASE_URL", _WANDB_HOST).rpartition("://")[2].partition("/")[0].partition(":")[0]
    if not any(_knows(file, host) for file in files):
        raise ConfigError(
            f"--use-wandb: no login for {host} (no {_WANDB_KEYS[0]} in the environment, no entry in .netrc); run "
            "wandb login, or use --wandb-mode offline"
        )


def _knows(file: Path, host: str) -> bool:
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
        return False


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
