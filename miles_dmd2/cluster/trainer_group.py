"""Trainers as Ray actors, and the group of ranks that the driver talks to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from torch import nn

from miles_dmd2.checkpointing import merge_states
from miles_dmd2.cluster.failures import introduce
from miles_dmd2.cluster.placement import Placement
from miles_dmd2.cluster.process import dtype_of, set_up
from miles_dmd2.cluster.runtime import wait
from miles_dmd2.cluster.settings import SavedState, TrainerJob
from miles_dmd2.cluster.wire import (
    Array,
    PackedScores,
    pack_scores,
    pack_tensors,
    unpack_samples,
    unpack_scores,
    unpack_tensors,
)
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.registry import build_adapter
from miles_dmd2.training.actor import ActorTrainer
from miles_dmd2.training.batching import wanted_ids
from miles_dmd2.training.critic import CriticTrainer
from miles_dmd2.training.distributed import Ranks, init_ranks, join_rendezvous, open_rendezvous
from miles_dmd2.training.optimizer import OptimizerSettings
from miles_dmd2.training.scoring import Guidance, ScoreSigma
from miles_dmd2.training.trainer import TrainerSettings
from miles_dmd2.types import (
    Chunk,
    Conditioning,
    GroupState,
    Role,
    RolloutBatch,
    RolloutSample,
    TrainResult,
    WeightKind,
    WeightUpdate,
    WeightVersion,
)

Windows = list[list[int]]


class TrainerWorker:
    """A shell around one trainer rank: fetches and packs what crosses the process, holds no logic of its own."""

    def __init__(self, rank: int, job: TrainerJob) -> None:
        self._rank, self._job = rank, job
        self._adapter = set_up(f"{job.spec.name}_{rank}", job.worker)
        self._store: Any = None

    def open_rendezvous(self) -> tuple[str, int]:
        """Rank 0: listen where the other ranks can reach this process; returns (host, port)."""
        host = "127.0.0.1" if self._job.worker.single_node else ray.util.get_node_ip_address()
        self._store = open_rendezvous(host, self._job.spec.num_ranks, self._job.start_timeout)
        return host, self._store.port

    def join(self, host: str, port: int) -> None:
        """Become a rank of the group. A collective."""
        spec = self._job.spec
        store = self._store or join_rendezvous(host, port, spec.num_ranks, self._job.start_timeout)
        self._ranks = init_ranks(
            self._rank,
            spec.num_ranks,
            store=store,
            device=self._job.worker.device,
            timeout_s=self._job.collective_timeout,
        )

    def build(self, saved: SavedState | None, uncond: dict[str, Array] | None) -> None:
        """Load networks (and a checkpoint's state), go to sleep. No collective: ranks may take turns."""
        cond = None if uncond is None else unpack_tensors(uncond)
        self._trainer = build_trainer(self._job, self._adapter, self._ranks, cond)
        if saved is not None:
            self._trainer.load(saved.directory, saved.counters, saved.world_size)
        self._trainer.sleep()

    def wake(self) -> None:
        self._trainer.wake()

    def sleep(self) -> None:
        self._trainer.sleep()

    def train(
        self,
        rollout_id: int,
        version: WeightVersion,
        windows: Windows,
        chunks: Sequence[Chunk],
        external: Sequence[Any],
        student_step: bool,
    ) -> tuple[dict[str, float], PackedScores | None]:
        """Two values (`num_returns`): metrics for the driver, scores for whoever is handed them.

        ValueError: samples of another student than `version`, which is what the engines were told to serve.
        """
        samples = self._fetch(windows, chunks)
        foreign = {str(sample.weight_version) for sample in samples if sample.weight_version != version}
        if foreign:
            raise ValueError(
                f"rollout {rollout_id} was to be of {version}, samples are of {', '.join(sorted(foreign))}"
            )
        if isinstance(self._trainer, CriticTrainer):
            metrics, scores = self._trainer.train(rollout_id, windows, samples, score=student_step)
            return metrics, pack_scores(scores)
        handed = [unpack_scores(packed) for packed in ray.get(list(external)) if packed is not None]
        return self._trainer.train(rollout_id, windows, samples, handed), None

    def export_weights(self, kinds: Sequence[WeightKind]) -> tuple[list[WeightUpdate] | dict[str, Array], ...]:
        """The updates without tensors, then one dictionary of arrays per kind, each an object of its own."""
        assert isinstance(self._trainer, ActorTrainer)
        updates = self._trainer.export_weights(kinds)
        slim = [replace(updates[kind], payload=None) for kind in kinds]
        return slim, *(pack_tensors(updates[kind].payload or {}) for kind in kinds)

    def save(self, directory: Path) -> GroupState:
        return self._trainer.save(directory)

    def _fetch(self, windows: Windows, chunks: Sequence[Chunk]) -> list[RolloutSample]:
        """This rank's samples: only the chunks that hold some of them are fetched."""
        wanted = set(wanted_ids(windows, self._rank, self._job.spec.num_ranks))
        refs = [chunk.payload for chunk in chunks if wanted & set(chunk.sample_ids)]
        samples = [sample for packed in ray.get(refs) for sample in unpack_samples(packed)]
        return [sample for sample in samples if sample.sample_id in wanted]


class RayTrainerGroup:
    """`types.TrainerGroup` over one worker per rank."""

    def __init__(self, job: TrainerJob, workers: Sequence[Any], start_timeout: float, phase_timeout: float) -> None:
        self._job, self._workers = job, list(workers)
        self._start_timeout, self._timeout = start_timeout, phase_timeout
        self._starting = f"start of the {job.spec.name} group"

    @classmethod
    def start(
        cls, job: TrainerJob, placement: Placement, start_timeout: float, phase_timeout: float
    ) -> RayTrainerGroup:
        """Start rank i on the device of rank i, without waiting: see `build`."""
        worker = ray.remote(TrainerWorker)
        workers = [worker.options(**placement.options(rank)).remote(rank, job) for rank in range(job.spec.num_ranks)]
        for rank, started in enumerate(workers):
            introduce(started, f"{job.spec.name}_{rank}", job.worker.log_directory)
        return cls(job, workers, start_timeout, phase_timeout)

    @property
    def name(self) -> str:
        return self._job.spec.name

    @property
    def role(self) -> Role:
        return self._job.spec.role

    @property
    def world_size(self) -> int:
        return len(self._workers)

    def build(self, saved: SavedState | None, uncond: Conditioning | None = None) -> None:
        """Introduce the ranks to each other and let them load; returns when all are asleep.

        A rank has whole networks in host memory until it has cut its part: of each node `load_at_once` load at a time.
        `uncond`: conditioning of a guided teacher's unconditional forward.
        """
        ((host, port),) = wait([self._workers[0].open_rendezvous.remote()], self._start_timeout, self._starting)
        wait([worker.join.remote(host, port) for worker in self._workers], self._start_timeout, self._starting)
        packed = None if uncond is None else pack_tensors(uncond)
        for first in range(0, self._job.ranks_per_node, self._job.load_at_once):
            turn = range(first, first + self._job.load_at_once)
            building = [
                worker.build.remote(saved, packed)
                for rank, worker in enumerate(self._workers)
                if rank % self._job.ranks_per_node in turn
            ]
            wait(building, self._start_timeout, self._starting)

    def wake(self) -> None:
        self._all("wake")

    def sleep(self) -> None:
        self._all("sleep")

    def train(self, batch: RolloutBatch, external: Mapping[str, tuple[Any, ...]]) -> TrainResult:
        windows = batch.windows[-1:] if self.role == "actor" else batch.windows
        ids = [[i for chunk in window for i in chunk.sample_ids] for window in windows]
        chunks = [chunk for window in windows for chunk in window]
        handed = [ref for refs in external.values() for ref in refs]
        metrics, scores = [], []
        for worker in self._workers:
            task = worker.train.options(num_returns=2)
            of_rank, scored = task.remote(
                batch.rollout_id, batch.weight_version, ids, chunks, handed, batch.student_step
            )
            metrics.append(of_rank)
            scores.append(scored)
        reduced = wait(metrics, self._timeout, f"rollout {batch.rollout_id}, {self.name} training")
        return TrainResult(reduced[0], tuple(scores) if self.role == "critic" else ())

    def export_weights(self) -> dict[WeightKind, WeightUpdate]:
        kinds: list[WeightKind] = ["raw", "ema"] if self._job.student_ema_decay else ["raw"]
        answers = [worker.export_weights.options(num_returns=1 + len(kinds)).remote(kinds) for worker in self._workers]
        updates = wait([answer[0] for answer in answers], self._timeout, f"export of the {self.name} weights")
        return {
            kind: replace(update, payload=payload)
            for kind, update, payload in zip(kinds, updates[0], answers[0][1:], strict=True)
        }

    def save(self, directory: Path) -> GroupState:
        return merge_states(self._all("save", directory.resolve()))

    def dispose(self) -> None:
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []

    def _all(self, method: str, *args: Any) -> list[Any]:
        refs = [getattr(worker, method).remote(*args) for worker in self._workers]
        return wait(refs, self._timeout, f"{self.name} group: {method}")


def _settings(job: TrainerJob) -> TrainerSettings:
    spec = job.spec
    return TrainerSettings(
        name=spec.name,
        seed=job.seed,
        optimizer=OptimizerSettings(
            lr=spec.lr,
            schedule=spec.lr_schedule,
            warmup_updates=spec.lr_warmup_updates,
            total_updates=spec.total_updates,
            beta1=spec.adam_beta1,
            beta2=spec.adam_beta2,
            eps=spec.adam_eps,
            weight_decay=spec.weight_decay,
            clip_grad=spec.clip_grad,
            max_skipped_steps=job.max_skipped_steps,
        ),
        micro_batch_size=spec.micro_batch_size,
        forward_dtype=dtype_of(job.worker.forward_dtype),
        gradient_checkpointing=job.gradient_checkpointing,
        lora=spec.lora,
        bad_batch_directory=job.bad_batch_directory,
    )


def build_trainer(
    job: TrainerJob, adapter: ModelAdapter, ranks: Ranks, uncond: Conditioning | None = None
) -> CriticTrainer | ActorTrainer:
    """This rank's trainer with its networks loaded, awake. `uncond`: for a guided teacher's unconditional forward."""
    if job.spec.role == "actor":
        return ActorTrainer(
            _settings(job),
            adapter,
            _start(job, adapter),
            ranks,
            ema_decay=job.student_ema_decay,
            max_x0_drift=job.max_x0_drift,
            ema_start=job.student_ema_start,
            normalizer=job.normalizer,
            normalizer_eps=job.normalizer_eps,
            part_weights=job.part_weights,
        )
    return CriticTrainer(
        _settings(job),
        adapter,
        _start(job, adapter),
        adapter.load_transformer() if job.spec.lora is None else None,
        ranks,
        score_sigma=_score_sigma(job),
        loss_space=job.critic_loss_space,
        scoring=job.critic_scoring,
        guidance=None if uncond is None else Guidance(job.teacher_guidance_scale, uncond),
        told_stop_steps=job.num_steps if job.tell_stop_step else None,
        part_weights=job.part_weights,
    )


def _score_sigma(job: TrainerJob) -> ScoreSigma:
    (lo, hi), (mean, std) = job.score_sigma_range, job.score_sigma_logit
    return ScoreSigma(lo, hi, job.score_shift, job.part_shifts, law=job.score_sigma_law, logit_mean=mean, logit_std=std)


def _start(job: TrainerJob, adapter: ModelAdapter) -> nn.Module:
    """The trained network as it begins: from the trainer's own checkpoint; the teacher is always the run's."""
    if job.spec.checkpoint.resolve() == adapter.checkpoint:
        return adapter.load_transformer()
    canvas = (adapter.height, adapter.width, adapter.num_frames)
    return build_adapter(job.spec.checkpoint, *canvas).load_transformer()
