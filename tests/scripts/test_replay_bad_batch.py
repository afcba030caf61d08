"""The script that computes a kept step again, on the real transformer class."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from miles_dmd2.algo import key_seed, normal
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


def test_it_prints_the_losses_again(
    script: ModuleType, ranks: Ranks, tiny_qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = QwenImageAdapter(tiny_qwen, SIZE, SIZE)
    settings = TrainerSettings("critic", 0, OptimizerSettings(lr=1e-3), bad_batch_directory=tmp_path)
    critic = CriticTrainer(settings, adapter, adapter.load_transformer(), adapter.load_transformer(), ranks)
    samples = [sample(adapter, i) for i in range(4)]
    samples[2] = replace(samples[2], x0=samples[2].x0 * torch.inf)
    critic.train(0, [range(4)], samples)
    met = critic.last_step
    assert met is not None
    assert script.main([str(next(tmp_path.iterdir()))]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["not_finite"] == [2]
    assert printed["losses"] == {str(i): str(loss) for i, loss in met.losses.items()}


def test_a_wrong_directory_is_one_line(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path} is not a complete bad batch")
    assert err.count("\n") == 1
