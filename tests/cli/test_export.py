"""miles-dmd2 export: the run's own student, bit for bit, and in plain diffusers picture for picture."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_dmd2.algo import eval_seed
from miles_dmd2.cli.main import main
from miles_dmd2.engines.base import EngineError
from miles_dmd2.training import Ranks
from tests.families import TINY, Tiny, checkpoints
from tests.in_process import PROMPTS, Outcome, run

__all__ = ["checkpoints"]

WEIGHTS = Path("transformer/diffusion_pytorch_model.safetensors")
OPTIONS = {
    "diffusion-height": "48",
    "diffusion-width": "32",
    "num-rollout": "2",
    "save-interval": "1",
    "rollout-batch-size": "2",
    "n-samples-per-prompt": "2",
    "num-steps-per-rollout": "2",
    "diffusion-num-steps": "2",
    "diffusion-flow-shift": "3",
    "student-ema-decay": "0.5",
    "lr": "1e-2",
    "cpu-threads": "1",
}


def words(directory: Path, **changes: str | None) -> list[str]:
    options = {**OPTIONS, **{name.replace("_", "-"): value for name, value in changes.items()}}
    flags = [word for name, value in options.items() if value is not None for word in (f"--{name}", value)]
    return [*flags, "--run-dir", str(directory / "run")]


def trained(ranks: Ranks, directory: Path, pipeline: Path, **changes: str | None) -> Outcome:
    torch.set_num_threads(1)
    return run(ranks, directory, words(directory, **changes), pipeline=pipeline)


def canvas(tiny: Tiny) -> dict[str, str]:
    frames = {"diffusion_num_frames": str(tiny.num_frames)} if tiny.num_frames > 1 else {}
    return {"diffusion_height": str(tiny.size[0]), "diffusion_width": str(tiny.size[1]), **frames}


def of_kind(outcome: Outcome, kind: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{kind}/"): value for name, value in outcome.weights.items() if name.startswith(f"{kind}/")
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a run")


@pytest.fixture(scope="module")
def outcome(ranks: Ranks, directory: Path, tiny_qwen: Path) -> Outcome:
    """Two rollouts of a tiny Qwen-Image, with checkpoints after both."""
    return trained(ranks, directory, tiny_qwen)


def same_weights(pipeline: Path, weights: dict[str, Tensor]) -> bool:
    written = load_file(pipeline / WEIGHTS)
    assert written.keys() >= weights.keys()
    return all(torch.equal(written[name], value) for name, value in weights.items())


# -- what is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["run", "run/checkpoints", "run/checkpoints/step_000002"])
def test_it_is_the_runs_own_student_bit_for_bit(
    directory: Path, outcome: Outcome, tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, ema = of_kind(outcome, "raw"), of_kind(outcome, "ema")
    assert any(not torch.equal(raw[name], ema[name]) for name in raw)
    for kind, wanted in (("raw", raw), ("ema", ema)):
        output = tmp_path / kind
        assert main(["export", str(directory / source), "--output", str(output), "--weights", kind, "--no-check"]) == 0
        assert same_weights(output, wanted)
    assert main(["export", str(directory / source), "--output", str(tmp_path / "best"), "--no-check"]) == 0
    assert same_weights(tmp_path / "best", ema)
    assert "best is the averaged student after 2 rollouts and 2 updates" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "ema", "raw"]
    grid = [1.0, 0.75, 0.0]  # 3 s / (1 + 2 s) at s = 1, 1/2, 0
    assert json.loads((tmp_path / "raw" / "student.json").read_text())["sigmas"] == grid


def test_an_earlier_checkpoint_is_another_student(directory: Path, outcome: Outcome, tmp_path: Path) -> None:
    step = directory / "run" / "checkpoints" / "step_000001"
    assert main(["export", str(step), "--output", str(tmp_path / "first"), "--weights", "raw", "--no-check"]) == 0
    assert not same_weights(tmp_path / "first", of_kind(outcome, "raw"))


# -- the check ---------------------------------------------------------------------------------------------------


def checked(run_dir: Path, output: Path, *more: str) -> int:
    return main(["export", str(run_dir), "--output", str(output), *more])


def differences(out: str) -> tuple[float, float]:
    match = re.search(r"differ by at most (\S+) in latents and (\S+) in pixels \(tolerance 0\.001\)", out)
    assert match, out
    return float(match[1]), float(match[2])


def test_plain_diffusers_makes_the_pictures_of_the_sheet(
    directory: Path, outcome: Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Called here as docs/export.md says; the run's own prompts, with the seeds of its evals."""
    assert checked(directory / "run", tmp_path / "student") == 0
    out = capsys.readouterr().out
    assert out.startswith("checked: 3 pictures")
    assert max(differences(out)) < 2e-5
    sheet = np.asarray(Image.open(tmp_path / "student.png")).astype(int)
    assert sheet.shape == (2 * 48 + 2, 3 * 32 + 2 * 2, 3)
    pipeline = QwenImagePipeline.from_pretrained(tmp_path / "student")
    pipeline.set_progress_bar_config(disable=True)
    for i, prompt in enumerate(PROMPTS):
        generator = torch.Generator().manual_seed(eval_seed(0, 0, i))
        (image,) = pipeline(
            prompt, num_inference_steps=2, height=48, width=32, true_cfg_scale=1.0, generator=generator
        ).images
        columns = slice(i * 34, i * 34 + 32)
        for top in (0, 50):
            assert abs(sheet[top : top + 48, columns] - np.asarray(image).astype(int)).max() <= 1
    assert abs(sheet[:48, :32] - sheet[:48, 34:66]).mean() > 1


