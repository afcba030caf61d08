"""The MiniMax H3 recipe: every figure of its source, both references, and the memory that it needs, offline."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import nn

from miles_dmd2.config import ConfigError, ParsedRun, build_plan, parse
from miles_dmd2.config.memory import GB, Limits, MemoryPlan, check_memory
from miles_dmd2.config.options import OPTIONS
from miles_dmd2.models.memory import plan_memory
from recipes import dmd2_h3_t2va_16gpu_multinode as recipe
from tests import h3_headers

WHERE = ["--checkpoint", "H3", "--sglang-python", "engine/python", "--prompts", "prompts", "--shared", "/shared/h3"]
H200, TWO_TIB = 149 * GB, 2199 * GB


def resolved(*more: str) -> ParsedRun:
    return parse(recipe.command([*WHERE, *more]))


def test_every_figure_of_the_source() -> None:
    parsed = resolved()
    config, plan = parsed.config, build_plan(parsed.config, parsed.trainers)
    critic, actor = parsed.trainers
    assert (critic.role, actor.role) == ("critic", "actor")
    for trainer in (critic, actor):
        assert (trainer.lr, trainer.lr_schedule, trainer.lr_warmup_updates) == (2e-6, "constant", 0)
        assert (trainer.adam_beta1, trainer.adam_beta2, trainer.weight_decay, trainer.clip_grad) == (
            0.9,
            0.999,
            0.01,
            1.0,
        )
        assert (trainer.window_size, trainer.num_ranks, trainer.micro_batch_size) == (64, 16, 1)
        assert trainer.checkpoint == config.model.hf_checkpoint == Path("H3")
    assert (critic.num_steps_per_rollout, actor.num_steps_per_rollout) == (5, 1)
    assert (critic.total_updates, actor.total_updates) == (1000, 200)
    assert (config.rollout.num_rollout, config.rollout.global_batch_size) == (200, 320)
    assert config.model.forward_dtype == "bf16"
    assert config.model.gradient_checkpointing
    assert not config.keeps_ema

    assert plan.student_steps == 4
    shift_12 = [12 * u / (1 + 11 * u) for u in (1.0, 0.75, 0.5, 0.25)]
    assert plan.sigmas == pytest.approx([*shift_12, 0.0], abs=1e-12)
    rungs = [12 * t / (1000 + 11 * t) for t in (999, 749, 500, 250)]  # FastH3's own
    assert max(abs(ours - theirs) for ours, theirs in zip(plan.sigmas, rungs, strict=False)) < 1.41e-4
    assert (plan.stop_law, plan.sample_type, plan.student_input) == ("per_sample", "ode", "backward_simulation")
    algorithm = config.algorithm
    assert algorithm.dmd2_teacher_guidance_scale == config.rollout.diffusion_guidance_scale == 1.0
    assert (algorithm.dmd2_critic_loss_space, algorithm.dmd2_score_sigma_range) == ("x0", (0.001, 0.999))
    assert config.score_shift == 5.0
    assert "--fsdp-flow-shift=visual=5.0" in recipe.command(WHERE)
    assert plan.forwards_per_update.cost == 31.5
    assert config.rollout.rm_type == "none"

    assert config.evaluation.diffusion_fps == 24
    assert config.evaluation.save_eval_media_dir == Path("/shared/h3/eval_media/run")
    assert config.rollout.debug_rollout_only is None
    assert (plan.evals, plan.eval_every) == (21, 10)  # at rollout 0, every tenth, after the last
    assert config.evaluation.eval_prompt_data == Path("prompts/eval_media.jsonl")
    assert config.rollout.prompt_data == Path("prompts/train.jsonl")


def test_our_own_choices() -> None:
    config = resolved().config
    assert (config.model.diffusion_height, config.model.diffusion_width) == (512, 896)
    assert config.model.diffusion_duration == 4
    assert (config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt) == (320, 1)
    source = Path(recipe.__file__).read_text()
    assert source.count("our choice") + source.count("Our choice") >= 4


def test_where_it_runs() -> None:
    config = resolved().config
    cluster = config.cluster
    assert (cluster.device, cluster.actor_num_nodes, cluster.actor_num_gpus_per_node) == ("cuda", 2, 8)
    assert (cluster.ray_address, config.num_engines, config.rollout.rollout_engine) == ("auto", 16, "sglang")
    one_node = resolved("--nodes", "1", "--eval-interval", "20").config
    assert (one_node.num_ranks, one_node.num_engines, one_node.evaluation.eval_interval) == (8, 4, 20)
    assert resolved("--ray-address", "10.0.0.1:6379").config.cluster.ray_address == "10.0.0.1:6379"


@pytest.mark.parametrize(("name", "steps"), [("teacher", 50), ("fasth3", 4)])
def test_references(name: str, steps: int) -> None:
    """The same prompts, seeds, canvas and grid shift as the run's evals; another number of steps, another directory."""
    swap = ("--fasth3-transformer", "fast/transformer") if name == "fasth3" else ()
    parsed = resolved("--reference", name, *swap)
    run = resolved().config
    config = parsed.config
    assert config.num_steps == steps
    grid = build_plan(config, parsed.trainers).sigmas
    assert grid == pytest.approx([12 * (1 - i / steps) / (1 + 11 * (1 - i / steps)) for i in range(steps + 1)])
    assert (config.canvas, config.model.hf_checkpoint) == (run.canvas, run.model.hf_checkpoint)
    assert config.evaluation.eval_prompt_data == run.evaluation.eval_prompt_data
    assert config.evaluation.eval_samples_per_prompt == run.evaluation.eval_samples_per_prompt
    assert config.rollout_seed == run.rollout_seed
    assert config.rollout.diffusion_guidance_scale == 1.0
    assert config.rollout.debug_rollout_only == "eval"
    assert config.evaluation.save_eval_media_dir == Path("/shared/h3/eval_media") / name
    assert config.evaluation.diffusion_fps == run.evaluation.diffusion_fps
    assert config.rollout.reference_transformer == (Path("fast/transformer") if name == "fasth3" else None)
    assert config.run.run_dir == Path("/shared/h3") / name


