"""MiniMax H3's adapter on a tiny checkpoint: against diffusers' transformer, called as its own pipeline calls it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from safetensors.torch import load_file
from torch import Tensor, nn

from miles_dmd2.algo import normal, sigma_grid, x0_from_velocity
from miles_dmd2.models.export import StudentSampling
from miles_dmd2.models.minimax_h3 import MiniMaxH3Adapter
from miles_dmd2.models.minimax_h3_layout import Canvas, join, split
from miles_dmd2.models.registry import build_adapter
from tests.tiny_h3 import TEXT_DIM, TRANSFORMER, h3_checkpoint, tiny_h3, transformer

__all__ = ["h3_checkpoint"]
CANVAS = Canvas(64, 32, 5)
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def adapter(h3_checkpoint: Path) -> MiniMaxH3Adapter:
    return MiniMaxH3Adapter(h3_checkpoint, CANVAS.height, CANVAS.width, CANVAS.frames)


@pytest.fixture(scope="module")
def network(adapter: MiniMaxH3Adapter) -> nn.Module:
    return adapter.load_transformer()


@pytest.fixture(scope="module")
def built() -> MiniMaxH3Transformer3DModel:
    """The module that the checkpoint was written from."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformer().eval()


def conds(*lengths: int) -> list[dict[str, Tensor]]:
    return [{"encoder_hidden_states": normal(i, (rows, TEXT_DIM))} for i, rows in enumerate(lengths)]


def latents(adapter: MiniMaxH3Adapter, count: int) -> Tensor:
    return torch.stack([normal(100 + i, adapter.latent_shape) for i in range(count)])


def expected(model: nn.Module, x: Tensor, sigma_video: float, sigma_audio: float, states: Tensor) -> Tensor:
    """noise - x0 of one sample, from the layout that diffusers' own step prepares."""
    video, audio = split(x, CANVAS)
    tags = torch.ones(len(states), dtype=torch.long)
    positions, tags, video_rows, audio_rows, text_rows, *_ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        tags, *CANVAS.latent_grid, CANVAS.audio_latents, (1, 2, 2), 2, 2, 0
    )
    clocks = torch.zeros(len(tags), dtype=torch.long)
    clocks[audio_rows] = 1
    with torch.no_grad():
        out = model(
            hidden_states=video[None],
            audio_hidden_states=audio[None],
            encoder_hidden_states=states[None],
            timestep=torch.tensor([1 - sigma_video, 1 - sigma_audio]),
            timestep_indices=clocks,
            token_tags=tags,
            position_ids=positions,
            video_indices=video_rows,
            audio_indices=audio_rows,
            text_indices=text_rows,
        )
    return -join(out.sample, out.audio_sample)[0]


@torch.no_grad()
def test_samples_of_any_length_and_level_get_what_diffusers_computes_for_each(
    adapter: MiniMaxH3Adapter, network: nn.Module, built: nn.Module
) -> None:
    records, x = conds(4, 1, 9), latents(adapter, 3)
    sigma = torch.tensor([1.0, 0.8, 0.3])
    velocity = adapter.velocity(network, x, sigma, adapter.collate(records))
    for i, level in enumerate(sigma.tolist()):
        sound = float(torch.tensor(0.25 * level / (0.25 * level + 1 - level)))  # a quarter of the odds
        alone = expected(built, x[i], level, sound, records[i]["encoder_hidden_states"])
        torch.testing.assert_close(velocity[i], alone, rtol=0, atol=2e-6)


@torch.no_grad()
def test_a_level_of_its_own_for_the_sound(adapter: MiniMaxH3Adapter, network: nn.Module, built: nn.Module) -> None:
    records, x = conds(3), latents(adapter, 1)
    sigma = adapter.spread([torch.tensor([0.6]), torch.tensor([0.9])])
    assert sigma.shape == x.shape
    velocity = adapter.velocity(network, x, sigma, adapter.collate(records))
    alone = expected(built, x[0], *sigma[0, [0, -1]].tolist(), records[0]["encoder_hidden_states"])
    torch.testing.assert_close(velocity[0], alone, rtol=0, atol=2e-6)
    on_curve = adapter.velocity(network, x, torch.tensor([0.6]), adapter.collate(records))
    assert (velocity - on_curve).abs().max() > 0.01


