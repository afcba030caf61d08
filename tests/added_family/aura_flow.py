"""AuraFlow (AuraFlowPipeline): latents `[C, h, w]`, the network's clock is sigma, one text encoder.

A family that this project does not ship: what test_adding_a_family.py puts into a copy of the tree as the one file of a
new family. Written by docs/families.md alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from miles_dmd2.algo import initial_noise, key_seed, normal
from miles_dmd2.models.base import Components, ModelAdapter, one_record_each, stack_rows
from miles_dmd2.models.checkpoint import FLAG, positive_int, read_config
from miles_dmd2.models.export import StudentSampling, plain_call_scheduler, plain_call_shift, write_student
from miles_dmd2.models.loading import (
    check_pipeline_class,
    check_size,
    full_precision,
    load_pipeline,
    load_transformer,
    pixels_of,
    quiet,
    refuse,
)
from miles_dmd2.types import Conditioning

EMBEDS = "prompt_embeds"
TOKENS = 256


class AuraFlowAdapter(ModelAdapter):
    family: ClassVar[str] = "aura_flow"
    pipeline_classes: ClassVar[tuple[str, ...]] = ("AuraFlowPipeline",)

    def __init__(self, checkpoint: Path, height: int, width: int, num_frames: int = 1) -> None:
        """ValueError: configs missing, malformed or of an unsupported variant, a size the family cannot make."""
        super().__init__(checkpoint, height, width, num_frames)
        check_pipeline_class(checkpoint, read_config(checkpoint, "model_index.json"), self.pipeline_classes)
        where = "transformer/config.json"
        config, vae = read_config(checkpoint, where), read_config(checkpoint, "vae/config.json")
        self._channels = positive_int(config, "in_channels", where, 4)
        self._text_dim = positive_int(config, "joint_attention_dim", where, 2048)
        refuse(checkpoint, where, config, {"out_channels": self._channels})
        refuse(checkpoint, "vae/config.json", vae, {"latent_channels": self._channels})
        self._scale = vae_scale(vae)
        patch = positive_int(config, "patch_size", where, 2)
        table = math.isqrt(positive_int(config, "pos_embed_max_size", where, 1024))
        for name, value in (("height", height), ("width", width)):
            check_size(f"--diffusion-{name}", value, self._scale * patch)
            if value > (largest := table * patch * self._scale):
                raise ValueError(f"--diffusion-{name} {value}: {FLAG}'s position table ends at {largest}")

    @classmethod
    def default_size(cls, checkpoint: Path) -> tuple[int, int]:
        where = "transformer/config.json"
        latent = positive_int(read_config(checkpoint, where), "sample_size", where, 64)
        side = latent * vae_scale(read_config(checkpoint, "vae/config.json"))
        return side, side

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self._channels, self.height // self._scale, self.width // self._scale)

    def initial_noise(self, seed: int) -> Tensor:
        return initial_noise(seed, (1, *self.latent_shape))[0]

    def load_transformer(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        from diffusers import AuraFlowTransformer2DModel

        transformer: nn.Module = load_transformer(
            AuraFlowTransformer2DModel, self.checkpoint, dtype, "context_embedder.weight", ("timestep",)
        )
        return transformer

    def load_components(self, dtype: torch.dtype = torch.float32) -> Components:
        from diffusers import AuraFlowPipeline

        pipeline = load_pipeline(AuraFlowPipeline, self.checkpoint, dtype)
        return Components(pipeline.text_encoder, pipeline.tokenizer, pipeline.vae)

    @torch.no_grad()
    def encode_prompts(self, components: Components, prompts: Sequence[str]) -> list[Conditioning]:
        """Per prompt {"prompt_embeds": `[256, d]`}, padded as the pipeline pads."""
        from diffusers import AuraFlowPipeline

        with quiet():
            pipeline = AuraFlowPipeline(
                components.tokenizer, components.text_encoder, components.vae, transformer=None, scheduler=None
            )
        device = next(components.text_encoder.parameters()).device

        def encode(prompt: str) -> Conditioning:
            embeds = pipeline.encode_prompt(prompt, do_classifier_free_guidance=False, device=device)[0]
            return {EMBEDS: embeds[0].to("cpu", torch.float32, copy=True)}

        return one_record_each(prompts, encode)

    @torch.no_grad()
    def decode(self, components: Components, latents: Tensor) -> Tensor:
        vae: Any = components.vae
        parameter = next(vae.parameters())
        scaled = latents.to(parameter.device, parameter.dtype) / vae.config.scaling_factor
        return pixels_of(vae.decode(scaled, return_dict=False)[0]).unsqueeze(1)

    @torch.no_grad()
    def encode(self, components: Components, pixels: Tensor) -> Tensor:
        vae: Any = components.vae
        moments = vae.encode(self.planes_of(components, pixels).squeeze(2)).latent_dist
        latents: Tensor = moments.mode() * vae.config.scaling_factor
        return latents.to("cpu", torch.float32)

    def collate(self, conds: Sequence[Conditioning]) -> dict[str, Tensor]:
        return {EMBEDS: stack_rows(conds, EMBEDS, (TOKENS, self._text_dim))}

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        self.check_inputs(x, sigma, len(cond[EMBEDS]))
        velocity = transformer(
            hidden_states=x,
            encoder_hidden_states=cond[EMBEDS],
            timestep=1000 * sigma / 1000,  # the scheduler multiplies, the pipeline divides
            return_dict=False,
        )[0]
        return full_precision(velocity)

    def probe_conditioning(self) -> Conditioning:
        return {EMBEDS: normal(key_seed(0, "probe", 0, 0), (TOKENS, self._text_dim))}

    def time_embedding(self, transformer: nn.Module) -> nn.Module:
        return transformer.get_submodule("time_step_proj")

    def shard_units(self, transformer: nn.Module) -> list[nn.Module]:
        names = ("joint_transformer_blocks", "single_transformer_blocks")
        return [block for name in names for block in transformer.get_submodule(name).children()]

    def idle_parameters(self, transformer: nn.Module) -> dict[str, str]:
        return {}

    def check_sampling(self, sampling: StudentSampling) -> None:
        plain_call_shift(sampling)

    def export_pipeline(self, weights: Mapping[str, Tensor], sampling: StudentSampling, directory: Path) -> None:
        call = {"guidance_scale": 1.0, "height": self.height, "width": self.width}
        write_student(self.checkpoint, weights, sampling, plain_call_scheduler(sampling), call, directory)


def vae_scale(vae_config: Mapping[str, Any]) -> int:
    """Pixels per latent pixel of an AutoencoderKL, as the pipeline computes it."""
    return int(2 ** (len(vae_config.get("block_out_channels", (64,))) - 1))
