"""Fixtures of the config tests; what they share lies in config_commands.py, imported by plain name."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

COMPONENTS = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A pipeline directory that passes the checks, to be broken one way at a time."""
    root = tmp_path / "teacher"
    for name in COMPONENTS:
        (root / name).mkdir(parents=True)
    index = {name: ["diffusers", f"Some{name}"] for name in COMPONENTS}
    extra = {"_class_name": "QwenImagePipeline", "_diffusers_version": "0.42.1", "safety": [None, None], "ratio": 0.8}
    (root / "model_index.json").write_text(json.dumps({**index, **extra}))
    for name in ("transformer", "vae", "text_encoder"):
        (root / name / "config.json").write_text("{}")
        (root / name / "model.safetensors").write_bytes(safetensors())
    (root / "tokenizer" / "tokenizer.json").write_text("{}")
    (root / "scheduler" / "scheduler_config.json").write_text("{}")
    return root


def safetensors(size: int = 16) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write text (or bytes) to a file of a name, and give its path."""

    def _write(content: str | bytes, name: str = "run.yaml") -> Path:
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return _write
