"""Eval samples as pictures one can look at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from miles_dmd2.media.pixels import eight_bit
from miles_dmd2.media.video import write_picture
from miles_dmd2.types import RolloutSample, WeightKind

_LARGEST = 100  # pictures of one contact sheet
_GAP = 2  # pixels between them


def save_eval_media(samples: Sequence[RolloutSample], directory: Path, rollout_id: int, kind: WeightKind) -> Path:
    """Write `eval_<rollout>_<kind>.png`, a contact sheet of the first pictures in request order; returns its path.

    Of a clip, the first, middle and last frames stand side by side. ValueError: a sample without media. MediaError: it
    could not be written.
    """
    frames = []
    for sample in samples[:_LARGEST]:
        if sample.media is None:
            raise ValueError(f"eval sample {sample.sample_id} came back without decoded media")
        shown = sample.media[_shown(len(sample.media))]
        frames.append(np.concatenate(eight_bit(shown), axis=1))
    path = directory / f"eval_{rollout_id:06d}_{kind}.png"
    write_picture(path, contact_sheet(frames, columns=math.ceil(math.sqrt(len(frames)))))
    return path


def shown_frames(media: np.ndarray) -> np.ndarray:
    """uint8 `[frames, height, width, 3]` -> one picture: of a clip, the first, middle and last in a row."""
    return np.concatenate(media[_shown(len(media))], axis=1)


def _shown(count: int) -> list[int]:
    return list(dict.fromkeys((0, count // 2, count - 1)))


def contact_sheet(frames: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """uint8 `[height, width, 3]` pictures of one size, row by row, on white."""
    height, width, _ = frames[0].shape
    rows = math.ceil(len(frames) / columns)
    sheet = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), 255, dtype=np.uint8)
    for i, frame in enumerate(frames):
        top, left = i // columns * (height + _GAP), i % columns * (width + _GAP)
        sheet[top : top + height, left : left + width] = frame
    return sheet
