"""The script that computes a kept step again, on the real transformer class."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from miles_dmd2.algo import key_seed, normal
from miles_dmd2.config.lora import Lora
from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.training import CriticTrainer, OptimizerSettings, Ranks, TrainerSettings
from miles_dmd2.types import RolloutSample, WeightVersion
from tests.tiny_qwen import SIZE, tiny_qwen

__all__ = ["tiny_qwen"]
FILE = Path(__file__).parents[2] / "scripts" / "replay_bad_batch.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("replay_bad_batch", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sample(adapter: QwenImageAdapter, i: int) -> RolloutSample:
    shape, width = adapter.latent_shape, adapter.probe_conditioning()["prompt_embeds"].shape[1]
    x_k, x0 = normal(key_seed(0, "probe", 0, i), shape), normal(key_seed(0, "probe", 1, i), shape)
    cond = {"prompt_embeds": normal(key_seed(0, "probe", 2, i), (5, width))}
    return RolloutSample(i, "one", i, 0, torch.tensor([1.0, 0.0]), x_k, x0, cond, WeightVersion(0))


def meet_it(ranks: Ranks, checkpoint: Path, directory: Path, lora: Lora | None = None) -> dict[str, str]:
    """A critic's step with an infinite sample, kept in `directory`; its losses, as the script prints them."""
    adapter = QwenImageAdapter(checkpoint, SIZE, SIZE)
    settings = TrainerSettings("critic", 0, OptimizerSettings(lr=1e-3), lora=lora, bad_batch_directory=directory)
    teacher = adapter.load_transformer() if lora is None else None
    critic = CriticTrainer(settings, adapter, adapter.load_transformer(), teacher, ranks)
    samples = [sample(adapter, i) for i in range(4)]
    samples[2] = replace(samples[2], x0=samples[2].x0 * torch.inf)
    critic.train(0, [range(4)], samples)
    met = critic.last_step
    assert met is not None
    return {str(i): str(loss) for i, loss in met.losses.items()}


def test_it_prints_the_losses_again(
    script: ModuleType, ranks: Ranks, tiny_qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = meet_it(ranks, tiny_qwen, tmp_path)
    assert script.main([str(next(tmp_path.iterdir()))]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["not_finite"] == [2]
    assert printed["losses"] == losses


def test_an_adapter_s_base_may_move_and_may_not_change(
    script: ModuleType, ranks: Ranks, tiny_qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = meet_it(ranks, tiny_qwen, tmp_path / "kept", Lora(2, 2))
    moved = Path(shutil.copytree(tiny_qwen, tmp_path / "moved"))
    words = [str(next((tmp_path / "kept").iterdir())), "--hf-checkpoint", str(moved)]
    assert script.main(words) == 0
    assert json.loads(capsys.readouterr().out)["losses"] == losses
    file = next((moved / "transformer").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")  # of the last value of the last tensor
    assert script.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: --hf-checkpoint {moved}: another transformer")
    assert err.count("\n") == 1


def test_a_wrong_directory_is_one_line(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path} is not a complete bad batch")
    assert err.count("\n") == 1
