"""Clips and pictures, read back with ffmpeg's own binary: as many frames, as long, as loud and as high as put in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from miles_dmd2.media.video import MediaError, sweep, write_picture, write_text, write_video
from tests.media.reading import frames, loudest, sound, streams

RATE = 32000


def clip(count: int = 24, height: int = 64, width: int = 96) -> np.ndarray:
    """Each frame one colour of its own."""
    values = np.linspace(30, 220, count).astype(np.uint8)
    colours = np.stack([values, values[::-1], np.full(count, 128, np.uint8)], axis=-1)
    return np.broadcast_to(colours[:, None, None], (count, height, width, 3)).copy()


def tone(frequency: float, seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


@pytest.mark.parametrize(("count", "fps"), [(24, 24.0), (17, 8.0), (5, 24.0), (2, 12.5), (1, 24.0), (30, 23.976)])
def test_a_clip_has_its_frames_and_lasts_as_long_as_they_do(tmp_path: Path, count: int, fps: float) -> None:
    write_video(tmp_path / "a.mp4", clip(count), fps)
    found = streams(tmp_path / "a.mp4")
    assert (found.video, found.size, found.audio) == ("h264", (96, 64), None)
    assert found.seconds == pytest.approx(count / fps, abs=0.011)  # ffmpeg prints hundredths
    assert count == 1 or found.fps == pytest.approx(fps, abs=0.01)
    assert len(frames(tmp_path / "a.mp4")) == count
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]


def test_colours_survive_in_every_frame(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", clip(), 24)
    difference = frames(tmp_path / "a.mp4").astype(int) - clip().astype(int)
    assert np.abs(difference).max() <= 6  # of 255: yuv420p and H.264


@pytest.mark.parametrize(("height", "width"), [(63, 96), (64, 97), (63, 97), (1, 1)])
def test_an_odd_side_gets_its_edge_twice(tmp_path: Path, height: int, width: int) -> None:
    write_video(tmp_path / "a.mp4", clip(3, height, width), 8)
    read = frames(tmp_path / "a.mp4")
    assert read.shape == (3, height + height % 2, width + width % 2, 3)
    assert np.abs(read[:, -1, -1].astype(int) - clip(3)[:, 0, 0].astype(int)).max() <= 6


def test_a_known_tone_comes_out_on_each_channel_at_its_frequency(tmp_path: Path) -> None:
    """440 Hz left and 1000 Hz right; over a second, lines of the spectrum are 1 Hz apart."""
    write_video(tmp_path / "a.mp4", clip(), 24, np.stack([tone(440), tone(1000)]), RATE)
    found = streams(tmp_path / "a.mp4")
    assert (found.video, found.audio, found.rate, found.layout) == ("h264", "aac", RATE, "stereo")
    assert found.seconds == pytest.approx(1.0, abs=0.05)
    left, right = sound(tmp_path / "a.mp4")
    assert loudest(left, RATE) == pytest.approx(440, abs=2)
    assert loudest(right, RATE) == pytest.approx(1000, abs=2)
    assert np.sqrt(np.mean(left[1000:31000] ** 2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)
    assert len(frames(tmp_path / "a.mp4")) == 24
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]


@pytest.mark.parametrize(("channels", "layout", "rate"), [(1, "mono", 16000), (2, "stereo", 44100)])
def test_mono_and_other_rates(tmp_path: Path, channels: int, layout: str, rate: int) -> None:
    write_video(tmp_path / "a.mp4", clip(), 24, np.stack([tone(330, rate=rate)] * channels), rate)
    found = streams(tmp_path / "a.mp4")
    assert (found.layout, found.rate) == (layout, rate)
    assert loudest(sound(tmp_path / "a.mp4")[0], rate) == pytest.approx(330, abs=2)


def test_silence_is_a_stream_too_and_too_loud_a_sound_is_clipped(tmp_path: Path) -> None:
    write_video(tmp_path / "quiet.mp4", clip(), 24, np.zeros((2, RATE), np.float32), RATE)
    assert streams(tmp_path / "quiet.mp4").audio == "aac"
    assert np.abs(sound(tmp_path / "quiet.mp4")).max() < 1e-4
    write_video(tmp_path / "loud.mp4", clip(), 24, np.full((1, RATE), 1e30, np.float32), RATE)
    assert np.abs(sound(tmp_path / "loud.mp4")).max() < 2


def test_sound_may_be_a_frame_longer_or_shorter_than_the_clip(tmp_path: Path) -> None:
    for samples in (RATE - RATE // 24, RATE + RATE // 24):
        write_video(tmp_path / "a.mp4", clip(), 24, np.zeros((1, samples), np.float32), RATE)
        assert len(frames(tmp_path / "a.mp4")) == 24


NAN = np.zeros((2, RATE), np.float32)
NAN[1, 7] = np.nan


@pytest.mark.parametrize(
    ("audio", "rate", "told"),
    [
        (NAN, RATE, "the sound is not finite"),
        (np.full((1, RATE), np.inf, np.float32), RATE, "the sound is not finite"),
        (np.zeros((1, RATE - RATE // 12), np.float32), RATE, "lasts 0.917 s and the clip 1.000 s"),
        (np.zeros((1, RATE + RATE // 12), np.float32), RATE, "--diffusion-fps"),
        (np.zeros((3, RATE), np.float32), RATE, r"\[1 or 2 channels, samples\], got float32 \[3, 32000\]"),
        (np.zeros(RATE, np.float32), RATE, r"got float32 \[32000\]"),
        (np.zeros((1, 0), np.float32), RATE, r"got float32 \[1, 0\]"),
        (np.zeros((1, RATE), np.int16), RATE, "got int16"),
        (np.zeros((1, RATE), np.float32), None, "sample rate must be > 0, got None"),
        (np.zeros((1, RATE), np.float32), 0, "sample rate must be > 0, got 0"),
    ],
)
def test_sound_that_cannot_be_right_is_one_clear_error(
    tmp_path: Path, audio: np.ndarray, rate: int | None, told: str
) -> None:
    with pytest.raises(MediaError, match=told) as caught:
        write_video(tmp_path / "a.mp4", clip(), 24, audio, rate)
    assert "a.mp4" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "pictures", [clip().astype(np.float32), clip()[0], clip()[..., :1], clip()[:0]], ids=["float", "3d", "grey", "none"]
)
def test_what_are_no_pictures_is_refused(tmp_path: Path, pictures: np.ndarray) -> None:
    with pytest.raises(MediaError, match=r"must be uint8 \[frames, height, width, 3\]"):
        write_video(tmp_path / "a.mp4", pictures, 24)
    assert list(tmp_path.iterdir()) == []


def test_a_rate_of_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="fps must be > 0, got 0"):
        write_video(tmp_path / "a.mp4", clip(), 0)


def test_a_single_frame_is_a_png_bit_for_bit(tmp_path: Path) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    write_picture(tmp_path / "sub" / "a.png", frame)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "sub" / "a.png")), frame)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["a.png"]


def test_a_file_that_fails_leaves_what_was_there_and_nothing_half(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", clip(), 24)
    before = (tmp_path / "a.mp4").read_bytes()
    with pytest.raises(MediaError):
        write_video(tmp_path / "a.mp4", clip(), 24, NAN, RATE)
    assert (tmp_path / "a.mp4").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]


def test_ffmpeg_that_fails_is_told_by_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "ffmpeg"
    failing.write_text("#!/bin/sh\necho 'x: No space left on device' >&2; echo 'Conversion failed!' >&2; exit 228\n")
    failing.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(failing))
    (tmp_path / "out").mkdir()
    with pytest.raises(MediaError, match=r"a\.mp4: ffmpeg failed \(228\): x: No space left on device"):
        write_video(tmp_path / "out" / "a.mp4", clip(), 24)
    assert list((tmp_path / "out").iterdir()) == []


def test_ffmpeg_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "ffmpeg"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(hanging))
    monkeypatch.setattr("miles_dmd2.media.video._SECONDS", 0.5)
    (tmp_path / "out").mkdir()
    with pytest.raises(MediaError, match=r"ffmpeg did not end within 0\.5 s"):
        write_video(tmp_path / "out" / "a.mp4", clip(), 24)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MediaError, match=r"Not a directory|File exists"):
        write_picture(tmp_path / "file" / "a.png", clip()[0])


def test_a_name_with_what_a_shell_would_read_is_only_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a; touch hacked $(touch hacked) %d.mp4"
    write_video(path, clip(2), 8)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    assert len(frames(path)) == 2


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    for name in (".a.1-2.partial.mp4", ".a.1-2.partial.f32", "a.mp4"):
        (tmp_path / name).write_text("x")
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]


def test_text_is_whole_or_not_there(tmp_path: Path) -> None:
    write_text(tmp_path / "index.jsonl", "ä\n")
    assert (tmp_path / "index.jsonl").read_bytes() == "ä\n".encode()
    assert subprocess.run(["ls", "-A", tmp_path], capture_output=True, text=True).stdout == "index.jsonl\n"  # noqa: S607
