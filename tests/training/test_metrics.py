from __future__ import annotations

import math

import pytest
import torch

from miles_dmd2.training import Ranks
from miles_dmd2.training.metrics import MetricBuffer, per_step
from tests.training.pool import RankPool

DECLARED = {"loss": "mean", "count": "sum", "norm": "max", "lr": "same", "spread": "std", "never": "mean"}


def uneven(ranks: Ranks) -> dict[str, float]:
    """Rank 0 holds 3 values, rank 1 one."""
    values = torch.tensor([1.0, 2.0, 3.0]) if ranks.rank == 0 else torch.tensor([10.0])
    buffer = MetricBuffer(DECLARED)
    for name in ("loss", "norm", "spread"):
        buffer.add(name, values)
    buffer.add("count", float(len(values)))
    buffer.add("lr", 0.1)
    return buffer.reduce(ranks)


def test_reductions_over_uneven_ranks(two_ranks: RankPool) -> None:
    """Not means of means, and maxima are not averaged."""
    first, second = two_ranks.run(uneven)
    assert first == second
    deviation = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64).std(correction=0).item()
    expected = {"loss": 4.0, "count": 4.0, "norm": 10.0, "lr": 0.1, "spread": deviation}
    assert first == pytest.approx(expected)


def unequal(ranks: Ranks) -> str:
    buffer = MetricBuffer({"lr": "same"})
    buffer.add("lr", float(ranks.rank))
    try:
        buffer.reduce(ranks)
    except ValueError as error:
        return str(error)
    return "no error"


def test_what_must_be_the_same_is_checked(two_ranks: RankPool) -> None:
    assert two_ranks.run(unequal) == ["lr differs between ranks or steps: from 0.0 to 1.0"] * 2


def test_per_step(ranks: Ranks) -> None:
    buffer = MetricBuffer(per_step("gap", "mean", 3))
    buffer.add_per_step("gap", torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 2, 2]))
    assert buffer.reduce(ranks) == {"gap": 3.0, "gap_step0": 1.0, "gap_step2": 4.0}


def test_values_of_another_buffer(ranks: Ranks) -> None:
    buffer = MetricBuffer({"loss": "mean"})
    buffer.add("loss", 1.0)
    other = buffer.fresh()
    other.add("loss", torch.tensor([3.0, math.pi]))
    buffer.extend(other)
    assert buffer.reduce(ranks) == {"loss": pytest.approx((4 + math.pi) / 3)}


def test_what_is_not_declared_is_refused() -> None:
    with pytest.raises(KeyError, match="'los' is not declared"):
        MetricBuffer({"loss": "mean"}).add("los", 1.0)
