"""Every registered family against diffusers' own pipeline, and against what trainers and engines need of an adapter.

Nothing here knows a family: `tests/families.py` has one entry each. What is peculiar to one is in a file of its own.
"""

import copy
import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from miles_dmd2.algo import normal, sigma_grid
from miles_dmd2.models.base import Components, ModelAdapter
from miles_dmd2.models.export import StudentSampling
from miles_dmd2.models.loading import eight_bit
from miles_dmd2.models.offload import held_bytes
from miles_dmd2.models.registry import FAMILIES, adapter_class, build_adapter
from miles_dmd2.training.conditioning import StopStepConditioning
from miles_dmd2.types import Probe
from tests.families import TINY, Tiny
from tests.models import pipelines

SEEDS = (11, 12, 13)
FP32 = 1e-5  # at velocities and latents of size 1 to 5
WEIGHTS = "diffusion_pytorch_model.safetensors"
OWN = tuple(torch.tensor([1.0, 0.9, 0.4, 0.0]).tolist())  # from 1: pipelines do not scale the noise by the first sigma
STUDENT_SDE = StudentSampling(tuple(sigma_grid(3, 3.0).tolist()), 3.0, "sde")


@pytest.fixture(scope="module")
def pipeline(tiny: Tiny, checkpoint: Path) -> Any:
    return tiny.pipeline_class().from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def transformer(adapter: ModelAdapter) -> nn.Module:
    return adapter.load_transformer().requires_grad_(False)


@pytest.fixture(scope="module")
def components(adapter: ModelAdapter) -> Components:
    return adapter.load_components()


@pytest.fixture(scope="module")
def conds(tiny: Tiny, adapter: ModelAdapter, components: Components) -> list[dict[str, Tensor]]:
    return adapter.encode_prompts(components, tiny.prompts)


@pytest.fixture(scope="module")
def together(tiny: Tiny, pipeline: Any) -> pipelines.Run:
    """Three prompts of different lengths in one batch of diffusers' pipeline, with the checkpoint's own scheduler."""
    return pipelines.run(pipeline, tiny, tiny.prompts, SEEDS, 3, tiny.call)


