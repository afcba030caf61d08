"""Qwen-Image on an SGLang server: packed latents as here, the prompt's embedding as a list of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from miles_dmd2.models.serving import ServingFormat, pictures
from miles_dmd2.types import Conditioning, Probe

EMBEDS, STATES = "prompt_embeds", "encoder_hidden_states"  # our name, the server's


class QwenImageServing(ServingFormat):
    """The engine's `txt_seq_lens`, `img_shapes` and rotary tables follow from the embedding's length and the canvas."""

    model_id = "Qwen-Image"
    complete_reply = True

    def __init__(self, height: int, width: int, latent_shape: tuple[int, ...], text_dim: int) -> None:
        self._height, self._width = height, width
        self._latent_shape = latent_shape
        self._text_dim = text_dim

    def launch_arguments(self, dtype: Literal["fp32", "bf16"]) -> list[str]:
        # All three: an fp32 transformer does not take a bf16 text encoder's output.
        return ["--dit-precision", dtype, "--vae-precision", dtype, "--text-encoder-precisions", dtype]

    def request_fields(self) -> dict[str, object]:
        # Both scales: the family reads true_cfg_scale and falls back to guidance_scale; 1 is one forward a step.
        return {"height": self._height, "width": self._width, "guidance_scale": 1.0, "true_cfg_scale": 1.0}

    @property
    def conditioning_names(self) -> tuple[str, ...]:
        return (STATES,)

    def conditioning(self, fields: Mapping[str, object]) -> Conditioning:
        states = fields.get(STATES)
        (embeds,) = states if isinstance(states, list) and len(states) == 1 else (None,)
        if not isinstance(embeds, Tensor) or embeds.ndim != 2 or not len(embeds) or embeds.shape[1] != self._text_dim:
            found = list(embeds.shape) if isinstance(embeds, Tensor) else type(states).__name__
            raise ValueError(f"{STATES} must be a list of one [L, {self._text_dim}], got {found}")
        return {EMBEDS: embeds.to(torch.float32)}

    def latent(self, tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) != self._latent_shape:
            raise ValueError(f"a latent must be {list(self._latent_shape)}, got {list(tensor.shape)}")
        return tensor.to(torch.float32)

    def probe(self, probe: Probe) -> dict[str, Tensor]:
        return {"x": probe.x[0], "prompt_embeds.0": probe.cond[EMBEDS].unsqueeze(0)}

    def media(self, output: Tensor) -> Tensor:
        return pictures(output, self._height, self._width)
