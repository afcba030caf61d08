"""What is peculiar to Qwen-Image; what every family must do is in test_families.py."""

from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from torch import Tensor, nn

from miles_dmd2.algo import normal
from miles_dmd2.models.base import Components
from miles_dmd2.models.qwen_image import QwenImageAdapter, pack, unpack
from tests.tiny_qwen import PROMPTS, TALL

HEIGHT, WIDTH = TALL
TOKENS = 6


@pytest.fixture(scope="module")
def pipeline(tiny_qwen: Path) -> QwenImagePipeline:
    return QwenImagePipeline.from_pretrained(tiny_qwen)


@pytest.fixture(scope="module")
def transformer(tiny_qwen: Path) -> nn.Module:
    return QwenImageAdapter(tiny_qwen, *TALL).load_transformer().requires_grad_(False)


@pytest.fixture(scope="module")
def components(tiny_qwen: Path) -> Components:
    return QwenImageAdapter(tiny_qwen, *TALL).load_components()


@pytest.fixture
def adapter(tiny_qwen: Path) -> QwenImageAdapter:
    return QwenImageAdapter(tiny_qwen, *TALL)


def embeds(length: int, key: int = 1) -> dict[str, Tensor]:
    return {"prompt_embeds": normal(key, (length, 32))}


def test_packing_is_the_pipelines(pipeline: QwenImagePipeline) -> None:
    latents = torch.randn(2, 16, 6, 4)
    tokens = pack(latents)
    assert torch.equal(tokens, pipeline._pack_latents(latents.unsqueeze(1), 2, 16, 6, 4))
    assert torch.equal(unpack(tokens, 3, 2), latents)
    assert torch.equal(unpack(tokens, 3, 2), pipeline._unpack_latents(tokens, HEIGHT, WIDTH, 8)[:, :, 0])


def test_a_long_prompt_is_cut_as_the_pipeline_cuts_it(
    adapter: QwenImageAdapter, components: Components, caplog: pytest.LogCaptureFixture
) -> None:
    (cond,) = adapter.encode_prompts(components, ["digit one " * 300])
    assert cond["prompt_embeds"].shape == (512, 32)
    assert "cut from 605 to 512 tokens" in caplog.text


def test_a_tokenizer_with_a_short_template_is_refused(
    adapter: QwenImageAdapter, components: Components, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QwenImagePipeline, "encode_prompt", lambda self, prompt, device: (torch.zeros(1, 0, 32), None))
    with pytest.raises(ValueError, match="keeps no token"):
        adapter.encode_prompts(components, ["digit one"])


def test_collate_masks_only_when_lengths_differ(adapter: QwenImageAdapter) -> None:
    assert set(adapter.collate([embeds(4), embeds(4, 2)])) == {"prompt_embeds"}
    batch = adapter.collate([embeds(4), embeds(2, 2)])
    assert batch["prompt_embeds"].shape == (2, 4, 32)
    assert batch["prompt_embeds_mask"].tolist() == [[True] * 4, [True, True, False, False]]
    assert torch.equal(batch["prompt_embeds"][1, :2], embeds(2, 2)["prompt_embeds"])
    assert not batch["prompt_embeds"][1, 2:].any()


def test_sigma_reaches_the_time_embedding_in_fp32(adapter: QwenImageAdapter, transformer: nn.Module) -> None:
    seen = []
    handle = transformer.time_text_embed.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = adapter.initial_noise(0).unsqueeze(0)
    sigma = torch.tensor([0.99902344 + 2**-24])
    adapter.velocity(transformer, x, sigma, adapter.collate([embeds(4)]))
    handle.remove()
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], sigma)


def test_the_last_text_block_is_idle(adapter: QwenImageAdapter, transformer: nn.Module) -> None:
    kinds = adapter.idle_parameters(transformer)
    assert sorted(kinds.values()) == ["none"] * 6 + ["zero"] * 3
    assert all(name.startswith("transformer_blocks.1.") for name in kinds)


def test_prompt_lengths_are_those_of_the_words(adapter: QwenImageAdapter, components: Components) -> None:
    assert [len(cond["prompt_embeds"]) for cond in adapter.encode_prompts(components, PROMPTS)] == [8, 7, 12]


def test_pictures_are_encoded_as_the_vae_and_the_pipeline_s_normalisation_say(tiny_qwen: Path) -> None:
    """Against vae.encode and the image-to-image pipeline's own (latents - mean) * (1 / std), then packed."""
    from diffusers import QwenImageImg2ImgPipeline

    adapter = QwenImageAdapter(tiny_qwen, 48, 32)
    components = adapter.load_components()
    pixels = (255 * torch.rand((2, 1, 48, 32, 3), generator=torch.Generator().manual_seed(0))).to(torch.uint8)
    ours = adapter.encode(components, pixels)
    vae = components.vae
    image = (pixels[:, 0].permute(0, 3, 1, 2).float() / 127.5 - 1).unsqueeze(2)
    latents = vae.encode(image).latent_dist.mode()
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    latents = ((latents - mean) * (1.0 / std)).transpose(1, 2)
    theirs = QwenImageImg2ImgPipeline._pack_latents(latents, 2, latents.shape[2], *latents.shape[3:])
    assert ours.shape == (2, *adapter.latent_shape)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match=r"pixels must be uint8 \[batch, 1, 48, 32, 3\], got torch.float32"):
        adapter.encode(components, pixels.float())
