"""One protocol for every rollout engine; `local` is its specification, one contract suite runs against all.

What every engine checks the same way is here: `check_requests` before it works, `check_samples` before it answers,
`check_update` before it lets new weights in and `check_probe` before it keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol, get_args

import torch
from torch import Tensor

from miles_dmd2.models.weights import checksum, mismatch, not_finite
from miles_dmd2.types import (
    Conditioning,
    RolloutRequest,
    RolloutSample,
    SampleType,
    VideoDtype,
    WeightUpdate,
    WeightVersion,
)

# Greatest |velocity - expected| in units of the greatest |expected|. Same operations in the same dtype give 0 on one
# machine; fp32 leaves room for other kernels, bf16 has 8 bits.
PROBE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 5e-2}

_MEDIA_DTYPE = {"uint8": "torch.uint8", "fp32": "torch.float32"}


class EngineError(RuntimeError):
    """An engine broke its contract (wrong weights, lost sample, non-finite output, used while asleep)."""


class RolloutEngine(Protocol):
    """Prompts in, samples out.

    `generate` answers in request order; a request with stop step k costs exactly k+1 student forwards, starts at
    `sigmas[0] * noise(seed)`, hops as its `sample_type` says and decodes media only when asked; with a
    `real_latent` it costs one forward, at that latent noised by noise(seed) to sigma_k. `load_weights` verifies
    names, shapes, checksum and probe, and raises `EngineError` leaving the previous weights in place when they do not
    fit. Asleep, an engine holds no weights on the working device and every call but `wake` and `close` raises
    `EngineError`; the properties answer.
    A request that cannot be served (see `check_requests`) is a `ValueError` and changes nothing.
    """

    @property
    def weight_version(self) -> WeightVersion | None:
        """Of the weights that would generate now; None before the first successful `load_weights`."""

    @property
    def weight_checksum(self) -> str | None:
        """`models.weights.checksum` of what was loaded last; None before the first successful `load_weights`."""

    @property
    def forward_count(self) -> int:
        """Student forwards spent on requests since the start, per sample (a batch of 64 counts 64)."""

    def wake(self) -> None:
        """Serve again, with the same weights. No effect on an engine that is awake."""

    def sleep(self) -> None: ...

    def load_weights(self, update: WeightUpdate, tensors: Mapping[str, Tensor]) -> None:
        """Serve `tensors` from now on, as `update.version`. They are copied: the caller may change them afterwards."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutSample]: ...

    def conditioning(self, prompts: Sequence[str]) -> list[Conditioning]:
        """What the samples of these prompts carry as `cond`, in the order of the prompts; "" is a prompt here.

        Kept for later calls of both methods. Costs no counted student forward. Needs no weights.
        """

    def close(self) -> None:
        """Give everything back. May be repeated; every other call raises afterwards."""


def check_requests(requests: Sequence[RolloutRequest]) -> None:
    """ValueError, naming the sample, for a request that no engine may serve, or an id that occurs twice."""
    seen: set[int] = set()
    for request in requests:
        problem = _problem(request)
        if problem is None and request.sample_id in seen:
            problem = "its id occurs twice in one call"
        if problem is not None:
            raise ValueError(f"request for sample {request.sample_id!r}: {problem}")
        seen.add(request.sample_id)


def check_real_latents(requests: Sequence[RolloutRequest], real_latents: Tensor | None) -> None:
    """ValueError, naming the sample, for a row that the engine's real latents have not."""
    count = 0 if real_latents is None else len(real_latents)
    for request in requests:
        if request.real_latent is not None and request.real_latent >= count:
            raise ValueError(
                f"request for sample {request.sample_id}: real_latent {request.real_latent}, this engine has {count}"
            )


