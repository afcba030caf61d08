"""What is peculiar to Wan; what every family must do is in test_families.py."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from miles_dmd2.models.wan import WanAdapter
from tests.tiny_wan import build


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "wan")


def edited(checkpoint: Path, target: Path, file: str, **change: Any) -> Path:
    for path in checkpoint.rglob("*.json"):
        (target / path.relative_to(checkpoint)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target / path.relative_to(checkpoint))
    (target / file).write_text(json.dumps(json.loads((target / file).read_text()) | change))
    return target


@pytest.mark.parametrize(("frames", "latent"), [(1, 1), (5, 2), (81, 21)])
def test_four_frames_are_one_of_the_latent_after_the_first(checkpoint: Path, frames: int, latent: int) -> None:
    assert WanAdapter(checkpoint, 48, 32, frames).latent_shape == (16, latent, 6, 4)


@pytest.mark.parametrize(
    ("frames", "nearest"), [(0, 1), (-4, 1), (2, 1), (4, 5), (6, 5), (8, 9), (80, 81), (82, 81), (83, 81), (84, 85)]
)
def test_other_lengths_name_the_nearest(checkpoint: Path, frames: int, nearest: int) -> None:
    message = rf"^--diffusion-num-frames {frames} must be 4 n \+ 1; the nearest is {nearest}$"
    with pytest.raises(ValueError, match=message):
        WanAdapter(checkpoint, 48, 32, frames)


def test_variants_that_do_not_fit_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    experts = edited(
        checkpoint, tmp_path / "a", "model_index.json", transformer_2=["diffusers", "WanTransformer3DModel"]
    )
    with pytest.raises(ValueError, match=r"^--hf-checkpoint .* models of two experts are not supported"):
        WanAdapter(experts, 48, 32, 5)
    from_pictures = edited(checkpoint, tmp_path / "b", "transformer/config.json", image_dim=1280)
    with pytest.raises(ValueError, match=r"^--hf-checkpoint .* models that start from a picture do not fit"):
        WanAdapter(from_pictures, 48, 32, 5)


def test_the_server_is_told_which_wan_it_is(checkpoint: Path, tmp_path: Path) -> None:
    def model_id(directory: Path) -> str:
        return WanAdapter(directory, 64, 32, 5).serving.model_id

    assert model_id(checkpoint) == "Wan2.1-T2V-1.3B-Diffusers"
    large = edited(checkpoint, tmp_path / "a", "transformer/config.json", num_layers=40)
    assert model_id(large) == "Wan2.1-T2V-14B-Diffusers"
    times = edited(checkpoint, tmp_path / "b", "model_index.json", expand_timesteps=True)
    assert model_id(times) == "Wan2.2-TI2V-5B-Diffusers"