def test_an_engine_that_cannot_be_asked_leaves_nothing(
    directory: Path,
    outcome: Outcome,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def generate(*_: object) -> None:
        raise EngineError("no more")

    monkeypatch.setattr("miles_dmd2.engines.local.LocalEngine.generate", generate)
    assert checked(directory / "run", tmp_path / "student") == 1
    assert capsys.readouterr().err == "error: --check: the local engine could not be asked: no more\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tiny", TINY, ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dmd2_student_sample_type": "sde"},
        {
            "diffusion_sigmas": "0.9,0.5",
            "dmd2_student_sample_type": "sde",
            "diffusion_num_steps": None,
            "diffusion_flow_shift": None,
        },
    ],
    ids=["ode", "sde", "own grid from 0.9"],
)
def test_other_ways_to_sample(
    ranks: Ranks,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tiny: Tiny,
    checkpoints: Callable[[Tiny], Path],
    changes: dict[str, str | None],
) -> None:
    """Of every family: fresh noise in the hops, a grid for the call and one for the scheduler, clips."""
    outcome = trained(ranks, tmp_path, checkpoints(tiny), num_rollout="1", **canvas(tiny), **changes)
    assert checked(tmp_path / "run", tmp_path / "student", "--check-prompts", "one two", "three") == 0
    out = capsys.readouterr().out
    assert "checked: 2 pictures" in out
    assert max(differences(out)) < 2e-5
    assert ("the grid starts at 0.9" in out) == ("diffusion_sigmas" in changes)
    assert same_weights(tmp_path / "student", of_kind(outcome, "ema"))


@pytest.mark.parametrize("tiny", TINY, ids=str)
def test_a_student_with_an_adapter(
    ranks: Ranks,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tiny: Tiny,
    checkpoints: Callable[[Tiny], Path],
) -> None:
    """The merged pipeline is the run's own, bit for bit, and the adapter on the run's pipeline makes its pictures."""
    pipeline = checkpoints(tiny)
    options = {"num_rollout": "2", "save_interval": "2", "lora_rank": "2", "lora_alpha": "3", **canvas(tiny)}
    outcome = trained(ranks, tmp_path, pipeline, **options)
    assert checked(tmp_path / "run", tmp_path / "student", "--adapter", "--check-prompts", "one two") == 0
    out = capsys.readouterr().out
    assert "of diffusers with the adapter and of the local engine" in out
    found = [max(map(float, pair)) for pair in re.findall(r"at most (\S+) in latents and (\S+) in pixels", out)]
    assert len(found) == 2
    assert max(found) < 2e-5
    merged = of_kind(outcome, "ema")
    assert same_weights(tmp_path / "student", merged)
    base = load_file(pipeline / WEIGHTS)
    assert max((merged[name] - base[name]).abs().max().item() for name in merged) > 1e-3, "pictures of another network"
    adapter = load_file(tmp_path / "student" / "lora" / "pytorch_lora_weights.safetensors")
    assert all(re.fullmatch(r"transformer\..+\.lora_[AB]\.weight", name) for name in adapter)


def other_weights(exported: Path) -> None:
    weights = load_file(exported / WEIGHTS)
    save_file({name: value * 1.01 for name, value in weights.items()}, exported / WEIGHTS)


def other_grid(exported: Path) -> None:
    file = exported / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "shift": 3.1}))


def not_finite(exported: Path) -> None:
    weights = load_file(exported / WEIGHTS)
    save_file({name: value * float("nan") for name, value in weights.items()}, exported / WEIGHTS)


@pytest.mark.parametrize("damage", [other_weights, other_grid, not_finite])
def test_other_pictures_are_no_export(
    directory: Path,
    outcome: Outcome,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
) -> None:
    from miles_dmd2.models.qwen_image import QwenImageAdapter

    write = QwenImageAdapter.export_pipeline

    def wrong(adapter: QwenImageAdapter, weights: object, sampling: object, target: Path) -> None:
        write(adapter, weights, sampling, target)
        damage(target)

    monkeypatch.setattr(QwenImageAdapter, "export_pipeline", wrong)
    assert checked(directory / "run", tmp_path / "student") == 1
    err = capsys.readouterr().err
    assert err.startswith("error: --check: plain diffusers does not make the pictures of the local engine")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["student.png"]
