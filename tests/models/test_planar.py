"""The fast way to decode one frame agrees with the VAE's own."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLQwenImage

from miles_dmd2.models.planar import decode_frame, planar_convolutions
from recipes.digits.report import PIPELINE


@pytest.mark.parametrize("which", ["tiny", "digits"])
@torch.no_grad()
def test_a_frame_decodes_as_in_the_vae(which: str, tiny_qwen: Path) -> None:
    root = tiny_qwen if which == "tiny" else PIPELINE
    vae = AutoencoderKLQwenImage.from_pretrained(root, subfolder="vae", local_files_only=True).eval()
    latents = torch.randn(3, 16, 4, 6, generator=torch.Generator().manual_seed(0))
    expected = vae.decode(latents.unsqueeze(2), return_dict=False)[0][:, :, 0]
    found = decode_frame(vae, latents)
    assert found.shape == expected.shape == (3, 3, 32, 48)
    assert (found - expected).abs().max() < 1e-5
    assert torch.equal(vae.decode(latents.unsqueeze(2), return_dict=False)[0][:, :, 0], expected)  # nothing is left


def test_a_clip_is_refused(tiny_qwen: Path) -> None:
    vae = AutoencoderKLQwenImage.from_pretrained(tiny_qwen, subfolder="vae", local_files_only=True)
    with planar_convolutions(vae), pytest.raises(ValueError, match="a single frame, got 2"):
        vae.post_quant_conv(torch.zeros(1, 16, 2, 4, 4))