def batch(adapter: ModelAdapter, conds: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = torch.stack([adapter.initial_noise(seed) for seed in range(len(conds))])
    return x, torch.linspace(0.2, 1.0, len(conds)), adapter.collate(conds)


def student_sampling(num_steps: int, shift: float) -> StudentSampling:
    return StudentSampling(tuple(sigma_grid(num_steps, shift).tolist()), shift)


def close(a: Tensor, b: Tensor, tolerance: float = FP32) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@torch.no_grad()
def test_encode_is_what_decode_undoes(tiny: Tiny, adapter: ModelAdapter) -> None:
    """decode(encode(x)) is the VAE's own round trip of x, and its normalisation is the pipeline's (see below)."""
    components = adapter.load_components()
    generator = torch.Generator().manual_seed(0)
    shape = (2, tiny.num_frames, *tiny.size, 3)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    latents = adapter.encode(components, pixels)
    assert latents.shape == (2, *adapter.latent_shape)
    vae: Any = components.vae
    planes = pixels.permute(0, 4, 1, 2, 3) / 127.5 - 1
    flat = tiny.num_frames == 1 and tiny.name != "qwen_image"
    own = vae.decode(vae.encode(planes.squeeze(2) if flat else planes).latent_dist.mode(), return_dict=False)[0]
    shown = (own * 0.5 + 0.5).clamp(0, 1).view(2, 3, *shape[1:4]).permute(0, 2, 3, 4, 1)
    close(adapter.decode(components, latents), shown, 2e-5)
    with pytest.raises(ValueError, match=r"pixels must be uint8 .* got torch.float32"):
        adapter.encode(components, pixels.float())


def test_every_registered_family_is_tested_here() -> None:
    """All that the local engine generates with; test_minimax_h3.py is of the other."""
    embedded = [family.name for family in FAMILIES if adapter_class(family).embedded]
    assert list(dict.fromkeys(tiny.name for tiny in TINY)) == embedded


# -- the pipeline's own forward ----------------------------------------------------------------------------------


def test_noise_is_the_pipelines_bit_for_bit(adapter: ModelAdapter, together: pipelines.Run) -> None:
    for seed, theirs in zip(SEEDS, together.latents[0], strict=True):
        ours = adapter.initial_noise(seed)
        assert ours.shape == adapter.latent_shape
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
    assert adapter.initial_noise(2**32 - 1).shape == adapter.latent_shape


def test_the_network_gets_what_the_pipeline_gives_it(
    tiny: Tiny, adapter: ModelAdapter, transformer: nn.Module, conds: list[dict[str, Tensor]], pipeline: Any
) -> None:
    """Prompts, latents, timesteps and positions: every tensor argument, for each prompt alone, to one rounding."""
    for prompt, seed, cond in zip(tiny.prompts, SEEDS, conds, strict=True):
        theirs = pipelines.run(pipeline, tiny, [prompt], [seed], 2, tiny.call)
        seen: list[dict[str, Any]] = []
        handle = transformer.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(pipelines.arguments(module, args, kwargs)),
            with_kwargs=True,
        )
        for latent, sigma in zip(theirs.latents, theirs.sigmas, strict=True):
            adapter.velocity(transformer, latent, sigma.reshape(1), adapter.collate([cond]))
        handle.remove()
        for ours, wanted in zip(seen, theirs.inputs, strict=True):
            assert ours.keys() == wanted.keys()
            for name, value in ours.items():
                theirs_of_it = wanted[name]
                if name == "timestep" and theirs_of_it.ndim == 2:  # one a token there, all equal; one a sample here
                    value = value.unsqueeze(1).expand_as(theirs_of_it)
                scale = max(1.0, theirs_of_it.abs().max().item())
                close(value.double(), theirs_of_it.double(), 1e-6 * scale)


def test_velocity_is_what_the_pipelines_scheduler_gets(
    adapter: ModelAdapter, transformer: nn.Module, conds: list[dict[str, Tensor]], together: pipelines.Run
) -> None:
    """Sign and scale included, for a padded batch; noise - x0: the scheduler adds (sigma' - sigma) of it."""
    cond = adapter.collate(conds)
    for latent, sigma, theirs in zip(together.latents, together.sigmas, together.velocities, strict=True):
        ours = adapter.velocity(transformer, latent, sigma.expand(3), cond)
        assert theirs.abs().max() > 0.1
        close(ours, theirs)


def test_pixels_are_the_pipelines(
    tiny: Tiny, adapter: ModelAdapter, components: Components, together: pipelines.Run
) -> None:
    media = adapter.decode(components, together.final)
    assert media.shape == (3, tiny.num_frames, *tiny.size, 3)
    assert media.dtype == torch.float32
    assert 0 <= media.min() < media.max() <= 1
    assert len(eight_bit(media).unique()) > 16
    difference = eight_bit(media).numpy().astype(int) - together.pictures.astype(int)
    assert abs(difference).max() <= 1  # another order of sums may round to the next of 256 levels
    assert (difference != 0).mean() < 0.01


# -- conditioning ------------------------------------------------------------------------------------------------


def test_prompts_are_encoded_each_alone_and_once(
    tiny: Tiny, adapter: ModelAdapter, components: Components, conds: list[dict[str, Tensor]]
) -> None:
    again = adapter.encode_prompts(components, [tiny.prompts[2], tiny.prompts[0], tiny.prompts[2]])
    assert again[0] is again[2]
    for found, expected in ((again[0], conds[2]), (again[1], conds[0])):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert all(value.dtype == torch.float32 and value.device.type == "cpu" for value in found.values())
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in found.values())
    x = adapter.initial_noise(0).expand(2, *adapter.latent_shape)
    velocity = adapter.velocity(
        adapter.load_transformer().requires_grad_(False), x, torch.full((2,), 0.5), adapter.collate(conds[:2])
    )
    assert (velocity[0] - velocity[1]).abs().max() > 1e-3