@torch.no_grad()
def test_diffusers_euler_step_is_ours(adapter: MiniMaxH3Adapter, network: nn.Module) -> None:
    """x_next = r x + (1 - r) (x + sigma v), v = x0 - noise: the release's step, for both streams at their levels."""
    grid, records, x = sigma_grid(4, 12.0), conds(5), latents(adapter, 1)
    here, there = (adapter.spread(adapter.part_sigmas(grid[i : i + 1])) for i in (2, 3))
    velocity = adapter.velocity(network, x, grid[2:3], adapter.collate(records))
    x0 = x0_from_velocity(x, velocity, here)
    torch.testing.assert_close(x + (there - here) * velocity, there / here * x + (1 - there / here) * x0)
    torch.testing.assert_close(here[0, -1], torch.tensor(0.75))  # the sound's shift 3 at u = 1/2
    torch.testing.assert_close(here[0, 0], torch.tensor(12 / 13))


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_both_layouts_load_to_the_same_weights(layout: str, tmp_path: Path, built: nn.Module) -> None:
    root = tiny_h3(tmp_path, layout=layout)
    loaded = build_adapter(root, 64, 32, 5).load_transformer()
    state, wanted = loaded.state_dict(), built.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert torch.equal(loaded.rope.inv_freq, built.rope.inv_freq)
    assert not any(value.is_meta for value in (*loaded.parameters(), *loaded.buffers()))


def test_bf16_keeps_in_fp32_what_diffusers_keeps(adapter: MiniMaxH3Adapter, tmp_path: Path) -> None:
    tiny_h3(tmp_path, layout="diffusers")
    own = MiniMaxH3Transformer3DModel.from_pretrained(
        tmp_path / "MiniMax-H3" / "FL2VA" / "transformer", dtype=torch.bfloat16
    )
    loaded = adapter.load_transformer(torch.bfloat16)
    found = {name: value.dtype for name, value in loaded.named_parameters()}
    assert found == {name: value.dtype for name, value in own.named_parameters()}
    assert set(found.values()) == {torch.bfloat16, torch.float32}
    units = {id(p) for unit in adapter.fp32_units(loaded) for p in unit.parameters()}
    assert units == {id(p) for p in loaded.parameters() if p.dtype == torch.float32}


def test_the_gradient_reaches_all_but_the_silent_head(adapter: MiniMaxH3Adapter) -> None:
    network, x = adapter.load_transformer(), latents(adapter, 2)
    velocity = adapter.velocity(network, x, torch.tensor([0.9, 0.5]), adapter.collate(conds(4, 6)))
    velocity[:, : CANVAS.video_size].square().mean().backward()
    zero = {name for name, value in network.named_parameters() if value.grad.count_nonzero() == 0}
    assert zero == set(adapter.head_of("audio"))


@pytest.mark.parametrize("layout", ["native", "diffusers"])
@pytest.mark.parametrize(
    ("sampling", "release"),
    [
        (
            StudentSampling(tuple(sigma_grid(4, 12.0).tolist()), 12.0),
            {"dmd_denoising_steps": [1000, 750, 500, 250], "sigma_shift_scales": {"video": 12.0, "audio": 3.0}},
        ),
        (
            StudentSampling(tuple(sigma_grid(3, 6.0).tolist()), 6.0),
            {"sigma_shift_scales": {"video": 6.0, "audio": 1.5}},
        ),
        (StudentSampling((1.0, 0.9, 0.0), None), {"sigma_shift_scales": {"video": 12.0, "audio": 3.0}}),
    ],
)
def test_an_export_is_a_release_of_the_student(
    layout: str, sampling: StudentSampling, release: dict[str, object], tmp_path: Path
) -> None:
    root = tiny_h3(tmp_path, layout=layout)
    adapter = build_adapter(root, 64, 32, 5)
    weights = {name: value + 1 for name, value in adapter.load_transformer().state_dict().items()}
    adapter.export_pipeline(weights, sampling, tmp_path / "student")
    again = build_adapter(tmp_path / "student", 64, 32, 5)
    assert all(torch.equal(value, weights[name]) for name, value in again.load_transformer().state_dict().items())
    index = json.loads((tmp_path / "student" / "model_index.json").read_text())
    own = json.loads((root / "model_index.json").read_text())
    assert index.pop("_minimax_h3") == {**own.pop("_minimax_h3"), **release}
    assert index == own
    assert load_file(tmp_path / "student" / WEIGHTS).keys() == load_file(root / WEIGHTS).keys()
    student = json.loads((tmp_path / "student" / "student.json").read_text())
    assert student["sigmas"] == list(sampling.sigmas)
    assert student["target"] == CANVAS.request_target()


