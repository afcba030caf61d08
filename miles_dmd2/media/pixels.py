"""Decoded media as the pixels that files and screens take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def eight_bit(media: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A sample's media `[frames, height, width, 3]`, uint8 or fp32 in [0, 1] -> uint8."""
    pixels = media.numpy()
    if pixels.dtype == np.uint8:
        return pixels
    return np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
