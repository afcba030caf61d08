"""What a worker is told when it starts: plain values, so that nothing below reads the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_dmd2.config import TrainerSpec
from miles_dmd2.engines.sglang.pool import SGLangSettings
from miles_dmd2.media.store import KeptMedia


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Common to every worker.

    `threads`: torch threads. `log_directory`: one file per worker. `python_path`: the driver's, so that a worker finds
    the modules that the driver finds. `single_node`: every process of the run is on one host. `driver_pid`: of the
    driver whose Ray this is, on this host; None on a cluster that outlives it.
    """

    checkpoint: Path
    height: int | None
    width: int | None
    num_frames: int | None
    seconds: float | None
    forward_dtype: Literal["fp32", "bf16"]
    device: Literal["cpu", "cuda"]
    threads: int
    single_node: bool
    log_directory: Path
    python_path: tuple[str, ...]
    driver_pid: int | None


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The SGLang servers of a run: where they run already (`urls`), or how each engine's own one is started.

    `python`: of the environment that has SGLang, None with `urls`. `arguments`: the user's flags for the server.
    `beside_client`: so many of them, the first ones, are on the node of the client and listen on its loopback alone.
    """

    urls: tuple[str, ...]
    python: Path | None
    arguments: tuple[str, ...]
    start_timeout: float
    beside_client: int


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`eval_metrics`, `reward`: module:function or file.py:function, None for none. `media_directory`: contact sheets
    of evals; `kept_media`: where single samples go, if anywhere. `own_weights`: serve the checkpoint's without a push.

    `latents`: file of real latents, None for backward simulation. `batch_size`: of the local engine; `client` and
    `servers`: of the SGLang engine, None for the local one.
    """

    worker: WorkerSettings
    batch_size: int
    eval_metrics: str | None
    media_directory: Path
    client: SGLangSettings | None = None
    servers: ServerSettings | None = None
    latents: Path | None = None
    reward: str | None = None
    kept_media: KeptMedia | None = None
    own_weights: bool = False


@dataclass(frozen=True, slots=True)
class TrainerJob:
    """One rank of one trainer group.

    `worker.checkpoint` is the teacher's, `spec.checkpoint` where the trained network starts.
    """

    worker: WorkerSettings
    spec: TrainerSpec
    ranks_per_node: int
    load_at_once: int  # ranks of a node
    gradient_checkpointing: bool
    seed: int
    num_steps: int
    critic_loss_space: Literal["velocity", "x0", "eps"]
    tell_stop_step: bool
    score_sigma_range: tuple[float, float]
    score_shift: float
    part_shifts: tuple[tuple[str, float], ...]
    part_weights: Mapping[str, float]
    score_sigma_law: Literal["uniform", "logit_normal"]
    score_sigma_logit: tuple[float, float]  # mean and standard deviation
    critic_scoring: Literal["fused", "original"]
    teacher_guidance_scale: float
    normalizer: Literal["sample", "batch"]
    normalizer_eps: float
    student_ema_decay: float
    student_ema_start: int
    max_skipped_steps: int
    max_x0_drift: float
    bad_batch_directory: Path | None
    start_timeout: float
    collective_timeout: float


@dataclass(frozen=True, slots=True)
class SavedState:
    """A group's part of a checkpoint. `world_size`: ranks that wrote it."""

    directory: Path
    counters: Mapping[str, int]
    world_size: int