def test_a_batch_of_different_lengths_equals_single_runs(
    adapter: ModelAdapter, transformer: nn.Module, conds: list[dict[str, Tensor]]
) -> None:
    x, sigma, cond = batch(adapter, conds)
    together = adapter.velocity(transformer, x, sigma, cond)
    for row, one in enumerate(conds):
        alone = adapter.velocity(transformer, x[row, None], sigma[row, None], adapter.collate([one]))
        close(together[row], alone[0])


def test_collate_and_velocity_refuse_other_shapes(
    adapter: ModelAdapter, transformer: nn.Module, conds: list[dict[str, Tensor]]
) -> None:
    with pytest.raises(ValueError, match="at least one"):
        adapter.collate([])
    for name, value in conds[0].items():
        for bad in (value[..., :-1], value.unsqueeze(0)):
            with pytest.raises(ValueError, match=f"{name} must be "):
                adapter.collate([conds[0], {**conds[0], name: bad}])
    x, sigma, cond = batch(adapter, conds)
    for other in ((x[:, :-1], sigma), (x[..., :-1], sigma), (x, sigma[:-1]), (x[:-1], sigma[:-1])):
        with pytest.raises(ValueError, match=r"velocity takes x \[batch, "):
            adapter.velocity(transformer, *other, cond)


def test_probe_conditioning_is_fixed_and_fits(adapter: ModelAdapter, transformer: nn.Module, checkpoint: Path) -> None:
    cond = adapter.probe_conditioning()
    again = build_adapter(checkpoint, adapter.height, adapter.width, adapter.num_frames).probe_conditioning()
    assert cond.keys() == again.keys()
    assert all(torch.equal(cond[name], again[name]) for name in cond)
    x, sigma, batched = batch(adapter, [cond])
    assert adapter.velocity(transformer, x, sigma, batched).shape == x.shape


# -- precision ---------------------------------------------------------------------------------------------------


def test_velocity_in_bf16_is_near_and_comes_back_in_fp32(
    tiny: Tiny, adapter: ModelAdapter, transformer: nn.Module, conds: list[dict[str, Tensor]]
) -> None:
    inputs = batch(adapter, conds)
    exact = adapter.velocity(transformer, *inputs)
    rounded = adapter.velocity(adapter.load_transformer(torch.bfloat16), *inputs)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < tiny.bf16 * exact.abs().max()


def test_velocity_follows_fp64_parameters(
    adapter: ModelAdapter, transformer: nn.Module, conds: list[dict[str, Tensor]]
) -> None:
    x, sigma, cond = batch(adapter, conds)
    precise = adapter.load_transformer().to(torch.float64)
    velocity = adapter.velocity(precise, x.double(), sigma.double(), cond)
    assert velocity.dtype == torch.float64
    close(velocity.float(), adapter.velocity(transformer, x, sigma, cond), 3e-5)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # nobody writes into the output
@pytest.mark.usefixtures("ranks")
def test_fsdp_mixed_precision_computes_what_bf16_parameters_do(
    adapter: ModelAdapter, conds: list[dict[str, Tensor]]
) -> None:
    """Shards are fp32, gathered weights bf16, buffers as they were, and FSDP casts no input: the root's hook does."""
    inputs = batch(adapter, conds)
    expected = adapter.load_transformer().requires_grad_(False)
    for parameter in expected.parameters():
        parameter.data = parameter.data.bfloat16()
    module = copy.deepcopy(adapter.load_transformer())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    for unit in (*adapter.shard_units(module), module):
        fully_shard(unit, mp_policy=policy, reshard_after_forward=True)
    velocity = adapter.velocity(module, *inputs)
    assert next(module.parameters()).dtype == velocity.dtype == torch.float32
    assert torch.equal(velocity, adapter.velocity(expected, *inputs))


# -- what trainers need ------------------------------------------------------------------------------------------


