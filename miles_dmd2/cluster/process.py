"""What every worker process does first."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading

import torch

from miles_dmd2.cluster.settings import WorkerSettings
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.registry import build_adapter

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_up(name: str, settings: WorkerSettings) -> ModelAdapter:
    """Threads, log file, offline hub; returns the run's model adapter.

    Ray sets OMP_NUM_THREADS=1 for fractional CPUs, so threads are set here, in the process that computes.
    """
    if settings.driver_pid is not None:
        end_with(settings.driver_pid)
    if settings.device == "cuda":
        exact_pinned_memory()
    torch.set_num_threads(settings.threads)
    sys.path.extend(entry for entry in settings.python_path if entry not in sys.path)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if settings.single_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    settings.log_directory.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(settings.log_directory / f"{name}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    logger = logging.getLogger("miles_dmd2")
    logger.setLevel(logging.INFO)
    logger.info("pid %d, torch %s, %d threads", os.getpid(), torch.__version__, settings.threads)
    return build_adapter(settings.checkpoint, settings.height, settings.width, settings.num_frames, settings.seconds)


def exact_pinned_memory() -> None:
    """torch rounds each block of pinned memory up to a power of two (2.13 and 2.14): up to twice as much.
    From here on only small ones, in this process and the server that it starts. A user's own setting stays.

    Before the first use of the allocator, which reads the variable once.
    """
    if not any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = "pinned_max_round_threshold_mb:1"


def end_with(pid: int) -> None:
    """This process ends as soon as that one does. Ray alone notices a killed driver after seconds, or minutes on a busy
    machine, in which a worker may go on writing to what the next run has begun to use.
    """
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="end_with_driver", daemon=True).start()


def dtype_of(name: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
