"""From a config to engines and trainer groups that sleep and wait for work."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from miles_dmd2.checkpointing import Manifest
from miles_dmd2.cluster.engine_group import RayEngineGroup
from miles_dmd2.cluster.placement import place
from miles_dmd2.cluster.preflight import preflight
from miles_dmd2.cluster.runtime import ray_session
from miles_dmd2.cluster.server_worker import ServerGroup
from miles_dmd2.cluster.settings import EngineSettings, SavedState, ServerSettings, TrainerJob, WorkerSettings
from miles_dmd2.cluster.trainer_group import RayTrainerGroup
from miles_dmd2.config import Config, TrainerSpec
from miles_dmd2.config.functions import absolute
from miles_dmd2.engines.sglang.pool import SGLangSettings
from miles_dmd2.media.store import KeptMedia
from miles_dmd2.types import Conditioning


@contextmanager
def launch(
    config: Config, trainers: Sequence[TrainerSpec], manifest: Manifest | None
) -> Iterator[tuple[RayEngineGroup, list[RayTrainerGroup]]]:
    """Ray, placement, actors; everyone ready and asleep. `manifest` is the checkpoint to continue from. Without
    trainers the engines serve the checkpoint's own weights.

    On exit, also by an exception, every process of the run is gone.
    """
    cluster = config.cluster
    worker = worker_settings(config)
    with ray_session(cluster.ray_address, config.devices_per_node, cluster.device, cluster.connect_timeout):
        placement = place(
            cluster.actor_num_nodes, cluster.actor_num_gpus_per_node, cluster.device, config.start_timeout
        )
        timeouts = (config.start_timeout, cluster.phase_timeout)
        with ExitStack() as stack:
            stack.callback(placement.release)
            if cluster.ray_address is not None:  # on a host of its own the driver has checked all of it
                preflight(config, trainers, placement, config.start_timeout)
            settings = engine_settings(config, worker)
            servers = ServerGroup.start(config.num_engines, settings, placement)
            stack.callback(servers.dispose)
            engines = RayEngineGroup.start(config.num_engines, settings, placement, *timeouts, servers.workers)
            stack.callback(engines.dispose)
            groups: list[RayTrainerGroup] = []
            for spec in trainers:
                group = RayTrainerGroup.start(trainer_job(config, spec, worker), placement, *timeouts)
                stack.callback(group.dispose)
                groups.append(group)
            servers.build()
            engines.build()  # one after the other, each asleep before the next: they share a device
            uncond = unconditional(engines, config) if groups else None
            for group in groups:
                group.build(saved_state(manifest, group), uncond)
            yield engines, groups


def unconditional(engines: RayEngineGroup, config: Config) -> Conditioning | None:
    """The conditioning of the guided teacher's second forward, once for the run; None for an unguided teacher."""
    if config.algorithm.dmd2_teacher_guidance_scale == 1:
        return None
    engines.wake()
    (cond,) = engines.conditioning([config.algorithm.dmd2_negative_prompt or ""])
    engines.sleep()
    return cond


def worker_settings(config: Config) -> WorkerSettings:
    cluster = config.cluster
    return WorkerSettings(
        checkpoint=config.model.hf_checkpoint.resolve(),
        height=config.model.diffusion_height,
        width=config.model.diffusion_width,
        num_frames=config.model.diffusion_num_frames,
        seconds=config.model.diffusion_duration,
        forward_dtype=config.model.forward_dtype,
        device=cluster.device,
        threads=config.threads,
        single_node=cluster.actor_num_nodes == 1,
        log_directory=(config.run.run_dir / "logs").resolve(),
        python_path=tuple(entry or str(Path.cwd()) for entry in sys.path),
        driver_pid=os.getpid() if cluster.ray_address is None else None,
    )