def test_loading_gives_frozen_components_and_storages_that_can_sleep(
    transformer: nn.Module, components: Components, adapter: ModelAdapter
) -> None:
    for module in (transformer, *components.modules()):
        tensors = [*module.parameters(), *module.buffers()]
        assert not module.training
        assert all(t.untyped_storage().resizable() and t.untyped_storage().nbytes() == t.nbytes for t in tensors)
    assert held_bytes(transformer) == sum(t.nbytes for t in (*transformer.parameters(), *transformer.buffers()))
    assert not any(p.requires_grad for module in components.modules() for p in module.parameters())
    # What a trainer exports, its parameters, is all that an engine has to load.
    assert set(transformer.state_dict()) == {name for name, _ in transformer.named_parameters()}
    assert all(parameter.requires_grad for parameter in adapter.load_transformer().parameters())


def test_loading_shows_no_progress_bar_and_leaves_the_switches(
    adapter: ModelAdapter, capfd: pytest.CaptureFixture[str]
) -> None:
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    adapter.encode_prompts(adapter.load_components(), ["a circle"])
    adapter.load_transformer()
    assert capfd.readouterr().err == ""
    assert diffusers_logging.is_progress_bar_enabled()
    assert transformers_logging.is_progress_bar_enabled()


def test_time_embedding_is_one_row_per_sample_and_all_that_knows_the_time(
    adapter: ModelAdapter, transformer: nn.Module, conds: list[dict[str, Tensor]]
) -> None:
    module = adapter.time_embedding(transformer)
    x, sigma, cond = batch(adapter, conds)
    plain = adapter.velocity(transformer, x, sigma, cond)
    outputs: list[Tensor] = []
    handle = module.register_forward_hook(lambda module, args, output: outputs.append(output))
    for level in (0.2, 0.7):
        adapter.velocity(transformer, x, torch.full((3,), level), cond)
    handle.remove()
    early, late = outputs
    assert early.shape == late.shape == (3, early.shape[1])
    handle = module.register_forward_hook(lambda module, args, output: early)  # whatever sigma says
    fixed = [adapter.velocity(transformer, x, torch.full((3,), level), cond) for level in (0.2, 0.7)]
    handle.remove()
    assert torch.equal(*fixed)
    shift = torch.tensor([0.0, 1.0, 0.0]).unsqueeze(1)
    handle = module.register_forward_hook(lambda module, args, output: output + shift)
    moved = adapter.velocity(transformer, x, sigma, cond)
    handle.remove()
    assert torch.equal(moved[[0, 2]], plain[[0, 2]])
    assert (moved[1] - plain[1]).abs().max() > 1e-3


def test_a_critic_can_be_told_the_stop_step(adapter: ModelAdapter, conds: list[dict[str, Tensor]]) -> None:
    inputs = batch(adapter, conds)
    critic = adapter.load_transformer().requires_grad_(False)
    plain = adapter.velocity(critic, *inputs)
    told = StopStepConditioning(adapter, critic, 4)
    with told.told(torch.tensor([0, 3, 1])):
        assert torch.equal(adapter.velocity(critic, *inputs), plain)


def test_the_weights_that_an_engine_waits_for_are_those_that_an_actor_sends(
    adapter: ModelAdapter, transformer: nn.Module
) -> None:
    """Read from the checkpoint's headers, without a network (SD3's position table is in the file and is no weight)."""
    sent = {name: tuple(value.shape) for name, value in transformer.named_parameters()}
    assert adapter.weight_shapes() == sent
    assert {name: tuple(value.shape) for name, value in transformer.state_dict().items()} == sent


def test_a_latent_comes_back_from_the_server_s_layout(adapter: ModelAdapter) -> None:
    x = normal(5, adapter.latent_shape)
    try:
        serving = adapter.serving
    except ValueError as error:  # a family that SGLang is not asked to serve
        pytest.skip(str(error))
    assert torch.equal(serving.latent(serving.start(x)), x)
    probe = Probe(x[None], torch.tensor([0.5]), adapter.probe_conditioning(), x[None])
    assert torch.equal(serving.probe(probe)["x"], serving.start(x))


