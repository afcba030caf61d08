"""The tiny variant of the MiniMax H3 recipe, whole: two ranks, a real server, prepared prompts, clips with sound."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import imageio_ffmpeg
import pytest
from safetensors.torch import load_file
from torch import Tensor

from miles_dmd2.models.minimax_h3 import MiniMaxH3Adapter
from miles_dmd2.models.minimax_h3_weights import from_native
from miles_dmd2.observability.declared import METRICS
from tests.sglang import tiny_h3_engine
from tests.tiny_h3 import HIDDEN, TRANSFORMER, WEIGHTS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
COLOURS = ("red", "green", "blue")
THINGS = ("circle", "square")
WAYS = (
    "moving left",
    "moving right",
    "up",
    "down",
    "left down",
    "right up",
    "left",
    "right",
    "moving up",
    "moving down",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("h3")


@pytest.fixture(scope="module")
def python(sglang_python: Path, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_h3_engine.python_with_tiny_vaes(sglang_python, tmp_path_factory.mktemp("engine") / "of h3", home)


@pytest.fixture(scope="module")
def checkpoint(python: Path, home: Path) -> Path:
    return tiny_h3_engine.build(home, python)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prompts")
    texts = [f"a {colour} {thing} {way}" for colour in COLOURS for thing in THINGS for way in WAYS]
    (directory / "source.txt").write_text("\n".join(texts))
    command("scripts/prepare_prompts.py", "--source", directory / "source.txt", "--num-test", 10, "--output", directory)
    return directory


def command(script: str, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=850,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def recipe(checkpoint: Path, python: Path, prompts: Path, shared: Path, *more: object) -> str:
    return command(
        "recipes/dmd2_h3_t2va_16gpu_multinode.py",
        *("--tiny", "--checkpoint", checkpoint, "--sglang-python", python, "--prompts", prompts, "--shared", shared),
        *("--eval-interval", 2, "--cpu-threads", 1, *more),
    )


@pytest.fixture(scope="module")
def trained(checkpoint: Path, python: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shared = tmp_path_factory.mktemp("shared")
    recipe(checkpoint, python, prompts, shared)
    return shared


def rows(trained: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text().splitlines()]


def weights(root: Path) -> dict[str, Tensor]:
    return from_native(load_file(root / "transformer" / WEIGHTS), TRANSFORMER)


def test_more_than_99_percent_of_what_is_trained_has_moved(trained: Path, checkpoint: Path) -> None:
    """But for two that the loss cannot reach: the sound's head, and of the last block's modulation what changes rows
    of text and sound after their keys and values, on which the video's output depends no more: 4 of 6 for 2 of 3 kinds.
    """
    before, after = weights(checkpoint), weights(trained / "run" / "student_raw")
    silent = set(MiniMaxH3Adapter(checkpoint, 32, 32, 5).head_of("audio"))
    assert all((before[name] == after[name]).all() for name in silent)
    last = f"transformer_blocks.{TRANSFORMER['num_layers'] - 1}.adaln_proj.linear.weight"
    still = (before[last] == after[last]).all(dim=1)
    assert int(still.sum()) == HIDDEN * 4 * 2
    trained_names = before.keys() - silent - {last, last.replace("weight", "bias")}
    moved = sum(int((before[name] != after[name]).sum()) for name in trained_names)
    assert moved / sum(before[name].numel() for name in trained_names) > 0.99
    assert float((before[last] != after[last])[~still].float().mean()) > 0.99


def wanted() -> list[str]:
    """Keys of every rollout, of a run on the CPU."""
    always = [metric for metric in METRICS if metric.where in ("", "--device cpu", "--rollout-engine sglang")]
    keys = []
    for metric in always:
        groups = ("critic", "actor") if "group" in (metric.source, metric.name.strip("<>")) else (None,)
        for group in groups:
            source = group if metric.source == "group" else metric.source
            keys.append(f"{source}/{metric.name.replace('<group>', group or '')}")
    return [key for key in keys if key != "time/export"]  # of the first rollout only


def test_every_figure_is_there_and_engine_and_trainer_agree(trained: Path) -> None:
    found = rows(trained)
    assert [row["rollout"] for row in found] == [0, 1, 2]
    for row in found[:2]:
        assert row["rollout/samples"] == 20
        assert row["actor/x0_mean_abs_diff"] < 1e-5  # bf16 on both sides; 0 where it was measured
        assert (row["rollout/forwards_over_plan"], row["critic/forwards_over_plan"]) == (0, 0)
        assert not [key for key in wanted() if key not in row]


CLIP = re.compile(r"Duration: 00:00:([\d.]+)")


@pytest.mark.parametrize("rollout_id", [0, 2])
def test_the_eval_leaves_26_clips_with_sound(trained: Path, prompts: Path, rollout_id: int) -> None:
    directory = trained / "eval_media" / "run" / f"eval_{rollout_id:06d}"
    entries = [json.loads(line) for line in (directory / "index.jsonl").read_text().splitlines()]
    wanted = [json.loads(line)["prompt"] for line in (prompts / "eval_media.jsonl").read_text().splitlines()]
    assert [entry["prompt"] for entry in entries] == wanted
    assert len(wanted) == 26
    for entry in entries:
        told = probe(directory / entry["file"])
        assert told.count("Stream #0:") == 2
        assert "Video: h264" in told
        assert "Audio: aac" in told
        assert "24 fps" in told
        duration = CLIP.search(told)
        assert duration is not None
        assert float(duration[1]) == pytest.approx(22 / 24, abs=0.05)


def probe(file: Path) -> str:
    return subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-i", str(file)], capture_output=True, text=True, check=False
    ).stderr


def test_a_reference_renders_the_same_files(trained: Path, checkpoint: Path, python: Path, prompts: Path) -> None:
    """The teacher, in fewer steps than its 50: the same names, so that they compare directly."""
    recipe(checkpoint, python, prompts, trained, "--reference", "teacher", "--diffusion-num-steps", 6)
    names = [
        {path.name for path in (trained / "eval_media" / name / "eval_000000").glob("*.mp4")}
        for name in ("run", "teacher")
    ]
    assert names[0] == names[1]
    assert len(names[0]) == 26
    assert not [
        file.name for file in (trained / "teacher" / "logs").glob("*") if "critic" in file.name or "actor" in file.name
    ]
