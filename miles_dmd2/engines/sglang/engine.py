"""The SGLang engine: `RolloutEngine` over one or more SGLang diffusion servers.

The facade is synchronous and has one event loop for its life, so that connections persist. A server that dies is
started again, gets the weights that are served, proves them, and takes requests again; see `pool`. No sample
comes from other weights than those loaded last: every reply names its weights' digest.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from miles_dmd2.algo import add_noise
from miles_dmd2.engines.base import (
    EngineError,
    RolloutEngine,
    check_real_latents,
    check_requests,
    check_samples,
    check_update,
)
from miles_dmd2.engines.sglang.calls import Calls
from miles_dmd2.engines.sglang.http import Transport
from miles_dmd2.engines.sglang.pool import TROUBLE, Job, Link, Pool, SGLangSettings, State
from miles_dmd2.engines.sglang.server import Server
from miles_dmd2.engines.sglang.weights import Push, WeightStore, in_memory, on_disk
from miles_dmd2.engines.sglang.wire import Answer, Ask, parse_conditioning, parse_rollout
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.types import Conditioning, RolloutRequest, RolloutSample, WeightUpdate, WeightVersion

__all__ = ["SGLangEngine", "SGLangSettings"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SGLangEngine(RolloutEngine):
    """`RolloutEngine` over servers that someone else owns: `close` leaves them running. Calls are not thread-safe.

    A server without the plugin is asked for whole rollouts, which are cut here: it must sample on the request's own
    grid, costs N forwards a sample (which `forward_count` counts) and a decode, cannot sleep on a CPU, and proves
    nothing about its weights. Conditioning records are shared, as in `LocalEngine`.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        servers: Sequence[Server],
        settings: SGLangSettings | None = None,
        *,
        checkpoint_version: WeightVersion | None = None,
        real_latents: Tensor | None = None,
    ) -> None:
        """Shakes hands with every server; awake. EngineError: one cannot be used, and why.

        checkpoint_version: the servers' own weights may be served, under this version, before any push. real_latents:
        `[n, *latent]` that requests name by row; the noised one is sent with its request.
        """
        if not servers:
            raise ValueError("an SGLang engine needs at least one server")
        self._adapter = adapter
        self._settings = settings or SGLangSettings()
        self._shapes = adapter.weight_shapes()
        self._real_latents = real_latents
        self._store: WeightStore | None = None
        self._prompts: OrderedDict[str, Conditioning] = OrderedDict()  # one canvas to an engine: the prompt is the key
        self._version = checkpoint_version
        self._checksum: str | None = None
        self._current: Push | None = None
        self._lost: str | None = None  # why nobody knows what the servers serve
        self._syncs = 0
        self._forwards = 0
        self._asleep = False
        self._closed = False
        self._runner = asyncio.Runner()
        try:
            self._run(self._open(servers))
        except BaseException:
            self._runner.close()
            raise

    async def _leave(self) -> None:
        """Servers of others go on being of use to them; ours are about to be stopped."""
        try:
            if self._asleep:
                for link in [link for link in self._pool.up() if not link.server.managed]:
                    await self._calls.wake(link)
        except TROUBLE as error:
            logger.warning("a server is left asleep: %s", error)
        finally:
            await self._transport.close()

    async def _open(self, servers: Sequence[Server]) -> None:
        self._transport = Transport(self._settings.request_timeout)
        self._calls = Calls(self._adapter, self._settings, self._transport)
        self._pool = Pool(servers, self._settings, self._transport, self._prepare)
        try:
            await self._pool.start()
        except BaseException:
            await self._transport.close()
            raise

    async def _prepare(self, link: Link) -> None:
        """All that a server that has just been started, or is another one, needs before it may answer."""
        link.capabilities = await self._calls.shake_hands(link)
        if link.capabilities.sleeping:
            await self._calls.wake(link)
        if self._current is not None:
            await self._calls.install(link, self._current, verify=True)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> WeightVersion | None:
        return None if self._lost is not None else self._version

    @property
    def weight_checksum(self) -> str | None:
        return None if self._lost is not None else self._checksum

    @property
    def forward_count(self) -> int:
        return self._forwards

    @property
    def asleep(self) -> bool:
        return self._asleep

    @property
    def faults(self) -> Mapping[str, int]:
        """Since the start: attempts that failed ("faults") or were made again ("retries"), "restarts" of servers, and
        servers "dropped" for good."""
        return dict(self._pool.faults)

    # -- sleep -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Also starts again what died asleep."""
        self._check_open()
        if self._asleep:
            self._run(self._wake())
            self._asleep = False

    def sleep(self) -> None:
        """A server of ours that does not confirm is ended, and started again by `wake`: others want the device now.

        EngineError: one that somebody else started answers, but does not confirm.
        """
        self._check_awake()
        self._run(self._sleep())
        self._asleep = True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._prompts.clear()
            try:
                self._run(self._leave())
            finally:
                self._runner.close()
                if self._store is not None:
                    self._store.close()

    async def _sleep(self) -> None:
        await self._on_all("sleep", self._calls.sleep)
        await self._pool.end_unconfirmed("sleep")

    async def _wake(self) -> None:
        await self._on_all("wake", self._calls.wake)
        await self._pool.recover()

    async def _on_all(self, what: str, operation: Callable[[Link], Awaitable[None]]) -> None:
        failed = await self._pool.each(operation)
        for link, error in failed.items():
            plugin = "" if link.capabilities.plugin else " (on a CPU this needs the miles_dmd2 plugin)"
            raise EngineError(f"{link.url} does not {what}{plugin}: {error}") from error

    # -- generate --------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutSample]:
        self._check_awake()
        if self._lost is not None:
            raise EngineError(f"no weights: {self._lost}; load some")
        if self._version is None:
            raise EngineError("no weights yet: push some with load_weights, or name a checkpoint_version")
        check_requests(requests)
        check_real_latents(requests, self._real_latents)
        self._check_hops(requests)
        self._check_cut(requests)
        return self._run(self._generate(requests, self._version))

    def conditioning(self, prompts: Sequence[str]) -> list[Conditioning]:
        self._check_awake()
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._prompts]
        return self._records(prompts, self._run(self._encode(new)) if new else {})

    async def _generate(self, requests: Sequence[RolloutRequest], version: WeightVersion) -> list[RolloutSample]:
        jobs: list[Job[Answer]] = []
        asked: set[str] = set(self._prompts)
        for request in requests:
            jobs.append(self._job(request, conditioning=request.prompt not in asked))
            asked.add(request.prompt)
        await self._pool.run(jobs)
        answers = [job.get() for job in jobs]
        new = {r.prompt: a.cond for r, a in zip(requests, answers, strict=True) if a.cond is not None}
        conds = self._records([request.prompt for request in requests], new)
        samples = [
            RolloutSample(
                sample_id=request.sample_id,
                prompt=request.prompt,
                seed=request.seed,
                stop_step=request.stop_step,
                sigmas=torch.tensor(request.sigmas, dtype=torch.float32),
                x_k=answer.x_k,
                x0=answer.x0,
                cond=cond,
                weight_version=version,
                media=answer.media,
                audio=answer.audio,
                audio_sample_rate=answer.audio_sample_rate,
            )
            for request, answer, cond in zip(requests, answers, conds, strict=True)
        ]
        check_samples(requests, samples)
        return samples

    async def _encode(self, prompts: Sequence[str]) -> dict[str, Conditioning]:
        """One forward each, whose sample is thrown away: a server has no call for an embedding alone."""
        jobs = [self._conditioning_job(prompt) for prompt in prompts]
        await self._pool.run(jobs)
        return {prompt: job.get() for prompt, job in zip(prompts, jobs, strict=True)}

    def _records(self, prompts: Sequence[str], new: Mapping[str, Conditioning]) -> list[Conditioning]:
        """The prompts' conditioning, new or kept; the least recently used beyond the cache size are dropped after."""
        self._prompts.update(new)
        for prompt in prompts:
            self._prompts.move_to_end(prompt)
        records = [self._prompts[prompt] for prompt in prompts]
        while len(self._prompts) > self._settings.prompt_cache_size:
            self._prompts.popitem(last=False)
        return records

    def _job(self, request: RolloutRequest, *, conditioning: bool) -> Job[Answer]:
        sent, start = self._on_the_wire(request)

        async def work(link: Link, attempt: int) -> Answer:
            client_id = f"{request.sample_id}.{attempt}.{secrets.token_hex(8)}"
            digest = None if self._current is None else self._current.digest
            ask = Ask(sent, client_id, digest, link.capabilities.plugin, conditioning, start=start)
            answer = await self._calls.ask(link, ask, parse_rollout)
            self._forwards += answer.forwards
            return answer

        return Job(f"sample {request.sample_id}", work)

    def _on_the_wire(self, request: RolloutRequest) -> tuple[RolloutRequest, Tensor | None]:
        """The request as a server can serve it: a real latent is noised here, and its one step is a grid of its own."""
        if request.real_latent is None:
            return request, None
        assert self._real_latents is not None
        sigma = request.sigmas[request.stop_step]
        noise = self._adapter.initial_noise(request.seed).unsqueeze(0)
        real = self._real_latents[request.real_latent].unsqueeze(0)
        levels = self._adapter.part_sigmas(torch.tensor([sigma], dtype=torch.float32))
        x_k = add_noise(real, noise, self._adapter.spread(levels))[0]
        return replace(request, sigmas=(sigma, 0.0), stop_step=0, real_latent=None, sample_type="ode"), x_k

    def _conditioning_job(self, prompt: str) -> Job[Conditioning]:
        request = RolloutRequest(0, prompt, 0, (1.0, 0.0), 0)

        async def work(link: Link, attempt: int) -> Conditioning:
            client_id = f"conditioning.{attempt}.{secrets.token_hex(8)}"
            ask = Ask(request, client_id, None, link.capabilities.plugin, conditioning=True)
            return await self._calls.ask(link, ask, parse_conditioning)

        return Job(f"the conditioning of {prompt!r:.80}", work)

    def _check_hops(self, requests: Sequence[RolloutRequest]) -> None:
        """ValueError: a way from step to step that the family's servers do not go."""
        for request in requests:
            if request.sample_type not in self._adapter.sample_types:
                raise ValueError(
                    f"request for sample {request.sample_id}: {self._adapter.family} is rolled out by "
                    f"{' or '.join(self._adapter.sample_types)}, not {request.sample_type}"
                )

    def _check_cut(self, requests: Sequence[RolloutRequest]) -> None:
        """EngineError: what a server without the plugin cannot do."""
        stock = [link.url for link in self._pool.links if not link.capabilities.plugin and link.state is not State.GONE]
        for request in requests if stock else ():
            if request.sample_type != "ode" or request.real_latent is not None:
                why = "rolls out from noise by Euler steps only"
            elif request.sigmas[0] != 1:
                why = f"starts at sigma 1, not at {request.sigmas[0]}"
            elif request.decode and request.stop_step != len(request.sigmas) - 2:
                why = f"decodes the last step's picture only, not that of step {request.stop_step}"
            else:
                continue
            raise EngineError(f"sample {request.sample_id}: {stock[0]} runs without the miles_dmd2 plugin and {why}")

    # -- weights ---------------------------------------------------------------------------------------------

    def load_weights(self, update: WeightUpdate, tensors: Mapping[str, Tensor]) -> None:
        """Send, then proof: the engine's digest of every parameter (see `verify_every`) and always the probe.

        On failure the weights before are put back, with proof. Where that fails, or this call is interrupted, the
        engine has no weights until the next success.
        """
        self._check_awake()
        check_update(update, tensors, self._shapes)
        push = self._push(update, tensors)
        self._run(self._load(push))

    def _push(self, update: WeightUpdate, tensors: Mapping[str, Tensor]) -> Push:
        """As the servers take them: their names, and in bf16 what they keep in no more."""
        sent = self._adapter.serving.weights(tensors)
        predicted = None
        if self._syncs % self._settings.verify_every == 0:
            predicted = self._adapter.serving.predicted(tensors, self._settings.forward_dtype)
        servers = [link.capabilities for link in self._pool.links if link.state is not State.GONE]
        exact = self._adapter.serving.exact_names if self._settings.forward_dtype == "bf16" else None
        if servers and all(server.all_bf16 for server in servers):
            exact = frozenset()
        if exact is not None:
            sent = {name: value if name in exact else value.to(torch.bfloat16) for name, value in sent.items()}
        if self._settings.weight_sync == "tensor":
            return replace(in_memory(update, sent), predicted=predicted)
        if self._store is None:
            self._store = WeightStore(self._settings.weight_directory, sum(value.nbytes for value in sent.values()))
        return replace(on_disk(update, sent, self._store), predicted=predicted)

    async def _load(self, push: Push) -> None:
        verify = self._syncs % self._settings.verify_every == 0
        lost, self._lost = self._lost, f"loading {push.update.version} was interrupted"
        failed: dict[Link, Exception] = {}
        sent = False
        while not sent and not failed:  # again only when every server died of it, or meanwhile
            await self._pool.recover()
            failed = await self._pool.each(lambda link: self._calls.install(link, push, verify=verify))
            sent = bool(self._pool.up())
        if failed:
            self._lost = await self._put_back(push, lost)
            self._discard(push)
            link, error = next(iter(failed.items()))
            raise EngineError(_refusal(push, link, error)) from error
        before, self._current, self._lost = self._current, push, None
        self._version, self._checksum = push.update.version, push.update.checksum
        self._syncs += 1
        self._discard(before)
        await self._pool.recover()

    async def _put_back(self, push: Push, lost: str | None) -> str | None:
        """Serve the weights before `push` again. Returns why there are none, or None if there are."""
        current = self._current
        if current is not None:
            failed = await self._pool.each(lambda link: self._calls.install(link, current, verify=True))
            if not failed:
                return None
            why = "; ".join(_refusal(current, link, error) for link, error in failed.items())
            lost = f"{push.update.version} was refused, and the weights before it cannot be put back: {why}"
        elif self._version is not None:
            lost = f"{push.update.version} was refused, and nothing was pushed before it"
        self._version = self._checksum = self._current = None
        self._discard(current)
        return lost

    def _discard(self, push: Push | None) -> None:
        if push is not None and push.directory is not None and self._store is not None:
            self._store.remove(push.directory)

    # -- pieces ----------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _check_awake(self) -> None:
        self._check_open()
        if self._asleep:
            raise EngineError("the engine is asleep: wake it first")


def _refusal(push: Push, link: Link, error: Exception) -> str:
    said = f"weights {push.update.version} refused"
    text = str(error)
    return f"{text} ({link.url})" if text.startswith(said) else f"{said} by {link.url}: {text}"
