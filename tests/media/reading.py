"""Files read back with ffmpeg alone: what its log says of the streams, and the decoded frames and sound."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import imageio_ffmpeg
import numpy as np

FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()


@dataclass(frozen=True)
class Streams:
    """What `ffmpeg -i` prints. size: width, height."""

    seconds: float
    video: str
    size: tuple[int, int]
    fps: float
    audio: str | None
    rate: int | None
    layout: str | None


def streams(path: Path) -> Streams:
    said = subprocess.run([FFMPEG, "-hide_banner", "-i", path], capture_output=True, text=True).stderr
    hours, minutes, seconds = re.search(r"Duration: (\d+):(\d+):([\d.]+)", said).groups()
    (video,) = re.findall(r"Stream .*: Video: (.*)", said)
    width, height = map(int, re.search(r", (\d+)x(\d+)", video).groups())
    audio = re.findall(r"Stream .*: Audio: (.*)", said)
    assert len(audio) <= 1
    found = re.search(r", (\d+) Hz, (\w+)", audio[0]) if audio else None
    return Streams(
        int(hours) * 3600 + int(minutes) * 60 + float(seconds),
        video.split()[0],
        (width, height),
        float(re.search(r"([\d.]+) fps", video)[1]),
        audio[0].split()[0] if audio else None,
        int(found[1]) if found else None,
        found[2] if found else None,
    )


def frames(path: Path) -> np.ndarray:
    """uint8 `[frames, height, width, 3]`, each decoded frame once."""
    words = [FFMPEG, "-loglevel", "error", "-i", path, "-fps_mode", "passthrough"]
    done = subprocess.run([*words, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], capture_output=True, check=True)
    width, height = streams(path).size
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)


def sound(path: Path) -> np.ndarray:
    """fp32 `[channels, samples]`."""
    done = subprocess.run(
        [FFMPEG, "-loglevel", "error", "-i", path, "-f", "f32le", "-"], capture_output=True, check=True
    )
    channels = {"mono": 1, "stereo": 2}[streams(path).layout]
    return np.frombuffer(done.stdout, "<f4").reshape(-1, channels).T


def loudest(channel: np.ndarray, rate: int) -> float:
    """Frequency in Hz of the strongest line of a spectrum."""
    spectrum = np.abs(np.fft.rfft(channel * np.hanning(len(channel))))
    return float(np.fft.rfftfreq(len(channel), 1 / rate)[spectrum.argmax()])
