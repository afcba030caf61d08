"""MiniMax H3 on an SGLang server: a canvas and a length in place of sizes, video and sound in one flat latent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from miles_dmd2.models.minimax_h3_layout import (
    AUDIO_CHANNELS,
    FPS,
    LATENTS_PER_SECOND,
    Canvas,
    packed_sequence,
)
from miles_dmd2.models.minimax_h3_weights import FP32_NAMES, engine_checksum, engine_tensors, to_native
from miles_dmd2.models.serving import ServingFormat, pictures
from miles_dmd2.types import Conditioning, Probe

STATES, LAYOUT, TAGS, TARGET = "encoder_hidden_states", "h3_packed_layout", "h3_token_tags", "h3_video_target_start"

TEXT_LAYERS = 50  # of the text encoder: its states are read there


class MiniMaxH3Serving(ServingFormat):
    """A record of conditioning is the text's states alone: the packed sequence follows from their number and the
    canvas, and a reply that was computed on another one is refused.
    """

    model_id = "MiniMax-H3"
    complete_reply = False  # without the plugin the sound's rows are missing
    exact_names = FP32_NAMES

    def __init__(self, canvas: Canvas, text_dim: int, config: Mapping[str, Any], *, native: bool) -> None:
        """config: of the served checkpoint's transformer. native: its file's layout, else diffusers'."""
        self._canvas = canvas
        self._text_dim = text_dim
        self._config = dict(config)
        self._native = native

    def launch_arguments(self, dtype: Literal["fp32", "bf16"]) -> list[str]:
        # Other components stay as released: the network casts the text's states. The checkpoint is the directory
        # itself: without a subfolder SGLang refuses one that has no `vae`.
        return ["--dit-precision", dtype, "--model-subfolder", "."]

    def served_width(self, component: str, name: str, dtype: Literal["fp32", "bf16"]) -> int:
        """SGLang's defaults: VAEs in fp32, the text encoder in bf16, without head, last norm and later layers."""
        if component == "transformer":
            return super().served_width(component, name, dtype)
        if component != "text_encoder":
            return 4
        layer = re.match(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.", name)
        later = layer is not None and int(layer[1]) >= TEXT_LAYERS
        return 0 if later or re.match(r"lm_head\.|(?:model\.)?(?:language_model\.)?norm\.", name) else 2

    def request_fields(self) -> dict[str, object]:
        target = self._canvas.request_target()
        return {"extra_sampling_params": {"task": "t2va", "conditions": [], "target": target}}

    @property
    def conditioning_names(self) -> tuple[str, ...]:
        return (STATES, LAYOUT, TAGS, TARGET)

    def conditioning(self, fields: Mapping[str, object]) -> Conditioning:
        states = fields.get(STATES)
        if isinstance(states, Tensor) and states.ndim == 1:  # SGLang drops the axis of a prompt of one token
            states = states.unsqueeze(0)
        if not isinstance(states, Tensor) or states.ndim != 2 or not len(states) or states.shape[1] != self._text_dim:
            found = list(states.shape) if isinstance(states, Tensor) else type(states).__name__
            raise ValueError(f"{STATES} must be [L, {self._text_dim}], got {found}")
        self._check_layout(len(states), fields)
        return {STATES: states.to(torch.float32)}

    def _check_layout(self, text_rows: int, fields: Mapping[str, object]) -> None:
        """ValueError: not the packed sequence of this many rows of text and this canvas."""
        layout, expected = fields.get(LAYOUT), packed_sequence(text_rows, self._canvas)
        if not isinstance(layout, dict):
            raise ValueError(f"{LAYOUT} must be a map, got {type(layout).__name__}")
        ends = _whole(layout.get("cu_seqlens"), "cu_seqlens")
        used = int(ends[1]) if len(ends) > 1 else 0
        if used != expected.length:
            raise ValueError(
                f"{LAYOUT} has {used} rows, {text_rows} rows of text on this canvas make {expected.length}"
            )
        positions = layout.get("img_position_ids")
        if not isinstance(positions, Tensor) or positions.ndim != 2:
            raise ValueError(f"{LAYOUT}: img_position_ids are missing")
        found = {
            "img_pos": (_whole(layout.get("img_pos"), "img_pos"), expected.video),
            "audio_pos": (_whole(layout.get("audio_pos"), "audio_pos"), expected.audio),
            "text_pos": (_whole(layout.get("text_pos"), "text_pos"), expected.text),
            TAGS: (_whole(fields.get(TAGS), TAGS)[:used], expected.token_tags),
            "img_position_ids": (positions[:used].double(), expected.position_ids.double()),
        }
        wrong = [name for name, (is_, due) in found.items() if not torch.equal(is_, due)]
        if fields.get(TARGET) != 0:
            wrong.append(TARGET)
        if wrong:
            raise ValueError(
                f"{LAYOUT} is not that of {text_rows} rows of text on this canvas: {', '.join(wrong)} differ"
            )

    def latent(self, tensor: Tensor) -> Tensor:
        size = self._canvas.video_size + self._canvas.audio_size
        if tuple(tensor.shape) != (size,):
            raise ValueError(f"a latent must be [{size}], got {list(tensor.shape)}")
        return tensor.to(torch.float32)

    def probe(self, probe: Probe) -> dict[str, Tensor]:
        return {"x": probe.x[0], STATES: probe.cond[STATES]}

    def media(self, output: Tensor) -> Tensor:
        shown = pictures(output, self._canvas.height, self._canvas.width)
        if len(shown) != self._canvas.frames:
            raise ValueError(f"generated_output must have {self._canvas.frames} frames, got {len(shown)}")
        return shown

    def sound(self, output: Tensor, sample_rate: int) -> Tensor:
        if output.ndim != 2 or output.shape[0] != AUDIO_CHANNELS:
            raise ValueError(f"the sound must be [{AUDIO_CHANNELS}, samples], got {list(output.shape)}")
        clip, lasts = self._canvas.frames / FPS, output.shape[1] / sample_rate
        if abs(lasts - clip) > 1 / LATENTS_PER_SECOND:
            raise ValueError(f"the sound lasts {lasts:.3f} s, the clip {clip:.3f} s")
        return output.to(torch.float32).clamp(-1, 1)

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return to_native(tensors, self._config, grouped=self._native)

    def predicted(self, tensors: Mapping[str, Tensor], dtype: Literal["fp32", "bf16"]) -> tuple[str, int]:
        held = engine_tensors(tensors, self._config, dtype)
        return engine_checksum(held), sum(value.numel() for value in held.values())


def _whole(value: object, name: str) -> Tensor:
    """A row of whole numbers as int64; SGLang drops the axis of a single one."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.ndim > 1:
        raise ValueError(f"{LAYOUT}: {name} must be a row of whole numbers")
    return value.reshape(-1).long()
