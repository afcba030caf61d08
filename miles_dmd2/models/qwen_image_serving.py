"""Qwen-Image on an SGLang server: packed latents as here, the prompt's embedding as a list of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from miles_dmd2.models.serving import CanvasServing, only_tensor
from miles_dmd2.types import Conditioning, Probe

EMBEDS, STATES = "prompt_embeds", "encoder_hidden_states"  # our name, the server's


class QwenImageServing(CanvasServing):
    """The engine's `txt_seq_lens`, `img_shapes` and rotary tables follow from the embedding's length and the canvas."""

    model_id = "Qwen-Image"
    complete_reply = True
    # Both scales: the family reads true_cfg_scale and falls back to guidance_scale; 1 is one forward a step.
    guidance: ClassVar[dict[str, object]] = {"guidance_scale": 1.0, "true_cfg_scale": 1.0}

    def __init__(self, height: int, width: int, latent_shape: tuple[int, ...], text_dim: int) -> None:
        super().__init__(height, width, latent_shape)
        self._text_dim = text_dim

    @property
    def conditioning_names(self) -> tuple[str, ...]:
        return (STATES,)

    def conditioning(self, fields: Mapping[str, object]) -> Conditioning:
        return {EMBEDS: only_tensor(fields, STATES, (None, self._text_dim))}

    def probe(self, probe: Probe) -> dict[str, Tensor]:
        return {"x": probe.x[0], "prompt_embeds.0": probe.cond[EMBEDS].unsqueeze(0)}
