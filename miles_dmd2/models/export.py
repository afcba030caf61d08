"""Writing a student as a diffusers pipeline: the checkpoint's parts, new transformer weights, the student's grid."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from miles_dmd2.algo import sigma_grid
from miles_dmd2.models.checkpoint import read_config
from miles_dmd2.models.weights import mismatch, not_finite, safetensors_shapes

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")  # never read here, so never copied
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
STUDENT_FILE = "student.json"


def static_shift_scheduler(shift: float) -> dict[str, Any]:
    """Config of diffusers' FlowMatchEuler whose grid for linspace(1, 1/N, N) has the bits of `sigma_grid(N, shift)`."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=False, shift_terminal=None)
    config: dict[str, Any] = json.loads(scheduler.to_json_string())
    return config


def plain_call_scheduler(num_steps: int, shift: float) -> dict[str, Any]:
    """As above, for pipelines that name the number of steps and no sigmas (SD3, Wan): N steps, and only N, give the
    values of `sigma_grid(N, shift)` to one fp32 rounding.

    FlowMatchEuler then shifts linspace(1, m, N), where m is its own shifted 1/1000, and stretches the result so that it
    ends at `shift_terminal`. In the step i that is 1 - i / (a + b i), and so is the grid: a shift s' and the last sigma
    of the grid as the terminal make them the same. With c = (1 - 1/s)(N - 1)/N / 0.999, s' is the smaller root of
    0.001 c s'^2 - (1 - 0.999 c) s' + 1 = 0. ValueError: there is none, for long grids with a large shift.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    terminal = None
    if num_steps > 1:
        terminal = sigma_grid(num_steps, shift)[-2].item()
        c = (1 - 1 / shift) * (num_steps - 1) / num_steps / 0.999
        middle = 1 - 0.999 * c
        if middle <= 0 or middle**2 < 0.004 * c:
            raise ValueError(f"no scheduler config gives {num_steps} steps with shift {shift:g}: lower one of them")
        shift = 2 / (middle + math.sqrt(middle**2 - 0.004 * c))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=False, shift_terminal=terminal)
    config: dict[str, Any] = json.loads(scheduler.to_json_string())
    return config


def write_student(
    checkpoint: Path,
    weights: Mapping[str, Tensor],
    num_steps: int,
    shift: float,
    scheduler_config: Mapping[str, Any],
    call: Mapping[str, Any],
    directory: Path,
) -> None:
    """`write_pipeline` for a student with the grid `sigma_grid(num_steps, shift)`; `call`: what else its pipeline's
    call needs. student.json holds all of that.
    """
    sigmas = sigma_grid(num_steps, shift).tolist()
    student = {"num_inference_steps": num_steps, "shift": shift, "sigmas": sigmas, **call}
    write_pipeline(checkpoint, "transformer", weights, scheduler_config, student, directory)


def write_pipeline(
    checkpoint: Path,
    transformer: str,
    weights: Mapping[str, Tensor],
    scheduler_config: Mapping[str, Any],
    student: Mapping[str, Any],
    directory: Path,
) -> None:
    """Copy `checkpoint` file by file (links followed) with these weights for component `transformer`, this scheduler
    config, and `student` as student.json. The directory appears under its name only when it is complete.

    ValueError: `directory` exists, or names, shapes or values of the weights do not fit the checkpoint.
    """
    if directory.exists():
        raise ValueError(f"{directory} exists already; exports never overwrite, choose another directory")
    shapes = safetensors_shapes(checkpoint / transformer)
    problem = mismatch(shapes, weights) or not_finite(weights)
    if problem:
        raise ValueError(f"weights for {checkpoint / transformer} do not fit it: {problem}")
    index = read_config(checkpoint, "model_index.json")
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        for component in _components(checkpoint, index):
            skip_weights = component == transformer
            _copy_component(checkpoint / component, aside / component, skip_weights)
        _write_json(aside / "scheduler" / "scheduler_config.json", scheduler_config)
        _write_weights(weights, aside / transformer)
        index["scheduler"] = ["diffusers", scheduler_config["_class_name"]]
        _write_json(aside / "model_index.json", index)
        _write_json(aside / STUDENT_FILE, student)
        aside.chmod(0o755)  # mkdtemp's 0700 is for secrets
        aside.rename(directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _components(checkpoint: Path, index: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in index.items()
        if name != "scheduler" and isinstance(value, list) and (checkpoint / name).is_dir()
    ]


def _copy_component(source: Path, target: Path, skip_weights: bool) -> None:
    for path in sorted(source.rglob("*")):
        weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if not path.is_file() or path.suffix in PICKLED or (skip_weights and weights):
            continue
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _write_weights(weights: Mapping[str, Tensor], directory: Path) -> None:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    full = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    save_file(full, directory / WEIGHTS_FILE, metadata={"format": "pt"})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