def changed(root: Path, file: str, change: dict[str, object]) -> None:
    content = json.loads((root / file).read_text())
    content.update(change)
    (root / file).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


RELEASED = {"schema_version": 1, "tasks": ["t2va"], "sigma_shift_scales": {"video": 12, "audio": 3}}


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model_index.json", {"_minimax_h3": None}, "has no _minimax_h3, the release's metadata"),
        ("model_index.json", {"_minimax_h3": {**RELEASED, "tasks": ["ref2va"]}}, "give the FL2VA partition"),
        ("model_index.json", {"_minimax_h3": {**RELEASED, "pdd_fused_heads": "x"}}, "without fused heads"),
        (
            "model_index.json",
            {"_minimax_h3": {**RELEASED, "sigma_shift_scales": {"video": 12}}},
            "needs sigma_shift_scales of video and audio above 0",
        ),
        ("transformer/config.json", {"_class_name": "Other"}, "_class_name 'Other'; supported are MiniMaxH3DiTModel"),
        ("transformer/config.json", {"latents_dim": 16}, "in_channels = 16; only 24 is supported"),
    ],
)
def test_other_directories_are_refused(
    h3_checkpoint: Path, tmp_path: Path, file: str, change: dict[str, object], message: str
) -> None:
    root = shutil.copytree(h3_checkpoint, tmp_path / "copy")
    changed(root, file, change)
    with pytest.raises(ValueError, match=message):
        build_adapter(root, 64, 32, 5)


def test_weights_that_do_not_fit_are_refused(h3_checkpoint: Path, tmp_path: Path) -> None:
    root = shutil.copytree(h3_checkpoint, tmp_path / "copy")
    changed(root, "transformer/config.json", {"ffn_hidden_size": 32})
    with pytest.raises(ValueError, match=r"transformer weights do not fit its config: .* wrong shapes"):
        build_adapter(root, 64, 32, 5).load_transformer()


def test_defaults_are_the_release(h3_checkpoint: Path) -> None:
    adapter = build_adapter(h3_checkpoint)
    assert isinstance(adapter, MiniMaxH3Adapter)
    assert (adapter.height, adapter.width, adapter.num_frames) == (768, 1344, 124)
    assert adapter.notes == ("clips of 124 frames, 5.17 s, 1344 x 768, with sound",)
    assert adapter.audio_ratio == 0.25
    assert [part.size for part in adapter.parts] == [37 * 24 * 42 * 96, 2 * 207 * 32]
    short = build_adapter(h3_checkpoint, 64, 32, seconds=0.1)
    assert short.num_frames == 5
    assert short.notes == ("clips of 5 frames, 0.21 s, 32 x 64, with sound: the release is made for 4 to 15 s",)


def test_the_tiny_one_has_every_argument_of_the_real_one() -> None:
    assert TRANSFORMER.keys() == MiniMaxH3Transformer3DModel(**TRANSFORMER).config.keys() - {
        *("rope_theta", "norm_eps", "qk_norm_eps", "final_norm_eps"),
        *(key for key in MiniMaxH3Transformer3DModel(**TRANSFORMER).config if key.startswith("_")),
    }