def test_shard_units_are_disjoint_and_hold_the_blocks(
    tiny: Tiny, adapter: ModelAdapter, transformer: nn.Module
) -> None:
    units = adapter.shard_units(transformer)
    named = {id(parameter) for unit in units for parameter in unit.parameters()}
    assert len(named) == sum(1 for unit in units for _ in unit.parameters())
    assert not any(a is b for i, unit in enumerate(units) for a in unit.modules() for b in units[i + 1 :])
    blocks = {type(unit) for unit in units}
    everywhere = [module for module in transformer.modules() if type(module) in blocks]
    assert {id(module) for module in everywhere} == {id(unit) for unit in units}
    single = reconfigured(adapter, transformer, tiny.one_block)
    assert len(adapter.shard_units(single)) < len(units)


def reconfigured(adapter: ModelAdapter, transformer: nn.Module, change: Any) -> nn.Module:
    config = json.loads((adapter.checkpoint / "transformer/config.json").read_text())
    return type(transformer).from_config(config | dict(change))


def useless_gradients(adapter: ModelAdapter, module: nn.Module, conds: list[dict[str, Tensor]]) -> dict[str, str]:
    """Parameters whose gradient of a generic loss is None or exactly zero."""
    inputs = batch(adapter, conds)
    module.zero_grad(set_to_none=True)
    (adapter.velocity(module, *inputs) - normal(3, inputs[0].shape)).square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {
        name: "none" if gradient is None else "zero"
        for name, gradient in gradients.items()
        if gradient is None or not gradient.any()
    }


def test_idle_parameters_are_exactly_those_without_a_gradient(
    tiny: Tiny, adapter: ModelAdapter, transformer: nn.Module, conds: list[dict[str, Tensor]]
) -> None:
    """A loss on the velocity is all that student and critic have, and none of these reaches the velocity."""
    for change in ({}, tiny.one_block, *tiny.variants):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            module = reconfigured(adapter, transformer, change)
        idle = adapter.idle_parameters(module)
        assert idle == useless_gradients(adapter, module, conds)
        assert idle == useless_gradients(adapter, module, [conds[0], conds[0]])
        inputs = batch(adapter, conds)
        with torch.no_grad():
            before = adapter.velocity(module, *inputs)
            for name in idle:
                module.get_parameter(name).normal_()
            assert torch.equal(before, adapter.velocity(module, *inputs))


# -- the student as a pipeline -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_steps", "shift"), [(1, 1.0), (2, 5.0), (4, 3.0), (8, 1.7)])
def test_an_exported_student_is_what_plain_diffusers_samples(
    tiny: Tiny,
    adapter: ModelAdapter,
    transformer: nn.Module,
    components: Components,
    tmp_path: Path,
    num_steps: int,
    shift: float,
) -> None:
    """Latent for latent and picture for picture, called with what student.json says."""
    weights = {n: p + 0.02 * normal(i, p.shape) for i, (n, p) in enumerate(transformer.named_parameters())}
    directory = tmp_path / "student"
    adapter.export_pipeline(weights, student_sampling(num_steps, shift), directory)
    written = load_file(directory / "transformer" / WEIGHTS)
    assert all(torch.equal(value, weights[name]) for name, value in written.items() if name in weights)
    assert weights.keys() <= written.keys()
    assert written.keys() == load_file(adapter.checkpoint / "transformer" / WEIGHTS).keys()

    notes = json.loads((directory / "student.json").read_text())
    assert torch.equal(torch.tensor(notes.pop("sigmas")), sigma_grid(num_steps, shift))
    assert (notes.pop("num_inference_steps"), notes.pop("shift"), notes.pop("sample_type")) == (num_steps, shift, "ode")
    theirs = pipelines.run(
        tiny.pipeline_class().from_pretrained(directory), tiny, tiny.prompts, SEEDS, num_steps, notes
    )
    assert len(theirs.inputs) == num_steps
    close(theirs.sigmas, sigma_grid(num_steps, shift)[:-1], 2e-7)

    exported = build_adapter(directory, adapter.height, adapter.width, adapter.num_frames)
    ours = pipelines.sample(exported, components, tiny.prompts, SEEDS, sigma_grid(num_steps, shift))
    assert ours.std() > 0.1
    close(ours, theirs.final, 2e-5)
    difference = eight_bit(exported.decode(components, ours)).numpy().astype(int) - theirs.pictures.astype(int)
    assert abs(difference).max() <= 1
    assert (difference != 0).mean() < 0.01
    with pytest.raises(ValueError, match="exists already"):
        adapter.export_pipeline(weights, student_sampling(num_steps, shift), directory)


