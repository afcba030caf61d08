"""The local engine and the exported pipeline against plain diffusers.

Latents agree to 1e-5 at a scale of about 4, not bitwise: the pipeline hands the transformer (1000 sigma) / 1000, which
may be one unit in the last place away from sigma, and the time embedding multiplies that by 1000.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from safetensors.torch import load_file
from torch import Tensor

from miles_dmd2.algo import normal, sigma_grid
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.models.export import StudentSampling
from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.types import RolloutRequest, RolloutSample, WeightVersion
from tests.tiny_qwen import PROMPTS, TALL, build

HEIGHT, WIDTH = TALL
SEEDS = (11, 12, 13)


@pytest.fixture(scope="module")
def adapter(tiny_qwen: Path) -> QwenImageAdapter:
    return QwenImageAdapter(tiny_qwen, HEIGHT, WIDTH)


@pytest.fixture(scope="module")
def student(adapter: QwenImageAdapter) -> dict[str, Tensor]:
    """Weights that are not the checkpoint's."""
    state = adapter.load_transformer().state_dict()
    return {name: value + 0.02 * normal(i, value.shape) for i, (name, value) in enumerate(state.items())}


def sampling(num_steps: int, shift: float) -> StudentSampling:
    return StudentSampling(tuple(sigma_grid(num_steps, shift).tolist()), shift)


def sampled(engine: LocalEngine, num_steps: int, shift: float) -> list[RolloutSample]:
    grid = tuple(sigma_grid(num_steps, shift).tolist())
    requests = [
        RolloutRequest(i, prompt, seed, grid, num_steps - 1, decode=True)
        for i, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True))
    ]
    return engine.generate(requests)


def piped(pipeline: QwenImagePipeline, num_steps: int, output_type: str, **more: object) -> Sequence[object]:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        list(PROMPTS),
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=num_steps,
        true_cfg_scale=1.0,
        generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
        output_type=output_type,
        **more,
    ).images


@pytest.mark.parametrize("num_steps", [1, 2, 4, 8])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_engine_samples_what_the_pipeline_samples(adapter: QwenImageAdapter, num_steps: int, shift: float) -> None:
    pipeline = QwenImagePipeline.from_pretrained(adapter.checkpoint)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    engine = LocalEngine(adapter, checkpoint_version=WeightVersion(0))
    ours = torch.stack([sample.x0 for sample in sampled(engine, num_steps, shift)])
    torch.testing.assert_close(ours, piped(pipeline, num_steps, "latent"), rtol=0, atol=1e-5)


