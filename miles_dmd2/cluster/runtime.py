"""Starting and stopping Ray for a run."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before the import: no phoning home
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves a run beside anything else
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keeps CUDA_VISIBLE_DEVICES as the user set it

import ray
from ray._private import ray_constants, services
from torch import Tensor

from miles_dmd2.cluster.failures import late, root_cause, summary_of, told
from miles_dmd2.cluster.wire import unpack_tensors
from miles_dmd2.config import ConfigError
from miles_dmd2.observability import RunError
from miles_dmd2.private_directory import abandoned, private_directory
from miles_dmd2.types import WeightUpdate

_SESSION_PREFIX = "md2-run-"
_RAY = "r"  # Ray's part of a session: socket paths are short

logger = logging.getLogger(__name__)


@contextmanager
def ray_session(address: str | None, devices: int, device: str, connect_timeout: float = 10.0) -> Iterator[None]:
    """A Ray to run in: `address` joins a running cluster, None starts one on this host with that many devices.

    A rank's device is one unit of Ray's `CPU` (device cpu) or `GPU` (device cuda). No `runtime_env`: with it Ray 2.60
    hangs without an error when the Python environment's path has a space. The session directory is short, because
    socket paths have a limit of 107 bytes, and removed at the end.
    """
    if ray.is_initialized():
        raise RunError("Ray is already running in this process; start a run from a process of its own")
    if address is not None:
        address = _started_cluster() if address == "auto" else address
        _check_reachable(address, connect_timeout)
        _init(address=address)
        try:
            yield
        finally:
            ray.shutdown()
        return
    sweep_sessions()
    with ExitStack() as ending:
        ending.callback(sweep_sessions)  # those that were in use at the start
        session = ending.enter_context(private_directory(f"{_SESSION_PREFIX}{os.getpid()}-"))
        ending.callback(ray.shutdown)
        with _on_loopback(), _in_own_groups():
            _init(
                address="local",
                num_cpus=max(devices, 1),
                num_gpus=devices if device == "cuda" else 0,
                include_dashboard=False,
                _temp_dir=str(session / _RAY),  # Ray opens its directory to everybody: it is in a private one
            )
        yield


@contextmanager
def _on_loopback() -> Iterator[None]:
    """A Ray started in this block listens on 127.0.0.1 alone, as it does on macOS; on Linux it would on every address.

    `_node_ip_address` does not help: Ray replaces a loopback address by the host's (2.60). Processes that Ray starts
    read the variable, this one has read it when it imported Ray. tests/cluster/test_loopback.py looks at the sockets.
    """
    variable, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    given = os.environ.get(variable)
    os.environ[variable], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        if given is None:
            del os.environ[variable]
        else:
            os.environ[variable] = given


@contextmanager
def _in_own_groups() -> Iterator[None]:
    """Processes that Ray starts in this block lead process groups of their own.

    A signal to the driver's whole group, as `timeout`, some schedulers and a terminal send it, then leaves Ray running
    until the driver has saved. On Linux each of them ends with the driver by the kernel; elsewhere Ray ends them by
    that very group, so there it stays as it is.
    """
    if sys.platform != "linux":
        yield
        return
    plain = services.ConsolePopen
    services.ConsolePopen = partial(plain, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = plain


def _started_cluster() -> str:
    """What `auto` is: RAY_ADDRESS, which a submitted job has, or what `ray start` wrote here. ConfigError: neither.

    Ray's own `auto` takes any cluster whose process it finds, also one that another run started for itself.
    """
    given = os.environ.get("RAY_ADDRESS", "")
    if given not in ("", "auto"):
        return given
    file = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"  # noqa: S108 - Ray's own place
    if not file.is_file():
        raise ConfigError(
            "--ray-address auto: no cluster was started on this host; say `ray start --head`, or `ray start --address "
            "HEAD:PORT` to join one, or leave it out to start Ray for this run alone"
        )
    return file.read_text().strip()


def _check_reachable(address: str, timeout: float) -> None:
    """ConfigError if nobody listens at host:port: Ray itself goes on trying for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return  # a form that Ray explains
    try:
        socket.create_connection((host, int(port)), timeout=timeout).close()
    except OSError as error:
        raise ConfigError(
            f"--ray-address {address}: no answer there ({error}); give host:port of a running cluster's head, or leave "
            "it out to start Ray on this machine"
        ) from error


def _init(**options: Any) -> None:
    """`ray.init`, which would leave a SIGTERM handler of its own that exits at once: the caller's stays."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, configure_logging=False, **options)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        where = f"join the cluster at --ray-address {options['address']}" if "_temp_dir" not in options else "start Ray"
        raise RunError(f"cannot {where}: {summary_of(str(error)) or repr(error)}") from error
    finally:
        signal.signal(signal.SIGTERM, handler)


def sweep_sessions() -> None:
    """Remove session directories of drivers that are gone (Ray leaves them behind when its driver is killed).

    Ray's own processes outlive a killed driver for seconds, or a minute on a busy machine, and make what they write to
    anew: a later sweep finds that.
    """
    for session in abandoned(_SESSION_PREFIX):
        shutil.rmtree(session / _RAY, ignore_errors=True)
        if not _is_in_use(session):
            shutil.rmtree(session, ignore_errors=True)


def _is_in_use(session: Path) -> bool:
    """Whether a process was started for this session: its path is on the command line of Ray's daemons."""
    name = os.fsencode(session.name)
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # ended meanwhile
            if name in command.read_bytes():
                return True
    return False


def wait(refs: Sequence[Any], timeout: float, what: str) -> list[Any]:
    """`ray.get` with a deadline. RunError, one line: what was waited for, which process failed and how, and its log."""
    refs = list(refs)
    try:
        return list(ray.get(refs, timeout=timeout))
    except ray.exceptions.GetTimeoutError as error:
        raise RunError(late(refs, timeout, what)) from error
    except ray.exceptions.RayError as error:
        ref, cause = root_cause(refs, error)
        logger.error("%s failed:\n%s", what, cause)  # with the worker's traceback
        raise RunError(f"{what}: {told(ref, cause)}") from error


def fetch(update: WeightUpdate, timeout: float) -> dict[str, Tensor]:
    """The tensors of a weight update in this process."""
    (arrays,) = wait([update.payload], timeout, f"fetching the {update.version} weights")
    return unpack_tensors(arrays)
