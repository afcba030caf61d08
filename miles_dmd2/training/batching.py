"""From samples in any order to the micro-batches of this rank, with everything checked that must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.training.distributed import Ranks
from miles_dmd2.types import RolloutSample, ScoreBatch, ScoreRow

Windows = Sequence[Sequence[int]]  # sample ids of a rollout's windows, over all ranks
TrainInputHook = Callable[[list[RolloutSample]], list[RolloutSample]]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward, on the working device, latents in master dtype.

    `sigmas` is the rollout's grid `[N + 1]`, `stop_steps` int64 `[batch]`, `x_k` and `x0` `[batch, *latent]`.
    """

    ids: tuple[int, ...]
    stop_steps: Tensor
    sigmas: Tensor
    x_k: Tensor
    x0: Tensor
    cond: dict[str, Tensor]


def rank_slice(window_ids: Sequence[int], rank: int, world_size: int) -> tuple[int, ...]:
    """The contiguous part of a window that a rank trains on. ValueError: the window does not divide by the ranks."""
    if len(window_ids) % world_size:
        raise ValueError(f"a window of {len(window_ids)} samples does not divide over {world_size} ranks")
    share = len(window_ids) // world_size
    return tuple(window_ids[rank * share : (rank + 1) * share])


def wanted_ids(windows: Windows, rank: int, world_size: int) -> tuple[int, ...]:
    """All samples that a rank has to be given for these windows."""
    return tuple(i for window in windows for i in rank_slice(window, rank, world_size))


def prepare(
    samples: Iterable[RolloutSample],
    windows: Windows,
    ranks: Ranks,
    hook: TrainInputHook | None = None,
    *,
    facts: Mapping[str, object],
) -> list[list[RolloutSample]]:
    """This rank's samples per window, after the hook. A collective.

    ValueError, on every rank alike: ids missing, doubled or not asked for, samples of more than one weight version or
    grid, ranks that disagree on these or on `facts` (name -> value that all ranks must share).
    """
    shares: list[list[RolloutSample]] = []
    cause, seen = None, dict(facts)
    try:
        wanted = wanted_ids(windows, ranks.rank, ranks.world_size)
        by_id = _by_id(list(samples), wanted, "this rank was given")
        if hook is not None:
            by_id = _by_id(hook([by_id[i] for i in wanted]), wanted, "the train-input hook returned")
        shares = [[by_id[i] for i in rank_slice(window, ranks.rank, ranks.world_size)] for window in windows]
        seen |= _common([by_id[i] for i in wanted])
        seen["windows"] = tuple(tuple(window) for window in windows)
    except Exception as error:  # also a hook's: the other ranks must hear of it, or they wait for this one
        cause = error
    _agree(ranks, cause, seen)
    return shares


def cut(samples: Sequence[RolloutSample], size: int | None) -> list[Sequence[RolloutSample]]:
    """Micro-batches of `size` samples (None: all at once); the last may be smaller."""
    step = size or len(samples)
    return [samples[start : start + step] for start in range(0, len(samples), step)]


def collate(
    adapter: ModelAdapter, samples: Sequence[RolloutSample], device: torch.device, dtype: torch.dtype
) -> MicroBatch:
    cond = adapter.collate([sample.cond for sample in samples])
    return MicroBatch(
        ids=tuple(sample.sample_id for sample in samples),
        stop_steps=torch.tensor([sample.stop_step for sample in samples], device=device),
        sigmas=samples[0].sigmas.to(device, dtype),
        x_k=torch.stack([sample.x_k for sample in samples]).to(device, dtype),
        x0=torch.stack([sample.x0 for sample in samples]).to(device, dtype),
        cond={name: value.to(device) for name, value in cond.items()},
    )


def merge_scores(external: Iterable[ScoreBatch], wanted: Sequence[int]) -> dict[int, ScoreRow]:
    """The score rows of all critic ranks as one mapping: exactly one row for each wanted id.

    ValueError naming the ids: missing, in two rows, or not asked for.
    """
    batches = list(external)
    count = Counter(i for batch in batches for i in batch)
    _check_ids(count, wanted, "scores")
    return {i: row for batch in batches for i, row in batch.items()}


def _by_id(samples: Sequence[RolloutSample], wanted: Sequence[int], who: str) -> dict[int, RolloutSample]:
    _check_ids(Counter(sample.sample_id for sample in samples), wanted, f"samples: {who}")
    return {sample.sample_id: sample for sample in samples}


def _check_ids(count: Mapping[int, int], wanted: Sequence[int], what: str) -> None:
    problems = {
        "missing": [i for i in wanted if i not in count],
        "more than once": [i for i, number in count.items() if number > 1],
        "not asked for": sorted(count.keys() - set(wanted)),
    }
    found = [f"{kind}: {_some(ids)}" for kind, ids in problems.items() if ids]
    if found:
        raise ValueError(f"{what} with wrong sample ids; {'; '.join(found)}")


def _common(samples: Sequence[RolloutSample]) -> dict[str, object]:
    """What all samples of a rollout must share."""
    versions = {str(sample.weight_version) for sample in samples}
    grids = {tuple(sample.sigmas.tolist()) for sample in samples}
    for what, values in (("weight version", versions), ("sigma grid", grids)):
        if len(values) > 1:
            raise ValueError(f"samples of more than one {what} in a rollout: {_some(sorted(values, key=str))}")
    for sample in samples:
        if not 0 <= sample.stop_step < len(sample.sigmas) - 1:
            raise ValueError(f"sample {sample.sample_id} has stop step {sample.stop_step} of {len(sample.sigmas) - 1}")
    return {"weight version": versions.pop(), "sigma grid": grids.pop()}


def _agree(ranks: Ranks, cause: Exception | None, facts: Mapping[str, object]) -> None:
    reports = ranks.gather((f"{cause or ''}", facts))
    problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text]
    if problems:
        raise ValueError("; ".join(problems)) from cause
    for name in facts:
        values = {str(other[name]) for _, other in reports}
        if len(values) > 1:
            raise ValueError(f"ranks disagree on the {name}: {_some(sorted(values))}")


def _some(values: Sequence[object], limit: int = 5) -> str:
    more = f" and {len(values) - limit} more" if len(values) > limit else ""
    return ", ".join(map(str, values[:limit])) + more
