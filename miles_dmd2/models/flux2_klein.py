"""FLUX.2 klein (Flux2KleinPipeline): latents are tokens `[h w, channels]`, one for 16 x 16 pixels.

A prompt is always MAX_TOKENS long: the network attends to the padding too, so it is neither cut nor masked. As in
Qwen-Image the transformer rounds the timestep to its compute dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from miles_dmd2.algo import initial_noise, key_seed, normal
from miles_dmd2.models.base import Components, ModelAdapter, one_record_each, stack_rows
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
    refuse,
)
from miles_dmd2.models.serving import CanvasServing, only_tensor
from miles_dmd2.types import Conditioning, Probe

PATCH = 2  # latent pixels to a side of a token
MAX_TOKENS = 512
DEFAULT_SAMPLE_SIZE = 128  # Flux2KleinPipeline.default_sample_size, in latent pixels
EMBEDS = "prompt_embeds"


class Flux2KleinAdapter(ModelAdapter):
    """Latents are the pipeline's: VAE latents in 2x2 patches, normalised by the VAE's batch norm, as tokens."""

    family: ClassVar[str] = "flux2_klein"
    pipeline_classes: ClassVar[tuple[str, ...]] = ("Flux2KleinPipeline",)

    def __init__(self, checkpoint: Path, height: int, width: int, num_frames: int = 1) -> None:
        """ValueError: configs missing, malformed or of an unsupported variant, a size the family cannot make."""
        super().__init__(checkpoint, height, width, num_frames)
        index = read_config(checkpoint, "model_index.json")
        check_pipeline_class(checkpoint, index, self.pipeline_classes)
        where = "transformer/config.json"
        config, vae = read_config(checkpoint, where), read_config(checkpoint, "vae/config.json")
        self._channels = positive_int(config, "in_channels", where, 128)
        self._text_dim = positive_int(config, "joint_attention_dim", where, 15360)
        supported = {"out_channels": self._channels, "patch_size": 1, "guidance_embeds": False}
        refuse(checkpoint, where, {"guidance_embeds": True, **config}, supported)  # diffusers' default is True
        latent = positive_int(vae, "latent_channels", "vae/config.json", 32)
        if self._channels != latent * PATCH**2:
            raise ValueError(
                f"{FLAG} {checkpoint}: in_channels {self._channels} must be 4 x the VAE's latent_channels ({latent})"
            )
        self._cell = PATCH * vae_scale(vae)
        for name, value in (("height", height), ("width", width)):
            check_size(f"--diffusion-{name}", value, self._cell)
        self._grid = (height // self._cell, width // self._cell)
        self._distilled = bool(index.get("is_distilled", False))

    @classmethod
    def default_size(cls, checkpoint: Path) -> tuple[int, int]:
        side = DEFAULT_SAMPLE_SIZE * vae_scale(read_config(checkpoint, "vae/config.json"))
        return side, side

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self._grid[0] * self._grid[1], self._channels)

    @property
    def serving(self) -> Flux2KleinServing:
        return Flux2KleinServing(self, self._text_dim, self._distilled)

    def initial_noise(self, seed: int) -> Tensor:
        """As `Flux2KleinPipeline.prepare_latents` draws it: `[1, channels, h, w]`, then tokens."""
        return initial_noise(seed, (1, self._channels, *self._grid))[0].flatten(1).t().contiguous()

    def load_transformer(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        from diffusers import Flux2Transformer2DModel

        return load_transformer(Flux2Transformer2DModel, self.checkpoint, dtype, "x_embedder.weight", ("timestep",))

    def load_components(self, dtype: torch.dtype = torch.float32) -> Components:
        from diffusers import Flux2KleinPipeline

        pipeline = load_pipeline(Flux2KleinPipeline, self.checkpoint, dtype)
        return Components(pipeline.text_encoder, pipeline.tokenizer, pipeline.vae)

    @torch.no_grad()
    def encode_prompts(self, components: Components, prompts: Sequence[str]) -> list[Conditioning]:
        """Per prompt {"prompt_embeds": fp32 `[512, d]` on the CPU}; equal prompts share one record. Longer ones are
        cut, as the pipeline does it.
        """
        from diffusers import Flux2KleinPipeline

        with quiet():
            pipeline = Flux2KleinPipeline(
                scheduler=None,
                vae=components.vae,
                text_encoder=components.text_encoder,
                tokenizer=components.tokenizer,
                transformer=None,
            )
        device = next(components.text_encoder.parameters()).device

        def encode(prompt: str) -> Conditioning:
            embeds, _ = pipeline.encode_prompt(prompt, device=device, max_sequence_length=MAX_TOKENS)
            return {EMBEDS: embeds[0].to("cpu", torch.float32, copy=True)}

        return one_record_each(prompts, encode)

    @torch.no_grad()
    def decode(self, components: Components, latents: Tensor) -> Tensor:
        vae: Any = components.vae
        parameter = next(vae.parameters())
        rows, columns = self._grid
        planes = latents.to(parameter.device, parameter.dtype).transpose(1, 2).unflatten(2, (rows, columns))
        mean, deviation = _statistics(vae, planes)
        patches = (planes * deviation + mean).unflatten(1, (-1, PATCH, PATCH))
        pixels = patches.permute(0, 1, 4, 2, 5, 3).reshape(len(planes), -1, PATCH * rows, PATCH * columns)
        return pixels_of(vae.decode(pixels, return_dict=False)[0]).unsqueeze(1)

    @torch.no_grad()
    def encode(self, components: Components, pixels: Tensor) -> Tensor:
        vae: Any = components.vae
        latents = vae.encode(self.planes_of(components, pixels).squeeze(2)).latent_dist.mode()
        rows, columns = self._grid
        patches = latents.reshape(len(latents), -1, rows, PATCH, columns, PATCH).permute(0, 1, 3, 5, 2, 4)
        planes = patches.reshape(len(latents), -1, rows, columns)
        mean, deviation = _statistics(vae, planes)
        return ((planes - mean) / deviation).flatten(2).transpose(1, 2).to("cpu", torch.float32)

    def collate(self, conds: Sequence[Conditioning]) -> dict[str, Tensor]:
        return {EMBEDS: stack_rows(conds, EMBEDS, (MAX_TOKENS, self._text_dim))}

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        embeds = cond[EMBEDS]
        self.check_inputs(x, sigma, len(embeds))
        text = positions(1, 1, embeds.shape[1])
        image = positions(*self._grid, 1)
        velocity = transformer(
            hidden_states=x,
            timestep=1000 * sigma / 1000,  # the pipeline's way, to the bit
            encoder_hidden_states=embeds,
            txt_ids=text.to(x.device).expand(len(x), -1, -1),
            img_ids=image.to(x.device).expand(len(x), -1, -1),
            return_dict=False,
        )[0]
        return full_precision(velocity)

    def probe_conditioning(self) -> Conditioning:
        return {EMBEDS: normal(key_seed(0, "probe", 0, 0), (MAX_TOKENS, self._text_dim))}

    def time_embedding(self, transformer: nn.Module) -> nn.Module:
        """The MLP behind the sinusoids: its output `[batch, dim]` modulates every block and the output."""
        return transformer.get_submodule("time_guidance_embed.timestep_embedder")

    def shard_units(self, transformer: nn.Module) -> list[nn.Module]:
        blocks = ("transformer_blocks", "single_transformer_blocks")
        return [block for name in blocks for block in transformer.get_submodule(name).children()]

    def idle_parameters(self, transformer: nn.Module) -> dict[str, str]:
        return {}

    def export_pipeline(self, weights: Mapping[str, Tensor], sampling: StudentSampling, directory: Path) -> None:
        call = {"guidance_scale": 1.0, "height": self.height, "width": self.width}
        write_student(self.checkpoint, weights, sampling, flow_match_scheduler(sampling), call, directory)


def _statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the VAE's patches, `[1, channels, 1, 1]`: those of its batch norm."""
    variance = vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps
    return vae.bn.running_mean.view(1, -1, 1, 1).to(like), torch.sqrt(variance).to(like)


