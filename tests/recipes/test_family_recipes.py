"""Each family's recipe resolves to a run on its tiny pipeline: options, plan and canvas, with nothing started."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import train_diffusion
from miles_dmd2.algo import sigma_grid
from tests.families import TINY, Tiny, checkpoints

__all__ = ["checkpoints"]

RECIPES = Path(train_diffusion.__file__).parent / "recipes"
FIRST = {tiny.name: tiny for tiny in reversed(TINY)}


@pytest.mark.parametrize("name", FIRST)
def test_a_recipe_resolves(
    name: str,
    checkpoints: Callable[[Tiny], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As written but for the machine, and for the canvas of SD3, whose tiny position table ends at 192 pixels."""
    monkeypatch.setattr(train_diffusion, "run", lambda *_: pytest.fail("the run started"))
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    machine = ["--device", "cpu", "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1"]
    canvas = ["--diffusion-height", "64", "--diffusion-width", "64"] if name == "sd3" else []
    own = {
        "hf-checkpoint": checkpoints(FIRST[name]),
        "prompt-data": tmp_path / "prompts.txt",
        "run-dir": tmp_path / "run",
    }
    flags = [f"--{key}={value}" for key, value in own.items()]
    arguments = ["--config", str(RECIPES / f"{name}.yaml"), *flags, *machine, *canvas, "--dry-run"]
    assert train_diffusion.main(arguments) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    plan = printed["plan"]
    for key in recipe.keys() - {"device", "actor-num-nodes", "actor-num-gpus-per-node", "trainer-config"}:
        assert str(printed[key]) == str(recipe[key]) or (canvas and "diffusion-" in key)
    grid = sigma_grid(recipe["diffusion-num-steps"], recipe["diffusion-flow-shift"])
    assert plan["sigmas"] == pytest.approx(grid.tolist(), abs=1e-6)
    assert plan["windows"] * plan["window-size"] == recipe["rollout-batch-size"]
    assert {group["role"]: group["updates"] for group in plan["groups"]} == {
        "critic": recipe["num-rollout"] * recipe["num-steps-per-rollout"],
        "actor": recipe["num-rollout"],
    }
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", FIRST)
def test_a_recipe_divides_over_its_own_devices(name: str) -> None:
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    ranks = recipe.get("actor-num-nodes", 1) * recipe["actor-num-gpus-per-node"]
    window, rest = divmod(recipe["rollout-batch-size"], recipe["num-steps-per-rollout"])
    assert rest == 0
    assert window % (ranks * recipe["micro-batch-size"]) == 0


# Where implementations differ, and a default would be nobody's choice.
CHOICES = (
    *("dmd2-student-input", "dmd2-student-sample-type", "dmd2-stop-step", "dmd2-critic-loss-space"),
    *("dmd2-teacher-guidance-scale", "dmd2-score-sigma-range", "diffusion-num-steps", "diffusion-flow-shift"),
    *("num-steps-per-rollout", "clip-grad", "forward-dtype"),
)


@pytest.mark.parametrize("name", FIRST)
def test_a_recipe_makes_every_choice_and_names_its_source(name: str) -> None:
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    sources = {line.partition(":")[0]: line.partition(" # ")[2] for line in lines}
    assert [choice for choice in CHOICES if not sources.get(choice)] == []


@pytest.mark.parametrize(
    ("name", "sample_type"),
    [("wan", "sde"), ("sd3", "sde"), ("qwen_image", "sde"), ("flux2_klein", "sde"), ("z_image", "ode")],
)
def test_a_recipe_hops_as_its_source(name: str, sample_type: str) -> None:
    """Self-Forcing, the official code, FastGen and DiffSynth-Studio noise x0 afresh; LightX2V takes Euler steps."""
    assert yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["dmd2-student-sample-type"] == sample_type


def test_wan_has_the_timesteps_of_its_source() -> None:
    recipe = yaml.safe_load((RECIPES / "wan.yaml").read_text())
    grid = sigma_grid(recipe["diffusion-num-steps"], recipe["diffusion-flow-shift"])
    assert (1000 * grid).tolist() == pytest.approx([1000, 937.5, 833.333, 625, 0], abs=1e-2)
