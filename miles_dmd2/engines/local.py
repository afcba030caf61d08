"""The embedded engine: the family's own diffusers components in this process. It specifies what an engine is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from miles_dmd2.algo import forward_noise, rollout
from miles_dmd2.engines.base import (
    PROBE_TOLERANCE,
    EngineError,
    RolloutEngine,
    check_probe,
    check_real_latents,
    check_requests,
    check_samples,
    check_update,
)
from miles_dmd2.models.base import Components, ModelAdapter
from miles_dmd2.models.loading import eight_bit
from miles_dmd2.models.offload import Entry, Residence, held_bytes, module_entries
from miles_dmd2.models.weights import checksum
from miles_dmd2.types import Conditioning, Probe, RolloutRequest, RolloutSample, VideoDtype, WeightUpdate, WeightVersion


class LocalEngine(RolloutEngine):
    """`RolloutEngine` over a `ModelAdapter`. One request batch at a time; calls are not thread-safe.

    Samples are batched by (grid, stop step), at most `batch_size` to a forward. Within one batch composition results
    are bitwise repeatable; another composition differs by fp rounding. Conditioning records are shared between the
    samples of a prompt and with the engine's cache: read them, do not write into them.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        batch_size: int = 64,
        *,
        probe_tolerance: float | None = None,
        prompt_cache_size: int = 512,
        checkpoint_version: WeightVersion | None = None,
        weights: Mapping[str, Tensor] | None = None,
        real_latents: Tensor | None = None,
    ) -> None:
        """Loads the checkpoint's components and transformer onto `device`; awake.

        probe_tolerance: see PROBE_TOLERANCE, the default by dtype. checkpoint_version: serve the checkpoint's own
        weights under this version before any push (for sampling a teacher); without it `generate` needs a push first.
        weights: of the transformer, instead of the checkpoint's own.
        real_latents: `[n, *latent]` that requests name by row; they stay in host memory.
        ValueError: batch or cache size < 1, or what the adapter says about the checkpoint.
        """
        if batch_size < 1 or prompt_cache_size < 1:
            raise ValueError(f"batch_size and prompt_cache_size must be >= 1, got {batch_size}, {prompt_cache_size}")
        if dtype not in PROBE_TOLERANCE:
            raise ValueError(f"dtype must be one of {[str(d) for d in PROBE_TOLERANCE]}, got {dtype}")
        self._adapter = adapter
        self._device = torch.device(device)
        self._batch_size = batch_size
        self._tolerance = PROBE_TOLERANCE[dtype] if probe_tolerance is None else probe_tolerance
        components_dtype = torch.float32 if dtype == torch.float64 else dtype
        self._components: Components = adapter.load_components(components_dtype)
        self._transformer: nn.Module = adapter.load_transformer(dtype).requires_grad_(False)
        if weights is not None:
            self._transformer.load_state_dict(weights)
        for module in self._modules():
            module.to(self._device)
        self._residence = Residence(self._entries())
        self._prompts: OrderedDict[str, Conditioning] = OrderedDict()
        self._prompt_cache_size = prompt_cache_size
        self._real_latents = real_latents
        self._forwards = 0
        self._closed = False
        self._version = checkpoint_version
        self._checksum = checksum(self._transformer.state_dict()) if checkpoint_version is not None else None

    @property
    def weight_version(self) -> WeightVersion | None:
        return self._version

    @property
    def weight_checksum(self) -> str | None:
        return self._checksum

    @property
    def forward_count(self) -> int:
        return self._forwards

    @property
    def asleep(self) -> bool:
        return not self._residence.awake

    def device_bytes(self) -> int:
        """Bytes of weights on the working device: of student, text encoder and VAE; 0 while asleep."""
        return 0 if self._closed else held_bytes(*self._modules())

    def wake(self) -> None:
        self._check_open()
        self._residence.wake()

    def sleep(self) -> None:
        """Student, text encoder and VAE leave the device for (pinned) host memory."""
        self._check_awake()
        self._residence.sleep()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._residence = Residence([])
            self._prompts.clear()
            del self._components, self._transformer

    @torch.no_grad()
    def load_weights(self, update: WeightUpdate, tensors: Mapping[str, Tensor]) -> None:
        """Everything that can be checked before is; then copy in, compare the probe, and on any failure copy back."""
        self._check_awake()
        current = self._transformer.state_dict()
        check_update(update, tensors, {name: tuple(value.shape) for name, value in current.items()})
        previous = {name: value.to("cpu", copy=True) for name, value in current.items()}
        try:
            _copy_into(current, tensors)
            self._check_held(update, tensors, current)
            check_probe(update, self._probe_velocity(update.probe), self._tolerance)
        except BaseException as error:  # also when interrupted: never serve a mixture
            _copy_into(current, previous)
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            raise EngineError(f"weights {update.version} refused: cannot run their probe: {error!r}") from error
        self._version, self._checksum = update.version, update.checksum

    @torch.no_grad()
    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutSample]:
        self._check_awake()
        if self._version is None:
            raise EngineError("no weights yet: push some with load_weights, or name a checkpoint_version")
        check_requests(requests)
        check_real_latents(requests, self._real_latents)
        conds = self._conditioning([request.prompt for request in requests])
        samples: dict[int, RolloutSample] = {}
        for indices in _batches(requests, self._batch_size):
            batch = self._run([requests[i] for i in indices], [conds[i] for i in indices], self._version)
            samples.update(zip(indices, batch, strict=True))
        answer = [samples[i] for i in sorted(samples)]
        check_samples(requests, answer)
        return answer

    @torch.no_grad()
    def conditioning(self, prompts: Sequence[str]) -> list[Conditioning]:
        self._check_awake()
        return self._conditioning(prompts)

    def _run(
        self, requests: Sequence[RolloutRequest], conds: Sequence[Conditioning], version: WeightVersion
    ) -> list[RolloutSample]:
        """One batch of one grid, stop step and way to get there."""
        noise = torch.stack([self._adapter.initial_noise(request.seed) for request in requests]).to(self._device)
        sigmas = torch.tensor(requests[0].sigmas, dtype=torch.float32)
        cond = self._on_device(conds)

        def velocity(x: Tensor, sigma: Tensor) -> Tensor:
            self._forwards += x.shape[0]
            return self._adapter.velocity(self._transformer, x, sigma, cond)

        stop_step = requests[0].stop_step
        if requests[0].real_latent is not None:
            x_k, x0 = forward_noise(velocity, self._real(requests), noise, sigmas, stop_step)
        else:
            hops = self._hop_noise(requests) if requests[0].sample_type == "sde" else None
            x_k, x0 = rollout(velocity, noise, sigmas, stop_step, hop_noise=hops)
        decoded = [i for i, request in enumerate(requests) if request.decode]
        media = self._decode(x0, decoded, requests[0].video_dtype)
        return [
            RolloutSample(
                sample_id=request.sample_id,
                prompt=request.prompt,
                seed=request.seed,
                stop_step=request.stop_step,
                sigmas=sigmas,
                x_k=x_k[i].to("cpu", torch.float32, copy=True),  # a copy: a view would be sent with its whole batch
                x0=x0[i].to("cpu", torch.float32, copy=True),
                cond=conds[i],
                weight_version=version,
                media=media.get(i),
            )
            for i, request in enumerate(requests)
        ]

    def _real(self, requests: Sequence[RolloutRequest]) -> Tensor:
        rows = [request.real_latent for request in requests]
        assert self._real_latents is not None
        return self._real_latents[rows].to(self._device)

    def _hop_noise(self, requests: Sequence[RolloutRequest]) -> Tensor:
        """`[stop step, batch, *latent]`, each sample's from its own seed."""
        rows = [self._adapter.hop_noise(request.seed, request.stop_step) for request in requests]
        return torch.stack(rows, dim=1).to(self._device)

    def _decode(self, x0: Tensor, rows: Sequence[int], dtype: VideoDtype) -> dict[int, Tensor]:
        """Media of the batch's rows that asked for them; the VAE does not run for the others."""
        if not rows:
            return {}
        decoded = self._adapter.decode(self._components, x0[list(rows)]).cpu()
        if dtype == "uint8":
            decoded = eight_bit(decoded)
        return {row: picture.clone() for row, picture in zip(rows, decoded, strict=True)}

    def _conditioning(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Each distinct prompt is encoded once and kept; the least recently used beyond the cache size are dropped."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._prompts]
        if new:
            self._prompts.update(zip(new, self._adapter.encode_prompts(self._components, new), strict=True))
        for prompt in prompts:
            self._prompts.move_to_end(prompt)
        conds = [self._prompts[prompt] for prompt in prompts]
        while len(self._prompts) > self._prompt_cache_size:
            self._prompts.popitem(last=False)
        return conds

    def _check_held(self, update: WeightUpdate, sent: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        """What the transformer holds after the copy is what was sent, in this engine's dtype, bit for bit."""
        same_dtype = all(sent[name].dtype == value.dtype for name, value in held.items())
        cast = {name: sent[name].to(value.dtype) for name, value in held.items()}
        expected = update.checksum if same_dtype else checksum(cast)
        if checksum(held) != expected:
            raise EngineError(f"weights {update.version} refused: the copy that the engine holds differs from them")

    def _probe_velocity(self, probe: Probe) -> Tensor:
        x, sigma = probe.x.to(self._device), probe.sigma.to(self._device)
        velocity = self._adapter.velocity(self._transformer, x, sigma, self._on_device([probe.cond]))
        return velocity.to("cpu", torch.float32)

    def _on_device(self, conds: Sequence[Conditioning]) -> dict[str, Tensor]:
        return {name: value.to(self._device) for name, value in self._adapter.collate(conds).items()}

    def _entries(self) -> list[Entry]:
        components = enumerate(self._components.modules())
        frozen = [entry for i, module in components for entry in module_entries(f"component_{i}", module, frozen=True)]
        return module_entries("transformer", self._transformer) + frozen

    def _modules(self) -> tuple[nn.Module, ...]:
        return (self._transformer, *self._components.modules())

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _check_awake(self) -> None:
        self._check_open()
        if not self._residence.awake:
            raise EngineError("the engine is asleep: wake it first")


def _batches(requests: Sequence[RolloutRequest], size: int) -> Iterator[list[int]]:
    """Indices of requests that run together, being alike in all but prompt and seed: in their order, at most `size`."""
    groups: dict[object, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(_way(request), []).append(index)
    for indices in groups.values():
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def _way(request: RolloutRequest) -> object:
    return (
        tuple(request.sigmas),
        request.stop_step,
        request.sample_type,
        request.real_latent is None,
        request.video_dtype,
    )


def _copy_into(current: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    for name, value in current.items():
        value.copy_(new[name])
