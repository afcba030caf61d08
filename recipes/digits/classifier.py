"""The demo's judge: a small classifier of the digits, Frechet distance in its features, label accuracy.

It reads 8x8 grey pictures (a decoded picture averaged over colours and areas, ``data.reduce``). It is
trained once by ``build_teacher.py`` and shipped as ``classifier.safetensors``; it is never trained on
anything that a VAE or a diffusion model made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from recipes.digits import data

WEIGHTS = Path(__file__).parent / "classifier.safetensors"
FEATURES = 64


class Classifier(nn.Module):
    """64 -> 128 -> 64 -> 10; the 64 activations before the last layer are the features."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(data.DIGIT_SIZE**2, 128)
        self.feature = nn.Linear(128, FEATURES)
        self.head = nn.Linear(FEATURES, 10)

    def features(self, grey: Tensor) -> Tensor:
        hidden = functional.silu(self.hidden(grey.flatten(1)))
        return functional.silu(self.feature(hidden))

    def forward(self, grey: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(grey))
        return logits


def train(digits: data.Digits, seed: int = 0, steps: int = 1500, batch: int = 128) -> Classifier:
    """A few seconds of AdamW with noise as augmentation; same seed, same weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        index = torch.randint(len(digits), (batch,), generator=generator)
        grey = digits.grey[index]
        grey = grey + 0.2 * torch.randn(grey.shape, generator=generator)
        loss = functional.cross_entropy(model(grey), digits.labels[index], label_smoothing=0.05)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval().requires_grad_(False)


def save(model: Classifier, path: Path = WEIGHTS) -> None:
    save_file(model.state_dict(), path)


def load(path: Path = WEIGHTS) -> Classifier:
    model = Classifier()
    model.load_state_dict(load_file(path))
    return model.eval().requires_grad_(False)


@torch.no_grad()
def features(model: Classifier, pictures: Tensor) -> Tensor:
    """Pictures ``[n, 3, size, size]`` or grey ``[n, 1, 8, 8]`` in [-1, 1] -> float64 ``[n, 64]``."""
    grey = data.reduce(pictures) if pictures.shape[1] == 3 else pictures
    return model.features(grey.float()).double()


@torch.no_grad()
def label_accuracy(model: Classifier, pictures: Tensor, labels: Tensor) -> float:
    """The share of pictures that the classifier reads as the prompted digit."""
    grey = data.reduce(pictures) if pictures.shape[1] == 3 else pictures
    return (model(grey.float()).argmax(dim=1) == labels).double().mean().item()


def _moments(sample: Tensor) -> tuple[Tensor, Tensor]:
    sample = sample.double()
    return sample.mean(dim=0), torch.cov(sample.T)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def _frechet(mean_a: Tensor, root_a: Tensor, trace_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> float:
    cross = torch.linalg.eigvalsh(root_a @ cov_b @ root_a).clamp_min(0).sqrt().sum()
    return ((mean_a - mean_b).square().sum() + trace_a + cov_b.trace() - 2 * cross).item()


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Frechet distance of two feature samples, |mean difference|^2 + tr(A + B - 2 (A B)^(1/2)), in float64."""
    mean_a, cov_a = _moments(a)
    mean_b, cov_b = _moments(b)
    return _frechet(mean_a, _root(cov_a), cov_a.trace(), mean_b, cov_b)


@dataclass(frozen=True)
class Distance:
    """A Frechet distance and its bootstrap deviation."""

    value: float
    deviation: float

    def __str__(self) -> str:
        return f"{self.value:.2f} +- {self.deviation:.2f}"


def frechet_with_bootstrap(sample: Tensor, reference: Tensor, draws: int = 20, seed: int = 0) -> Distance:
    """Distance of ``sample`` to ``reference`` and its deviation over resamples of ``sample`` with replacement."""
    generator = torch.Generator().manual_seed(seed)
    mean, cov = _moments(reference)
    root, trace = _root(cov), cov.trace()
    values = []
    for _ in range(draws):
        index = torch.randint(len(sample), (len(sample),), generator=generator)
        values.append(_frechet(mean, root, trace, *_moments(sample[index])))
    spread = torch.tensor(values, dtype=torch.float64).std().item() if draws > 1 else math.nan
    return Distance(_frechet(mean, root, trace, *_moments(sample)), spread)


def frechet_floor(reference: Tensor, labels: Tensor, draws: int = 20, seed: int = 0) -> Distance:
    """About what a perfect sampler would score: the mean distance between two independent resamples of ``reference``.

    The Frechet distance of finite samples is biased upwards by the sampling error of both. Two resamples with
    replacement, of the same size and class counts, stand for the reference and as many fresh draws; ``deviation`` is
    over pairs. (A resample against ``reference`` itself has only one of the two errors, and about half the bias.)
    """
    generator = torch.Generator().manual_seed(seed)
    groups = [torch.nonzero(labels == label).flatten() for label in labels.unique()]

    def resample() -> Tensor:
        index = [g[torch.randint(len(g), (len(g),), generator=generator)] for g in groups]
        return reference[torch.cat(index)]

    found = torch.tensor([frechet_distance(resample(), resample()) for _ in range(draws)], dtype=torch.float64)
    return Distance(found.mean().item(), found.std().item())
