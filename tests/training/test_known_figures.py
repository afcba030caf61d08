"""Figures of samples whose gap, distance, spread and drift are chosen: each metric is that number."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from miles_dmd2.training import ActorTrainer, Ranks, wanted_ids
from miles_dmd2.types import RolloutSample, ScoreRow
from tests.training.pool import RankPool
from tests.training.runs import Setup, make_actor
from tests.training.toy import LATENT, ToyAdapter, make_sample

SETUP = Setup(windows=1, window=8, micro=3)
WINDOW = tuple(range(8))  # sample i stops at step i % 4
GAP, DISTANCE, MEAN, SPREAD, SHIFT = 0.25, 0.5, 3.0, 2.0, 0.125


class Silent(ToyAdapter):
    """A student whose velocity is 0: its x0 is x_k."""

    def load_transformer(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        module = super().load_transformer(dtype)
        nn.init.zeros_(module.exit.weight)
        nn.init.zeros_(module.exit.bias)
        return module


def sample(sample_id: int) -> RolloutSample:
    """Of step k: values (k + 1) (MEAN +- SPREAD), and an engine that is off by (k + 1) SHIFT."""
    size = sample_id % 4 + 1
    signs = torch.tensor([1.0, -1.0] * 3).reshape(LATENT)
    x_k = size * (MEAN + SPREAD * signs)
    return replace(make_sample(sample_id), x_k=x_k, x0=x_k - size * SHIFT)


def scores(ids: tuple[int, ...]) -> dict[int, ScoreRow]:
    """Of step k: the teacher (k + 1) DISTANCE away from the student, the critic GAP from the teacher."""
    real = {i: sample(i).x_k + (i % 4 + 1) * DISTANCE for i in ids}
    return {i: ScoreRow(x0, x0 + GAP, 0.5) for i, x0 in real.items()}


def figures(ranks: Ranks, ids: tuple[int, ...]) -> dict[str, float]:
    actor: ActorTrainer = make_actor(ranks, SETUP, Silent())
    samples = [sample(i) for i in wanted_ids([ids], ranks.rank, ranks.world_size)]
    return actor.train(0, [ids], samples, [scores(ids)])


def expected(steps: tuple[int, ...]) -> dict[str, float]:
    """Over as many samples of each of these steps, and of each step alone."""
    found: dict[str, float] = {}
    for suffix, of in (("", steps), *((f"_step{step}", (step,)) for step in steps)):
        sizes = [step + 1 for step in of]
        count = len(sizes)
        squares = sum(size**2 for size in sizes) / count * (MEAN**2 + SPREAD**2)
        mean = MEAN * sum(sizes) / count
        gradients = [GAP / (size * DISTANCE) for size in sizes]
        found |= {
            f"dmd2_score_gap_abs_mean{suffix}": GAP,
            f"dmd2_teacher_dist_abs_mean{suffix}": DISTANCE * sum(sizes) / count,
            f"dmd2_grad_abs_mean{suffix}": sum(gradients) / count,
            f"dmd2_x0_mean{suffix}": mean,
            f"dmd2_x0_std{suffix}": (squares - mean**2) ** 0.5,
            f"x0_mean_abs_diff{suffix}": SHIFT * sum(sizes) / count,
            f"dmd_loss{suffix}": 0.5 * sum(gradient**2 for gradient in gradients) / count,
        }
    return found


def check(metrics: dict[str, float], steps: tuple[int, ...]) -> None:
    """All of these, and no figure of another step."""
    wanted = expected(steps)
    found = {key: value for key, value in metrics.items() if key in wanted or re.search(r"_step\d+$", key)}
    assert found == pytest.approx(wanted, rel=1e-9)


def test_every_figure_is_the_number_that_was_put_in(ranks: Ranks) -> None:
    check(figures(ranks, WINDOW), (0, 1, 2, 3))


def test_on_two_ranks(two_ranks: RankPool) -> None:
    """Each rank has all the steps, or only one that the other has not."""
    for metrics in two_ranks.run(figures, WINDOW):
        check(metrics, (0, 1, 2, 3))
    for metrics in two_ranks.run(figures, (0, 4, 1, 5)):
        check(metrics, (0, 1))


def test_a_step_that_no_sample_stopped_at_logs_nothing(ranks: Ranks) -> None:
    metrics = figures(ranks, (1, 3, 5, 7))
    check(metrics, (1, 3))
    assert metrics["x0_mean_abs_diff_max"] == pytest.approx(4 * SHIFT, rel=1e-9)