def test_the_tiny_variant_is_the_same_recipe() -> None:
    """Other sizes alone: every option that is no size, place or machine is the large one's."""
    large, tiny = resolved(), resolved("--tiny")
    sizes = {"diffusion_height", "diffusion_width", "num_rollout", "global_batch_size", "rollout_batch_size"}
    machine = {"device", "actor_num_nodes", "actor_num_gpus_per_node", "num_gpus_per_node", "rollout_num_engines"}
    machine |= {"ray_address", "gpu_memory_gb", "host_memory_gb", "load_ranks_at_once", "start_timeout"}
    machine |= {"phase_timeout", "engine_request_timeout", "sglang_weight_directory", "save_interval", "keep_last"}
    different = {
        name
        for name, option in OPTIONS.items()
        if getattr(getattr(large.config, option.section), name) != getattr(getattr(tiny.config, option.section), name)
    }
    assert different <= sizes | machine | {"diffusion_duration"}
    assert (tiny.config.cluster.device, tiny.config.cluster.ray_address) == ("cpu", None)
    assert resolved("--tiny", "--ray-address", "auto").config.cluster.ray_address == "auto"
    assert {trainer.num_ranks for trainer in tiny.trainers} == {2}
    assert build_plan(tiny.config, tiny.trainers).window_size == 4


def test_options_of_the_user_win() -> None:
    config = resolved("--lr", "1e-6", "--dmd2-score-sigma-range", "0.02", "0.98", "--rollout-num-engines=4").config
    assert (config.trainer.lr, config.algorithm.dmd2_score_sigma_range, config.num_engines) == (1e-6, (0.02, 0.98), 4)
    other = resolved(
        "--no-gradient-checkpointing", "--diffusion-num-frames", "124", "--diffusion-sigmas", "1,0.5"
    ).config
    assert not other.model.gradient_checkpointing
    assert (other.model.diffusion_num_frames, other.model.diffusion_duration) == (124, None)
    assert other.explicit_sigmas == (1.0, 0.5, 0.0)


