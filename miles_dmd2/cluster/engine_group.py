"""Rollout engines as Ray actors, and the group of them that the driver talks to."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from miles_dmd2.cluster.failures import introduce
from miles_dmd2.cluster.placement import Placement
from miles_dmd2.cluster.process import dtype_of, set_up
from miles_dmd2.cluster.runtime import wait
from miles_dmd2.cluster.server_worker import RemoteServer
from miles_dmd2.cluster.settings import EngineSettings
from miles_dmd2.cluster.wire import Array, PackedSamples, pack_samples, pack_tensors, unpack_samples, unpack_tensors
from miles_dmd2.config.functions import load_function
from miles_dmd2.data.latents import read_latents
from miles_dmd2.engines.base import RolloutEngine
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.engines.sglang.engine import SGLangEngine
from miles_dmd2.engines.sglang.server import ExternalServer, Server
from miles_dmd2.media.gallery import save_eval_media
from miles_dmd2.media.store import EvalMedia
from miles_dmd2.media.video import MediaError
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.observability import RunError
from miles_dmd2.rewards import Rewards
from miles_dmd2.types import Chunk, Conditioning, RolloutRequest, RolloutSample, WeightKind, WeightUpdate, WeightVersion

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0  # for a client to remove what it wrote; the next run removes what one that is killed leaves


class EngineWorker:
    """A shell around one engine: packs what leaves the process, holds no logic of its own."""

    def __init__(self, index: int, settings: EngineSettings, server_workers: Sequence[Any] = ()) -> None:
        self._server_workers = server_workers
        self._adapter = set_up(f"engine_{index}", settings.worker)
        self._settings = settings
        self._metrics = load_function(settings.eval_metrics) if settings.eval_metrics else None
        self._rewards = Rewards(settings.reward)
        self._new_rewards: list[float] = []
        self._sheets: list[str] = []  # contact sheets that could not be written
        self._media = EvalMedia(settings.kept_media) if settings.kept_media and index == 0 else None
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

    def generate(
        self, windows: Sequence[Sequence[RolloutRequest]], *, for_eval: bool = False
    ) -> tuple[int | PackedSamples, ...]:
        """The number of samples, then one value per window: each is an object of its own (`num_returns`).

        So the driver learns of success without fetching a tensor, and a reader of one window fetches only that.
        Scored here; media and sound travel on for evals alone.
        """
        # A reward reads media: then one window's at a time are held, otherwise engines batch over windows.
        together = [[window] for window in windows] if self._rewards.active else [windows]
        packed: list[PackedSamples] = []
        for part in together:
            requests = [request for window in part for request in window]
            samples = self._rewards.score(requests, self._engine.generate(requests))
            if not for_eval:
                self._new_rewards += [sample.reward for sample in samples]
                samples = [without_media(sample) for sample in samples]
            for window in part:
                packed.append(pack_samples(samples[: len(window)]))
                samples = samples[len(window) :]
        return sum(map(len, windows)), *packed

    def evaluate(self, parts: Sequence[Any], rollout_id: int, kind: WeightKind) -> dict[str, float]:
        """Pictures and figures of an eval whose samples came from any engine. Files are written afterwards."""
        samples = [sample for part in ray.get(list(parts)) for sample in unpack_samples(part)]
        figures = {"reward": statistics.fmean(sample.reward for sample in samples)} if self._rewards.active else {}
        if self._media is not None:
            self._media.keep(samples, rollout_id, kind)
        try:
            save_eval_media(samples, self._settings.media_directory, rollout_id, kind)
        except (MediaError, OSError) as error:  # a full disk: it costs the file, not the training
            logger.exception("the contact sheet of the %s eval at rollout %d was not written", kind, rollout_id)
            self._sheets.append(f"the contact sheet of the {kind} eval at rollout {rollout_id} is missing: {error}")
        return figures | (dict(self._metrics(samples)) if self._metrics else {})

    def media_failures(self) -> list[str]:
        """Evals so far whose files are not complete."""
        return self._sheets + ([] if self._media is None else self._media.failures())

    def settled_media(self) -> list[str]:
        """The same, when all files so far are written."""
        return self._sheets + ([] if self._media is None else self._media.settled())

    def finish_media(self) -> list[str]:
        """The same, when the last file is written: nothing is evaluated afterwards."""
        return self._sheets + ([] if self._media is None else self._media.finish())

    def new_rewards(self) -> list[float]:
        """Of training samples since the last call."""
        new, self._new_rewards = self._new_rewards, []
        return new

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
    own = WeightVersion(0) if settings.own_weights else None
    if settings.client is None or settings.servers is None:
        return LocalEngine(
            adapter,
            device=worker.device,
            dtype=dtype_of(worker.forward_dtype),
            batch_size=settings.batch_size,
            checkpoint_version=own,
            real_latents=latents,
        )
    servers: list[Server] = [ExternalServer(url) for url in settings.servers.urls]
    for i, actor in enumerate(server_workers):  # the client is on the device of the first
        shared = "cuda" if i == 0 and worker.device == "cuda" else None
        servers.append(RemoteServer(actor, f"server_{i}", settings.servers.start_timeout, shared_device=shared))
    return SGLangEngine(adapter, servers, settings.client, checkpoint_version=own, real_latents=latents)


class RayEngineGroup:
    """`types.Engines` over engine actors; every request goes to one engine, contiguous shares of each window.

    With SGLang there is one actor: the client of all servers, which shares the requests among them itself.
    """

    def __init__(
        self, actors: Sequence[Any], start_timeout: float, phase_timeout: float, *, close_timeout: float = 0.0
    ) -> None:
        """close_timeout: seconds to end by themselves; 0: they have nothing to end.

        media_failures: one line for each eval whose files are not complete, as far as it is known; when disposed, all.
        """
        self._actors = list(actors)
        self._close_timeout = close_timeout
        self._start_timeout = start_timeout
        self._timeout = phase_timeout
        self._samples = 0
        self._idle = True  # False: a call has failed, or is abandoned, and may still run
        self._evaluated = False
        self._told = 0  # of the engine's failures to write files
        self.media_failures: list[str] = []

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
        served = self._wait([actor.load_weights.remote(slim, update.payload) for actor in self._actors], "weight sync")
        if set(served) != {update.checksum}:
            raise RunError(f"weight sync: the actor exported {update.checksum}, engines serve {sorted(set(served))}")

    def conditioning(self, prompts: Sequence[str]) -> list[Conditioning]:
        """The first engine's: all hold the same text encoder."""
        (packed,) = self._wait([self._actors[0].conditioning.remote(list(prompts))], "conditioning")
        return [unpack_tensors(arrays) for arrays in packed]

    def generate(self, windows: Sequence[Sequence[RolloutRequest]]) -> tuple[tuple[Chunk, ...], ...]:
        chunks = self._generate(windows)
        self._samples += sum(len(chunk.sample_ids) for window in chunks for chunk in window)
        return chunks

    def _generate(
        self, windows: Sequence[Sequence[RolloutRequest]], *, for_eval: bool = False
    ) -> tuple[tuple[Chunk, ...], ...]:
        chunks: list[list[Chunk]] = [[] for _ in windows]
        counts = []
        for i, actor in enumerate(self._actors):
            shares = [_share(window, i, len(self._actors)) for window in windows]
            filled = [w for w, share in enumerate(shares) if share]
            if not filled:
                continue
            task = actor.generate.options(num_returns=len(filled) + 1)
            count, *parts = task.remote([shares[w] for w in filled], for_eval=for_eval)
            counts.append(count)
            for w, part in zip(filled, parts, strict=True):
                chunks[w].append(Chunk(tuple(request.sample_id for request in shares[w]), part))
        self._wait(counts, "evaluation" if for_eval else "rollout")
        return tuple(map(tuple, chunks))

    def evaluate(self, requests: Sequence[RolloutRequest], rollout_id: int, kind: WeightKind) -> Mapping[str, float]:
        (chunks,) = self._generate([requests], for_eval=True)
        parts = [chunk.payload for chunk in chunks]
        (figures,) = self._wait([self._actors[0].evaluate.remote(parts, rollout_id, kind)], "evaluation")
        self._all("new_forwards")  # eval forwards are not part of the training budget
        self._evaluated = True
        self._tell("media_failures", self._timeout)
        return dict(figures)

    def metrics(self) -> Mapping[str, float]:
        samples, self._samples = self._samples, 0
        faults: Counter[str] = Counter()
        for of_engine in self._all("new_faults"):
            faults.update(of_engine)
        counts = {"samples": samples, "forwards": sum(self._all("new_forwards")), **faults}
        figures = {name: float(count) for name, count in counts.items()}
        rewards = [reward for of_engine in self._all("new_rewards") for reward in of_engine]
        return figures | ({"reward_mean": statistics.fmean(rewards)} if rewards else {})

    def settle(self) -> None:
        """See `types.Engines`. Not long for an engine that fails or is busy: it is told by its next call."""
        if self._evaluated:
            self._tell_or_doubt("settled_media")

    def _tell_or_doubt(self, method: str) -> None:
        """Not raised: whatever ends the run here is told by others, and training may be whole."""
        try:
            self._tell(method, self._timeout if self._idle else _CLOSE_SECONDS)
        except RunError as error:
            self.media_failures.append(f"the files of the last eval may not be complete: {error}")
            logger.warning("%s", self.media_failures[-1])

    def _tell(self, method: str, timeout: float) -> None:
        """Keep and log what is new of the eval files that are not there."""
        (failures,) = self._wait([getattr(self._actors[0], method).remote()], "files of the evals", timeout)
        for failure in failures[self._told :]:
            self.media_failures.append(failure)
            logger.warning("%s", failure)
        self._told = len(failures)

    def dispose(self) -> None:
        """Waits for the last file of the evals; see `media_failures`. Not long for engines that fail or are busy."""
        try:
            if self._actors and self._evaluated:
                self._tell_or_doubt("finish_media")
        finally:
            self._end()

    def _end(self) -> None:
        if self._actors and self._close_timeout:
            closing = [actor.close.remote() for actor in self._actors]
            ray.wait(closing, num_returns=len(closing), timeout=self._close_timeout)
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _all(self, method: str) -> list[Any]:
        refs = [getattr(actor, method).remote() for actor in self._actors]
        return self._wait(refs, f"rollout engines: {method}")

    def _wait(self, refs: Sequence[Any], what: str, timeout: float | None = None) -> list[Any]:
        self._idle = False
        answers = wait(refs, self._timeout if timeout is None else timeout, what)
        self._idle = True
        return answers


def without_media(sample: RolloutSample) -> RolloutSample:
    return replace(sample, media=None, audio=None, audio_sample_rate=None)


def _share(window: Sequence[RolloutRequest], index: int, count: int) -> list[RolloutRequest]:
    """Contiguous share of engine `index`: sizes differ by one at most, and all shares together are the window."""
    return list(window[len(window) * index // count : len(window) * (index + 1) // count])
