"""The wandb sink against a stand-in for the package: media as files, under their eval, uploaded before the end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miles_dmd2.sinks.wandb import WandbSink


class Run:
    """Records what it is told, in order."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.finished = 0

    def define_metric(self, *names: str, **options: str) -> None:
        pass

    def log(self, values: dict[str, Any]) -> None:
        assert not self.finished
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    stand_in, recorded = ModuleType("wandb"), Run()

    def media(kind: str) -> Any:
        def made(file: str, **options: str) -> tuple[str, str, dict[str, str]]:
            assert Path(file).is_file()
            return kind, Path(file).name, options

        return made

    stand_in.init = lambda **_: recorded  # type: ignore[attr-defined]
    stand_in.Image, stand_in.Video = media("image"), media("video")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return recorded


def write_eval(directory: Path, rollout_id: int, kinds: tuple[str, ...] = ("raw",), suffix: str = "mp4") -> None:
    folder = directory / f"eval_{rollout_id:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    entries = [{"file": f"{i}_{kind}.{suffix}", "prompt": f"p{i}", "kind": kind} for kind in kinds for i in range(4)]
    for entry in entries:
        (folder / entry["file"]).write_text("x")
    (folder / "index.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def media_of(run: Run) -> list[tuple[int, str, list[str]]]:
    return [
        (values["rollout"], key, [name for _, name, _ in value])
        for values in run.logged
        for key, value in values.items()
        if key.startswith("eval_media/")
    ]


def test_as_many_as_asked_for_once_they_are_written_and_once(run: Run, tmp_path: Path) -> None:
    sink = WandbSink("p", "offline", tmp_path, {}, tmp_path / "media", 2)
    sink.metrics(0, {"a": 1.0})
    assert media_of(run) == []  # still being written
    write_eval(tmp_path / "media", 0)
    sink.metrics(1, {"a": 1.0})
    assert media_of(run) == [(0, "eval_media/raw", ["0_raw.mp4", "1_raw.mp4"])]
    write_eval(tmp_path / "media", 0, ("raw", "ema"))
    write_eval(tmp_path / "media", 10)
    assert not run.finished
    sink.close()
    assert media_of(run)[1:] == [
        (0, "eval_media/ema", ["0_ema.mp4", "1_ema.mp4"]),
        (10, "eval_media/raw", ["0_raw.mp4", "1_raw.mp4"]),
    ]
    assert run.finished == 1  # which waits for the uploads
    kind, _, options = run.logged[-1]["eval_media/raw"][0]
    assert (kind, options) == ("video", {"caption": "p0", "format": "mp4"})


def test_pictures_are_images(run: Run, tmp_path: Path) -> None:
    sink = WandbSink("p", "offline", tmp_path, {}, tmp_path / "media", 1)
    write_eval(tmp_path / "media", 0, suffix="png")
    sink.close()
    assert run.logged == [{"rollout": 0, "eval_media/raw": [("image", "0_raw.png", {"caption": "p0"})]}]


@pytest.mark.parametrize(("directory", "shown"), [(None, 2), ("media", 0)])
def test_none_are_logged_when_none_are_asked_for_or_kept(
    run: Run, tmp_path: Path, directory: str | None, shown: int
) -> None:
    write_eval(tmp_path / "media", 0)
    sink = WandbSink("p", "offline", tmp_path, {}, directory and tmp_path / directory, shown)
    sink.metrics(0, {"a": 1.0})
    sink.close()
    assert run.logged == [{"rollout": 0, "a": 1.0}]


def test_a_continued_run_logs_no_eval_of_before(run: Run, tmp_path: Path) -> None:
    """Nor what the run that was stopped had made further on: that is logged when it is made again."""
    for rollout_id in (0, 5, 10):
        write_eval(tmp_path / "media", rollout_id)
    sink = WandbSink("p", "offline", tmp_path, {}, tmp_path / "media", 1, start=5)
    sink.metrics(5, {"a": 1.0})
    assert media_of(run) == []
    os.utime(tmp_path / "media" / "eval_000010" / "index.jsonl", ns=(1, 1))  # written anew
    write_eval(tmp_path / "media", 15)
    sink.close()
    assert [rollout for rollout, _, _ in media_of(run)] == [10, 15]


def test_an_index_that_cannot_be_read_costs_its_media_alone(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = WandbSink("p", "offline", tmp_path, {}, tmp_path / "media", 1)
    for rollout_id in (0, 5):
        write_eval(tmp_path / "media", rollout_id)
    (tmp_path / "media" / "eval_000000" / "index.jsonl").write_text("{")
    for rollout_id in range(2):
        sink.metrics(rollout_id, {"a": 1.0})
    sink.close()
    assert [rollout for rollout, _, _ in media_of(run)] == [5]
    assert run.finished == 1
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "wandb shows no media of eval_000000" in told[0]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"miles-dmd2\[wandb\]"):
        WandbSink("p", "offline", tmp_path, {})