def engine_settings(config: Config, worker: WorkerSettings) -> EngineSettings:
    sglang = config.rollout.rollout_engine == "sglang"
    return EngineSettings(
        worker=worker,
        batch_size=config.rollout.rollout_engine_batch_size,
        eval_metrics=absolute(config.evaluation.eval_metrics_path),
        media_directory=(config.run.run_dir / "eval").resolve(),
        client=client_settings(config) if sglang else None,
        servers=server_settings(config) if sglang else None,
        latents=config.algorithm.dmd2_latents.resolve() if config.algorithm.dmd2_latents else None,
        reward=absolute(config.rollout.custom_rm_path),
        kept_media=kept_media(config),
        own_weights=config.rollout.debug_rollout_only is not None,
    )


def kept_media(config: Config) -> KeptMedia | None:
    """Where eval samples go as files; None: nowhere."""
    directory, limit = config.eval_media
    return None if directory is None else KeptMedia(directory.resolve(), config.playback_fps, limit)


def client_settings(config: Config) -> SGLangSettings:
    own = config.sglang
    directory = own.sglang_weight_directory
    return SGLangSettings(
        max_in_flight=own.engine_max_in_flight,
        request_timeout=own.engine_request_timeout,
        attempts=own.engine_attempts,
        max_restarts=own.engine_max_restarts,
        weight_sync=own.sglang_weight_sync,
        weight_directory=None if directory is None else directory.absolute(),
        verify_every=own.verify_weights_every,
        probe_tolerance=own.probe_tolerance,
        require_plugin=own.require_engine_plugin,
        allow_untested_version=own.sglang_allow_untested_version,
        forward_dtype=config.model.forward_dtype,
    )


def server_settings(config: Config) -> ServerSettings:
    own, cluster = config.sglang, config.cluster
    return ServerSettings(
        urls=own.rollout_engine_url,
        python=None if own.sglang_python is None else own.sglang_python.absolute(),  # not resolved: a link in a venv
        arguments=own.sglang_args,
        start_timeout=config.start_timeout,
        beside_client=cluster.actor_num_gpus_per_node,
    )


def trainer_job(config: Config, spec: TrainerSpec, worker: WorkerSettings) -> TrainerJob:
    algorithm = config.algorithm
    return TrainerJob(
        worker=worker,
        spec=replace(spec, checkpoint=spec.checkpoint.resolve()),
        ranks_per_node=config.cluster.actor_num_gpus_per_node,
        load_at_once=config.cluster.load_ranks_at_once or config.cluster.actor_num_gpus_per_node,
        gradient_checkpointing=config.model.gradient_checkpointing,
        seed=config.run.seed,
        num_steps=config.num_steps,
        critic_loss_space=algorithm.dmd2_critic_loss_space,
        tell_stop_step=algorithm.dmd2_critic_conditioning == "stop_step",
        score_sigma_range=algorithm.dmd2_score_sigma_range,
        score_shift=config.score_shift,
        part_shifts=tuple(config.part_shifts.items()),
        part_weights=config.part_weights,
        score_sigma_law=algorithm.dmd2_score_sigma_law,
        score_sigma_logit=(algorithm.dmd2_score_sigma_logit_mean, algorithm.dmd2_score_sigma_logit_std),
        critic_scoring=algorithm.dmd2_critic_scoring,
        teacher_guidance_scale=algorithm.dmd2_teacher_guidance_scale,
        normalizer=algorithm.dmd2_normalizer,
        normalizer_eps=algorithm.dmd2_normalizer_eps,
        student_ema_decay=algorithm.student_ema_decay,
        student_ema_start=algorithm.student_ema_start,
        max_skipped_steps=config.run.max_skipped_steps,
        max_x0_drift=config.max_x0_drift,
        bad_batch_directory=(config.run.run_dir / "bad_batches").resolve() if config.run.dump_bad_batch else None,
        start_timeout=config.start_timeout,
        collective_timeout=config.cluster.phase_timeout,
    )


def saved_state(manifest: Manifest | None, group: RayTrainerGroup) -> SavedState | None:
    """This group's part of a checkpoint, whose groups are known to be this run's."""
    if manifest is None:
        return None
    saved = manifest.groups[group.name]
    return SavedState(manifest.directory.resolve(), saved.counters, saved.world_size)
