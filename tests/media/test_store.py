"""Eval samples on the disk: all of them, indexed, written behind the caller; and what is told when they are not."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from miles_dmd2.media import store, video
from miles_dmd2.media.names import sample_name
from miles_dmd2.media.store import EvalMedia, KeptMedia, read_index
from miles_dmd2.types import RolloutSample, WeightVersion
from tests.media.reading import frames, loudest, sound, streams

RATE = 32000


def sample(i: int, *, count: int = 1, audio: bool = False, kind: str = "raw", fp32: bool = False) -> RolloutSample:
    media = torch.full((count, 8, 8, 3), 10 * i, dtype=torch.uint8)
    wave = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(count * RATE // 8) / RATE)
    return RolloutSample(
        sample_id=i,
        prompt=f"prompt {i}",
        seed=500 + i,
        stop_step=3,
        sigmas=torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]),
        x_k=torch.zeros(1),
        x0=torch.zeros(1),
        cond={},
        weight_version=WeightVersion(7, kind),
        media=media / 255 if fp32 else media,
        audio=wave.expand(2, -1) if audio else None,
        audio_sample_rate=RATE if audio else None,
        reward=0.5 * i,
    )


def test_pictures_and_their_index(tmp_path: Path) -> None:
    media = EvalMedia(KeptMedia(tmp_path, 8.0))
    media.keep([sample(i) for i in range(3)], 25, "raw")
    assert media.finish() == []
    entries = read_index(tmp_path / "eval_000025" / "index.jsonl")
    assert entries[2] == {
        "file": f"{sample_name('prompt 2', 502, 'raw')}.png",
        "prompt": "prompt 2",
        "seed": 502,
        "steps": 4,
        "reward": 1.0,
        "kind": "raw",
        "weight_version": "raw@7",
        "sample_id": 2,
        "frames": 1,
        "fps": None,
        "sound": False,
    }
    files = {path.name for path in (tmp_path / "eval_000025").iterdir()}
    assert files == {"index.jsonl", *(entry["file"] for entry in entries)}
    for i, entry in enumerate(entries):
        assert (np.asarray(Image.open(tmp_path / "eval_000025" / entry["file"])) == 10 * i).all()


def test_clips_with_sound_have_two_streams_at_the_playback_rate(tmp_path: Path) -> None:
    media = EvalMedia(KeptMedia(tmp_path, 8.0))
    media.keep([sample(i, count=9, audio=True) for i in range(3)], 0, "raw")
    assert media.finish() == []
    for entry in read_index(tmp_path / "eval_000000" / "index.jsonl"):
        path = tmp_path / "eval_000000" / entry["file"]
        found = streams(path)
        assert (found.video, found.audio, found.fps, entry["fps"], entry["sound"]) == ("h264", "aac", 8.0, 8.0, True)
        assert len(frames(path)) == 9
        assert loudest(sound(path)[1], RATE) == pytest.approx(440, abs=2)


def test_one_frame_with_sound_is_a_clip(tmp_path: Path) -> None:
    media = EvalMedia(KeptMedia(tmp_path, 8.0))
    media.keep([sample(0, audio=True)], 0, "raw")
    assert media.finish() == []
    (entry,) = read_index(tmp_path / "eval_000000" / "index.jsonl")
    assert entry["file"].endswith(".mp4")
    assert streams(tmp_path / "eval_000000" / entry["file"]).audio == "aac"


def test_both_kinds_share_a_directory_and_its_index_in_either_order(tmp_path: Path) -> None:
    for order in (("raw", "ema"), ("ema", "raw")):
        media = EvalMedia(KeptMedia(tmp_path / order[0], 8.0))
        for kind in order:
            media.keep([sample(i, kind=kind) for i in range(2)], 5, kind)
        assert media.finish() == []
        entries = read_index(tmp_path / order[0] / "eval_000005" / "index.jsonl")
        assert [(entry["kind"], entry["sample_id"]) for entry in entries] == [
            *(("raw", 0), ("raw", 1), ("ema", 0), ("ema", 1)),
        ]
        assert len({entry["file"] for entry in entries}) == 4


def test_an_eval_that_is_made_again_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """As in a run that is continued from before that eval."""
    for _ in range(2):
        media = EvalMedia(KeptMedia(tmp_path, 8.0))
        media.keep([sample(0), sample(1)], 5, "raw")
        assert media.finish() == []
    assert len(read_index(tmp_path / "eval_000005" / "index.jsonl")) == 2
    assert len(list((tmp_path / "eval_000005").iterdir())) == 3


def test_a_limit_keeps_the_first(tmp_path: Path) -> None:
    media = EvalMedia(KeptMedia(tmp_path, 8.0, limit=2))
    media.keep([sample(i) for i in range(5)], 0, "raw")
    media.finish()
    assert [entry["sample_id"] for entry in read_index(tmp_path / "eval_000000" / "index.jsonl")] == [0, 1]


def test_fp32_media_become_the_nearest_of_256_values(tmp_path: Path) -> None:
    media = EvalMedia(KeptMedia(tmp_path, 8.0))
    media.keep([sample(7, fp32=True)], 0, "raw")
    media.finish()
    (entry,) = read_index(tmp_path / "eval_000000" / "index.jsonl")
    assert (np.asarray(Image.open(tmp_path / "eval_000000" / entry["file"])) == 70).all()


def test_writing_goes_on_behind_the_caller_and_holds_media_no_longer_than_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), video.write_picture

    def gated(path: Path, frame: np.ndarray) -> None:
        assert gate.wait(30)
        write(path, frame)

    monkeypatch.setattr("miles_dmd2.media.store.write_picture", gated)
    media = EvalMedia(KeptMedia(tmp_path, 8.0))
    samples = [sample(i) for i in range(3)]
    alive = [weakref.ref(one.media) for one in samples]
    latents = [weakref.ref(one.x0) for one in samples]
    media.keep(samples, 0, "raw")
    del samples
    gc.collect()
    assert all(ref() is not None for ref in alive)  # not written yet, and `keep` has returned
    assert all(ref() is None for ref in latents)  # only what is written is held
    assert not (tmp_path / "eval_000000" / "index.jsonl").exists()
    gate.set()
    assert media.finish() == []
    gc.collect()
    assert all(ref() is None for ref in alive)
    assert len(read_index(tmp_path / "eval_000000" / "index.jsonl")) == 3


def test_settled_means_that_all_so_far_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = store.write_picture

    def slowly(*arguments: Any) -> None:
        time.sleep(0.3)
        plain(*arguments)

    monkeypatch.setattr(store, "write_picture", slowly)
    media = EvalMedia(KeptMedia(tmp_path, 8.0))
    for rollout in (0, 5):
        media.keep([sample(0)], rollout, "raw")
        assert media.settled() == []
        assert len(read_index(tmp_path / f"eval_{rollout:06d}" / "index.jsonl")) == 1
    media.finish()


def test_one_bad_sample_is_told_and_the_others_are_there(tmp_path: Path) -> None:
    bad = sample(1, count=9, audio=True)
    wave = bad.audio.clone()
    wave[0, 3] = float("nan")
    samples = [sample(0, count=9, audio=True), RolloutSample(**{**_fields(bad), "audio": wave})]
    media = EvalMedia(KeptMedia(tmp_path, 8.0))
    media.keep(samples, 10, "ema")
    media.keep([sample(0)], 11, "raw")  # the eval after it goes on
    (failure,) = media.finish()
    assert f"the ema eval at rollout 10 are not complete in {tmp_path / 'eval_000010'} (1 of 2 written): " in failure
    assert failure.endswith("the sound is not finite")
    assert [entry["sample_id"] for entry in read_index(tmp_path / "eval_000010" / "index.jsonl")] == [0]
    assert len(read_index(tmp_path / "eval_000011" / "index.jsonl")) == 1
    assert not list(tmp_path.rglob(".*"))


def test_a_directory_that_cannot_be_written_is_one_line_for_the_eval(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    media = EvalMedia(KeptMedia(tmp_path / "file", 8.0))
    media.keep([sample(i) for i in range(3)], 0, "raw")
    (failure,) = media.finish()
    assert "(0 of 3 written)" in failure
    assert "Not a directory" in failure or "File exists" in failure


def test_a_sample_without_media_is_named(tmp_path: Path) -> None:
    media = EvalMedia(KeptMedia(tmp_path, 8.0))
    bare = RolloutSample(**{**_fields(sample(5)), "media": None})
    with pytest.raises(ValueError, match="eval sample 5 came back without decoded media"):
        media.keep([bare], 0, "raw")
    media.finish()


def test_what_a_killed_run_left_half_written_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "eval_000000" / ".x.1-2.partial.mp4"
    left.parent.mkdir()
    left.write_text("x")
    EvalMedia(KeptMedia(tmp_path, 8.0)).finish()
    assert list(left.parent.iterdir()) == []


def test_the_index_is_json_lines_of_any_prompt(tmp_path: Path) -> None:
    media = EvalMedia(KeptMedia(tmp_path, 8.0))
    prompt = 'line\nbreak "quoted" \u2028 é 💥'
    media.keep([RolloutSample(**{**_fields(sample(0)), "prompt": prompt})], 0, "raw")
    assert media.finish() == []
    text = (tmp_path / "eval_000000" / "index.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line)["prompt"] for line in text.split("\n")[:-1]] == [prompt]
    assert read_index(tmp_path / "eval_000000" / "index.jsonl")[0]["prompt"] == prompt


def _fields(one: RolloutSample) -> dict[str, object]:
    return {name: getattr(one, name) for name in RolloutSample.__slots__}
