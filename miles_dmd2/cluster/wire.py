"""Records as stacked NumPy arrays while they travel through Ray's object store.

Ray moves NumPy buffers without copying them and pickles every torch tensor on its own; a rollout of 320 samples is a
handful of arrays this way. Conditioning travels once per distinct prompt. Decoding copies, since the store's buffers
are read-only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_dmd2.types import RolloutSample, ScoreRow, WeightVersion

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """`list[RolloutSample]`: per-sample fields stacked, `conds` and `grids` indexed by `cond_index`, `grid_index`."""

    sample_ids: tuple[int, ...]
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    stop_steps: tuple[int, ...]
    grids: tuple[Array, ...]
    grid_index: tuple[int, ...]
    conds: tuple[dict[str, Array], ...]
    cond_index: tuple[int, ...]
    x_k: Array
    x0: Array
    media: Array | None
    audio: tuple[Array | None, ...]
    audio_sample_rates: tuple[int | None, ...]
    rewards: tuple[float, ...]
    weight_version: WeightVersion


def pack_samples(samples: Sequence[RolloutSample]) -> PackedSamples:
    """Raises ValueError for samples of several weight versions, or of which only some carry media."""
    versions = {sample.weight_version for sample in samples}
    if len(versions) != 1:
        raise ValueError(f"one batch holds samples of several students: {sorted(map(str, versions))}")
    with_media = [sample.media for sample in samples if sample.media is not None]
    if with_media and len(with_media) != len(samples):
        raise ValueError(f"{len(with_media)} of {len(samples)} samples carry decoded media; all or none must")
    grids, grid_index = _distinct(samples, lambda s: tuple(s.sigmas.tolist()), lambda s: _array(s.sigmas))
    conds, cond_index = _distinct(
        samples, lambda s: s.prompt, lambda s: {name: _array(value) for name, value in s.cond.items()}
    )
    return PackedSamples(
        sample_ids=tuple(sample.sample_id for sample in samples),
        prompts=tuple(sample.prompt for sample in samples),
        seeds=tuple(sample.seed for sample in samples),
        stop_steps=tuple(sample.stop_step for sample in samples),
        grids=grids,
        grid_index=grid_index,
        conds=conds,
        cond_index=cond_index,
        x_k=_array(torch.stack([sample.x_k for sample in samples])),
        x0=_array(torch.stack([sample.x0 for sample in samples])),
        media=_array(torch.stack(with_media)) if with_media else None,
        audio=tuple(None if sample.audio is None else _array(sample.audio) for sample in samples),
        audio_sample_rates=tuple(sample.audio_sample_rate for sample in samples),
        rewards=tuple(sample.reward for sample in samples),
        weight_version=versions.pop(),
    )


def unpack_samples(packed: PackedSamples) -> list[RolloutSample]:
    conds = [{name: _tensor(value) for name, value in cond.items()} for cond in packed.conds]
    grids = [_tensor(grid) for grid in packed.grids]
    x_k, x0 = _tensor(packed.x_k), _tensor(packed.x0)
    media = None if packed.media is None else _tensor(packed.media)
    return [
        RolloutSample(
            sample_id=sample_id,
            prompt=packed.prompts[i],
            seed=packed.seeds[i],
            stop_step=packed.stop_steps[i],
            sigmas=grids[packed.grid_index[i]],
            x_k=x_k[i],
            x0=x0[i],
            cond=conds[packed.cond_index[i]],
            weight_version=packed.weight_version,
            media=None if media is None else media[i],
            audio=_optional_tensor(packed.audio[i]),
            audio_sample_rate=packed.audio_sample_rates[i],
            reward=packed.rewards[i],
        )
        for i, sample_id in enumerate(packed.sample_ids)
    ]


@dataclass(frozen=True, slots=True)
class PackedScores:
    """`dict[sample_id, ScoreRow]`, stacked."""

    sample_ids: tuple[int, ...]
    x0_real: Array
    x0_fake: Array
    score_sigma: tuple[float, ...]


def pack_scores(scores: Mapping[int, ScoreRow]) -> PackedScores | None:
    """None for a group that scores nothing."""
    if not scores:
        return None
    rows = list(scores.values())
    return PackedScores(
        sample_ids=tuple(scores),
        x0_real=_array(torch.stack([row.x0_real for row in rows])),
        x0_fake=_array(torch.stack([row.x0_fake for row in rows])),
        score_sigma=tuple(row.score_sigma for row in rows),
    )


def unpack_scores(packed: PackedScores) -> dict[int, ScoreRow]:
    x0_real, x0_fake = _tensor(packed.x0_real), _tensor(packed.x0_fake)
    rows = zip(packed.sample_ids, x0_real, x0_fake, packed.score_sigma, strict=True)
    return {sample_id: ScoreRow(real, fake, sigma) for sample_id, real, fake, sigma in rows}


def pack_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    return {name: _array(value) for name, value in tensors.items()}


def unpack_tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    return {name: _tensor(value) for name, value in arrays.items()}


def _distinct(samples: Sequence[RolloutSample], key: Any, value: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    position: dict[Any, int] = {}
    values: list[Any] = []
    index: list[int] = []
    for sample in samples:
        k = key(sample)
        if k not in position:
            position[k] = len(values)
            values.append(value(sample))
        index.append(position[k])
    return tuple(values), tuple(index)


def _array(value: Tensor) -> Array:
    return value.detach().cpu().contiguous().numpy()


def _tensor(value: Array) -> Tensor:
    return torch.from_numpy(value.copy())


def _optional_tensor(value: Array | None) -> Tensor | None:
    return None if value is None else _tensor(value)