def _problem(request: RolloutRequest) -> str | None:
    if not _is_int(request.sample_id) or request.sample_id < 0:
        return "sample_id must be an int >= 0"
    if not isinstance(request.prompt, str) or not request.prompt.strip():
        return f"prompt must be text that is not empty, got {request.prompt!r}"
    if not _is_int(request.seed) or not 0 <= request.seed < 2**63:
        return f"seed must be an int in [0, 2^63), got {request.seed!r}"
    grid = request.sigmas
    if len(grid) < 2 or grid[-1] != 0 or not 0 < grid[0] <= 1.000001:
        return f"sigmas must be N + 1 >= 2 values that start in (0, 1] and end with 0, got {grid}"
    if not all(here > there for here, there in pairwise(grid)):
        return f"sigmas must decrease, got {grid}"
    if request.sample_type not in get_args(SampleType):
        return f"sample_type must be one of {get_args(SampleType)}, got {request.sample_type!r}"
    if request.video_dtype not in get_args(VideoDtype):
        return f"video_dtype must be one of {get_args(VideoDtype)}, got {request.video_dtype!r}"
    if request.real_latent is not None and not (_is_int(request.real_latent) and request.real_latent >= 0):
        return f"real_latent must be a row >= 0 or None, got {request.real_latent!r}"
    if not _is_int(request.stop_step) or not 0 <= request.stop_step < len(grid) - 1:
        return f"stop_step must be an int in [0, {len(grid) - 1}), got {request.stop_step!r}"
    return None


def check_samples(requests: Sequence[RolloutRequest], samples: Sequence[RolloutSample]) -> None:
    """EngineError unless the samples answer the requests: one each, in order, as asked, finite, of one version."""
    wanted, got = [r.sample_id for r in requests], [s.sample_id for s in samples]
    if wanted != got:
        lost, extra = sorted(set(wanted) - set(got)), sorted(set(got) - set(wanted))
        twice = sorted({i for i in got if got.count(i) > 1})
        what = f"lost {lost}, twice {twice}, not asked for {extra}" if lost or twice or extra else "in another order"
        raise EngineError(f"asked for {len(wanted)} samples, got {len(got)}: {what}")
    differ = [s.sample_id for r, s in zip(requests, samples, strict=True) if not _answers(r, s)]
    if differ:
        raise EngineError(f"samples {differ[:8]} do not carry their request's prompt, seed, stop step, grid or media")
    bad = [s.sample_id for s in samples if not bool(torch.isfinite(s.x_k).all() and torch.isfinite(s.x0).all())]
    if bad:
        raise EngineError(f"{len(bad)} of {len(samples)} samples are not finite, ids {bad[:8]}")
    versions = {s.weight_version for s in samples}
    if len(versions) > 1:
        raise EngineError(f"samples of one call come from several weights: {sorted(map(str, versions))}")


def _answers(request: RolloutRequest, sample: RolloutSample) -> bool:
    same = (sample.prompt, sample.seed, sample.stop_step) == (request.prompt, request.seed, request.stop_step)
    grid = sample.sigmas.tolist()
    near = len(grid) == len(request.sigmas) and all(
        abs(a - b) < 1e-6 for a, b in zip(grid, request.sigmas, strict=True)
    )
    dtype = None if sample.media is None else str(sample.media.dtype)
    return same and near and dtype == (_MEDIA_DTYPE[request.video_dtype] if request.decode else None)


def check_update(update: WeightUpdate, tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """EngineError unless the tensors have these names and shapes, are finite, and are what the checksum says."""
    problem = mismatch(shapes, tensors) or not_finite(tensors)
    if problem is not None:
        raise EngineError(f"weights {update.version} refused: {problem}")
    found = checksum(tensors)
    if found != update.checksum:
        raise EngineError(
            f"weights {update.version} refused: checksum {found[:16]}..., the exporter says {update.checksum[:16]}..."
        )


def check_probe(update: WeightUpdate, found: Tensor, tolerance: float) -> None:
    """EngineError unless `found`, the engine's velocity `[1, *latent]` at the probe's input, is what it has to be.

    tolerance: see PROBE_TOLERANCE.
    """
    expected = update.probe.velocity.to(torch.float32)
    if found.shape != expected.shape:
        raise EngineError(
            f"weights {update.version} refused: the probe's velocity has shape {list(found.shape)} here, "
            f"{list(expected.shape)} at the exporter"
        )
    scale = expected.abs().max().item()
    error = (found - expected).abs().max().item()
    if not error <= tolerance * scale:  # not: so that a NaN is refused
        raise EngineError(
            f"weights {update.version} refused: the probe's velocity differs by {error:.3g} at a scale of "
            f"{scale:.3g}, more than the tolerance {tolerance:g}; do both run the same forward dtype?"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
