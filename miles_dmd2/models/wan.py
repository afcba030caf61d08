"""Wan 2.1 T2V and 2.2 TI2V from text (WanPipeline): clips, latents `[C, frames, h, w]`, timesteps 1000 sigma.

A prompt is always MAX_TOKENS long with zeros behind its end, and the network attends to the zeros too: it is neither
cut nor masked. TI2V can give each token a time of its own, for pictures that it starts from; from text alone all are
equal, and one time a sample is the same function.

Precision in bf16: diffusers keeps time embedding, tables and norms of a loaded bf16 network in fp32; FSDP gathers all
parameters in bf16. Teacher, critic and student agree; a bf16 engine is a little more exact than they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

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
from miles_dmd2.types import Conditioning, Probe

logger = logging.getLogger(__name__)

PATCH = (1, 2, 2)
MAX_TOKENS = 512
DEFAULT_SIZE, DEFAULT_FRAMES = (480, 832), 81  # WanPipeline.__call__'s own defaults
LARGE = 40  # blocks of the 14B network
EMBEDS = "prompt_embeds"


class WanAdapter(ModelAdapter):
    """Latents are the pipeline's: normalised VAE latents."""

    family: ClassVar[str] = "wan"
    pipeline_classes: ClassVar[tuple[str, ...]] = ("WanPipeline",)
    makes_clips: ClassVar[bool] = True

    def __init__(self, checkpoint: Path, height: int, width: int, num_frames: int = 1) -> None:
        """ValueError: configs missing, malformed or of an unsupported variant, a size or length that cannot be made."""
        super().__init__(checkpoint, height, width, num_frames)
        index = read_config(checkpoint, "model_index.json")
        check_pipeline_class(checkpoint, index, self.pipeline_classes)
        if (index.get("transformer_2") or [None, None])[1] is not None:
            raise ValueError(f"{FLAG} {checkpoint}: has a transformer_2; models of two experts are not supported")
        where = "transformer/config.json"
        config, vae = read_config(checkpoint, where), read_config(checkpoint, "vae/config.json")
        self._channels = positive_int(config, "in_channels", where, 16)
        self._text_dim = positive_int(config, "text_dim", where, 4096)
        refuse(checkpoint, where, config, {"patch_size": PATCH, "out_channels": self._channels})
        refuse(checkpoint, "vae/config.json", vae, {"z_dim": self._channels})
        if config.get("image_dim") is not None or config.get("added_kv_proj_dim") is not None:
            raise ValueError(f"{FLAG} {checkpoint}: {where} has image_dim: models that start from a picture do not fit")
        self._scale = positive_int(vae, "scale_factor_spatial", "vae/config.json", 8)
        for name, value in (("height", height), ("width", width)):
            check_size(f"--diffusion-{name}", value, self._scale * PATCH[1])
        hop = positive_int(vae, "scale_factor_temporal", "vae/config.json", 4)
        if num_frames < 1 or num_frames % hop != 1:
            nearest = max(0, round((num_frames - 1) / hop)) * hop + 1
            raise ValueError(f"--diffusion-num-frames {num_frames} must be {hop} n + 1; the nearest is {nearest}")
        self._latent_frames = (num_frames - 1) // hop + 1
        self._times_per_token = bool(index.get("expand_timesteps", False))
        self._blocks = positive_int(config, "num_layers", where, LARGE)

    @classmethod
    def default_size(cls, checkpoint: Path) -> tuple[int, int]:
        return DEFAULT_SIZE

    @classmethod
    def default_frames(cls, checkpoint: Path) -> int:
        return DEFAULT_FRAMES

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self._channels, self._latent_frames, self.height // self._scale, self.width // self._scale)

    @property
    def serving(self) -> WanServing:
        model_id = "Wan2.1-T2V-14B-Diffusers" if self._blocks >= LARGE else "Wan2.1-T2V-1.3B-Diffusers"
        return WanServing(self, "Wan2.2-TI2V-5B-Diffusers" if self._times_per_token else model_id, self._text_dim)

    def initial_noise(self, seed: int) -> Tensor:
        return initial_noise(seed, (1, *self.latent_shape))[0]

    def load_transformer(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        from diffusers import WanTransformer3DModel

        return load_transformer(WanTransformer3DModel, self.checkpoint, dtype, "patch_embedding.weight", ("timestep",))

    def load_components(self, dtype: torch.dtype = torch.float32) -> Components:
        from diffusers import WanPipeline

        pipeline = load_pipeline(WanPipeline, self.checkpoint, dtype)
        return Components(pipeline.text_encoder, pipeline.tokenizer, pipeline.vae)

    @torch.no_grad()
    def encode_prompts(self, components: Components, prompts: Sequence[str]) -> list[Conditioning]:
        """Per prompt {"prompt_embeds": fp32 `[512, d]` on the CPU}, zero behind its end; equal prompts share a record.
        Longer ones are cut, as the pipeline does it.
        """
        from diffusers import WanPipeline

        with quiet():
            pipeline = WanPipeline(
                scheduler=None,
                vae=components.vae,
                text_encoder=components.text_encoder,
                tokenizer=components.tokenizer,
                transformer=None,
            )
        device = next(components.text_encoder.parameters()).device

        def encode(prompt: str) -> Conditioning:
            embeds, _ = pipeline.encode_prompt(
                prompt, do_classifier_free_guidance=False, max_sequence_length=MAX_TOKENS, device=device
            )
            return {EMBEDS: embeds[0].to("cpu", torch.float32, copy=True)}

        return one_record_each(prompts, encode)

    @torch.no_grad()
    def decode(self, components: Components, latents: Tensor) -> Tensor:
        vae: Any = components.vae
        parameter = next(vae.parameters())
        planes = latents.to(parameter.device, parameter.dtype)
        mean, deviation = _statistics(vae, planes)
        return pixels_of(vae.decode(planes / (1.0 / deviation) + mean, return_dict=False)[0])

    @torch.no_grad()
    def encode(self, components: Components, pixels: Tensor) -> Tensor:
        vae: Any = components.vae
        latents = vae.encode(self.planes_of(components, pixels)).latent_dist.mode()
        mean, deviation = _statistics(vae, latents)
        return ((latents - mean) * (1.0 / deviation)).to("cpu", torch.float32)

    def collate(self, conds: Sequence[Conditioning]) -> dict[str, Tensor]:
        return {EMBEDS: stack_rows(conds, EMBEDS, (MAX_TOKENS, self._text_dim))}

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        self.check_inputs(x, sigma, len(cond[EMBEDS]))
        velocity = transformer(
            hidden_states=x, timestep=1000 * sigma, encoder_hidden_states=cond[EMBEDS], return_dict=False
        )[0]
        return full_precision(velocity)

    def probe_conditioning(self) -> Conditioning:
        return {EMBEDS: normal(key_seed(0, "probe", 0, 0), (MAX_TOKENS, self._text_dim))}

    def time_embedding(self, transformer: nn.Module) -> nn.Module:
        """The MLP behind the sinusoids: its output `[batch, dim]` modulates every block and the output."""
        return transformer.get_submodule("condition_embedder.time_embedder")

    def shard_units(self, transformer: nn.Module) -> list[nn.Module]:
        return list(transformer.get_submodule("blocks").children())

    def idle_parameters(self, transformer: nn.Module) -> dict[str, str]:
        return {}

    def check_sampling(self, sampling: StudentSampling) -> None:
        plain_call_shift(sampling)

    def export_pipeline(self, weights: Mapping[str, Tensor], sampling: StudentSampling, directory: Path) -> None:
        """As said in the base class, but the pipeline's call takes no sigmas: a grid of its own has to be given to the
        scheduler, in the place of the number of steps.
        """
        call = {"guidance_scale": 1.0, "height": self.height, "width": self.width, "num_frames": self.num_frames}
        write_student(self.checkpoint, weights, sampling, plain_call_scheduler(sampling), call, directory)
        if sampling.shift is None:
            logger.warning(
                "%s: WanPipeline's call takes no sigmas: have its scheduler's set_timesteps called with those of "
                "student.json, all but the last, or it samples another grid",
                directory,
            )


def _statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the VAE's latents, `[1, channels, 1, 1, 1]`."""
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(like.device, like.dtype)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, deviation


class WanServing(CanvasServing):
    """A server without the plugin ignores the checkpoint's scheduler, and with it the student's grid."""

    complete_reply = False

    def __init__(self, adapter: WanAdapter, model_id: str, text_dim: int) -> None:
        super().__init__(adapter.height, adapter.width, adapter.latent_shape, adapter.num_frames)
        self.model_id = model_id
        self._text_dim = text_dim

    def launch_arguments(self, dtype: Literal["fp32", "bf16"]) -> list[str]:
        return [*super().launch_arguments(dtype), "--vae-decode-precision", dtype]

    def request_fields(self) -> dict[str, object]:
        return {**super().request_fields(), "num_frames": self._num_frames}

    @property
    def conditioning_names(self) -> tuple[str, ...]:
        return ("encoder_hidden_states",)

    def conditioning(self, fields: Mapping[str, object]) -> Conditioning:
        return {EMBEDS: only_tensor(fields, "encoder_hidden_states", (MAX_TOKENS, self._text_dim))}

    def probe(self, probe: Probe) -> dict[str, Tensor]:
        return {"x": probe.x[0], "prompt_embeds.0": probe.cond[EMBEDS].unsqueeze(0)}
