"""Rollout engines as Ray actors, and the group of them that the driver talks to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from miles_dmd2.cluster.failures import introduce
from miles_dmd2.cluster.placement import Placement
from miles_dmd2.cluster.process import dtype_of, load_function, set_up
from miles_dmd2.cluster.runtime import wait
from miles_dmd2.cluster.settings import EngineSettings
from miles_dmd2.cluster.wire import Array, PackedSamples, pack_samples, unpack_samples, unpack_tensors
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.media.gallery import save_eval_media
from miles_dmd2.observability import RunError
from miles_dmd2.types import Chunk, RolloutRequest, WeightKind, WeightUpdate


class EngineWorker:
    """A shell around one engine: packs what leaves the process, holds no logic of its own."""

    def __init__(self, index: int, settings: EngineSettings) -> None:
        self._adapter = set_up(f"engine_{index}", settings.worker)
        self._settings = settings
        self._metrics = load_function(settings.eval_metrics) if settings.eval_metrics else None
        self._reported_forwards = 0

    def build(self) -> None:
        """Load, go to sleep."""
        worker = self._settings.worker
        self._engine = LocalEngine(
            self._adapter,
            device=worker.device,
            dtype=dtype_of(worker.forward_dtype),
            batch_size=self._settings.batch_size,
        )
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def sleep(self) -> None:
        self._engine.sleep()

    def load_weights(self, update: WeightUpdate, arrays: Mapping[str, Array]) -> str:
        """Returns the checksum that this engine now serves."""
        self._engine.load_weights(update, unpack_tensors(arrays))
        assert self._engine.weight_checksum is not None
        return self._engine.weight_checksum

    def generate(self, windows: Sequence[Sequence[RolloutRequest]]) -> tuple[int | PackedSamples, ...]:
        """The number of samples, then one value per window: each is an object of its own (`num_returns`).

        So the driver learns of success without fetching a tensor, and a reader of one window fetches only that.
        """
        samples = self._engine.generate([request for window in windows for request in window])
        packed: list[int | PackedSamples] = [len(samples)]
        for window in windows:
            packed.append(pack_samples(samples[: len(window)]))
            samples = samples[len(window) :]
        return tuple(packed)

    def evaluate(self, parts: Sequence[Any], rollout_id: int, kind: WeightKind) -> dict[str, float]:
        """Pictures and figures of an eval whose samples came from any engine."""
        samples = [sample for part in ray.get(list(parts)) for sample in unpack_samples(part)]
        save_eval_media(samples, self._settings.media_directory, rollout_id, kind)
        return dict(self._metrics(samples)) if self._metrics else {}

    def new_forwards(self) -> int:
        total = self._engine.forward_count
        new, self._reported_forwards = total - self._reported_forwards, total
        return new


class RayEngineGroup:
    """`types.Engines` over engine actors; every request goes to one engine, contiguous shares of each window."""

    def __init__(self, actors: Sequence[Any], start_timeout: float, phase_timeout: float) -> None:
        self._actors = list(actors)
        self._start_timeout = start_timeout
        self._timeout = phase_timeout
        self._samples = 0

    @classmethod
    def start(
        cls, count: int, settings: EngineSettings, placement: Placement, start_timeout: float, phase_timeout: float
    ) -> RayEngineGroup:
        """Start engine i on the device of rank i, without waiting: see `build`."""
        worker = ray.remote(EngineWorker)
        actors = [worker.options(**placement.options(i)).remote(i, settings) for i in range(count)]
        for i, actor in enumerate(actors):
            introduce(actor, f"engine_{i}", settings.worker.log_directory)
        return cls(actors, start_timeout, phase_timeout)

    def build(self) -> None:
        """Let the engines load; returns when all are asleep."""
        refs = [actor.build.remote() for actor in self._actors]
        wait(refs, self._start_timeout, "start of the rollout engines")

    def wake(self) -> None:
        self._all("wake")

    def sleep(self) -> None:
        self._all("sleep")

    def load_weights(self, update: WeightUpdate) -> None:
        slim = WeightUpdate(update.version, update.checksum, update.probe, None)
        served = wait(
            [actor.load_weights.remote(slim, update.payload) for actor in self._actors], self._timeout, "weight sync"
        )
        if set(served) != {update.checksum}:
            raise RunError(f"weight sync: the actor exported {update.checksum}, engines serve {sorted(set(served))}")

    def generate(self, windows: Sequence[Sequence[RolloutRequest]]) -> tuple[tuple[Chunk, ...], ...]:
        chunks: list[list[Chunk]] = [[] for _ in windows]
        counts = []
        for i, actor in enumerate(self._actors):
            shares = [_share(window, i, len(self._actors)) for window in windows]
            filled = [w for w, share in enumerate(shares) if share]
            if not filled:
                continue
            task = actor.generate.options(num_returns=len(filled) + 1)
            count, *parts = task.remote([shares[w] for w in filled])
            counts.append(count)
            for w, part in zip(filled, parts, strict=True):
                chunks[w].append(Chunk(tuple(request.sample_id for request in shares[w]), part))
        self._samples += sum(wait(counts, self._timeout, "rollout"))
        return tuple(map(tuple, chunks))

    def evaluate(self, requests: Sequence[RolloutRequest], rollout_id: int, kind: WeightKind) -> Mapping[str, float]:
        samples_before = self._samples
        (chunks,) = self.generate([requests])
        self._samples = samples_before
        (figures,) = wait(
            [self._actors[0].evaluate.remote([chunk.payload for chunk in chunks], rollout_id, kind)],
            self._timeout,
            "evaluation",
        )
        self._all("new_forwards")  # eval forwards are not part of the training budget
        return dict(figures)

    def metrics(self) -> Mapping[str, float]:
        samples, self._samples = self._samples, 0
        return {"samples": float(samples), "forwards": float(sum(self._all("new_forwards")))}

    def dispose(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _all(self, method: str) -> list[Any]:
        refs = [getattr(actor, method).remote() for actor in self._actors]
        return wait(refs, self._timeout, f"rollout engines: {method}")


def _share(window: Sequence[RolloutRequest], index: int, count: int) -> list[RolloutRequest]:
    """Contiguous share of engine `index`: sizes differ by one at most, and all shares together are the window."""
    return list(window[len(window) * index // count : len(window) * (index + 1) // count])
