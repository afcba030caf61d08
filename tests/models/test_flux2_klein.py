"""What is peculiar to FLUX.2 klein; what every family must do is in test_families.py."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import Flux2KleinPipeline

from miles_dmd2.models.flux2_klein import Flux2KleinAdapter, positions
from tests.tiny_klein import build


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "klein")


def test_positions_are_the_pipelines() -> None:
    assert torch.equal(positions(3, 2, 1), Flux2KleinPipeline._prepare_latent_ids(torch.zeros(1, 4, 3, 2))[0])
    assert torch.equal(positions(1, 1, 7), Flux2KleinPipeline._prepare_text_ids(torch.zeros(1, 7, 4))[0])


def test_a_network_that_reads_its_guidance_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Also where the config leaves it out: diffusers' default is to read it."""
    for name in ("model_index.json", "transformer/config.json", "vae/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((checkpoint / name).read_text())
    file = tmp_path / "transformer/config.json"
    config = json.loads(file.read_text())
    for changed in (config | {"guidance_embeds": True}, {k: v for k, v in config.items() if k != "guidance_embeds"}):
        file.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"^--hf-checkpoint .* guidance_embeds = True; only False is supported"):
            Flux2KleinAdapter(tmp_path, 32, 32)


def test_the_server_is_told_whether_the_checkpoint_is_distilled(checkpoint: Path, tmp_path: Path) -> None:
    assert Flux2KleinAdapter(checkpoint, 32, 32).serving.model_id == "FLUX.2-klein-base-4B"
    for name in ("model_index.json", "transformer/config.json", "vae/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((checkpoint / name).read_text())
    index = tmp_path / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"is_distilled": True}))
    assert Flux2KleinAdapter(tmp_path, 32, 32).serving.model_id == "FLUX.2-klein-4B"
