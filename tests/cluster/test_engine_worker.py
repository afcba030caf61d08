"""What an engine's process does with samples before they travel: scores them, and lets go of media."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from miles_dmd2.cluster import engine_group
from miles_dmd2.cluster.engine_group import EngineWorker
from miles_dmd2.cluster.wire import unpack_samples
from miles_dmd2.media.store import EvalMedia, KeptMedia, read_index
from miles_dmd2.rewards import Rewards
from miles_dmd2.types import RolloutRequest, RolloutSample, WeightVersion
from tests.media.reading import streams

RATE = 16000
SCORE = "def score(samples):\n    assert all(s.media is not None for s in samples)\n"
SCORE += "    return [float(s.media.float().mean()) + s.audio_sample_rate for s in samples]\n"


class Engine:
    """Clips of 8 frames at 8 per second with a second of sound, for requests that ask for media."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutSample]:
        return [
            RolloutSample(
                r.sample_id, r.prompt, r.seed, r.stop_step, torch.tensor(r.sigmas), torch.zeros(2), torch.zeros(2),
                {"e": torch.zeros(1)}, WeightVersion(3),
                media=torch.full((8, 4, 4, 3), r.sample_id, dtype=torch.uint8) if r.decode else None,
                audio=torch.zeros(2, RATE) if r.decode else None,
                audio_sample_rate=RATE if r.decode else None,
            )
            for r in requests
        ]  # fmt: skip


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineWorker:
    file = tmp_path / "rewards.py"
    file.write_text(SCORE)
    made = object.__new__(EngineWorker)  # without a model and a log of its own
    made._engine, made._rewards, made._new_rewards = Engine(), Rewards(f"{file}:score"), []
    made._settings = SimpleNamespace(media_directory=tmp_path / "sheets")
    made._media, made._metrics = EvalMedia(KeptMedia(tmp_path / "media", 8.0)), None
    made._sheets = []
    monkeypatch.setattr(engine_group.ray, "get", lambda parts: parts)
    return made


def requests(*scored: bool, decode: bool = True) -> list[RolloutRequest]:
    return [
        RolloutRequest(i, f"p{i}", 50 + i, (1.0, 0.5, 0.0), 1, decode=decode and one, scored=one)
        for i, one in enumerate(scored)
    ]


def test_a_contact_sheet_that_cannot_be_written_costs_the_file_alone(worker: EngineWorker, tmp_path: Path) -> None:
    (tmp_path / "sheets").write_text("a file where the directory should be")
    _, part = worker.generate([requests(True)], for_eval=True)
    assert worker.evaluate([part], 10, "raw") == {"reward": RATE}
    (told,) = worker.finish_media()
    assert told.startswith("the contact sheet of the raw eval at rollout 10 is missing: ")
    assert len(read_index(tmp_path / "media" / "eval_000010" / "index.jsonl")) == 1


def test_with_a_reward_one_windows_media_are_held_at_a_time(
    worker: EngineWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    generate = worker._engine.generate
    monkeypatch.setattr(worker._engine, "generate", lambda requests: asked.append(len(requests)) or generate(requests))
    worker.generate([requests(True, True), requests(True)])
    assert asked == [2, 1]
    worker._rewards = Rewards(None)
    worker.generate([requests(True, True), requests(True)])
    assert asked == [2, 1, 3]


def test_training_samples_travel_with_their_reward_and_without_media(worker: EngineWorker) -> None:
    count, first, second = worker.generate([requests(True, False), requests(True)])
    assert count == 3
    found = [sample for part in (first, second) for sample in unpack_samples(part)]
    assert [sample.reward for sample in found] == [RATE + 0.0, 0.0, RATE + 0.0]
    assert all((s.media, s.audio, s.audio_sample_rate) == (None, None, None) for s in found)
    assert worker.new_rewards() == [RATE, 0.0, RATE]
    assert worker.new_rewards() == []


def test_eval_samples_keep_theirs_and_become_files_with_sound(worker: EngineWorker, tmp_path: Path) -> None:
    asked = [dataclasses.replace(request, decode=True) for request in requests(True, False)]
    _, part = worker.generate([asked], for_eval=True)
    assert worker.new_rewards() == []  # these are no training samples
    figures = worker.evaluate([part], 10, "raw")
    assert figures == {"reward": RATE / 2}
    assert worker.finish_media() == []
    entries = read_index(tmp_path / "media" / "eval_000010" / "index.jsonl")
    assert [(entry["reward"], entry["weight_version"], entry["steps"]) for entry in entries] == [
        (RATE, "raw@3", 2),
        (0.0, "raw@3", 2),
    ]
    for entry in entries:
        found = streams(tmp_path / "media" / "eval_000010" / entry["file"])
        assert (found.video, found.audio, found.rate, found.fps) == ("h264", "aac", RATE, 8.0)
    assert (tmp_path / "sheets" / "eval_000010_raw.png").is_file()


def test_without_a_scorer_an_eval_has_no_reward_figure(worker: EngineWorker) -> None:
    worker._rewards, worker._metrics = Rewards(None), lambda samples: {"count": float(len(samples))}
    _, part = worker.generate([requests(True, True)], for_eval=True)
    assert worker.evaluate([part], 0, "raw") == {"count": 2.0}
    assert worker.finish_media() == []
