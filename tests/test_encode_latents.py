"""The tool that encodes a data set: what it writes is what the adapter encodes, and bad data is one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from miles_dmd2.data.latents import check_latents, read_latents
from miles_dmd2.models.checkpoint import component_digest
from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.models.registry import build_adapter
from scripts.encode_latents import main
from tests import tiny_wan
from tests.tiny_qwen import SIZE, build


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "qwen")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three pictures of two prompts, one of them of another size."""
    random = np.random.default_rng(0)
    lines = []
    for i, (side, prompt) in enumerate(((SIZE, "one"), (SIZE, "two"), (2 * SIZE, "one"))):
        Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
        lines.append(json.dumps({"image": f"{i}.png", "prompt": prompt}))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return tmp_path / "data.jsonl"


def arguments(pipeline: Path, data: Path) -> list[str]:
    canvas = ["--diffusion-height", str(SIZE), "--diffusion-width", str(SIZE), "--batch-size", "2"]
    output = str(data.with_name("latents.safetensors"))
    return ["--hf-checkpoint", str(pipeline), "--data", str(data), "--output", output, *canvas]


def test_each_picture_is_a_latent_with_its_prompt(pipeline: Path, data: Path) -> None:
    assert main(arguments(pipeline, data)) == 0
    content = read_latents(data.with_name("latents.safetensors"))
    assert content.rows() == {"one": [0, 2], "two": [1]}
    adapter = QwenImageAdapter(pipeline, SIZE, SIZE)
    picture = torch.from_numpy(np.array(Image.open(data.with_name("1.png"))))[None, None]
    expected = adapter.encode(adapter.load_components(), picture)
    torch.testing.assert_close(content.latents[1:2], expected, rtol=0, atol=1e-5)
    check_latents(data, content, ["one", "two"], adapter.latent_shape, component_digest(pipeline, "vae"))


@pytest.mark.parametrize("line", ["{", '{"image": "0.png"}', '["0.png", "one"]', '{"image": "no.png", "prompt": "a"}'])
def test_bad_data_is_one_line(pipeline: Path, data: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    data.write_text(line)
    with pytest.raises(SystemExit) as stopped:
        main(arguments(pipeline, data))
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "data.jsonl:1" in last or "no.png" in last
    assert not data.with_name("latents.safetensors").exists()


def test_clips_are_lists_of_frames(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = tiny_wan.build(tmp_path / "wan")
    random = np.random.default_rng(1)
    names = [f"{i}.png" for i in range(5)]
    for name in names:
        Image.fromarray(random.integers(0, 256, (32, 48, 3), dtype=np.uint8)).save(tmp_path / name)
    data = tmp_path / "clips.jsonl"
    data.write_text(json.dumps({"frames": names, "prompt": "a"}))
    words = ["--hf-checkpoint", str(pipeline), "--data", str(data), "--output", str(tmp_path / "clips.safetensors")]
    words += ["--diffusion-height", "32", "--diffusion-width", "48", "--diffusion-num-frames", "5"]
    assert main(words) == 0
    adapter = build_adapter(pipeline, 32, 48, 5)
    clip = torch.from_numpy(np.stack([np.array(Image.open(tmp_path / name)) for name in names]))[None]
    expected = adapter.encode(adapter.load_components(), clip)
    torch.testing.assert_close(read_latents(tmp_path / "clips.safetensors").latents, expected, rtol=0, atol=1e-5)
    data.write_text(json.dumps({"frames": names[:4], "prompt": "a"}))
    with pytest.raises(SystemExit):
        main(words)
    assert "clips.jsonl:1: has 4 frames, the canvas 5" in capsys.readouterr().err
