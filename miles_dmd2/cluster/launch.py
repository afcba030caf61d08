"""From a config to engines and trainer groups that sleep and wait for work."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from miles_dmd2.checkpointing import CheckpointError, Manifest
from miles_dmd2.cluster.engine_group import RayEngineGroup
from miles_dmd2.cluster.placement import place
from miles_dmd2.cluster.runtime import ray_session
from miles_dmd2.cluster.settings import EngineSettings, SavedState, TrainerJob, WorkerSettings
from miles_dmd2.cluster.trainer_group import RayTrainerGroup
from miles_dmd2.config import Config, TrainerSpec


@contextmanager
def launch(
    config: Config, trainers: Sequence[TrainerSpec], manifest: Manifest | None
) -> Iterator[tuple[RayEngineGroup, list[RayTrainerGroup]]]:
    """Ray, placement, actors; everyone ready and asleep. `manifest` is the checkpoint to continue from.

    On exit, also by an exception, every process of the run is gone.
    """
    cluster = config.cluster
    worker = worker_settings(config)
    with ray_session(cluster.ray_address, config.devices_per_node, cluster.device):
        placement = place(
            cluster.actor_num_nodes, cluster.actor_num_gpus_per_node, cluster.device, cluster.start_timeout
        )
        timeouts = (cluster.start_timeout, cluster.phase_timeout)
        with ExitStack() as stack:
            stack.callback(placement.release)
            engines = RayEngineGroup.start(
                config.rollout.rollout_num_engines, engine_settings(config, worker), placement, *timeouts
            )
            stack.callback(engines.dispose)
            groups: list[RayTrainerGroup] = []
            for spec in trainers:
                group = RayTrainerGroup.start(trainer_job(config, spec, worker), placement, *timeouts)
                stack.callback(group.dispose)
                groups.append(group)
            engines.build()  # one after the other, each asleep before the next: they share a device
            for group in groups:
                group.build(saved_state(manifest, group))
            yield engines, groups


def worker_settings(config: Config) -> WorkerSettings:
    cluster = config.cluster
    return WorkerSettings(
        checkpoint=config.model.hf_checkpoint.resolve(),
        height=config.model.diffusion_height,
        width=config.model.diffusion_width,
        num_frames=config.model.diffusion_num_frames,
        forward_dtype=config.model.forward_dtype,
        device=cluster.device,
        threads=config.threads,
        single_node=cluster.actor_num_nodes == 1,
        log_directory=(config.run.run_dir / "logs").resolve(),
        python_path=tuple(entry or str(Path.cwd()) for entry in sys.path),
    )


def engine_settings(config: Config, worker: WorkerSettings) -> EngineSettings:
    return EngineSettings(
        worker=worker,
        batch_size=config.rollout.rollout_engine_batch_size,
        eval_metrics=_absolute(config.evaluation.eval_metrics_path),
        media_directory=(config.run.run_dir / "eval").resolve(),
    )


def _absolute(function: str | None) -> str | None:
    """`file.py:function` with the file's full path: workers run elsewhere."""
    if function is None or not function.rpartition(":")[0].endswith(".py"):
        return function
    file, _, name = function.rpartition(":")
    return f"{Path(file).resolve()}:{name}"


def trainer_job(config: Config, spec: TrainerSpec, worker: WorkerSettings) -> TrainerJob:
    algorithm = config.algorithm
    return TrainerJob(
        worker=worker,
        spec=replace(spec, checkpoint=spec.checkpoint.resolve()),
        seed=config.run.seed,
        num_steps=config.rollout.diffusion_num_steps,
        critic_loss_space=algorithm.dmd2_critic_loss_space,
        tell_stop_step=algorithm.dmd2_critic_conditioning == "stop_step",
        score_sigma_range=algorithm.dmd2_score_sigma_range,
        score_shift=config.score_shift,
        student_ema_decay=algorithm.student_ema_decay,
        max_skipped_steps=config.run.max_skipped_steps,
        start_timeout=config.cluster.start_timeout,
        collective_timeout=config.cluster.phase_timeout,
    )


def saved_state(manifest: Manifest | None, group: RayTrainerGroup) -> SavedState | None:
    """This group's part of a checkpoint. CheckpointError: it has none, or of another number of ranks."""
    if manifest is None:
        return None
    saved = manifest.groups.get(group.name)
    if saved is None:
        raise CheckpointError(f"{manifest.directory} holds no group {group.name}, only {', '.join(manifest.groups)}")
    if saved.world_size != group.world_size:
        raise CheckpointError(
            f"{manifest.directory}: group {group.name} was saved by {saved.world_size} ranks and now has "
            f"{group.world_size}; resume needs the same number"
        )
    return SavedState(manifest.directory.resolve(), saved.counters)
