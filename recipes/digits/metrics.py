"""Figures of one eval for `--eval-metrics-path recipes/digits/metrics.py:evaluate`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from miles_dmd2.types import RolloutSample
from recipes.digits import classifier, data


@functools.cache
def judge() -> classifier.Classifier:
    return classifier.load()


@functools.cache
def data_features() -> Tensor:
    """Features of all 1797 digits, enlarged and reduced again as every decoded picture is."""
    return classifier.features(judge(), data.enlarge(data.load().grey))


def pictures_of(samples: Sequence[RolloutSample]) -> Tensor:
    """Decoded `[1, height, width, 3]` of each sample, uint8 or in [0, 1] -> `[n, 3, height, width]` in [-1, 1]."""
    media = [sample.media for sample in samples]
    missing = [sample.sample_id for sample in samples if sample.media is None]
    if missing:
        raise ValueError(f"samples {missing[:5]} have no decoded media")
    stacked = torch.stack([picture[0] for picture in media if picture is not None])
    scale = 127.5 if stacked.dtype == torch.uint8 else 0.5
    return stacked.permute(0, 3, 1, 2).float() / scale - 1


def labels_of(samples: Sequence[RolloutSample]) -> Tensor:
    return torch.tensor([data.label_of(sample.prompt) for sample in samples])


def evaluate(samples: Sequence[RolloutSample]) -> dict[str, float]:
    """`fd`: Frechet distance to the data in the classifier's features (biased upwards for few samples: compare equal
    sizes only). `accuracy`: the share of pictures that read as the prompted digit.
    """
    pictures, labels = pictures_of(samples), labels_of(samples)
    return {
        "fd": classifier.frechet_distance(classifier.features(judge(), pictures), data_features()),
        "accuracy": classifier.label_accuracy(judge(), pictures, labels),
    }
