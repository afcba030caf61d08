"""An adapter's merged weights on a real server: proven after each sync, and what is generated is what is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from miles_dmd2.algo import key_seed, normal
from miles_dmd2.config.lora import Lora
from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.training import ActorTrainer, OptimizerSettings, Ranks, TrainerSettings
from miles_dmd2.types import RolloutRequest, ScoreRow, WeightVersion
from tests.engines.contract import GRID
from tests.sglang.test_contract import SAME
from tests.tiny_qwen import PROMPTS, SIZE

pytestmark = pytest.mark.sglang


def test_merged_weights_are_served_and_trained_on(ranks: Ranks, server: Any, qwen_pipeline: Path) -> None:
    """Three updates: the engine's x0, of merged weights, is that of base and adapter in the trainer, to rounding."""
    adapter = QwenImageAdapter(qwen_pipeline, SIZE, SIZE)
    settings = TrainerSettings("actor", 0, OptimizerSettings(lr=1e-2), lora=Lora(2, 4))
    actor = ActorTrainer(settings, adapter, adapter.load_transformer(), ranks, max_x0_drift=SAME)
    engine = SGLangEngine(adapter, [server], SGLangSettings(require_plugin=True))
    engine.wake()
    served = []
    for rollout_id in range(4):
        update = actor.export_weights(["raw"])["raw"]
        assert update.payload is not None
        engine.load_weights(update, update.payload)
        assert (engine.weight_version, engine.weight_checksum) == (WeightVersion(rollout_id), update.checksum)
        requests = [RolloutRequest(i, PROMPTS[i % 2], 500 + i, GRID, i, False) for i in range(4)]
        samples = engine.generate(requests)
        served.append(torch.stack([sample.x0 for sample in samples]))
        noise = [normal(key_seed(0, "probe", rollout_id, s.sample_id), adapter.latent_shape) for s in samples]
        scores = {s.sample_id: ScoreRow(s.x0, s.x0 + n, 0.5) for s, n in zip(samples, noise, strict=True)}
        metrics = actor.train(rollout_id, [tuple(scores)], samples, [scores])
        assert metrics["x0_mean_abs_diff"] < SAME
    assert (served[-1] - served[0]).abs().mean() > 1e-3, "of another student than at the start"
    engine.close()
