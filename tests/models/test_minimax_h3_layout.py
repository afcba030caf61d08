"""The packed sequence against diffusers' own pipeline, and a canvas as diffusers makes it."""

from __future__ import annotations

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import before_denoise, modular_pipeline

from miles_dmd2.algo import sigma_grid
from miles_dmd2.models.minimax_h3_layout import (
    ASPECT_RATIOS,
    MAX_PIXELS,
    MULTIPLE,
    Canvas,
    aligned_frames,
    audio_sigma,
    initial_rows,
    join,
    pack_video,
    packed_sequence,
    split,
    unpack_video,
)

SMALL = Canvas(64, 128, 22)


@pytest.mark.parametrize("edge", [32, 64, 256, 480, 768])
@pytest.mark.parametrize("name", ASPECT_RATIOS)
def test_a_canvas_is_asked_for_as_what_diffusers_resolves_to_it(edge: int, name: str) -> None:
    width, height = map(int, name.split(":"))
    size = modular_pipeline.resolve_canvas_size(width, height, MULTIPLE, edge, MAX_PIXELS)
    asked, ratio = Canvas(*size, 5).request_size() or (0, "1:1")
    again = map(int, ratio.split(":"))
    assert modular_pipeline.resolve_canvas_size(*again, MULTIPLE, asked, MAX_PIXELS) == size


def test_the_release_canvas() -> None:
    canvas = Canvas(768, 1344, aligned_frames(5.0))
    assert canvas.request_target() == {"short_edge": 768, "aspect_ratio": "16:9", "duration_seconds": 124 / 24}
    assert canvas.latent_grid == (37, 48, 84)
    assert (canvas.video_rows, canvas.audio_latents) == (37 * 24 * 42, 207)


@pytest.mark.parametrize(("seconds", "frames"), [(4.0, 107), (0.2, 5), (5.0, 124), (15.0, 362), (107 / 24, 107)])
def test_durations_are_snapped_up(seconds: float, frames: int) -> None:
    assert aligned_frames(seconds) == frames == modular_pipeline.align_num_frames(round(seconds * 24), 17, 5)
    canvas = Canvas(32, 32, frames)
    assert canvas.latent_grid[0] == modular_pipeline.video_latent_num_frames(frames, 17, 5)
    assert canvas.audio_latents == modular_pipeline.audio_latent_num_frames(frames)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((64, 64, 81), "--diffusion-num-frames 81 must be 17 n \\+ 5; the nearest is 73"),
        ((64, 64, 1), "--diffusion-num-frames 1 must be .* nearest is 5"),
        ((64, 48, 5), "--diffusion-height 64 --diffusion-width 48: .* multiples of 32"),
        ((768, 4096, 5), "--diffusion-width 4096"),
        ((0, 64, 5), "--diffusion-height 0"),
    ],
)
def test_sizes_that_the_engine_does_not_make_are_refused(size: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Canvas(*size)


def test_rows_are_patches_in_the_order_of_the_packed_sequence() -> None:
    frames, height, width = SMALL.latent_grid
    channel, t, h, w = (torch.arange(n) for n in (24, frames, height, width))
    latent = channel.view(-1, 1, 1, 1) * 10**6 + t.view(-1, 1, 1) * 10**4 + h.view(-1, 1) * 100 + w
    rows = pack_video(latent, SMALL)
    row = (2 * (height // 2) + 1) * (width // 2) + 3  # frame 2, patch row 1, patch column 3
    assert rows[row, 5 * 4 + 2] == 5 * 10**6 + 2 * 10**4 + 3 * 100 + 6  # channel 5, lower left of its patch
    assert torch.equal(unpack_video(rows, SMALL), latent)


def test_the_flat_latent_is_both_parts() -> None:
    latent = torch.randn(3, SMALL.video_size + SMALL.audio_size)
    video, audio = split(latent, SMALL)
    assert video.shape == (3, SMALL.video_rows, 96)
    assert audio.shape == (3, SMALL.audio_rows, 32)
    assert torch.equal(join(video, audio), latent)
    with pytest.raises(ValueError, match=f"has {latent.shape[1]} values, got {latent.shape[1] - 1}"):
        split(latent[:, 1:], SMALL)


def test_sound_and_video_start_from_the_same_stream_each() -> None:
    video, audio = split(initial_rows(7, SMALL), SMALL)
    stream = torch.randn(audio.numel(), generator=torch.Generator().manual_seed(7))
    assert torch.equal(audio.flatten(), stream)
    assert torch.equal(unpack_video(video, SMALL).flatten()[:16], stream[:16])


def test_the_sequence_is_text_then_sound_then_video() -> None:
    packed = packed_sequence(3, SMALL)
    assert packed.length == 3 + SMALL.audio_rows + SMALL.video_rows
    assert packed.text.tolist() == [0, 1, 2]
    assert packed.audio.tolist() == list(range(3, 3 + SMALL.audio_rows))
    assert packed.token_tags[packed.audio].unique().tolist() == [2]
    assert packed.token_tags[packed.video].unique().tolist() == [0]
    spans = packed.position_ids[packed.video, 0].unique().diff() * 3 / 5  # 5/3 of a second's 40th per frame
    torch.testing.assert_close(spans, torch.tensor([1.0, 4, 4, 4, 4, 1], dtype=torch.float64))
    tags = torch.ones(3, dtype=torch.long)
    own = before_denoise.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        tags, *SMALL.latent_grid, SMALL.audio_latents, (1, 2, 2), 2, 2, 0
    )
    assert torch.equal(own[0], packed.position_ids)


@pytest.mark.parametrize("steps", [1, 4, 50])
def test_the_sound_is_at_the_level_of_its_own_grid(steps: int) -> None:
    """Odds at a quarter: on the uniform grid shifted by 12 that is the uniform grid shifted by 3."""
    found = audio_sigma(sigma_grid(steps, 12.0), 3 / 12)
    torch.testing.assert_close(found, sigma_grid(steps, 3.0), rtol=0, atol=3e-7)
    assert (found[0], found[-1]) == (1, 0)
