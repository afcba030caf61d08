"""Stable Diffusion 3 and 3.5 (StableDiffusion3Pipeline): latents `[C, h, w]`, timesteps 1000 sigma, three encoders.

The position table is a buffer in the checkpoint's safetensors file: it is no weight of a student, so it does not travel
with one, and an export takes it from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from miles_dmd2.models.serving import CanvasServing, only_tensor
from miles_dmd2.models.weights import read_tensor
from miles_dmd2.types import Conditioning, Probe

EMBEDS, POOLED = "prompt_embeds", "pooled_prompt_embeds"
TOKENS = 77 + 256  # of CLIP, then of T5: both padded, StableDiffusion3Pipeline.__call__'s own default
PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
POSITIONS = "pos_embed.pos_embed"

# The last block writes the picture's stream only: the text's queries in it get a gradient that is exactly zero.
IDLE_IN_LAST_BLOCK = ("attn.add_q_proj.", "attn.norm_added_q.")


@dataclass
class SD3Components(Components):
    """Two CLIP encoders with a projection, and T5."""

    text_encoder_2: nn.Module
    text_encoder_3: nn.Module
    tokenizer_2: object
    tokenizer_3: object

    def modules(self) -> tuple[nn.Module, ...]:
        return (self.text_encoder, self.text_encoder_2, self.text_encoder_3, self.vae)


class SD3Adapter(ModelAdapter):
    """Latents are the pipeline's: shifted and scaled VAE latents `[C, h, w]`."""

    family: ClassVar[str] = "sd3"
    pipeline_classes: ClassVar[tuple[str, ...]] = ("StableDiffusion3Pipeline",)

    def __init__(self, checkpoint: Path, height: int, width: int, num_frames: int = 1) -> None:
        """ValueError: configs missing, malformed or of an unsupported variant, a size the family cannot make."""
        super().__init__(checkpoint, height, width, num_frames)
        index = read_config(checkpoint, "model_index.json")
        check_pipeline_class(checkpoint, index, self.pipeline_classes)
        absent = [name for name in PARTS if not index.get(name) or index[name][1] is None]
        if absent:
            raise ValueError(f"{FLAG} {checkpoint}: model_index.json has no {', '.join(absent)}; all three are needed")
        where = "transformer/config.json"
        config, vae = read_config(checkpoint, where), read_config(checkpoint, "vae/config.json")
        self._channels = positive_int(config, "in_channels", where, 16)
        self._text_dim = positive_int(config, "joint_attention_dim", where, 4096)
        self._pooled_dim = positive_int(config, "pooled_projection_dim", where, 2048)
        refuse(checkpoint, where, config, {"out_channels": self._channels})
        refuse(checkpoint, "vae/config.json", vae, {"latent_channels": self._channels})
        self._scale = vae_scale(vae)
        patch = positive_int(config, "patch_size", where, 2)
        largest = positive_int(config, "pos_embed_max_size", where, 96) * patch * self._scale
        for name, value in (("height", height), ("width", width)):
            check_size(f"--diffusion-{name}", value, self._scale * patch)
            if value > largest:
                raise ValueError(f"--diffusion-{name} {value}: the checkpoint's position table ends at {largest}")

    @classmethod
    def default_size(cls, checkpoint: Path) -> tuple[int, int]:
        where = "transformer/config.json"
        latent = positive_int(read_config(checkpoint, where), "sample_size", where, 128)
        side = latent * vae_scale(read_config(checkpoint, "vae/config.json"))
        return side, side

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self._channels, self.height // self._scale, self.width // self._scale)

    @property
    def serving(self) -> SD3Serving:
        return SD3Serving(self, (TOKENS, self._text_dim), (self._pooled_dim,))

    def initial_noise(self, seed: int) -> Tensor:
        return initial_noise(seed, (1, *self.latent_shape))[0]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in super().weight_shapes().items() if name != POSITIONS}

    def load_transformer(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        from diffusers import SD3Transformer2DModel

        transformer: nn.Module = load_transformer(
            SD3Transformer2DModel, self.checkpoint, dtype, "context_embedder.weight", ("timestep",)
        )
        transformer.get_submodule("pos_embed")._non_persistent_buffers_set.add("pos_embed")  # out of the state dict
        return transformer

    def load_components(self, dtype: torch.dtype = torch.float32) -> SD3Components:
        from diffusers import StableDiffusion3Pipeline

        pipeline = load_pipeline(StableDiffusion3Pipeline, self.checkpoint, dtype)
        return SD3Components(vae=pipeline.vae, **{name: getattr(pipeline, name) for name in PARTS})

    @torch.no_grad()
    def encode_prompts(self, components: Components, prompts: Sequence[str]) -> list[Conditioning]:
        """Per prompt {"prompt_embeds": `[333, d]`, "pooled_prompt_embeds": `[p]`}, fp32 on the CPU, padded as the
        pipeline pads; equal prompts share one record. Too long is cut, with diffusers' own warning.
        """
        from diffusers import StableDiffusion3Pipeline

        parts = {name: getattr(components, name) for name in PARTS}
        with quiet():
            pipeline = StableDiffusion3Pipeline(transformer=None, scheduler=None, vae=components.vae, **parts)
        device = next(components.text_encoder.parameters()).device

        def encode(prompt: str) -> Conditioning:
            embeds, _, pooled, _ = pipeline.encode_prompt(
                prompt, None, None, device=device, do_classifier_free_guidance=False
            )
            return {
                EMBEDS: embeds[0].to("cpu", torch.float32, copy=True),
                POOLED: pooled[0].to("cpu", torch.float32, copy=True),
            }

        return one_record_each(prompts, encode)

    @torch.no_grad()
    def decode(self, components: Components, latents: Tensor) -> Tensor:
        vae: Any = components.vae
        parameter = next(vae.parameters())
        scaled = latents.to(parameter.device, parameter.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return pixels_of(vae.decode(scaled, return_dict=False)[0]).unsqueeze(1)

    @torch.no_grad()
    def encode(self, components: Components, pixels: Tensor) -> Tensor:
        vae: Any = components.vae
        moments = vae.encode(self.planes_of(components, pixels).squeeze(2)).latent_dist
        latents = (moments.mode() - vae.config.shift_factor) * vae.config.scaling_factor
        return latents.to("cpu", torch.float32)

    def collate(self, conds: Sequence[Conditioning]) -> dict[str, Tensor]:
        return {
            EMBEDS: stack_rows(conds, EMBEDS, (TOKENS, self._text_dim)),
            POOLED: stack_rows(conds, POOLED, (self._pooled_dim,)),
        }

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        self.check_inputs(x, sigma, len(cond[EMBEDS]))
        velocity = transformer(
            hidden_states=x,
            timestep=1000 * sigma,
            encoder_hidden_states=cond[EMBEDS],
            pooled_projections=cond[POOLED],
            return_dict=False,
        )[0]
        return full_precision(velocity)

    def probe_conditioning(self) -> Conditioning:
        return {
            EMBEDS: normal(key_seed(0, "probe", 0, 0), (TOKENS, self._text_dim)),
            POOLED: normal(key_seed(0, "probe", 0, 2), (self._pooled_dim,)),
        }

    def time_embedding(self, transformer: nn.Module) -> nn.Module:
        """The MLP behind the sinusoids; the pooled prompt's MLP is added to its output `[batch, dim]`."""
        return transformer.get_submodule("time_text_embed.timestep_embedder")

    def shard_units(self, transformer: nn.Module) -> list[nn.Module]:
        return list(transformer.get_submodule("transformer_blocks").children())

    def idle_parameters(self, transformer: nn.Module) -> dict[str, str]:
        last = f"transformer_blocks.{len(self.shard_units(transformer)) - 1}."
        prefixes = tuple(last + part for part in IDLE_IN_LAST_BLOCK)
        return {name: "zero" for name, _ in transformer.named_parameters() if name.startswith(prefixes)}

    def check_sampling(self, sampling: StudentSampling) -> None:
        plain_call_shift(sampling)

    def export_pipeline(self, weights: Mapping[str, Tensor], sampling: StudentSampling, directory: Path) -> None:
        call = {"guidance_scale": 1.0, "height": self.height, "width": self.width}
        whole = self.with_positions(weights)
        write_student(self.checkpoint, whole, sampling, plain_call_scheduler(sampling), call, directory)

    def with_positions(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A student's weights with the checkpoint's position table, for those who take it for one of them."""
        return {**weights, POSITIONS: read_tensor(self.checkpoint / "transformer", POSITIONS)}


class SD3Serving(CanvasServing):
    """Both embeddings come as they are here; a stock server's reply is complete."""

    model_id = "stable-diffusion-3-medium-diffusers"
    complete_reply = True
    text_encoders = 3

    def __init__(self, adapter: SD3Adapter, embeds: tuple[int, ...], pooled: tuple[int, ...]) -> None:
        super().__init__(adapter.height, adapter.width, adapter.latent_shape)
        self._adapter = adapter
        self._embeds, self._pooled = embeds, pooled

    @property
    def conditioning_names(self) -> tuple[str, ...]:
        return ("encoder_hidden_states", "pooled_projections")

    def conditioning(self, fields: Mapping[str, object]) -> Conditioning:
        return {
            EMBEDS: only_tensor(fields, "encoder_hidden_states", self._embeds),
            POOLED: only_tensor(fields, "pooled_projections", self._pooled),
        }

    def probe(self, probe: Probe) -> dict[str, Tensor]:
        return {
            "x": probe.x[0],
            "prompt_embeds.0": probe.cond[EMBEDS].unsqueeze(0),
            "pooled_embeds.0": probe.cond[POOLED].unsqueeze(0),
        }

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._adapter.with_positions(tensors)  # a parameter in the engine


def vae_scale(vae_config: Mapping[str, Any]) -> int:
    """Pixels per latent pixel of an AutoencoderKL, as the pipeline computes it."""
    return int(2 ** (len(vae_config.get("block_out_channels", (64,))) - 1))
