"""Which checkpoint gets which adapter, and what a bad checkpoint or size is told."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from miles_dmd2.models import registry
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.registry import FAMILIES, Family, adapter_class, build_adapter, known_pipelines


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_table_says_what_the_adapter_says(family: Family) -> None:
    adapter = adapter_class(family)
    assert issubclass(adapter, ModelAdapter)
    assert (adapter.family, adapter.pipeline_classes) == (family.name, family.pipeline_classes)


def test_no_class_is_served_twice() -> None:
    assert len(known_pipelines()) == sum(len(family.pipeline_classes) for family in FAMILIES)


def test_asking_for_the_classes_loads_neither_torch_nor_diffusers() -> None:
    code = (
        "import sys; from miles_dmd2.models.registry import known_pipelines as k; print(k());"
        "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(registry.__file__).parents[2], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"QwenImagePipeline" in done.stdout


def test_builds_the_adapter_of_the_checkpoint(tiny_qwen: Path) -> None:
    adapter = build_adapter(tiny_qwen, 48, 32)
    assert (adapter.family, adapter.height, adapter.width) == ("qwen_image", 48, 32)
    assert adapter.latent_shape == (6, 64)


def test_default_size_is_the_pipelines(tiny_qwen: Path) -> None:
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline.from_pretrained(tiny_qwen)
    side = pipeline.default_sample_size * pipeline.vae_scale_factor
    adapter = build_adapter(tiny_qwen)
    assert (adapter.height, adapter.width) == (side, side) == (1024, 1024)
    assert build_adapter(tiny_qwen, height=32).width == 1024


def broken(source: Path, target: Path, name: str, text: str | None) -> Path:
    """A copy of the JSON files with one of them replaced, or removed."""
    for path in source.rglob("*.json"):
        (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target / path.relative_to(source))
    if text is None:
        (target / name).unlink()
    else:
        (target / name).write_text(text)
    return target


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("model_index.json", None, "has no model_index.json"),
        ("model_index.json", "{", "cannot read model_index.json"),
        ("model_index.json", "[]", "must be a JSON object, got list"),
        ("model_index.json", '{"_class_name": "FluxPipeline"}', "'FluxPipeline'; supported are QwenImagePipeline"),
        ("model_index.json", "{}", "None; supported are QwenImagePipeline"),
        ("transformer/config.json", None, "has no transformer/config.json"),
        ("transformer/config.json", '{"in_channels": "64"}', "in_channels as a positive integer, got '64'"),
        ("transformer/config.json", '{"in_channels": 32}', "in_channels 32 must be 4 x out_channels (16)"),
        ("transformer/config.json", '{"zero_cond_t": true}', "zero_cond_t = true, which is not supported"),
        ("vae/config.json", None, "has no vae/config.json"),
        ("vae/config.json", '{"z_dim": 8}', "4 x the VAE's z_dim (8)"),
    ],
)
def test_a_bad_checkpoint_is_one_line(
    tiny_qwen: Path, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        build_adapter(broken(tiny_qwen, tmp_path, name, text), 32, 32)
    assert str(caught.value).startswith("--hf-checkpoint")
    assert "\n" not in str(caught.value)


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*nowhere is not a directory"):
        build_adapter(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("height", "width", "message"),
    [
        (33, 32, r"--diffusion-height 33 must be a positive multiple of 16; the nearest is 32"),
        (32, 8, r"--diffusion-width 8 .* the nearest is 16"),
        (0, 32, r"--diffusion-height 0 .* the nearest is 16"),
        (32, -16, r"--diffusion-width -16 .* the nearest is 16"),
        (1000, 32, r"--diffusion-height 1000 .* the nearest is 992"),
    ],
)
def test_a_size_that_the_vae_cannot_make(tiny_qwen: Path, height: int, width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_adapter(tiny_qwen, height, width)


def test_the_vae_decides_the_multiple(tiny_qwen: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_qwen / "vae/config.json").read_text()) | {"temperal_downsample": [False, True]}
    checkpoint = broken(tiny_qwen, tmp_path, "vae/config.json", json.dumps(config))
    assert build_adapter(checkpoint, 24, 8).latent_shape == (3, 64)
