"""Rollout engines as Ray actors, and the group of them that the driver talks to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from miles_dmd2.cluster.failures import introduce
from miles_dmd2.cluster.placement import Placement
from miles_dmd2.cluster.process import dtype_of, load_function, set_up
from miles_dmd2.cluster.runtime import wait
from miles_dmd2.cluster.server_worker import RemoteServer
from miles_dmd2.cluster.settings import EngineSettings
from miles_dmd2.cluster.wire import Array, PackedSamples, pack_samples, pack_tensors, unpack_samples, unpack_tensors
from miles_dmd2.data.latents import read_latents
from miles_dmd2.engines.base import RolloutEngine
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.engines.sglang.engine import SGLangEngine
from miles_dmd2.engines.sglang.server import ExternalServer, Server
from miles_dmd2.media.gallery import save_eval_media
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.observability import RunError
from miles_dmd2.types import Chunk, Conditioning, RolloutRequest, WeightKind, WeightUpdate

_CLOSE_SECONDS = 5.0  # for a client to remove what it wrote; the next run removes what one that is killed leaves


class EngineWorker:
    """A shell around one engine: packs what leaves the process, holds no logic of its own."""

    def __init__(self, index: int, settings: EngineSettings, server_workers: Sequence[Any] = ()) -> None:
        self._server_workers = server_workers
        self._adapter = set_up(f"engine_{index}", settings.worker)
        self._settings = settings
        self._metrics = load_function(settings.eval_metrics) if settings.eval_metrics else None
        self._reported_forwards = 0
        self._reported_faults: Counter[str] = Counter()

    def build(self) -> None:
        """Load (or meet the servers, which are up), go to sleep."""
        self._engine = build_engine(self._settings, self._adapter, self._server_workers)
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

    def conditioning(self, prompts: Sequence[str]) -> list[dict[str, Array]]:
        return [pack_tensors(cond) for cond in self._engine.conditioning(prompts)]

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

    def new_faults(self) -> dict[str, int]:
        """See `SGLangEngine.faults`; nothing for an engine that has no servers."""
        if not isinstance(self._engine, SGLangEngine):
            return {}
        total = Counter(self._engine.faults)
        new = {name: count - self._reported_faults[name] for name, count in total.items()}
        self._reported_faults = total
        return new

    def close(self) -> None:
        self._engine.close()


def build_engine(settings: EngineSettings, adapter: ModelAdapter, server_workers: Sequence[Any]) -> RolloutEngine:
    """The engine that `settings` ask for, awake. server_workers: actors whose servers are up, for SGLang."""
    worker = settings.worker
    latents = None if settings.latents is None else read_latents(settings.latents).latents
    if settings.client is None or settings.servers is None:
        return LocalEngine(
            adapter,
            device=worker.device,
            dtype=dtype_of(worker.forward_dtype),
            batch_size=settings.batch_size,
            real_latents=latents,
        )
    servers: list[Server] = [ExternalServer(url) for url in settings.servers.urls]
    for i, actor in enumerate(server_workers):  # the client is on the device of the first
        shared = "cuda" if i == 0 and worker.device == "cuda" else None
        servers.append(RemoteServer(actor, settings.servers.start_timeout, shared_device=shared))
    return SGLangEngine(adapter, servers, settings.client, real_latents=latents)


class RayEngineGroup:
    """`types.Engines` over engine actors; every request goes to one engine, contiguous shares of each window.

    With SGLang there is one actor: the client of all servers, which shares the requests among them itself.
    """

    def __init__(
        self, actors: Sequence[Any], start_timeout: float, phase_timeout: float, *, close_timeout: float = 0.0
    ) -> None:
        """close_timeout: seconds to end by themselves; 0: they have nothing to end."""
        self._actors = list(actors)
        self._close_timeout = close_timeout
        self._start_timeout = start_timeout
        self._timeout = phase_timeout
        self._samples = 0

    @classmethod
    def start(
        cls,
        count: int,
        settings: EngineSettings,
        placement: Placement,
        start_timeout: float,
        phase_timeout: float,
        server_workers: Sequence[Any] = (),
    ) -> RayEngineGroup:
        """Start engine i on the device of rank i, without waiting: see `build`."""
        worker = ray.remote(EngineWorker)
        clients = count if settings.servers is None else 1
        actors = [worker.options(**placement.options(i)).remote(i, settings, server_workers) for i in range(clients)]
        for i, actor in enumerate(actors):
            introduce(actor, f"engine_{i}", settings.worker.log_directory)
        close_timeout = 0.0 if settings.servers is None else _CLOSE_SECONDS
        return cls(actors, start_timeout, phase_timeout, close_timeout=close_timeout)

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

    def conditioning(self, prompts: Sequence[str]) -> list[Conditioning]:
        """The first engine's: all hold the same text encoder."""
        (packed,) = wait([self._actors[0].conditioning.remote(list(prompts))], self._timeout, "conditioning")
        return [unpack_tensors(arrays) for arrays in packed]

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
        faults: Counter[str] = Counter()
        for of_engine in self._all("new_faults"):
            faults.update(of_engine)
        counts = {"samples": samples, "forwards": sum(self._all("new_forwards")), **faults}
        return {name: float(count) for name, count in counts.items()}

    def dispose(self) -> None:
        if self._actors and self._close_timeout:
            closing = [actor.close.remote() for actor in self._actors]
            ray.wait(closing, num_returns=len(closing), timeout=self._close_timeout)
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _all(self, method: str) -> list[Any]:
        refs = [getattr(actor, method).remote() for actor in self._actors]
        return wait(refs, self._timeout, f"rollout engines: {method}")


def _share(window: Sequence[RolloutRequest], index: int, count: int) -> list[RolloutRequest]:
    """Contiguous share of engine `index`: sizes differ by one at most, and all shares together are the window."""
    return list(window[len(window) * index // count : len(window) * (index + 1) // count])
