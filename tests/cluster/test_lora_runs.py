"""A run whose student and critic are adapters, under Ray: small checkpoints, the same bits after a stop, its export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_commands import Finished
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.ray

LORA = {"lora_rank": 2, "lora_alpha": 4, "lora_target_modules": ["to_q", "to_k", "to_v", "to_out.0"]}
LAYERS = {
    f"transformer_blocks.{i}.attn.{name}.weight" for i in range(2) for name in ("to_q", "to_k", "to_v", "to_out.0")
}
PIPELINE = Path("transformer/diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def adapted(run: Callable[..., Finished]) -> Finished:
    done = run("adapted", save_interval=2, **LORA)
    assert done.code == 0, done.err
    return done


def test_it_trains_the_adapters_alone(adapted: Finished, workspace: Path) -> None:
    for row in adapted.rows():
        assert (row["critic/critic_forwards"], row["critic/teacher_forwards"]) == (16, 8)
        assert row["actor/x0_mean_abs_diff"] < 1e-5, "the engine has the merged weights"
        assert row["actor/dmd_loss"] > 0
    start = load_file(workspace / "pipeline" / PIPELINE)
    for kind in ("raw", "ema"):
        student = adapted.student(kind)
        assert {name for name in start if not torch.equal(start[name], student[name])} == LAYERS
    assert "LoRA of rank 2, alpha 4, over to_q to_k to_v to_out.0" in adapted.out
    manifest = json.loads((adapted.directory / "checkpoints" / "step_000003" / "manifest.json").read_text())
    values = sum(start[name].shape[0] + start[name].shape[1] for name in LAYERS) * LORA["lora_rank"]
    (actor,) = (group for group in manifest["groups"].values() if group["role"] == "actor")
    (file,) = actor["files"].values()
    bytes_of_tensors = 4 * 4 * values  # fp32 adapter, two moments, average
    assert bytes_of_tensors < file["size"] < bytes_of_tensors + 20_000, "names, and nothing of the base"


def test_a_resumed_run_ends_with_the_same_bits_and_its_checkpoint_exports_them(
    run: Callable[..., Finished], adapted: Finished, tmp_path: Path
) -> None:
    from miles_dmd2.cli.main import main

    second = run("adapted resumed", load=adapted.directory / "checkpoints" / "step_000002", **LORA)
    assert second.code == 0, second.err
    assert [row["rollout"] for row in second.rows()] == [2]
    for kind in ("raw", "ema"):
        wanted = adapted.student(kind)
        assert all(torch.equal(value, wanted[name]) for name, value in second.student(kind).items())
        output = tmp_path / kind
        words = ["export", str(second.directory), "--output", str(output), "--weights", kind, "--no-check", "--adapter"]
        assert main(words) == 0
        assert all(torch.equal(value, wanted[name]) for name, value in load_file(output / PIPELINE).items())


def test_another_base_is_refused_before_anything_starts(
    run: Callable[..., Finished], adapted: Finished, workspace: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(workspace / "pipeline", tmp_path / "other"))
    weights = load_file(other / PIPELINE)
    weights["proj_out.bias"] += 1e-3
    save_file(weights, other / PIPELINE)
    allowed = {"allow_config_change": ["hf-checkpoint"], "load": adapted.directory, "num_rollout": 4}
    refused = run("other base", hf_checkpoint=other, **allowed, **LORA)
    assert refused.code == 2
    assert "has another transformer" in refused.err
    assert refused.err.count("\n") == 1
