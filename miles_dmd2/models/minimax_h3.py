"""MiniMax H3 from text (MiniMaxH3Pipeline): clips with sound, one packed sequence, guidance distilled into the network.

A latent is flat: the patchified video rows, then the rows of the sound (`minimax_h3_layout`). The sound has a noise
level of its own beside the video's, on one curve that the release's two sigma shifts give. Inside, the network says
x0 - noise at the clock 1 - sigma, not scaled; here, as everywhere, velocity is noise - x0 at sigma. It reads one
sequence at a time: samples of other lengths or levels cannot share a forward.

Text encoder and VAEs stay with SGLang: there is no embedded engine for this family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from miles_dmd2.algo import key_seed, normal
from miles_dmd2.models.base import VISUAL, Components, LatentPart, ModelAdapter, one_width
from miles_dmd2.models.checkpoint import FLAG, positive_int, read_config
from miles_dmd2.models.export import StudentSampling, write_pipeline
from miles_dmd2.models.loading import check_pipeline_class, full_precision, read_weights, refuse
from miles_dmd2.models.minimax_h3_layout import (
    AUDIO_WIDTH,
    FPS,
    SECONDS,
    VIDEO_CHANNELS,
    Canvas,
    aligned_frames,
    audio_sigma,
    initial_rows,
    join,
    packed_sequence,
    split,
)
from miles_dmd2.models.minimax_h3_serving import MiniMaxH3Serving
from miles_dmd2.models.minimax_h3_weights import (
    DIFFUSERS_CLASS,
    NATIVE_CLASS,
    ROPE,
    TransformerShape,
    from_native,
    native_shapes,
    to_native,
)
from miles_dmd2.models.offload import own_storage
from miles_dmd2.models.serving import ServingFormat
from miles_dmd2.models.weights import mismatch, safetensors_shapes
from miles_dmd2.types import Conditioning, SampleType

STATES, ROWS = "encoder_hidden_states", "text_rows"
AUDIO = "audio"
TEXT_DIM = 5120
PROBE_ROWS = 7
RELEASE = "_minimax_h3"  # of model_index.json
# Native config key -> diffusers' argument.
_ARGUMENTS = {
    "token_refiner_num_layers": "num_refiner_layers",
    "ffn_hidden_size": "ffn_dim",
    "latents_dim": "in_channels",
    "audio_latents_dim": "audio_in_channels",
    "timestep_input_dim": "freq_dim",
    "time_embed_hidden_size": "time_embed_hidden_dim",
    "rope_inv_freq_len": "rope_freq_dim",
}
_DERIVED = ("adaln_out_features", "final_adaln_out_features")  # of other entries; diffusers has no such argument
_FP32 = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")
_SERVED = "text encoder and VAEs of minimax_h3 run in SGLang only: use --rollout-engine sglang"


class MiniMaxH3Adapter(ModelAdapter):
    """The transformer in SGLang's native layout, as released, or in diffusers' one."""

    family: ClassVar[str] = "minimax_h3"
    pipeline_classes: ClassVar[tuple[str, ...]] = ("MiniMaxH3Pipeline",)
    makes_clips: ClassVar[bool] = True
    fewest_decoded_frames: ClassVar[int] = 22  # with 5 SGLang's video VAE fails, in its plan of a streamed decode
    embedded: ClassVar[bool] = False
    guidance_distilled: ClassVar[bool] = True
    sample_types: ClassVar[tuple[SampleType, ...]] = ("ode",)  # SGLang hops the sound by Euler whatever the video does
    one_by_one: ClassVar[bool] = True

    def __init__(self, checkpoint: Path, height: int, width: int, num_frames: int = 1) -> None:
        """ValueError: configs missing, malformed or of another variant, a size or length that cannot be made."""
        super().__init__(checkpoint, height, width, num_frames)
        index = read_config(checkpoint, "model_index.json")
        check_pipeline_class(checkpoint, index, self.pipeline_classes)
        self._shifts = _shifts(checkpoint, index.get(RELEASE))
        where = "transformer/config.json"
        config = read_config(checkpoint, where)
        if config.get("_class_name") not in (NATIVE_CLASS, DIFFUSERS_CLASS):
            raise ValueError(
                f"{FLAG} {checkpoint}: {where} has _class_name {config.get('_class_name')!r}; supported are "
                f"{NATIVE_CLASS} and {DIFFUSERS_CLASS}"
            )
        self._native = config["_class_name"] == NATIVE_CLASS
        self.config = _arguments(config)
        known = {"in_channels": VIDEO_CHANNELS, "audio_in_channels": AUDIO_WIDTH, "patch_size": (1, 2, 2)}
        refuse(checkpoint, where, self.config, known)
        self._text_dim = positive_int(self.config, "text_dim", where, TEXT_DIM)
        self.canvas = Canvas(height, width, num_frames)

    @classmethod
    def default_size(cls, checkpoint: Path) -> tuple[int, int]:
        return 768, 1344

    @classmethod
    def frames_of(cls, seconds: float) -> int:
        if not 0 < seconds < math.inf:
            raise ValueError(f"--diffusion-duration {seconds:g}: must be a number of seconds above 0")
        return aligned_frames(seconds)

    @classmethod
    def default_frames(cls, checkpoint: Path) -> int:
        return aligned_frames(5.0)

    @property
    def notes(self) -> tuple[str, ...]:
        seconds = self.num_frames / FPS
        low, high = SECONDS
        made = f"clips of {self.num_frames} frames, {seconds:.2f} s, {self.width} x {self.height}, with sound"
        return (made if low <= seconds <= high else f"{made}: the release is made for {low:g} to {high:g} s",)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self.canvas.video_size + self.canvas.audio_size,)

    @property
    def parts(self) -> tuple[LatentPart, ...]:
        return LatentPart(VISUAL, self.canvas.video_size), LatentPart(AUDIO, self.canvas.audio_size)

    @property
    def audio_ratio(self) -> float:
        """odds of the sound's sigma over odds of the video's."""
        video, audio = self._shifts
        return audio / video

    def part_sigmas(self, sigma: Tensor) -> tuple[Tensor, ...]:
        return sigma, audio_sigma(sigma, self.audio_ratio)

    @property
    def serving(self) -> ServingFormat:
        return MiniMaxH3Serving(self.canvas, self._text_dim, self.config, native=self._native)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().weight_shapes()
        if self._native:
            return native_shapes(shapes, self.config)
        shapes.pop(ROPE, None)
        return shapes

    def initial_noise(self, seed: int) -> Tensor:
        return initial_rows(seed, self.canvas)

    def load_transformer(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Built on no device, then given the file's tensors: no weight is drawn first. In bf16 the projections of
        latents and the clock stay fp32, as in the release. ValueError: weights that do not fit the config.
        """
        from diffusers import MiniMaxH3Transformer3DModel

        with torch.device("meta"):
            transformer: Any = MiniMaxH3Transformer3DModel(**self.config)
        weights = self._read(transformer)
        for name in weights:
            exact = dtype == torch.bfloat16 and name.startswith(tuple(f"{unit}." for unit in _FP32))
            weights[name] = weights[name].to(torch.float32 if exact else dtype)
        transformer.load_state_dict(weights, strict=True, assign=True)
        rope = TransformerShape.of(self.config).rope()  # no part of the state, so still on no device
        transformer.rope.register_buffer("inv_freq", rope, persistent=False)
        own_storage(transformer)
        loaded: nn.Module = transformer.eval()
        return loaded

    def _read(self, transformer: nn.Module) -> dict[str, Tensor]:
        """The checkpoint's transformer in diffusers' names."""
        directory = self.checkpoint / "transformer"
        tensors = read_weights(directory)
        try:
            if self._native:
                tensors = from_native(tensors, self.config)
        except ValueError as error:
            raise ValueError(f"{FLAG} {self.checkpoint}: transformer: {error}") from error
        tensors.pop(ROPE, None)  # a file in diffusers' layout has it for SGLang alone
        expected = {name: tuple(value.shape) for name, value in transformer.state_dict().items()}
        problem = mismatch(expected, tensors)
        if problem:
            raise ValueError(f"{FLAG} {self.checkpoint}: transformer weights do not fit its config: {problem}")
        return tensors

    def load_components(self, dtype: torch.dtype = torch.float32) -> Components:
        raise ValueError(_SERVED)

    def encode_prompts(self, components: Components, prompts: Sequence[str]) -> list[Conditioning]:
        raise ValueError(_SERVED)

    def decode(self, components: Components, latents: Tensor) -> Tensor:
        raise ValueError(_SERVED)

    def collate(self, conds: Sequence[Conditioning]) -> dict[str, Tensor]:
        """{"encoder_hidden_states": `[batch, longest, d]`, zero behind a text's end, "text_rows": int64 `[batch]`}."""
        rows = one_width(conds, STATES, self._text_dim)
        lengths = torch.tensor([len(row) for row in rows])
        return {STATES: nn.utils.rnn.pad_sequence(rows, batch_first=True), ROWS: lengths}

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        self.check_inputs(x, sigma, len(cond[STATES]))
        video_sigma, sound_sigma = self.part_sigmas(sigma) if sigma.ndim == 1 else (sigma[:, 0], sigma[:, -1])
        clocks = torch.stack([1 - video_sigma, 1 - sound_sigma], dim=1)
        video, audio = split(x, self.canvas)
        rows = []
        for i, text_rows in enumerate(cond[ROWS].tolist()):
            packed = packed_sequence(text_rows, self.canvas, x.device)
            data_ward = transformer(
                hidden_states=video[i : i + 1],
                audio_hidden_states=audio[i : i + 1],
                encoder_hidden_states=cond[STATES][i : i + 1, :text_rows],
                timestep=clocks[i],
                timestep_indices=packed.clock_of_row,
                token_tags=packed.token_tags,
                position_ids=packed.position_ids,
                video_indices=packed.video,
                audio_indices=packed.audio,
                text_indices=packed.text,
                return_dict=False,
            )
            rows.append(-join(*data_ward))
        return full_precision(torch.cat(rows))

    def probe_conditioning(self) -> Conditioning:
        return {STATES: normal(key_seed(0, "probe", 0, 0), (PROBE_ROWS, self._text_dim))}

    def time_embedding(self, transformer: nn.Module) -> nn.Module:
        """The MLP behind the sinusoids: its output `[2, dim]`, one row per clock, modulates blocks and output."""
        return transformer.get_submodule("time_embedder")

    def shard_units(self, transformer: nn.Module) -> list[nn.Module]:
        stacks = ("transformer_blocks", "token_refiner.refiner_blocks")
        return [block for stack in stacks for block in transformer.get_submodule(stack).children()]

    def fp32_units(self, transformer: nn.Module) -> list[nn.Module]:
        return [transformer.get_submodule(name) for name in _FP32]

    def idle_parameters(self, transformer: nn.Module) -> dict[str, str]:
        return {}

    def head_of(self, part: str) -> tuple[str, ...]:
        head = "proj_out" if part == VISUAL else "audio_proj_out"
        return f"{head}.weight", f"{head}.bias"

    def export_pipeline(self, weights: Mapping[str, Tensor], sampling: StudentSampling, directory: Path) -> None:
        """As said in the base class; the release has no scheduler: its metadata hold the grid.

        SGLang then takes the student's number of steps and, where these are whole thousandths, no other.
        """
        named = to_native(weights, self.config) if self._native else dict(weights)
        if not self._native and ROPE in safetensors_shapes(self.checkpoint / "transformer"):
            named[ROPE] = TransformerShape.of(self.config).rope()
        call = {"task": "t2va", "target": self.canvas.request_target()}
        write_pipeline(
            self.checkpoint,
            "transformer",
            named,
            None,
            {**sampling.described(), **call},
            directory,
            index_changes={RELEASE: self._release(sampling)},
        )

    def _release(self, sampling: StudentSampling) -> dict[str, Any]:
        """The release's metadata with the student's shifts, and its steps in thousandths before the shift."""
        release = dict(read_config(self.checkpoint, "model_index.json")[RELEASE])
        release.pop("dmd_denoising_steps", None)
        if sampling.shift is None:
            return release
        release["sigma_shift_scales"] = {"video": sampling.shift, "audio": sampling.shift * self.audio_ratio}
        if 1000 % sampling.num_steps == 0:
            hop = 1000 // sampling.num_steps
            release["dmd_denoising_steps"] = [1000 - hop * i for i in range(sampling.num_steps)]
        return release


