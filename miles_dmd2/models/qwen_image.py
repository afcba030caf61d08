"""Qwen-Image (QwenImagePipeline): 2x2 packed latents `[tokens, in_channels]`, sigma is the transformer's timestep.

Precision of sigma: this adapter passes it in fp32, but the transformer rounds it to its compute dtype before the time
embedding. In bf16 that is up to 2e-3 (2 of 1000 timesteps) and, on a tiny random model, most of what bf16 costs: a mean
error of 0.0036 of 0.0048. It stays so on purpose, because a student is deployed in a pipeline that rounds alike, and
teacher, critic, student and engine agree. x_sigma, hops and x0 are computed from the exact sigma.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from miles_dmd2.algo import initial_noise, key_seed, normal
from miles_dmd2.models.base import Components, ModelAdapter, one_record_each, pad_rows
from miles_dmd2.models.checkpoint import FLAG, positive_int, read_config
from miles_dmd2.models.export import StudentSampling, flow_match_scheduler, write_student
from miles_dmd2.models.loading import (
    check_pipeline_class,
    check_size,
    full_precision,
    load_pipeline,
    load_transformer,
    pixels_of,
    quiet,
)
from miles_dmd2.models.planar import decode_frame, encode_frame
from miles_dmd2.models.qwen_image_serving import EMBEDS, QwenImageServing
from miles_dmd2.types import Conditioning

logger = logging.getLogger(__name__)

PATCH = 2  # the pipeline packs 2x2 latent pixels into a token
MAX_TOKENS = 512  # of a prompt: QwenImagePipeline.__call__'s own default
DEFAULT_SAMPLE_SIZE = 128  # QwenImagePipeline.default_sample_size, in latent pixels
PROBE_TOKENS = 8
MASK = "prompt_embeds_mask"

# In the last block nobody reads the text stream after attention: these get no gradient at all, or exactly zero. (Two
# thirds of its txt_mod.1 are idle as well, but a parameter is listed whole or not at all.)
IDLE_IN_LAST_BLOCK = {
    "attn.to_add_out.": "none",
    "txt_mlp.": "none",
    "attn.add_q_proj.": "zero",
    "attn.norm_added_q.": "zero",
}
UNSUPPORTED = ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")


class QwenImageAdapter(ModelAdapter):
    """Latents are the pipeline's: normalised VAE latents `[C, h, w]` packed to `[h/2 * w/2, 4 C]`."""

    family: ClassVar[str] = "qwen_image"
    pipeline_classes: ClassVar[tuple[str, ...]] = ("QwenImagePipeline",)

    def __init__(self, checkpoint: Path, height: int, width: int, num_frames: int = 1) -> None:
        """ValueError: configs missing, malformed or of an unsupported variant, a size the family cannot make."""
        super().__init__(checkpoint, height, width, num_frames)
        check_pipeline_class(checkpoint, read_config(checkpoint, "model_index.json"), self.pipeline_classes)
        where = "transformer/config.json"
        transformer, vae = read_config(checkpoint, where), read_config(checkpoint, "vae/config.json")
        for key in UNSUPPORTED:
            if transformer.get(key):
                raise ValueError(
                    f"{FLAG} {checkpoint}: {where} has {key} = true, which is not supported; use a plain Qwen-Image"
                )
        self._in_channels = positive_int(transformer, "in_channels", where, 64)
        self._text_dim = positive_int(transformer, "joint_attention_dim", where, 3584)
        channels = positive_int(vae, "z_dim", "vae/config.json", 16)
        out_channels = positive_int(transformer, "out_channels", where, 16)
        if not self._in_channels == channels * PATCH**2 == out_channels * PATCH**2:
            raise ValueError(
                f"{FLAG} {checkpoint}: in_channels {self._in_channels} must be 4 x out_channels ({out_channels}) and "
                f"4 x the VAE's z_dim ({channels}); download the pipeline again"
            )
        self._vae_scale = vae_scale_factor(vae)
        for name, value in (("height", height), ("width", width)):
            check_size(f"--diffusion-{name}", value, self._vae_scale * PATCH)
        self._grid = (height // self._vae_scale // PATCH, width // self._vae_scale // PATCH)

    @classmethod
    def default_size(cls, checkpoint: Path) -> tuple[int, int]:
        side = DEFAULT_SAMPLE_SIZE * vae_scale_factor(read_config(checkpoint, "vae/config.json"))
        return side, side

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self._grid[0] * self._grid[1], self._in_channels)

    @property
    def serving(self) -> QwenImageServing:
        return QwenImageServing(self.height, self.width, self.latent_shape, self._text_dim)

    def initial_noise(self, seed: int) -> Tensor:
        """As `QwenImagePipeline.prepare_latents` and SGLang draw it: `[1, 1, C, h, w]`, then packed."""
        height, width = (PATCH * side for side in self._grid)
        noise = initial_noise(seed, (1, 1, self._in_channels // PATCH**2, height, width))
        return pack(noise[:, 0])[0]

    def load_transformer(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        from diffusers import QwenImageTransformer2DModel

        return load_transformer(QwenImageTransformer2DModel, self.checkpoint, dtype, "img_in.weight", ("timestep",))

    def load_components(self, dtype: torch.dtype = torch.float32) -> Components:
        from diffusers import QwenImagePipeline

        pipeline = load_pipeline(QwenImagePipeline, self.checkpoint, dtype)
        return Components(pipeline.text_encoder, pipeline.tokenizer, pipeline.vae)

    @torch.no_grad()
    def encode_prompts(self, components: Components, prompts: Sequence[str]) -> list[Conditioning]:
        """Per prompt {"prompt_embeds": fp32 `[L, d]` on the CPU}, unpadded; equal prompts share one record.

        Each prompt is encoded by itself, so its embedding does not depend on the batch around it. Longer than
        MAX_TOKENS is cut there with a warning, as the pipeline does. ValueError: a prompt of which no token is left.
        """
        from diffusers import QwenImagePipeline

        with quiet():
            pipeline = QwenImagePipeline(
                scheduler=None,
                vae=components.vae,
                text_encoder=components.text_encoder,
                tokenizer=components.tokenizer,
                transformer=None,
            )
        device = next(components.text_encoder.parameters()).device

        def encode(prompt: str) -> Conditioning:
            embeds, _ = pipeline.encode_prompt(prompt, device=device)
            return {EMBEDS: self._checked_embeds(embeds[0], prompt).to("cpu", torch.float32, copy=True)}

        return one_record_each(prompts, encode)

    def _checked_embeds(self, embeds: Tensor, prompt: str) -> Tensor:
        if not len(embeds):
            raise ValueError(f"prompt {prompt!r} keeps no token: the tokenizer makes the pipeline's template too short")
        if len(embeds) > MAX_TOKENS:
            logger.warning("prompt cut from %d to %d tokens: %.60r", len(embeds), MAX_TOKENS, prompt)
        return embeds[:MAX_TOKENS]

    @torch.no_grad()
    def decode(self, components: Components, latents: Tensor) -> Tensor:
        """Packed normalised latents `[batch, tokens, channels]` -> fp32 in [0, 1] `[batch, 1, height, width, 3]`."""
        vae: Any = components.vae
        parameter = next(vae.parameters())
        planes = unpack(latents, *self._grid).to(parameter.device, parameter.dtype)
        mean, deviation = (
            torch.tensor(values).view(1, -1, 1, 1).to(planes.device, planes.dtype)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        pixels = decode_frame(vae, planes / (1.0 / deviation) + mean)
        return pixels_of(pixels).unsqueeze(1)

    @torch.no_grad()
    def encode(self, components: Components, pixels: Tensor) -> Tensor:
        """uint8 `[batch, 1, height, width, 3]` -> the posterior's mode, normalised and packed, fp32 on the CPU."""
        vae: Any = components.vae
        planes = self.planes_of(components, pixels).squeeze(2)
        mean, deviation = (
            torch.tensor(values).view(1, -1, 1, 1).to(planes.device, planes.dtype)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        latents = (encode_frame(vae, planes) - mean) / deviation
        return pack(latents).to("cpu", torch.float32)

    def collate(self, conds: Sequence[Conditioning]) -> dict[str, Tensor]:
        """prompt_embeds `[batch, L, d]`; prompt_embeds_mask, bool `[batch, L]`, only where lengths differ."""
        embeds, mask = pad_rows(conds, EMBEDS, self._text_dim)
        return {EMBEDS: embeds} if mask is None else {EMBEDS: embeds, MASK: mask}

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        """fp32 `[batch, tokens, channels]`; fp64 from a transformer with fp64 parameters.

        Not everything in it is fp64 then: the time embedding's angles, queries and keys in the rotary embedding, and
        the variance in RMSNorm pass through fp32 inside diffusers. ValueError: shapes.
        """
        embeds = cond[EMBEDS]
        self.check_inputs(x, sigma, len(embeds))
        velocity = transformer(
            hidden_states=x,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=cond.get(MASK),
            timestep=sigma,
            img_shapes=[[(1, *self._grid)]] * x.shape[0],
            return_dict=False,
        )[0]
        return full_precision(velocity)

    def probe_conditioning(self) -> Conditioning:
        """{"prompt_embeds": `[8, d]`}, normal by key."""
        return {EMBEDS: normal(key_seed(0, "probe", 0, 0), (PROBE_TOKENS, self._text_dim))}

    def time_embedding(self, transformer: nn.Module) -> nn.Module:
        """The MLP behind the sinusoids: its output `[batch, dim]` modulates every block."""
        return transformer.get_submodule("time_text_embed.timestep_embedder")

    def shard_units(self, transformer: nn.Module) -> list[nn.Module]:
        return list(transformer.get_submodule("transformer_blocks").children())

    def idle_parameters(self, transformer: nn.Module) -> dict[str, str]:
        last = f"transformer_blocks.{len(self.shard_units(transformer)) - 1}."
        return {
            name: kind
            for name, _ in transformer.named_parameters()
            for part, kind in IDLE_IN_LAST_BLOCK.items()
            if name.startswith(last + part)
        }

    def export_pipeline(self, weights: Mapping[str, Tensor], sampling: StudentSampling, directory: Path) -> None:
        """`QwenImagePipeline.from_pretrained(directory)(prompt, num_inference_steps=num_steps)` is then the student.

        A student with a grid of its own also takes `sigmas=`, those of student.json without the last. ValueError: the
        directory exists, or the weights do not fit.
        """
        call = {"true_cfg_scale": 1.0, "height": self.height, "width": self.width}
        write_student(self.checkpoint, weights, sampling, flow_match_scheduler(sampling), call, directory)


def vae_scale_factor(vae_config: Mapping[str, Any]) -> int:
    """Pixels per latent pixel, as the pipeline computes it (the key's spelling is diffusers')."""
    stages = vae_config.get("temperal_downsample", (False, True, True))
    if not isinstance(stages, list | tuple) or len(stages) > 8:
        raise ValueError(f"{FLAG}: vae/config.json must have temperal_downsample as a list, got {stages!r:.60}")
    return 2 ** len(stages)


def pack(latents: Tensor) -> Tensor:
    """`[batch, C, h, w]` -> tokens of 2x2 latent pixels `[batch, h/2 * w/2, 4 C]`."""
    batch, channels, height, width = latents.shape
    patches = latents.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH**2)


def unpack(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `pack` for a grid of rows x columns tokens: `[batch, C, 2 rows, 2 columns]`."""
    batch, _, width = tokens.shape
    patches = tokens.reshape(batch, rows, columns, width // PATCH**2, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, rows * PATCH, columns * PATCH)
