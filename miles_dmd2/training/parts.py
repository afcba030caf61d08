"""The parts of a latent that are trained: each with a loss, a normalizer and a weight of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from miles_dmd2.models.base import VISUAL, ModelAdapter

PICTURE_ALONE: Mapping[str, float] = {VISUAL: 1.0}


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """`weight` of its mean loss in the sum; `where` its values are in a flat latent, None for a latent of one part."""

    name: str
    weight: float
    where: slice | None

    def of(self, value: Tensor) -> Tensor:
        """Its share of latents `[batch, *latent]`, or of a sigma as `ModelAdapter.spread` gives it."""
        return value if self.where is None or value.ndim == 1 else value[:, self.where]

    def metric(self, name: str) -> str:
        """A figure's name: the picture's is the plain one."""
        return name if self.name == VISUAL else f"{name}_{self.name}"


def trained_parts(adapter: ModelAdapter, weights: Mapping[str, float]) -> tuple[TrainedPart, ...]:
    """The parts with a weight above 0, in the adapter's order. ValueError: a name that the family has not, none left,
    a negative weight.
    """
    names = [part.name for part in adapter.parts]
    unknown = sorted(weights.keys() - set(names))
    if unknown:
        raise ValueError(
            f"--dmd2-part-weights: {adapter.family} has no {', '.join(unknown)}; it has {', '.join(names)}"
        )
    if min(weights.values(), default=0.0) < 0 or not any(weights.values()):
        raise ValueError(f"--dmd2-part-weights: weights must be >= 0 and one of them above, got {dict(weights)}")
    parts, start = [], 0
    for part in adapter.parts:
        where = None if len(names) == 1 else slice(start, start + part.size)
        start += part.size
        if weights.get(part.name, 0.0) > 0:
            parts.append(TrainedPart(part.name, weights[part.name], where))
    return tuple(parts)


def silent_heads(adapter: ModelAdapter, parts: Sequence[TrainedPart]) -> dict[str, str]:
    """Parameters whose gradient is 0 because only parts without a loss need them, as `idle_parameters` has them."""
    trained = {part.name for part in parts}
    return {name: "zero" for part in adapter.parts if part.name not in trained for name in adapter.head_of(part.name)}