def _shifts(checkpoint: Path, release: object) -> tuple[float, float]:
    """(video's, audio's) sigma shift of the release's metadata."""
    where = f"{FLAG} {checkpoint}: model_index.json"
    if not isinstance(release, dict):
        raise ValueError(f"{where} has no {RELEASE}, the release's metadata: give the directory as released (FL2VA)")
    if "t2va" not in (release.get("tasks") or ()):
        raise ValueError(
            f"{where}: {RELEASE} has tasks {release.get('tasks')!r}, without t2va; give the FL2VA partition"
        )
    if release.get("pdd_fused_heads") is not None:
        raise ValueError(f"{where}: {RELEASE} has pdd_fused_heads; give the release without fused heads")
    scales = release.get("sigma_shift_scales")
    found = [scales.get(name) for name in ("video", "audio")] if isinstance(scales, dict) else []
    shifts = [float(shift) for shift in found if isinstance(shift, int | float) and 0 < shift < math.inf]
    if len(shifts) != 2:
        raise ValueError(f"{where}: {RELEASE} needs sigma_shift_scales of video and audio above 0, got {scales!r}")
    return shifts[0], shifts[1]


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of either layout as arguments of diffusers' class."""
    named = {_ARGUMENTS.get(key, key): value for key, value in config.items()}
    return {key: value for key, value in named.items() if not key.startswith("_") and key not in _DERIVED}
