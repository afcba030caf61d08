"""The same numbers however the work is cut: micro-batches, ranks, repetition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from miles_dmd2.training import Ranks
from miles_dmd2.training.trainer import Trainer
from tests.training.pool import RankPool
from tests.training.runs import OPTIONS, Run, Setup, distance, same_bits, train


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Run:
    """One rank, a window in one forward, fp64, plain modules."""
    return train(ranks, Setup())


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_accumulated_gradients_are_the_gradient_of_one_large_batch(ranks: Ranks, reference: Run, micro: int) -> None:
    run = train(ranks, Setup(micro=micro))
    assert distance(run.critic, reference.critic) < 1e-12
    assert distance(run.student, reference.student) < 1e-12


@pytest.mark.parametrize("micro", [None, 3])
def test_two_ranks_are_one_rank(two_ranks: RankPool, reference: Run, micro: int | None) -> None:
    """Sharded modules against the plain one, after 9 critic and 3 student steps with clipping and sleep."""
    for run in two_ranks.run(train, Setup(micro=micro)):
        assert distance(run.critic, reference.critic) < 1e-12
        assert distance(run.student, reference.student) < 1e-12
        for ours, theirs in zip(run.metrics, reference.metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)
    first, second = two_ranks.run(train, Setup(micro=micro))
    assert distance(first.exported["ema"], reference.exported["ema"]) < 1e-7  # exported in fp32
    assert second.exported == {"raw": {}, "ema": {}}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_blind_to_the_cut(ranks: Ranks, two_ranks: RankPool, reference: Run, option: str) -> None:
    """Micro-batches and ranks change nothing, the option does change the student."""
    setup = Setup(**OPTIONS[option])
    alone = train(ranks, setup)
    assert distance(alone.student, reference.student) > 1e-6
    for run in (train(ranks, replace(setup, micro=3)), *two_ranks.run(train, replace(setup, micro=3))):
        assert distance(run.critic, alone.critic) < 1e-12
        assert distance(run.student, alone.student) < 1e-12


def test_in_fp32_two_ranks_differ_by_rounding_only(ranks: Ranks, two_ranks: RankPool) -> None:
    setup = Setup(dtype=torch.float32, micro=3)
    alone = train(ranks, setup)
    for run in two_ranks.run(train, setup):
        moved = distance(alone.student, train(ranks, setup, rollouts=0).student)
        assert distance(run.critic, alone.critic) < 1e-4 * moved + 2e-6
        assert distance(run.student, alone.student) < 1e-4 * moved + 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_command_twice_gives_the_same_bits(ranks: Ranks, two_ranks: RankPool, dtype: torch.dtype) -> None:
    setup = Setup(dtype=torch.float32, forward_dtype=dtype, micro=3)
    runs: list[Callable[[], Run]] = [lambda: train(ranks, setup), lambda: two_ranks.run(train, setup)[0]]
    for run in runs:
        first, second = run(), run()
        assert same_bits(first.critic, second.critic)
        assert same_bits(first.student, second.student)
        assert same_bits(first.exported["ema"], second.exported["ema"])
        assert first.metrics == second.metrics


def test_another_seed_gives_other_numbers(ranks: Ranks, reference: Run) -> None:
    assert distance(train(ranks, Setup(seed=4)).critic, reference.critic) > 1e-4


def test_mutation_a_loss_divided_by_the_rank_s_share_is_found(
    ranks: Ranks, reference: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each micro-batch's mean instead of its part of the window's mean: the clip hides the scale, the cut shows."""

    def wrong(self: Trainer, sample_losses: torch.Tensor, window: object) -> None:
        sample_losses.mean().backward()

    monkeypatch.setattr(Trainer, "_backward", wrong)
    assert distance(train(ranks, Setup(micro=3)).critic, reference.critic) > 1e-6