def test_an_exported_sde_student_on_a_grid_of_its_own_is_what_plain_diffusers_samples(
    adapter: QwenImageAdapter, student: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers' stochastic sampling, with the noise of the samples' own generators where it would draw globally.

    The grid starts at 1: plain pipelines do not scale the initial noise by the first sigma, engines do.
    """
    grid = tuple(torch.tensor([1.0, 0.9, 0.4, 0.0]).tolist())
    adapter.export_pipeline(student, StudentSampling(grid, None, "sde"), tmp_path / "student")
    described = json.loads((tmp_path / "student" / "student.json").read_text())
    engine = LocalEngine(QwenImageAdapter(tmp_path / "student", HEIGHT, WIDTH), checkpoint_version=WeightVersion(1))
    requests = [
        RolloutRequest(i, prompt, seed, grid, 2, False, described["sample_type"])
        for i, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True))
    ]
    ours = torch.stack([sample.x0 for sample in engine.generate(requests)])
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    for generator in generators:
        torch.randn(adapter.latent_shape, generator=generator)  # the initial noise
    monkeypatch.setattr(
        "diffusers.schedulers.scheduling_flow_match_euler_discrete.randn_tensor",
        lambda shape, **_: torch.stack([torch.randn(shape[1:], generator=g) for g in generators]),
    )
    pipeline = QwenImagePipeline.from_pretrained(tmp_path / "student")
    theirs = piped(pipeline, 3, "latent", sigmas=described["sigmas"][:-1])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    ode = engine.generate([dataclasses.replace(request, sample_type="ode") for request in requests])
    assert (ours - torch.stack([sample.x0 for sample in ode])).abs().max() > 0.1


def test_an_export_holds_the_weights_and_copies_of_the_rest(
    adapter: QwenImageAdapter, student: dict[str, Tensor], tmp_path: Path
) -> None:
    directory = tmp_path / "student"
    adapter.export_pipeline(student, sampling(4, 3.0), directory)
    written = load_file(directory / "transformer/diffusion_pytorch_model.safetensors")
    assert written.keys() == student.keys()
    assert all(torch.equal(value, student[name]) for name, value in written.items())
    kept = [p for p in adapter.checkpoint.rglob("*") if p.is_file() and p.parent.name not in ("scheduler", "qwen")]
    for path in kept:
        copy = directory / path.relative_to(adapter.checkpoint)
        assert not copy.is_symlink()
        if path.name != "diffusion_pytorch_model.safetensors" or path.parent.name == "vae":
            assert copy.read_bytes() == path.read_bytes()
    scheduler = json.loads((directory / "scheduler/scheduler_config.json").read_text())
    assert (scheduler["shift"], scheduler["use_dynamic_shifting"], scheduler["shift_terminal"]) == (3.0, False, None)
    notes = json.loads((directory / "student.json").read_text())
    assert notes["num_inference_steps"] == 4
    assert torch.equal(torch.tensor(notes["sigmas"]), sigma_grid(4, 3.0))
    assert {p.name for p in tmp_path.iterdir()} == {"student"}
    assert all(value.untyped_storage().resizable() for value in student.values())


def test_links_and_pickles_of_a_hub_cache_do_not_reach_the_export(
    adapter: QwenImageAdapter, student: dict[str, Tensor], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(adapter.checkpoint, cache / "blobs")
    for path in (cache / "blobs").rglob("*"):
        if path.is_file():
            link = cache / "snapshot" / path.relative_to(cache / "blobs")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(path, link.parent))
    (cache / "snapshot/vae/old.bin").write_bytes(b"pickle")
    QwenImageAdapter(cache / "snapshot", HEIGHT, WIDTH).export_pipeline(student, sampling(2, 1.0), tmp_path / "student")
    shutil.rmtree(cache)
    assert not any(path.is_symlink() or path.suffix == ".bin" for path in (tmp_path / "student").rglob("*"))
    QwenImagePipeline.from_pretrained(tmp_path / "student")


@pytest.mark.parametrize("fault", ["exists", "missing", "shape", "nan", "stop step"])
def test_an_export_that_cannot_be_right_writes_nothing(
    adapter: QwenImageAdapter, student: dict[str, Tensor], tmp_path: Path, fault: str
) -> None:
    weights = dict(student)
    directory = tmp_path / "student"
    name = "proj_out.bias"
    if fault == "exists":
        directory.mkdir()
    elif fault == "missing":
        del weights[name]
    elif fault == "shape":
        weights[name] = weights[name][:1]
    elif fault == "nan":
        weights[name] = weights[name] * float("nan")
    else:
        weights["time_text_embed.timestep_embedder.stop_step_embedding"] = torch.zeros(4, 64)
    with pytest.raises(ValueError, match=r"exists already|do not fit it"):
        adapter.export_pipeline(weights, sampling(4, 3.0), directory)
    assert [p.name for p in tmp_path.rglob("*")] == (["student"] if fault == "exists" else [])


def test_an_export_that_fails_half_way_leaves_nothing(
    adapter: QwenImageAdapter, student: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        adapter.export_pipeline(student, sampling(4, 3.0), tmp_path / "student")
    assert list(tmp_path.iterdir()) == []


def test_sharded_checkpoints_export_too(student: dict[str, Tensor], tmp_path: Path) -> None:
    checkpoint = build(tmp_path / "sharded")
    (checkpoint / "transformer/diffusion_pytorch_model.safetensors").unlink()
    adapter = QwenImageAdapter(checkpoint, HEIGHT, WIDTH)
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        adapter.export_pipeline(student, sampling(4, 3.0), tmp_path / "student")
    from diffusers import QwenImageTransformer2DModel

    config = json.loads((checkpoint / "transformer/config.json").read_text())
    QwenImageTransformer2DModel.from_config(config).save_pretrained(checkpoint / "transformer", max_shard_size="400KB")
    assert len(list((checkpoint / "transformer").glob("*.safetensors"))) > 1
    adapter.export_pipeline(student, sampling(4, 3.0), tmp_path / "student")
    loaded = QwenImageAdapter(tmp_path / "student", HEIGHT, WIDTH).load_transformer()
    assert all(torch.equal(value, student[name]) for name, value in loaded.state_dict().items())
