"""The digits recipe on the real server and on the local engine: the same run, but for rounding in the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from recipes.digits.report import PIPELINE
from recipes.digits.run import HERE, ROOT

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

# Of the distance that the weights travel in five rollouts. AdamW's first steps have full size whatever the gradient's,
# so an element whose gradient is nothing but rounding may go either way. Measured: 8e-5 raw, 1.5e-4 averaged.
SHARE = 0.002
SETTINGS = {
    "--config": HERE / "configs" / "4_steps.yaml",
    "--hf-checkpoint": PIPELINE,
    "--prompt-data": HERE / "prompts.txt",
    "--eval-prompt-data": HERE / "prompts.txt",
    "--eval-samples-per-prompt": 1,
    "--num-rollout": 5,
    "--rollout-batch-size": 64,
    "--num-steps-per-rollout": 4,
}


def trained(run_dir: Path, *flags: str) -> Path:
    settings = [str(part) for pair in (SETTINGS | {"--run-dir": run_dir}).items() for part in pair]
    command = [sys.executable, str(ROOT / "train_diffusion.py"), *settings, *flags]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return run_dir


def weights(directory: Path) -> dict[str, Tensor]:
    (file,) = (directory / "transformer").glob("*.safetensors")
    return load_file(file)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum((a[name].double() - b[name].double()).square().sum().item() for name in b) ** 0.5


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_five_rollouts_on_sglang_are_those_of_the_local_engine(tmp_path: Path, sglang_python: Path) -> None:
    local = trained(tmp_path / "local")
    served = trained(tmp_path / "sglang", "--rollout-engine", "sglang", "--sglang-python", str(sglang_python))
    for kind in ("raw", "ema"):
        here, there = weights(local / f"student_{kind}"), weights(served / f"student_{kind}")
        travelled = distance(here, weights(PIPELINE))
        assert here.keys() == there.keys()
        assert travelled > 0.002
        share = distance(here, there) / travelled
        print(f"{kind}: {share:.2g} of the distance travelled")
        assert 0 < share < SHARE  # 0 would be the same engine twice
    for mine, theirs in list(zip(rows(local), rows(served), strict=True))[:5]:  # the sixth is the last eval's
        assert mine["rollout/samples"] == theirs["rollout/samples"]
        assert mine["rollout/forwards"] == theirs["rollout/forwards"]
        assert theirs["actor/x0_mean_abs_diff"] < 1e-5
        assert theirs["rollout/retries"] == theirs["rollout/faults"] == 0
