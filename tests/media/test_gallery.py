from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from miles_dmd2.media.gallery import contact_sheet, save_eval_media, shown_frames
from miles_dmd2.types import RolloutSample, WeightVersion


def sample(i: int, media: torch.Tensor | None) -> RolloutSample:
    return RolloutSample(
        i, "p", i, 0, torch.tensor([1.0, 0.0]), torch.zeros(1), torch.zeros(1), {}, WeightVersion(0), media
    )


def test_every_picture_lands_in_its_cell() -> None:
    frames = [np.full((2, 3, 3), value, dtype=np.uint8) for value in (10, 20, 30)]
    sheet = contact_sheet(frames, columns=2)
    assert sheet.shape == (2 * 2 + 2, 2 * 3 + 2, 3)
    assert (sheet[:2, :3] == 10).all()
    assert (sheet[:2, 5:] == 20).all()
    assert (sheet[4:, :3] == 30).all()
    assert (sheet[4:, 5:] == 255).all()  # no fourth picture


def test_eval_sheet_is_named_by_rollout_and_kind_and_reads_back(tmp_path: Path) -> None:
    samples = [sample(i, torch.full((1, 4, 4, 3), i, dtype=torch.uint8)) for i in range(4)]
    path = save_eval_media(samples, tmp_path / "media", 25, "ema")
    assert path.name == "eval_000025_ema.png"
    picture = np.asarray(Image.open(path))
    assert picture.shape == (10, 10, 3)
    assert (picture[6:, 6:] == 3).all()


def test_a_clip_shows_its_first_middle_and_last_frame(tmp_path: Path) -> None:
    clip = torch.arange(5, dtype=torch.uint8).reshape(5, 1, 1, 1).expand(5, 4, 6, 3) * 10
    path = save_eval_media([sample(0, clip), sample(1, clip + 1)], tmp_path, 0, "raw")
    picture = np.asarray(Image.open(path))
    assert picture.shape == (4, 2 * 18 + 2, 3)
    for left, value in ((0, 0), (6, 20), (12, 40), (20, 1), (26, 21), (32, 41)):
        assert (picture[:, left : left + 6] == value).all()
    assert len(shown_frames(clip[:2].numpy())[0]) == 12  # of two frames, both


def test_a_sample_without_media_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="eval sample 5 came back without decoded media"):
        save_eval_media([sample(5, None)], tmp_path, 0, "raw")
