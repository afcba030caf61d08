"""Z-Image (ZImagePipeline): latents `[C, h, w]`; the network's clock is 1 - sigma and its output x0 - noise.

Both streams are padded to a multiple of 32 tokens inside the network, with learned tokens that take part in attention;
what a longer prompt beside it in the batch adds is masked.
"""

from __future__ import annotations

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
    refuse,
)
from miles_dmd2.models.serving import CanvasServing, only_tensor
from miles_dmd2.types import Conditioning, Probe

PATCH = 2  # latent pixels to a side of a token
TOKENS_MULTIPLE = 32
MAX_TOKENS = 512  # of a prompt: ZImagePipeline.__call__'s own default
DEFAULT_SIDE = 1024  # ZImagePipeline.__call__'s own default, in pixels
PROBE_TOKENS = 8
EMBEDS, LENGTHS = "prompt_embeds", "prompt_lengths"


class ZImageAdapter(ModelAdapter):
    """Latents are the pipeline's: shifted and scaled VAE latents `[C, h, w]`."""

    family: ClassVar[str] = "z_image"
    pipeline_classes: ClassVar[tuple[str, ...]] = ("ZImagePipeline",)

    def __init__(self, checkpoint: Path, height: int, width: int, num_frames: int = 1) -> None:
        """ValueError: configs missing, malformed or of an unsupported variant, a size the family cannot make."""
        super().__init__(checkpoint, height, width, num_frames)
        check_pipeline_class(checkpoint, read_config(checkpoint, "model_index.json"), self.pipeline_classes)
        where = "transformer/config.json"
        config, vae = read_config(checkpoint, where), read_config(checkpoint, "vae/config.json")
        self._channels = positive_int(config, "in_channels", where, 16)
        self._text_dim = positive_int(config, "cap_feat_dim", where, 2560)
        refuse(checkpoint, where, config, {"all_patch_size": (PATCH,), "all_f_patch_size": (1,)})
        if config.get("siglip_feat_dim") is not None:
            raise ValueError(f"{FLAG} {checkpoint}: {where} has siglip_feat_dim, which is not supported")
        refuse(checkpoint, where, config, {"out_channels": self._channels})
        refuse(checkpoint, "vae/config.json", vae, {"latent_channels": self._channels})
        self._scale = vae_scale(vae)
        for name, value in (("height", height), ("width", width)):
            check_size(f"--diffusion-{name}", value, self._scale * PATCH)

    @classmethod
    def default_size(cls, checkpoint: Path) -> tuple[int, int]:
        return DEFAULT_SIDE, DEFAULT_SIDE

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self._channels, self.height // self._scale, self.width // self._scale)

    @property
    def serving(self) -> ZImageServing:
        return ZImageServing(self, self._text_dim)

    def initial_noise(self, seed: int) -> Tensor:
        return initial_noise(seed, (1, *self.latent_shape))[0]

    def load_transformer(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        from diffusers import ZImageTransformer2DModel

        return load_transformer(ZImageTransformer2DModel, self.checkpoint, dtype, "all_x_embedder.2-1.weight", ("t",))

    def load_components(self, dtype: torch.dtype = torch.float32) -> Components:
        from diffusers import ZImagePipeline

        pipeline = load_pipeline(ZImagePipeline, self.checkpoint, dtype)
        return Components(pipeline.text_encoder, pipeline.tokenizer, pipeline.vae)

    @torch.no_grad()
    def encode_prompts(self, components: Components, prompts: Sequence[str]) -> list[Conditioning]:
        """Per prompt {"prompt_embeds": fp32 `[L, d]` on the CPU}, unpadded; equal prompts share one record. Longer ones
        than MAX_TOKENS are cut, as the pipeline does it.
        """
        from diffusers import ZImagePipeline

        with quiet():
            pipeline = ZImagePipeline(
                scheduler=None,
                vae=components.vae,
                text_encoder=components.text_encoder,
                tokenizer=components.tokenizer,
                transformer=None,
            )
        device = next(components.text_encoder.parameters()).device

        def encode(prompt: str) -> Conditioning:
            (embeds,), _ = pipeline.encode_prompt(
                prompt, device=device, do_classifier_free_guidance=False, max_sequence_length=MAX_TOKENS
            )
            return {EMBEDS: embeds.to("cpu", torch.float32, copy=True)}

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
        """prompt_embeds `[batch, L, d]`; prompt_lengths, int64 `[batch]`, only where lengths differ."""
        embeds, mask = pad_rows(conds, EMBEDS, self._text_dim)
        return {EMBEDS: embeds} if mask is None else {EMBEDS: embeds, LENGTHS: mask.sum(1)}

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        embeds = cond[EMBEDS]
        self.check_inputs(x, sigma, len(embeds))
        rows = list(embeds)
        if LENGTHS in cond:  # the network takes each prompt in its own length
            rows = [row[:length] for row, length in zip(rows, cond[LENGTHS].tolist(), strict=True)]
        clock = (1000 - 1000 * sigma) / 1000  # the pipeline's way, to the bit
        output = transformer(x=list(x.unsqueeze(2)), t=clock, cap_feats=rows, return_dict=False)[0]
        return full_precision(-torch.stack(output).squeeze(2))

    def probe_conditioning(self) -> Conditioning:
        return {EMBEDS: normal(key_seed(0, "probe", 0, 0), (PROBE_TOKENS, self._text_dim))}

    def time_embedding(self, transformer: nn.Module) -> nn.Module:
        """The MLP with its sinusoids: its output `[batch, dim]` modulates the picture's and the joint blocks."""
        return transformer.get_submodule("t_embedder")

    def shard_units(self, transformer: nn.Module) -> list[nn.Module]:
        blocks = ("noise_refiner", "context_refiner", "layers")
        return [block for name in blocks for block in transformer.get_submodule(name).children()]

    def idle_parameters(self, transformer: nn.Module) -> dict[str, str]:
        """The picture's padding token, where the canvas needs no padding: 1024 x 1024 is 128 x 32 tokens."""
        tokens = self.latent_shape[1] // PATCH * (self.latent_shape[2] // PATCH)
        return {} if tokens % TOKENS_MULTIPLE else {"x_pad_token": "zero"}

    def export_pipeline(self, weights: Mapping[str, Tensor], sampling: StudentSampling, directory: Path) -> None:
        call = {"guidance_scale": 0.0, "height": self.height, "width": self.width}  # 1.0 is guided here
        write_student(self.checkpoint, weights, sampling, flow_match_scheduler(sampling), call, directory)


class ZImageServing(CanvasServing):
    """The prompt comes padded to a multiple of 32 with copies of its last row, and its length beside it."""

    model_id = "Z-Image-Turbo"
    complete_reply = True
    guidance: ClassVar[dict[str, object]] = {"guidance_scale": 0.0}  # at 1.0 each step runs two forwards

    def __init__(self, adapter: ZImageAdapter, text_dim: int) -> None:
        super().__init__(adapter.height, adapter.width, adapter.latent_shape)
        self._text_dim = text_dim

    @property
    def conditioning_names(self) -> tuple[str, ...]:
        return ("encoder_hidden_states", "caption_valid_lens")

    def conditioning(self, fields: Mapping[str, object]) -> Conditioning:
        embeds = only_tensor(fields, "encoder_hidden_states", (None, self._text_dim))
        length = int(only_tensor(fields, "caption_valid_lens", ()).item())
        if not 1 <= length <= len(embeds):
            raise ValueError(f"caption_valid_lens must be in [1, {len(embeds)}], got {length}")
        return {EMBEDS: embeds[:length].clone()}

    def latent(self, tensor: Tensor) -> Tensor:
        return super().latent(tensor.squeeze(1) if tensor.ndim == 4 else tensor)

    def start(self, latent: Tensor) -> Tensor:
        return latent.unsqueeze(1)  # one frame

    def probe(self, probe: Probe) -> dict[str, Tensor]:
        embeds = probe.cond[EMBEDS]
        return {
            "x": self.start(probe.x[0]),
            "prompt_embeds.0": embeds.unsqueeze(0),
            "prompt_seq_lens.0": torch.tensor([len(embeds)]),
        }


def vae_scale(vae_config: Mapping[str, Any]) -> int:
    """Pixels per latent pixel of an AutoencoderKL, as the pipeline computes it."""
    return int(2 ** (len(vae_config.get("block_out_channels", (64,))) - 1))
