"""MiniMax H3's geometry: what a canvas holds, how latents become rows, and the packed sequence that the network reads.

The network sees one sequence [text L | audio 2A | video V]: V rows of patchified video latents, and A latents of sound
for each of two channels. Everything here follows from the canvas and L, as in diffusers' modular pipeline and SGLang.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from miles_dmd2.algo import shift_sigma

FPS = 24
LATENTS_PER_SECOND = 40  # of sound
AUDIO_CHANNELS = 2
VIDEO_CHANNELS, PATCH, COMPRESSION = 24, 2, 16
MULTIPLE = PATCH * COMPRESSION
VIDEO_WIDTH, AUDIO_WIDTH = VIDEO_CHANNELS * PATCH * PATCH, 32
TEXT_TAG, VIDEO_TAG, AUDIO_TAG = 1, 0, 2
SHORT_EDGE, MAX_PIXELS = 768, 768 * 1344  # of the release
SECONDS = (4.0, 15.0)  # of the release
# Width to height. A request names one of them and a short edge, and the engine makes the canvas.
ASPECT_RATIOS = {"21:9": 21 / 9, "16:9": 16 / 9, "4:3": 4 / 3, "1:1": 1.0, "3:4": 3 / 4, "9:16": 9 / 16}


def aligned_frames(seconds: float) -> int:
    """Frames of a clip of this length: rounded to frames, then up to 17 n + 5, as the engine does it."""
    frames = round(seconds * FPS)
    return frames + (5 - frames) % 17


@dataclass(frozen=True, slots=True)
class Canvas:
    """Height and width in pixels, and frames."""

    height: int
    width: int
    frames: int

    def __post_init__(self) -> None:
        """ValueError, with the flag and the remedy: a size or length that the engine does not make."""
        if self.frames < 5 or self.frames % 17 != 5:
            nearest = 17 * max(0, round((self.frames - 5) / 17)) + 5
            raise ValueError(f"--diffusion-num-frames {self.frames} must be 17 n + 5; the nearest is {nearest}")
        if min(self.height, self.width) < 1 or self.request_size() is None:
            raise ValueError(
                f"--diffusion-height {self.height} --diffusion-width {self.width}: MiniMax H3 makes canvases of "
                f"{', '.join(ASPECT_RATIOS)} with sides that are multiples of {MULTIPLE}, at most {MAX_PIXELS} pixels; "
                f"for example {SHORT_EDGE} and 1344"
            )

    @property
    def latent_grid(self) -> tuple[int, int, int]:
        """Frames, height and width of the video latent; 17 n + 5 frames are 5 n + 2 latent ones."""
        return (self.frames - 5) // 17 * 5 + 2, self.height // COMPRESSION, self.width // COMPRESSION

    @property
    def video_rows(self) -> int:
        frames, height, width = self.latent_grid
        return frames * (height // PATCH) * (width // PATCH)

    @property
    def audio_latents(self) -> int:
        """Of each channel."""
        return round(self.frames / FPS * LATENTS_PER_SECOND)

    @property
    def audio_rows(self) -> int:
        return AUDIO_CHANNELS * self.audio_latents

    @property
    def video_size(self) -> int:
        return self.video_rows * VIDEO_WIDTH

    @property
    def audio_size(self) -> int:
        return self.audio_rows * AUDIO_WIDTH

    def request_size(self) -> tuple[int, str] | None:
        """(short edge, aspect ratio) of which the engine makes this canvas; None: it makes it of none."""
        short, ratio = min(self.height, self.width), self.width / self.height
        names = sorted(ASPECT_RATIOS, key=lambda name: abs(math.log(ASPECT_RATIOS[name] / ratio)))
        for edge in sorted(range(max(1, short - MULTIPLE), short + MULTIPLE), key=lambda edge: abs(edge - short)):
            for name in names:
                if _canvas(edge, name) == (self.height, self.width):
                    return edge, name
        return None

    def request_target(self) -> dict[str, object]:
        """The `target` of an SGLang request."""
        size = self.request_size()
        assert size is not None  # __post_init__
        return {"short_edge": size[0], "aspect_ratio": size[1], "duration_seconds": self.frames / FPS}


def _canvas(short_edge: int, aspect_ratio: str) -> tuple[int, int]:
    """(height, width): the short edge, at most MAX_PIXELS, then the nearest multiples."""
    ratio = ASPECT_RATIOS[aspect_ratio]
    width, height = (short_edge * ratio, float(short_edge)) if ratio >= 1 else (float(short_edge), short_edge / ratio)
    scale = min(1.0, math.sqrt(MAX_PIXELS / (width * height)))
    return (
        max(MULTIPLE, round(height * scale / MULTIPLE) * MULTIPLE),
        max(MULTIPLE, round(width * scale / MULTIPLE) * MULTIPLE),
    )


def pack_video(latent: Tensor, canvas: Canvas) -> Tensor:
    """`[24, T, h, w]` -> rows `[V, 96]`: row order (t, h, w), inside a row (channel, patch row, patch column)."""
    frames, height, width = canvas.latent_grid
    parts = latent.reshape(VIDEO_CHANNELS, frames, height // PATCH, PATCH, width // PATCH, PATCH)
    return parts.permute(1, 2, 4, 0, 3, 5).reshape(canvas.video_rows, VIDEO_WIDTH)


def unpack_video(rows: Tensor, canvas: Canvas) -> Tensor:
    """The inverse of `pack_video`."""
    frames, height, width = canvas.latent_grid
    parts = rows.reshape(frames, height // PATCH, width // PATCH, VIDEO_CHANNELS, PATCH, PATCH)
    return parts.permute(3, 0, 1, 4, 2, 5).reshape(VIDEO_CHANNELS, frames, height, width)


def join(video: Tensor, audio: Tensor) -> Tensor:
    """Rows `[..., V, 96]` and `[..., 2A, 32]` as the flat latent `[..., V * 96 + 2A * 32]`."""
    return torch.cat([video.flatten(-2), audio.flatten(-2)], dim=-1)


def split(latent: Tensor, canvas: Canvas) -> tuple[Tensor, Tensor]:
    """The inverse of `join`. ValueError: not of this canvas."""
    size = canvas.video_size
    if latent.shape[-1] != size + canvas.audio_size:
        raise ValueError(f"a latent of this canvas has {size + canvas.audio_size} values, got {latent.shape[-1]}")
    video, audio = latent[..., :size], latent[..., size:]
    return video.unflatten(-1, (-1, VIDEO_WIDTH)), audio.unflatten(-1, (-1, AUDIO_WIDTH))


def initial_rows(seed: int, canvas: Canvas) -> Tensor:
    """Initial noise, the flat latent in fp32: video and sound each from a CPU generator of their own with this seed,
    video in the layout of the VAE's latent (as SGLang draws them).
    """
    video = torch.randn(1, VIDEO_CHANNELS, *canvas.latent_grid, generator=torch.Generator().manual_seed(seed))
    audio = torch.randn(canvas.audio_rows, AUDIO_WIDTH, generator=torch.Generator().manual_seed(seed))
    return join(pack_video(video[0], canvas), audio)


def audio_sigma(sigma: Tensor, ratio: float) -> Tensor:
    """The sound's noise level at the video's: odds(sigma) x ratio, odds(s) = s / (1 - s); the dtype of `sigma`.

    `ratio`: audio's sigma shift over video's, of the release 3 / 12. Both grids are shifts of one uniform grid, and
    shifts multiply the odds. In fp64, so that trainer and engine have the same bits.
    """
    return shift_sigma(sigma.double(), ratio).to(sigma.dtype)


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """What the network is told about its rows: position_ids fp64 `[S, 3]` (t, h, w), token_tags and clock_of_row int64
    `[S]`, and where the rows of each kind are, int64. There are two clocks, the video's and the sound's; text has the
    video's.
    """

    position_ids: Tensor
    token_tags: Tensor
    clock_of_row: Tensor
    video: Tensor
    audio: Tensor
    text: Tensor

    @property
    def length(self) -> int:
        return len(self.token_tags)


@lru_cache(maxsize=128)
def packed_sequence(text_rows: int, canvas: Canvas, device: str | torch.device = "cpu") -> PackedSequence:
    """[text | audio | video] of a prompt with so many rows of text, without a padding. Shared: do not write into it."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    positions, tags, video, audio, text, *_ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.full((text_rows,), TEXT_TAG),
        *canvas.latent_grid,
        canvas.audio_latents,
        (1, PATCH, PATCH),
        AUDIO_CHANNELS,
        AUDIO_TAG,
        VIDEO_TAG,
    )
    clock_of_row = torch.zeros_like(tags).index_fill_(0, audio, 1)
    return PackedSequence(*(part.to(device) for part in (positions, tags, clock_of_row, video, audio, text)))