@pytest.mark.parametrize("sampling", [StudentSampling(OWN, None, "sde"), STUDENT_SDE], ids=["own grid", "shift"])
def test_an_exported_sde_student_is_what_plain_diffusers_samples(
    tiny: Tiny,
    adapter: ModelAdapter,
    transformer: nn.Module,
    components: Components,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sampling: StudentSampling,
) -> None:
    """The noise of its hops is that of the samples' own generators, which diffusers would draw globally.

    A grid of its own goes into the pipeline's call, or, where that takes no sigmas, into its scheduler.
    """
    adapter.export_pipeline(dict(transformer.named_parameters()), sampling, tmp_path / "student")
    notes = json.loads((tmp_path / "student" / "student.json").read_text())
    assert (notes.pop("sample_type"), notes.pop("shift")) == ("sde", sampling.shift)
    grid, num_steps = notes.pop("sigmas"), notes.pop("num_inference_steps")
    assert grid == list(sampling.sigmas)
    hop_noise = torch.stack([adapter.hop_noise(seed, num_steps - 1) for seed in SEEDS], dim=1)
    drawn = iter([*hop_noise, torch.zeros_like(hop_noise[0])])  # the last one is multiplied by 0
    monkeypatch.setattr(
        "diffusers.schedulers.scheduling_flow_match_euler_discrete.randn_tensor",
        lambda shape, **_: next(drawn).reshape(shape),
    )
    pipeline = tiny.pipeline_class().from_pretrained(tmp_path / "student")
    takes_sigmas = "sigmas" in inspect.signature(pipeline.__call__).parameters
    if sampling.shift is None and takes_sigmas:
        notes["sigmas"] = grid[:-1]
    elif sampling.shift is None:
        set_timesteps = pipeline.scheduler.set_timesteps
        pipeline.scheduler.set_timesteps = lambda _, device: set_timesteps(sigmas=grid[:-1], device=device)
    assert ("takes no sigmas" in caplog.text) == (sampling.shift is None and not takes_sigmas)
    theirs = pipelines.run(pipeline, tiny, tiny.prompts, SEEDS, num_steps, notes)
    close(theirs.sigmas, torch.tensor(grid[:-1]), 2e-7)

    ours = pipelines.sample(adapter, components, tiny.prompts, SEEDS, torch.tensor(grid), hop_noise)
    close(ours, theirs.final, 2e-5)
    ode = pipelines.sample(adapter, components, tiny.prompts, SEEDS, torch.tensor(grid))
    assert (ours - ode).abs().max() > 0.1


def test_an_export_that_cannot_be_right_writes_nothing(
    adapter: ModelAdapter, transformer: nn.Module, tmp_path: Path
) -> None:
    whole = dict(transformer.named_parameters())
    name = min(whole)
    for weights in (
        {n: p for n, p in whole.items() if n != name},
        {**whole, name: whole[name].unsqueeze(0)},
        {**whole, name: whole[name] * float("nan")},
        {**whole, "stop_step_embedding": torch.zeros(4, 64)},
    ):
        with pytest.raises(ValueError, match="do not fit it"):
            adapter.export_pipeline(weights, student_sampling(4, 3.0), tmp_path / "student")
    assert list(tmp_path.iterdir()) == []


# -- bad checkpoints and sizes -----------------------------------------------------------------------------------


