"""A student out of its checkpoint, without the ranks that wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from miles_dmd2.training.actor import ActorTrainer
from miles_dmd2.training.checkpoint import read_whole
from miles_dmd2.types import WeightKind


def saved_student(files: Sequence[Path], kind: WeightKind) -> dict[str, Tensor]:
    """What `ActorTrainer.export_weights` gave when the actor's ranks wrote `files` (in rank order): full fp32 tensors
    in the model's own names, bit for bit. Of a student with an adapter it is the adapter, to be merged with its base.
    ValueError: files that hold no student, or no average for kind "ema".
    """
    weights = read_whole(files, f"{ActorTrainer.network_role}/")
    if not weights:
        raise ValueError(f"{files[0].parent}: holds no student")
    if kind == "ema":
        average = read_whole(files, "ema/")
        if not average:
            raise ValueError(f"{files[0].parent}: holds no average")
        weights |= average  # of the trained ones; the others are as they were
    return {name: tensor.to(torch.float32) for name, tensor in weights.items()}
