"""Numbers of one train call: declared with their reduction, added anywhere, reduced over ranks once."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from miles_dmd2.observability.declared import Reduction as Reduction
from miles_dmd2.training.distributed import Ranks


class MetricBuffer:
    """mean: over all added values of all ranks, whatever the split. same: equal on all ranks, or an error.

    std: of all elements together. Values are per sample (or scalars). A metric without values is left out.
    """

    def __init__(self, reductions: Mapping[str, Reduction]) -> None:
        self._reductions = dict(reductions)
        self._values: dict[str, list[Tensor]] = {name: [] for name in reductions}

    def declare(self, reductions: Mapping[str, Reduction]) -> None:
        """More of them."""
        self._reductions.update(reductions)
        self._values.update({name: [] for name in reductions})

    def add(self, name: str, values: Tensor | float) -> None:
        if name not in self._reductions:
            raise KeyError(f"metric {name!r} is not declared; declared are {sorted(self._reductions)}")
        tensor = values.detach().double() if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
        self._values[name].append(tensor.reshape(-1))

    def add_per_step(self, name: str, values: Tensor, stop_steps: Tensor) -> None:
        """Add per-sample values, `[batch, ...]`, to `name` and to `<name>_step{i}` for each sample's stop step i."""
        self.add(name, values)
        for step in stop_steps.unique().tolist():
            self.add(f"{name}_step{step}", values[stop_steps == step])

    def fresh(self) -> MetricBuffer:
        """An empty buffer with the same declarations."""
        return MetricBuffer(self._reductions)

    def extend(self, other: MetricBuffer) -> None:
        """Take over another buffer's values."""
        for name, values in other._values.items():
            self._values[name] += values

    def reduce(self, ranks: Ranks) -> dict[str, float]:
        """A collective: every rank has declared the same metrics and gets the same numbers."""
        rows = {name: _moments(self._values[name]) for name in sorted(self._reductions)}
        sums = iter(ranks.sum([value for row in rows.values() for value in row[:3]]))
        maxima = iter(ranks.max([value for row in rows.values() for value in row[3:]]))
        reduced = {}
        for name in rows:
            count, total, squares, largest, smallest_negated = *_take(sums, 3), *_take(maxima, 2)
            if count:
                reduction = self._reductions[name]
                reduced[name] = _result(name, reduction, count, total, squares, largest, -smallest_negated)
        return reduced


def per_step(name: str, reduction: Reduction, num_steps: int) -> dict[str, Reduction]:
    """Declarations of a metric that is also reported per stop step."""
    return {name: reduction, **{f"{name}_step{step}": reduction for step in range(num_steps)}}


def _moments(values: list[Tensor]) -> tuple[float, ...]:
    """count, sum, sum of squares, max, -min."""
    if not values:
        return 0.0, 0.0, 0.0, -math.inf, -math.inf
    flat = torch.cat(values)
    stacked = torch.stack([flat.sum(), flat.square().sum(), flat.max(), -flat.min()])
    return float(flat.numel()), *stacked.tolist()


def _take(values: object, count: int) -> list[float]:
    return [next(values) for _ in range(count)]  # type: ignore[call-overload]


def _result(
    name: str, reduction: Reduction, count: float, total: float, squares: float, largest: float, smallest: float
) -> float:
    if reduction == "sum":
        return total
    if reduction == "max":
        return largest
    if reduction == "std":
        return math.sqrt(max(0.0, squares / count - (total / count) ** 2))
    if reduction == "same":
        if largest != smallest:
            raise ValueError(f"{name} differs between ranks or steps: from {smallest} to {largest}")
        return largest
    return total / count
