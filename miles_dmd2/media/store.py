"""Eval samples kept as files, written by background threads: `eval_<rollout>/<name>.mp4 or .png` and `index.jsonl`.

An index is written when all files of its eval and kind are: a reader that sees a line sees the file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_dmd2.media.names import eval_directory, sample_name
from miles_dmd2.media.pixels import eight_bit
from miles_dmd2.media.video import Array, MediaError, sweep, write_picture, write_text, write_video
from miles_dmd2.types import RolloutSample, WeightKind

INDEX = "index.jsonl"

logger = logging.getLogger(__name__)

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeptMedia:
    """Where eval samples go, at which playback rate (frames per second), and how many of each eval and kind (all)."""

    directory: Path
    fps: float
    limit: int | None = None


class EvalMedia:
    """Writes what `keep` is given. What goes wrong is logged and told by `failures`, and stops neither caller nor run.

    At most one eval waits to be written: `keep` waits for the one before, so that no more than it is held in memory.
    """

    def __init__(self, settings: KeptMedia, threads: int = 2) -> None:
        self._settings = settings
        self._writers = ThreadPoolExecutor(threads, thread_name_prefix="eval_media")
        self._closer = ThreadPoolExecutor(1, thread_name_prefix="eval_media_index")
        self._last: Future[None] | None = None
        self._failures: list[str] = []
        for directory in settings.directory.glob("eval_*"):
            sweep(directory)

    def keep(self, samples: Sequence[RolloutSample], rollout_id: int, kind: WeightKind) -> None:
        """Returns as soon as the eval before is written. Of the samples, only media and sound are held any longer."""
        self._wait()
        directory = self._settings.directory / eval_directory(rollout_id)
        jobs = [_Job.of(sample, directory, kind, self._settings.fps) for sample in samples[: self._settings.limit]]
        writing = [self._writers.submit(job.write) for job in jobs]
        self._last = self._closer.submit(self._close, writing, directory, rollout_id, kind)

    def failures(self) -> list[str]:
        """One line for each eval so far that is not complete on the disk."""
        return list(self._failures)

    def settled(self) -> list[str]:
        """Wait for everything so far. Returns `failures`."""
        self._wait()
        return self.failures()

    def finish(self) -> list[str]:
        """Wait for everything, end the threads. Returns `failures`."""
        self._wait()
        self._writers.shutdown()
        self._closer.shutdown()
        return self.failures()

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _close(self, writing: Sequence[Future[Entry]], directory: Path, rollout_id: int, kind: WeightKind) -> None:
        entries: list[Entry] = []
        errors: list[str] = []
        for one in writing:
            try:
                entries.append(one.result())
            except Exception as error:
                logger.exception("a sample of the %s eval at rollout %d was not written", kind, rollout_id)
                errors.append(str(error) if isinstance(error, MediaError) else repr(error))
        try:
            _write_index(directory / INDEX, entries, kind)
        except Exception as error:
            logger.exception("the index of the %s eval at rollout %d was not written", kind, rollout_id)
            errors.append(str(error) if isinstance(error, MediaError) else repr(error))
        if errors:
            self._failures.append(
                f"the files of the {kind} eval at rollout {rollout_id} are not complete in {directory} "
                f"({len(entries)} of {len(writing)} written): {errors[0]}"
            )


@dataclass
class _Job:
    """One file to write."""

    path: Path
    media: Any
    audio: Array | None
    audio_sample_rate: int | None
    fps: float
    entry: Entry

    @classmethod
    def of(cls, sample: RolloutSample, directory: Path, kind: WeightKind, fps: float) -> _Job:
        if sample.media is None:
            raise ValueError(f"eval sample {sample.sample_id} came back without decoded media")
        single = len(sample.media) == 1 and sample.audio is None
        name = f"{sample_name(sample.prompt, sample.seed, kind)}.{'png' if single else 'mp4'}"
        entry = {
            "file": name,
            "prompt": sample.prompt,
            "seed": sample.seed,
            "steps": len(sample.sigmas) - 1,
            "reward": sample.reward,
            "kind": kind,
            "weight_version": str(sample.weight_version),
            "sample_id": sample.sample_id,
            "frames": len(sample.media),
            "fps": None if single else fps,
            "sound": sample.audio is not None,
        }
        audio = None if sample.audio is None else sample.audio.numpy()
        return cls(directory / name, sample.media, audio, sample.audio_sample_rate, fps, entry)

    def write(self) -> Entry:
        media, self.media = self.media, None
        audio, self.audio = self.audio, None
        if self.path.suffix == ".png":
            write_picture(self.path, eight_bit(media)[0])
        else:
            write_video(self.path, eight_bit(media), self.fps, audio, self.audio_sample_rate)
        return self.entry


def read_index(path: Path) -> list[Entry]:
    """The lines of an index. MediaError: it cannot be read."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise MediaError(f"{path}: {error}") from error


def _write_index(path: Path, entries: Sequence[Entry], kind: WeightKind) -> None:
    """Raw samples before averaged ones, each in the order of the eval set; of the other kind what is there stays."""
    others = [entry for entry in read_index(path) if entry["kind"] != kind] if path.exists() else []
    lines = sorted([*others, *entries], key=lambda entry: (entry["kind"] != "raw", entry["sample_id"]))
    write_text(path, "".join(json.dumps(entry) + "\n" for entry in lines))
