"""Starting and stopping Ray for a run."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before the import: no phoning home
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keeps CUDA_VISIBLE_DEVICES as the user set it

import ray
from torch import Tensor

from miles_dmd2.cluster.wire import unpack_tensors
from miles_dmd2.types import WeightUpdate

_SESSION_PREFIX = "md2-ray-"


class RunError(RuntimeError):
    """A process of the run failed or did not answer. The message names it and the phase."""


@contextmanager
def ray_session(address: str | None, devices: int, device: str) -> Iterator[None]:
    """A Ray to run in: `address` joins a running cluster, None starts one on this host with that many devices.

    A rank's device is one unit of Ray's `CPU` (device cpu) or `GPU` (device cuda). No `runtime_env`: with it Ray 2.60
    hangs without an error when the Python environment's path has a space. The session directory is short, because
    socket paths have a limit of 107 bytes, and removed at the end.
    """
    if ray.is_initialized():
        raise RunError("Ray is already running in this process; start a run from a process of its own")
    if address is not None:
        _init(address=address)
        try:
            yield
        finally:
            ray.shutdown()
        return
    _sweep_left_over_sessions()
    session = tempfile.mkdtemp(prefix=f"{_SESSION_PREFIX}{os.getpid()}-", dir="/tmp")
    try:
        _init(
            address="local",
            num_cpus=max(devices, 1),
            num_gpus=devices if device == "cuda" else 0,
            include_dashboard=False,
            _temp_dir=session,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(session, ignore_errors=True)


def _init(**options: Any) -> None:
    """`ray.init`, which would leave a SIGTERM handler of its own that exits at once: the caller's stays."""
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, configure_logging=False, **options)
    signal.signal(signal.SIGTERM, handler)


def _sweep_left_over_sessions() -> None:
    """Remove session directories of drivers that are gone (Ray leaves them behind when its driver is killed)."""
    for directory in Path("/tmp").glob(f"{_SESSION_PREFIX}*"):
        pid = directory.name.removeprefix(_SESSION_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and directory.stat().st_uid == os.getuid():
            shutil.rmtree(directory, ignore_errors=True)


def wait(refs: Sequence[Any], timeout: float, what: str) -> list[Any]:
    """`ray.get` with a deadline; failures become one RunError that says what was waited for."""
    try:
        return list(ray.get(list(refs), timeout=timeout))
    except ray.exceptions.GetTimeoutError as error:
        raise RunError(f"{what}: no answer within {timeout:g} s (--phase-timeout, --start-timeout)") from error
    except ray.exceptions.RayTaskError as error:
        raise RunError(f"{what}: {_cause(error)}") from error
    except ray.exceptions.RayError as error:
        raise RunError(f"{what}: {_summary(str(error))}") from error


def fetch(update: WeightUpdate) -> dict[str, Tensor]:
    """The tensors of a weight update in this process."""
    return unpack_tensors(ray.get(update.payload))


def _summary(text: str) -> str:
    """Ray's report in one line; where an actor's constructor failed, the error it failed with is the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if "creation task" in lines[0] else lines[0]


def _cause(error: ray.exceptions.RayTaskError) -> str:
    cause = error.cause
    return f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
