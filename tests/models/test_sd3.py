"""What is peculiar to Stable Diffusion 3; what every family must do is in test_families.py."""

import json
import re
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel

from miles_dmd2.algo import sigma_grid
from miles_dmd2.models.export import StudentSampling
from miles_dmd2.models.sd3 import POSITIONS, SD3Adapter
from tests.tiny_sd3 import build


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "sd3")


def test_a_checkpoint_without_one_of_the_text_encoders_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    index = json.loads((checkpoint / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"text_encoder_3": [None, None]}))
    with pytest.raises(ValueError, match=r"^--hf-checkpoint .* has no text_encoder_3; all three are needed"):
        SD3Adapter(tmp_path, 32, 32)


def test_the_position_table_limits_the_canvas(checkpoint: Path) -> None:
    assert SD3Adapter(checkpoint, 192, 32).latent_shape == (16, 24, 4)
    with pytest.raises(
        ValueError, match=re.escape("--diffusion-height 208: the checkpoint's position table ends at 192")
    ):
        SD3Adapter(checkpoint, 208, 32)


def test_the_position_table_is_no_weight_and_comes_back_in_exports(checkpoint: Path, tmp_path: Path) -> None:
    adapter = SD3Adapter(checkpoint, 32, 32)
    transformer = adapter.load_transformer()
    sampling = StudentSampling(tuple(sigma_grid(4, 3.0).tolist()), 3.0)
    assert POSITIONS not in transformer.state_dict()
    adapter.export_pipeline(transformer.state_dict(), sampling, tmp_path / "student")
    exported = SD3Transformer2DModel.from_pretrained(tmp_path / "student", subfolder="transformer")
    original = SD3Transformer2DModel.from_pretrained(checkpoint, subfolder="transformer")
    assert torch.equal(exported.pos_embed.pos_embed, original.pos_embed.pos_embed)
