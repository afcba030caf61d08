"""The Qwen-Image adapter against diffusers' own pipeline: noise, packing, prompts, velocity, pixels."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from miles_dmd2.algo import normal
from miles_dmd2.models.base import Components
from miles_dmd2.models.offload import held_bytes
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


def embeds(length: int, key: int = 1) -> dict[str, Tensor]:
    return {"prompt_embeds": normal(key, (length, 32))}


def inputs(adapter: QwenImageAdapter, batch: int) -> tuple[Tensor, Tensor]:
    x = torch.stack([adapter.initial_noise(seed) for seed in range(batch)])
    return x, torch.linspace(0.1, 1.0, batch)


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_noise_is_the_pipelines_bit_for_bit(adapter: QwenImageAdapter, pipeline: QwenImagePipeline, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    theirs = pipeline.prepare_latents(1, 16, HEIGHT, WIDTH, torch.float32, torch.device("cpu"), generator)
    ours = adapter.initial_noise(seed)
    assert ours.shape == adapter.latent_shape == (TOKENS, 64)
    assert torch.equal(ours, theirs[0])


def test_packing_is_the_pipelines(pipeline: QwenImagePipeline) -> None:
    latents = torch.randn(2, 16, 6, 4)
    tokens = pack(latents)
    assert torch.equal(tokens, pipeline._pack_latents(latents.unsqueeze(1), 2, 16, 6, 4))
    assert torch.equal(unpack(tokens, 3, 2), latents)
    assert torch.equal(unpack(tokens, 3, 2), pipeline._unpack_latents(tokens, HEIGHT, WIDTH, 8)[:, :, 0])


def test_loading_gives_frozen_components_and_storages_that_can_sleep(
    transformer: nn.Module, components: Components
) -> None:
    for module in (transformer, *components.modules()):
        tensors = [*module.parameters(), *module.buffers()]
        assert not module.training
        assert all(t.untyped_storage().resizable() and t.untyped_storage().nbytes() == t.nbytes for t in tensors)
    assert held_bytes(transformer) == sum(p.nbytes for p in transformer.parameters())
    assert not any(p.requires_grad for module in components.modules() for p in module.parameters())


def test_loading_shows_no_progress_bar_and_leaves_the_switches(
    adapter: QwenImageAdapter, capfd: pytest.CaptureFixture[str]
) -> None:
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    adapter.load_components()
    adapter.load_transformer()
    assert capfd.readouterr().err == ""
    assert diffusers_logging.is_progress_bar_enabled()
    assert transformers_logging.is_progress_bar_enabled()


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_weights_that_do_not_fit_their_config_are_refused(tiny_qwen: Path, tmp_path: Path, change: str) -> None:
    """diffusers itself only warns, and leaves the missing ones random."""
    checkpoint = tmp_path / "changed"
    shutil.copytree(tiny_qwen, checkpoint)
    file = checkpoint / "transformer/diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    if change == "missing":
        del weights["proj_out.bias"]
    else:
        weights["proj_out.extra"] = torch.zeros(1)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"transformer weights do not fit its config.*{change}_keys.*proj_out"):
        QwenImageAdapter(checkpoint, *TALL).load_transformer()


def test_pickled_weights_are_never_read(tiny_qwen: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "pickled"
    shutil.copytree(tiny_qwen, checkpoint)
    file = checkpoint / "transformer/diffusion_pytorch_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    with pytest.raises(OSError, match="safetensors"):
        QwenImageAdapter(checkpoint, *TALL).load_transformer()


def test_prompts_are_encoded_as_the_pipeline_encodes_each_alone(
    adapter: QwenImageAdapter, components: Components, pipeline: QwenImagePipeline
) -> None:
    conds = adapter.encode_prompts(components, [*PROMPTS, PROMPTS[0]])
    for prompt, cond in zip(PROMPTS, conds[:3], strict=True):
        theirs, mask = pipeline.encode_prompt(prompt, device="cpu")
        assert mask is None
        assert torch.equal(cond["prompt_embeds"], theirs[0])
    assert [len(cond["prompt_embeds"]) for cond in conds] == [8, 7, 12, 8]
    assert conds[3] is conds[0]
    together, _ = pipeline.encode_prompt(list(PROMPTS), device="cpu")
    torch.testing.assert_close(together[1, :7], conds[1]["prompt_embeds"], rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("bad", [torch.zeros(0, 32), torch.zeros(4, 31), torch.zeros(1, 4, 32)])
def test_collate_refuses_other_shapes(adapter: QwenImageAdapter, bad: Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be \[L, 32\]"):
        adapter.collate([embeds(4), {"prompt_embeds": bad}])
    with pytest.raises(ValueError, match="at least one"):
        adapter.collate([])


def test_velocity_is_the_transformers_at_timestep_sigma(adapter: QwenImageAdapter, transformer: nn.Module) -> None:
    x, sigma = inputs(adapter, 3)
    cond = adapter.collate([embeds(5, key) for key in range(3)])
    ours = adapter.velocity(transformer, x, sigma, cond)
    theirs = transformer(
        hidden_states=x,
        encoder_hidden_states=cond["prompt_embeds"],
        timestep=sigma,
        img_shapes=[[(1, 3, 2)]] * 3,
        return_dict=False,
    )[0]
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs)


def test_padding_does_not_change_a_sample(adapter: QwenImageAdapter, transformer: nn.Module) -> None:
    x, sigma = inputs(adapter, 2)
    conds = [embeds(3), embeds(9, 2)]
    together = adapter.velocity(transformer, x, sigma, adapter.collate(conds))
    for row in range(2):
        alone = adapter.velocity(transformer, x[row, None], sigma[row, None], adapter.collate([conds[row]]))
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "sigma", "batch"),
    [((2, TOKENS, 32), 2, 2), ((2, TOKENS + 1, 64), 2, 2), ((2, TOKENS, 64), 1, 2), ((2, TOKENS, 64), 2, 3)],
)
def test_velocity_refuses_other_shapes(
    adapter: QwenImageAdapter, transformer: nn.Module, x: tuple[int, ...], sigma: int, batch: int
) -> None:
    cond = adapter.collate([embeds(4)] * batch)
    with pytest.raises(ValueError, match=r"velocity takes x \[batch, 6, 64\]"):
        adapter.velocity(transformer, torch.zeros(x), torch.zeros(sigma), cond)


def test_velocity_in_bf16_is_close_and_comes_back_in_fp32(adapter: QwenImageAdapter, transformer: nn.Module) -> None:
    x, sigma = inputs(adapter, 4)
    cond = adapter.collate([embeds(5, key) for key in range(4)])
    exact = adapter.velocity(transformer, x, sigma, cond)
    rounded = adapter.velocity(adapter.load_transformer(torch.bfloat16), x, sigma, cond)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.05 * exact.abs().max()


def test_velocity_follows_fp64_parameters_and_carries_gradients(adapter: QwenImageAdapter) -> None:
    transformer = adapter.load_transformer(torch.float64)
    x, sigma = inputs(adapter, 2)
    velocity = adapter.velocity(transformer, x.double(), sigma.double(), adapter.collate([embeds(5)] * 2))
    assert velocity.dtype == torch.float64
    velocity.square().sum().backward()
    assert transformer.proj_out.weight.grad.abs().sum() > 0


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # nobody writes into the output
@pytest.mark.usefixtures("one_rank")
def test_fsdp_mixed_precision_computes_what_a_bf16_transformer_does(adapter: QwenImageAdapter) -> None:
    """Shards are fp32, gathered weights bf16, and FSDP casts no input: the entry layers do, also in a copy."""
    x, sigma = inputs(adapter, 4)
    cond = adapter.collate([embeds(5 + key, key) for key in range(4)])
    transformer = copy.deepcopy(adapter.load_transformer())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    for module in (*adapter.shard_units(transformer), transformer):
        fully_shard(module, mp_policy=policy, reshard_after_forward=True)
    velocity = adapter.velocity(transformer, x, sigma, cond)
    assert next(transformer.parameters()).dtype == torch.float32
    assert velocity.dtype == torch.float32
    assert torch.equal(velocity, adapter.velocity(adapter.load_transformer(torch.bfloat16), x, sigma, cond))


def test_sigma_reaches_the_time_embedding_in_fp32(adapter: QwenImageAdapter, transformer: nn.Module) -> None:
    seen = []
    handle = transformer.time_text_embed.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x, _ = inputs(adapter, 1)
    sigma = torch.tensor([0.99902344 + 2**-24])
    adapter.velocity(transformer, x, sigma, adapter.collate([embeds(4)]))
    handle.remove()
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], sigma)


def test_time_embedding_output_is_one_row_per_sample_and_steers_the_velocity(
    adapter: QwenImageAdapter, transformer: nn.Module
) -> None:
    module = adapter.time_embedding(transformer)
    assert module in set(transformer.modules())
    shapes, shift = [], 0.0
    handle = module.register_forward_hook(lambda module, args, output: (shapes.append(output.shape), output + shift)[1])
    x, sigma = inputs(adapter, 3)
    cond = adapter.collate([embeds(4)] * 3)
    plain = adapter.velocity(transformer, x, sigma, cond)
    shift = torch.tensor([0.0, 1.0, 0.0]).unsqueeze(1)
    moved = adapter.velocity(transformer, x, sigma, cond)
    handle.remove()
    assert shapes == [(3, 64), (3, 64)]
    assert torch.equal(plain, adapter.velocity(transformer, x, sigma, cond))
    assert torch.equal(moved[[0, 2]], plain[[0, 2]])
    assert (moved[1] - plain[1]).abs().max() > 1e-3


def test_shard_units_are_the_blocks(adapter: QwenImageAdapter, transformer: nn.Module) -> None:
    units = adapter.shard_units(transformer)
    assert len(units) == 2
    assert {type(unit).__name__ for unit in units} == {"QwenImageTransformerBlock"}


def useless_gradients(adapter: QwenImageAdapter, transformer: nn.Module, lengths: list[int]) -> dict[str, str]:
    """Parameters whose gradient of a generic loss is None or exactly zero."""
    x, sigma = inputs(adapter, len(lengths))
    cond = adapter.collate([embeds(length, key) for key, length in enumerate(lengths)])
    transformer.zero_grad(set_to_none=True)
    (adapter.velocity(transformer, x, sigma, cond) - torch.randn(x.shape)).square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in transformer.named_parameters()}
    return {
        name: "none" if gradient is None else "zero"
        for name, gradient in gradients.items()
        if gradient is None or not gradient.any()
    }


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 2, 7]], ids=["unmasked", "masked"])
def test_idle_parameters_are_those_without_a_gradient(
    adapter: QwenImageAdapter, num_layers: int, lengths: list[int]
) -> None:
    """A loss on the velocity is all that student and critic have, and none of these reaches the velocity."""
    config = json.loads((adapter.checkpoint / "transformer/config.json").read_text())
    transformer = QwenImageTransformer2DModel.from_config(config | {"num_layers": num_layers})
    idle = adapter.idle_parameters(transformer)
    assert idle == useless_gradients(adapter, transformer, lengths)
    assert sorted(idle.values()) == ["none"] * 6 + ["zero"] * 3
    x, sigma = inputs(adapter, 2)
    before = adapter.velocity(transformer, x, sigma, adapter.collate([embeds(5)] * 2))
    with torch.no_grad():
        for name in idle:
            transformer.get_parameter(name).normal_()
    assert torch.equal(before, adapter.velocity(transformer, x, sigma, adapter.collate([embeds(5)] * 2)))


def test_pixels_are_the_pipelines(
    adapter: QwenImageAdapter, components: Components, pipeline: QwenImagePipeline
) -> None:
    generator = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    arguments = {"prompt": ["digit one"] * 2, "height": HEIGHT, "width": WIDTH, "num_inference_steps": 2}
    pipeline.set_progress_bar_config(disable=True)
    pictures = pipeline(**arguments, generator=generator).images
    generator = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    latents = pipeline(**arguments, generator=generator, output_type="latent").images
    media = adapter.decode(components, latents)
    assert media.shape == (2, 1, HEIGHT, WIDTH, 3)
    assert media.dtype == torch.uint8
    assert np.array_equal(media[:, 0].numpy(), np.stack([np.asarray(picture) for picture in pictures]))


def test_probe_conditioning_is_fixed(adapter: QwenImageAdapter, tiny_qwen: Path) -> None:
    cond = adapter.probe_conditioning()
    assert cond["prompt_embeds"].shape == (8, 32)
    again = QwenImageAdapter(tiny_qwen, *TALL).probe_conditioning()
    assert torch.equal(cond["prompt_embeds"], again["prompt_embeds"])
    assert set(adapter.collate([cond])) == {"prompt_embeds"}


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
