from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from miles_dmd2.training import Ranks, rank_slice, wanted_ids
from miles_dmd2.training.batching import collate, cut, prepare
from miles_dmd2.types import RolloutSample, WeightVersion
from tests.training.pool import RankPool
from tests.training.toy import GRID, ToyAdapter, make_sample

WINDOWS = ((0, 1, 2, 3), (4, 5, 6, 7))


def samples(*ids: int) -> list[RolloutSample]:
    return [make_sample(i) for i in ids]


def test_slices_are_contiguous_and_cover_the_window() -> None:
    window = tuple(range(10, 22))
    assert [rank_slice(window, rank, 3) for rank in range(3)] == [window[:4], window[4:8], window[8:]]
    assert wanted_ids(WINDOWS, 1, 2) == (2, 3, 6, 7)
    with pytest.raises(ValueError, match="4 samples does not divide over 3 ranks"):
        rank_slice(WINDOWS[0], 0, 3)


def test_samples_are_sorted_into_their_windows(ranks: Ranks) -> None:
    shares = prepare(samples(5, 2, 7, 0, 1, 4, 6, 3), WINDOWS, ranks, facts={})
    assert [[s.sample_id for s in share] for share in shares] == [list(window) for window in WINDOWS]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0, 1, 2, 3, 4, 5, 6), "missing: 7"),
        ((0, 1, 2, 3, 4, 5, 6, 7, 3), "more than once: 3"),
        ((0, 1, 2, 3, 4, 5, 6, 7, 8), "not asked for: 8"),
        ((0, 1, 2, 3, 4, 5, 5, 9), "missing: 6, 7; more than once: 5; not asked for: 9"),
    ],
)
def test_wrong_ids_are_named(ranks: Ranks, given: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(samples(*given), WINDOWS, ranks, facts={})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_version": WeightVersion(3)}, "more than one weight version in a rollout: raw@0, raw@3"),
        ({"weight_version": WeightVersion(0, "ema")}, "more than one weight version in a rollout: ema@0, raw@0"),
        ({"sigmas": torch.tensor([*GRID[:3], 0.2, 0.0])}, "more than one sigma grid"),
        ({"stop_step": 4}, "sample 2 has stop step 4 of 4"),
    ],
)
def test_samples_of_different_origin_are_refused(ranks: Ranks, change: dict, message: str) -> None:
    mixed = [replace(s, **change) if s.sample_id == 2 else s for s in samples(*range(8))]
    with pytest.raises(ValueError, match=message):
        prepare(mixed, WINDOWS, ranks, facts={})


def test_cut_and_collate() -> None:
    parts = cut(samples(0, 1, 2, 3, 4), 2)
    assert [len(part) for part in parts] == [2, 2, 1]
    assert [len(part) for part in cut(samples(0, 1, 2), None)] == [3]
    batch = collate(ToyAdapter(), parts[1], torch.device("cpu"), torch.float64)
    assert batch.ids == (2, 3)
    assert batch.stop_steps.tolist() == [2, 3]
    assert batch.x_k.dtype == batch.x0.dtype == batch.sigmas.dtype == torch.float64
    assert torch.equal(batch.x0[1], make_sample(3).x0.double())
    assert batch.cond["label"].shape == (2, 4)


def prepare_error(ranks: Ranks, case: str) -> str:
    """Each rank is given its own samples, except for what the case changes on rank 1."""
    mine, facts = samples(*wanted_ids(WINDOWS, ranks.rank, 2)), {"micro-batch size": 2}
    windows, hook = WINDOWS, None
    if ranks.rank == 1:
        if case == "missing":
            mine = mine[1:]
        elif case == "version":
            mine = [replace(s, weight_version=WeightVersion(9)) for s in mine]
        elif case == "grid":
            mine = [replace(s, sigmas=s.sigmas * 0.999) for s in mine]
        elif case == "micro":
            facts = {"micro-batch size": 1}
        elif case == "windows":
            windows = ((0, 1, 2, 3), (4, 8, 6, 7))
        elif case == "hook":
            hook = broken_hook
    try:
        prepare(mine, windows, ranks, hook, facts=facts)
    except ValueError as error:
        return str(error)
    return "no error"


def broken_hook(samples: list[RolloutSample]) -> list[RolloutSample]:
    raise ZeroDivisionError("in the hook")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("none", "no error"),
        ("missing", "rank 1: samples: this rank was given with wrong sample ids; missing: 2"),
        ("version", "ranks disagree on the weight version: raw@0, raw@9"),
        ("grid", "ranks disagree on the sigma grid"),
        ("micro", "ranks disagree on the micro-batch size: 1, 2"),
        ("windows", "ranks disagree on the windows"),
        ("hook", "rank 1: in the hook"),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(two_ranks: RankPool, case: str, message: str) -> None:
    errors = two_ranks.run(prepare_error, case)
    assert errors[0] == errors[1]
    assert message in errors[0]