def changed(checkpoint: Path, target: Path) -> Path:
    """A copy whose files may be changed."""
    return Path(shutil.copytree(checkpoint, target))


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_weights_that_do_not_fit_their_config_are_refused(
    tiny: Tiny, checkpoint: Path, tmp_path: Path, change: str
) -> None:
    """diffusers itself only warns, and leaves the missing ones random."""
    copy = changed(checkpoint, tmp_path / "changed")
    weights = load_file(copy / "transformer" / WEIGHTS)
    name = next(name for name in weights if "blocks" in name or "layers" in name)
    weights = {n: v for n, v in weights.items() if n != name} if change == "missing" else weights
    save_file(weights | ({"extra": torch.zeros(1)} if change == "unexpected" else {}), copy / "transformer" / WEIGHTS)
    wanted = re.escape(name if change == "missing" else "extra")
    with pytest.raises(ValueError, match=f"transformer weights do not fit its config.*{change}_keys.*{wanted}"):
        tiny.adapter(copy).load_transformer()


def test_pickled_weights_are_never_read(tiny: Tiny, checkpoint: Path, tmp_path: Path) -> None:
    copy = changed(checkpoint, tmp_path / "pickled")
    file = copy / "transformer" / WEIGHTS
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    with pytest.raises(OSError, match="safetensors"):
        tiny.adapter(copy).load_transformer()


def test_default_canvas_is_the_pipelines(tiny: Tiny, checkpoint: Path) -> None:
    found = build_adapter(checkpoint)
    assert (found.height, found.width, found.num_frames) == tiny.default
    _, width, _ = tiny.default
    assert build_adapter(checkpoint, height=tiny.multiple).width == width


@pytest.mark.parametrize(("value", "nearest"), [(33, 32), (0, "multiple"), (-16, "multiple"), (1000, 992)])
@pytest.mark.parametrize("side", ["height", "width"])
def test_a_size_that_the_family_cannot_make_names_the_nearest(
    tiny: Tiny, checkpoint: Path, side: str, value: int, nearest: int | str
) -> None:
    multiple = tiny.multiple
    wanted = multiple if nearest == "multiple" else round(value / multiple) * multiple
    sizes = dict(zip(("height", "width"), tiny.size, strict=True)) | {side: value}
    with pytest.raises(ValueError, match=rf"--diffusion-{side} {value} must be .* {multiple}; the nearest is {wanted}"):
        build_adapter(checkpoint, **sizes, num_frames=tiny.num_frames)


def test_frames_that_the_family_cannot_make(tiny: Tiny, checkpoint: Path) -> None:
    message = "makes single pictures" if tiny.num_frames == 1 else "the nearest is 5"
    for frames in (0, 5) if tiny.num_frames == 1 else (4, 6):
        with pytest.raises(ValueError, match=rf"--diffusion-num-frames {frames}.*{message}"):
            build_adapter(checkpoint, *tiny.size, frames)


@pytest.mark.parametrize("name", ["model_index.json", "transformer/config.json", "vae/config.json"])
@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_broken_config_is_one_line(tiny: Tiny, checkpoint: Path, tmp_path: Path, name: str, text: str | None) -> None:
    for path in checkpoint.rglob("*.json"):
        (tmp_path / path.relative_to(checkpoint)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(checkpoint))
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}") as caught:
        tiny.adapter(tmp_path)
    assert str(caught.value).startswith("--hf-checkpoint")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["in_channels", "out_channels"])
def test_a_network_that_does_not_fit_the_vae_is_refused(tiny: Tiny, checkpoint: Path, tmp_path: Path, key: str) -> None:
    copy = changed(checkpoint, tmp_path / "changed")
    file = copy / "transformer/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: 12}))
    with pytest.raises(ValueError, match=r"^--hf-checkpoint.*12"):
        tiny.adapter(copy)


def test_pictures_are_not_all_alike(together: pipelines.Run) -> None:
    """The tiny pipelines can tell right from wrong: three seeds and prompts, three pictures."""
    first, second, third = together.pictures.astype(np.float64)
    assert min(np.abs(first - second).mean(), np.abs(second - third).mean()) > 1