class Flux2KleinServing(CanvasServing):
    """The positions follow from the canvas and the prompt's fixed length."""

    complete_reply = True

    def __init__(self, adapter: Flux2KleinAdapter, text_dim: int, distilled: bool) -> None:
        super().__init__(adapter.height, adapter.width, adapter.latent_shape)
        self.model_id = "FLUX.2-klein-4B" if distilled else "FLUX.2-klein-base-4B"
        self._text_dim = text_dim

    @property
    def conditioning_names(self) -> tuple[str, ...]:
        return ("encoder_hidden_states",)

    def conditioning(self, fields: Mapping[str, object]) -> Conditioning:
        return {EMBEDS: only_tensor(fields, "encoder_hidden_states", (MAX_TOKENS, self._text_dim))}

    def probe(self, probe: Probe) -> dict[str, Tensor]:
        return {"x": probe.x[0], "prompt_embeds.0": probe.cond[EMBEDS].unsqueeze(0)}


def positions(rows: int, columns: int, length: int) -> Tensor:
    """`[rows * columns * length, 4]`: (0, row, column, place in the text) of each token, in row-major order."""
    return torch.cartesian_prod(torch.zeros(1, dtype=torch.int64), *map(torch.arange, (rows, columns, length)))


def vae_scale(vae_config: Mapping[str, Any]) -> int:
    """Pixels per latent pixel, as the pipeline computes it."""
    return int(2 ** (len(vae_config.get("block_out_channels", (128, 256, 512, 512))) - 1))
