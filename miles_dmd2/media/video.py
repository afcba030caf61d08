"""A clip with its sound as an mp4, a single frame as a PNG: whole under its name, or not there.

ffmpeg is the binary that the package imageio-ffmpeg brings; it is started without a shell, pictures go in by a pipe.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
from PIL import Image

Array = np.ndarray[Any, Any]

_PARTIAL = ".partial"
_SECONDS = 1800.0  # for one clip; a long one takes seconds


class MediaError(RuntimeError):
    """A file that could not be written, and why: in one line."""


def write_picture(path: Path, frame: Array) -> None:
    """uint8 `[height, width, 3]` as PNG. MediaError."""
    with _aside(path) as partial, _told(path):
        Image.fromarray(_frames(frame[None], path)[0]).save(partial, format="png")


def write_video(
    path: Path, frames: Array, fps: float, audio: Array | None = None, audio_sample_rate: int | None = None
) -> None:
    """uint8 `[frames, height, width, 3]` as H.264 (yuv420p, an odd size made even by repeating an edge) in an mp4.

    audio: fp32 `[1 or 2 channels, samples]` in [-1, 1] (clipped to it), becomes AAC beside it; must last as long as the
    clip, to within one frame. MediaError: it does not, or is not finite, or nothing could be written.
    """
    frames = _even(_frames(frames, path))
    if not fps > 0:
        raise MediaError(f"{path.name}: fps must be > 0, got {fps}")
    with _aside(path) as partial, _told(path):
        words = [
            *(imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-loglevel", "error", "-y"),
            *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{frames.shape[2]}x{frames.shape[1]}"),
            *("-framerate", repr(float(fps)), "-i", "pipe:0"),
        ]
        sound = partial.with_suffix(".f32")
        try:
            if audio is not None:
                _check_sound(audio, audio_sample_rate, len(frames) / fps, 1 / fps, path)
                sound.write_bytes(np.ascontiguousarray(np.clip(audio, -1, 1).T, dtype="<f4").tobytes())
                words += ["-f", "f32le", "-ar", str(audio_sample_rate), "-ac", str(len(audio)), "-i", str(sound)]
                words += ["-map", "0:v:0", "-map", "1:a:0", "-c:a", "aac", "-b:a", "192k"]
            words += [
                *("-vf", "scale=out_color_matrix=bt709:out_range=tv", "-c:v", "libx264", "-pix_fmt", "yuv420p"),
                *("-crf", "16", "-threads", "1", "-color_range", "tv", "-colorspace", "bt709"),
                *("-movflags", "+faststart", "-f", "mp4", str(partial)),
            ]
            done = subprocess.run(
                words, input=frames.data.cast("B"), capture_output=True, timeout=_SECONDS, check=False
            )
        finally:
            sound.unlink(missing_ok=True)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise MediaError(f"{path.name}: ffmpeg failed ({done.returncode}): {_reason(said)}")


def sweep(directory: Path) -> None:
    """Remove what a process that was killed left half written in `directory`."""
    for partial in directory.glob(f".*{_PARTIAL}*"):
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A text file, whole or not there. MediaError."""
    with _aside(path) as partial, _told(path):
        partial.write_text(text, encoding="utf-8")


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; after the block it is `path`, or gone if the block failed."""
    partial = path.with_name(f".{path.stem}.{os.getpid()}-{threading.get_ident()}{_PARTIAL}{path.suffix}")
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        with _told(path):
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Failures of the operating system and a deadline, as MediaError."""
    try:
        yield
    except OSError as error:
        raise MediaError(f"{path}: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise MediaError(f"{path}: ffmpeg did not end within {_SECONDS:g} s") from error


def _frames(frames: Array, path: Path) -> Array:
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
        raise MediaError(
            f"{path.name}: pictures must be uint8 [frames, height, width, 3], got {frames.dtype} {list(frames.shape)}"
        )
    return frames


def _even(frames: Array) -> Array:
    """H.264 in yuv420p halves the colour planes: an odd side gets its last row or column twice."""
    _, height, width, _ = frames.shape
    return np.ascontiguousarray(np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge"))


def _check_sound(audio: Array, rate: int | None, seconds: float, frame: float, path: Path) -> None:
    if audio.ndim != 2 or len(audio) not in (1, 2) or not audio.size or not np.issubdtype(audio.dtype, np.floating):
        raise MediaError(
            f"{path.name}: sound must be floating point [1 or 2 channels, samples], got {audio.dtype} "
            f"{list(audio.shape)}"
        )
    if rate is None or not rate > 0:
        raise MediaError(f"{path.name}: the sound's sample rate must be > 0, got {rate}")
    if not np.isfinite(audio).all():
        raise MediaError(f"{path.name}: the sound is not finite")
    lasts = audio.shape[1] / rate
    if abs(lasts - seconds) > frame * 1.001:
        raise MediaError(
            f"{path.name}: the sound lasts {lasts:.3f} s and the clip {seconds:.3f} s, more than a frame apart; set "
            "--diffusion-fps to the rate that the clip was made for"
        )


def _reason(lines: list[str]) -> str:
    """ffmpeg's last line is seldom the cause: a full disk is said before it."""
    causes = [line for line in lines if "No space left" in line or "error" in line.lower()]
    return (causes or lines or ["it printed nothing"])[0]
