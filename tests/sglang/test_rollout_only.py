"""Renders without trainers on servers that this run starts: the checkpoint's own weights, and another transformer's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from miles_dmd2.media.store import read_index
from tests.sglang.test_run import PROMPTS, Done, run
from tests.tiny_qwen import build

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


def pictures(done: Done) -> dict[str, np.ndarray]:
    directory = done.directory / "eval" / "eval_000000"
    found = {
        entry["file"]: np.asarray(Image.open(directory / entry["file"]))
        for entry in read_index(directory / "index.jsonl")
    }
    assert {path.name for path in directory.iterdir()} == {"index.jsonl", *found}
    return found


def far(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> int:
    """The largest difference of any pixel, of 255."""
    assert one.keys() == other.keys()
    return max(int(np.abs(picture.astype(int) - other[name].astype(int)).max()) for name, picture in one.items())


def test_the_checkpoint_and_another_transformer_in_its_pipeline(
    tmp_path: Path, qwen_pipeline: Path, sglang_python: Path
) -> None:
    """SGLang's pictures are the local engine's, to one level of rounding, also those of a pipeline made of links."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    other = build(tmp_path / "other", seed=5)
    render = {"eval_prompt_data": tmp_path / "prompts.txt", "debug_rollout_only": "eval"}
    done = run(tmp_path, "sglang", qwen_pipeline, sglang_python, **render, reference_transformer=other)
    assert done.code == 0, done.err
    logs = {file.name for file in (done.directory / "logs").iterdir()}
    assert logs == {"driver.log", "engine_0.log", "server_0.log", "sglang_0.log"}
    assert not (done.directory / "reference").exists()
    plain = run(tmp_path, "plain", qwen_pipeline, sglang_python, **render, rollout_video_dtype="fp32")
    assert plain.code == 0, plain.err

    local = {"rollout_engine": "local", "sglang_python": None, "sglang_attention_backend": None}
    mine = run(tmp_path, "local", qwen_pipeline, sglang_python, **render, **local, reference_transformer=other)
    mine_plain = run(tmp_path, "local plain", qwen_pipeline, sglang_python, **render, **local)
    assert mine.code == mine_plain.code == 0, mine.err + mine_plain.err
    assert far(pictures(done), pictures(mine)) <= 1
    assert far(pictures(plain), pictures(mine_plain)) <= 1
    assert far(pictures(done), pictures(plain)) > 1
