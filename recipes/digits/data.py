"""The demo's data: scikit-learn's 8x8 handwritten digits as small RGB pictures with prompts.

Nothing is downloaded: ``load_digits`` ships with scikit-learn (1797 pictures of 8x8, 17 grey levels).
Each is enlarged bilinearly so that the 8x-compressing VAE of Qwen-Image has something to compress.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

COUNT = 1797
IMAGE_SIZE = 64
DIGIT_SIZE = 8
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PROMPTS = tuple(f"the digit {word}" for word in WORDS)


@dataclass(frozen=True)
class Digits:
    """All digits: ``grey`` ``[n, 1, 8, 8]`` in [-1, 1] and ``labels`` ``[n]`` (int64)."""

    grey: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def load(count: int = COUNT) -> Digits:
    """The first ``count`` digits, in scikit-learn's order."""
    bunch = load_digits()
    grey = torch.from_numpy(bunch.images[:count]).float().unsqueeze(1) / 8 - 1
    return Digits(grey=grey, labels=torch.from_numpy(bunch.target[:count]).long())


def enlarge(grey: Tensor, size: int = IMAGE_SIZE) -> Tensor:
    """``[n, 1, 8, 8]`` -> RGB ``[n, 3, size, size]``, bilinear."""
    large = functional.interpolate(grey, size=(size, size), mode="bilinear", align_corners=False)
    return large.expand(-1, 3, -1, -1).contiguous()


def reduce(pictures: Tensor) -> Tensor:
    """RGB ``[n, 3, size, size]`` -> grey ``[n, 1, 8, 8]``: mean over colours and over each area."""
    return functional.adaptive_avg_pool2d(pictures.float().mean(dim=1, keepdim=True), DIGIT_SIZE)


def prompt_of(label: int) -> str:
    """The prompt for one digit, "the digit seven" for 7."""
    return PROMPTS[label]


def label_of(prompt: str) -> int:
    """The digit that a prompt asks for."""
    try:
        return PROMPTS.index(prompt)
    except ValueError:
        raise ValueError(f"prompt {prompt!r} is none of the ten digit prompts: {', '.join(PROMPTS)}") from None
