"""The student's exponential moving average, per successful student update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Ema:
    """average = decay * average + (1 - decay) * weight; shards in master dtype.

    Until update number `start` it is a copy of the weights, so it begins at the weights of that moment.
    """

    def __init__(self, shards: Mapping[str, Tensor], decay: float, start: int = 0) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"the decay of an average must be in (0, 1), got {decay}")
        self.decay, self.start = decay, start
        self.shards = dict(shards)
        self.average = {name: shard.clone() for name, shard in self.shards.items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """After successful update number `updates`, counted from 1."""
        for name, shard in self.shards.items():
            if updates <= self.start:
                self.average[name].copy_(shard)
            else:
                self.average[name].lerp_(shard, 1 - self.decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes with the averaged weights inside the block, bitwise with its own again after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, shard in self.shards.items():
            kept = shard.clone()
            shard.copy_(self.average[name])
            self.average[name].copy_(kept)