@pytest.mark.parametrize("more", [["--reference", "fasth3"], ["--fasth3-transformer", "x"], ["--reference", "else"]])
def test_a_reference_that_cannot_be_is_refused(more: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        recipe.command([*WHERE, *more])
    assert caught.value.code == 2
    assert "--reference" in capsys.readouterr().err


def test_it_is_a_script() -> None:
    done = subprocess.run([sys.executable, recipe.__file__, "--help"], capture_output=True, text=True, check=True)
    assert "--fasth3-transformer" in done.stdout


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return h3_headers.build(tmp_path_factory.mktemp("h3") / "MiniMax-H3")


def planned(shapes: Path, *more: str) -> MemoryPlan:
    parsed = parse(recipe.command([*WHERE, "--hf-checkpoint", str(shapes), *more]))
    return plan_memory(parsed.config, parsed.trainers)


def test_memory_at_full_size(shapes: Path) -> None:
    """33.1 billion parameters over 16 ranks: 8.28 GB of each kind of fp32 state on a GPU."""
    first, second = planned(shapes).nodes
    phases = {phase.name: phase for phase in first.phases}
    shard = h3_headers.DIT_VALUES / 16 * 4
    critic = phases["critic"].device
    assert critic["master weights"] == critic["teacher"] == critic["gradients"] == pytest.approx(shard, rel=1e-3)
    assert critic["moments"] == pytest.approx(2 * shard, rel=1e-3)
    assert critic["gathered gradients"] == 645_571_840 * (2 + 4)
    assert sum(critic.values()) < 50 * GB
    engine = phases["generate"].device
    assert engine["engine transformer"] == h3_headers.DIT_VALUES * 2
    layer = 5120 * (2 * 64 * 128 + 2 * 8 * 128) + 3 * 5120 * 25600 + 2 * 5120 + 2 * 128  # attention, MLP, four norms
    assert engine["engine text_encoder"] - 2 * (50 * layer + 151936 * 5120) == pytest.approx(
        1.2 * GB, rel=0.1
    )  # vision
    assert 48 * GB < engine["engine text_encoder"] < 52 * GB
    assert engine["engine video_vae"] == 4 * 2_603_868_984
    assert engine["engine audio_vae"] == pytest.approx(4 * 151_321_489, rel=1e-4)  # its file has filters beside weights
    assert 120 * GB < sum(engine.values()) < 130 * GB
    copies = phases["actor"].host["host copy of engines"]
    assert copies == 8 * sum(engine.values())
    assert second.phases[-1].total("host") < first.phases[-1].total("host") < 1900 * GB
    assert phases["start of critic"].host["loading"] == 2 * h3_headers.DIT_VALUES * 4


def test_adapters_leave_one_base_a_group(shapes: Path) -> None:
    """At rank 64 over the 33.1 billion parameters: what critic and actor hold falls by two thirds and more."""
    first, _ = planned(shapes, "--lora-rank", "64").nodes
    phases = {phase.name: phase for phase in first.phases}
    critic, actor = phases["critic"].device, phases["actor"].device
    shard = h3_headers.DIT_VALUES / 16 * 4
    linear = [m for block in h3_blocks() for m in block.modules() if isinstance(m, nn.Linear)]
    adapter = sum(64 * (m.in_features + m.out_features) for m in linear) / 16 * 4
    for parts in (critic, actor):
        assert parts["frozen base"] == pytest.approx(shard, rel=1e-3)
        assert parts["master weights"] == parts["gradients"] == pytest.approx(adapter, rel=1e-2)
        assert parts["moments"] == 2 * parts["master weights"]
        assert "teacher" not in parts
    (whole, _) = planned(shapes).nodes
    full = {phase.name: sum(phase.device.values()) for phase in whole.phases}
    assert sum(critic.values()) < full["critic"] / 3
    assert phases["start of critic"].host["loading"] == h3_headers.DIT_VALUES * 4


def h3_blocks() -> list[nn.Module]:
    transformer = h3_headers.modules()["transformer"]
    return [transformer.get_submodule(name) for name in ("transformer_blocks", "token_refiner.refiner_blocks")]


def test_a_reference_needs_engines_alone(shapes: Path) -> None:
    plan = planned(shapes, "--reference", "teacher")
    for node in plan.nodes:
        assert [phase.name for phase in node.phases] == ["generate"]
        assert list(node.runs) == ["engines"]


def test_it_fits_where_it_is_meant_to_run_and_nowhere_smaller(shapes: Path) -> None:
    check_memory(planned(shapes), Limits(H200, TWO_TIB))
    with pytest.raises(ConfigError, match=r"--gpu-memory-gb 80: a GPU of node \d needs 12\d GB in the phase generate"):
        check_memory(planned(shapes), Limits(80 * GB, TWO_TIB))
    with pytest.raises(ConfigError, match=r"--host-memory-gb 1500: .*use fewer engines"):
        check_memory(planned(shapes), Limits(H200, 1500 * GB))
    check_memory(planned(shapes, "--rollout-num-engines", "3"), Limits(H200, 1500 * GB))
    with pytest.raises(ConfigError, match=r"phase start of critic.*--load-ranks-at-once"):
        check_memory(planned(shapes, "--load-ranks-at-once", "8"), Limits(H200, TWO_TIB))
    check_memory(planned(shapes, "--nodes", "1"), Limits(H200, TWO_TIB))
    with pytest.raises(ConfigError, match="--host-memory-gb 2199"):
        check_memory(planned(shapes, "--nodes", "1", "--rollout-num-engines", "8"), Limits(H200, TWO_TIB))
