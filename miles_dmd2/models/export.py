"""Writing a student as a diffusers pipeline: the checkpoint's parts, new transformer weights, the student's grid."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from miles_dmd2.models.checkpoint import PICKLED, read_config
from miles_dmd2.models.weights import mismatch, not_finite, safetensors_shapes
from miles_dmd2.types import SampleType

WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
STUDENT_FILE = "student.json"
ADAPTER_DIRECTORY = "lora"  # beside the pipeline's components
ADAPTER_FILE = "pytorch_lora_weights.safetensors"  # the name that diffusers looks for


@dataclass(frozen=True, slots=True)
class StudentSampling:
    """How a student is sampled.

    sigmas: its grid `[N + 1]`, terminal 0 included, exact in fp32. shift: what makes the grid from linspace(1, 1/N, N);
    None for a grid of its own, which has to be given to the pipeline.
    """

    sigmas: tuple[float, ...]
    shift: float | None
    sample_type: SampleType = "ode"

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    def described(self) -> dict[str, Any]:
        """For student.json."""
        return {
            "num_inference_steps": self.num_steps,
            "shift": self.shift,
            "sigmas": list(self.sigmas),
            "sample_type": self.sample_type,
        }


def flow_match_scheduler(sampling: StudentSampling) -> dict[str, Any]:
    """Config of diffusers' FlowMatchEuler with the student's hops.

    For linspace(1, 1/N, N) its grid has the bits of `sigma_grid(N, shift)`; without a shift it takes the pipeline's
    `sigmas` as they are. Its stochastic sampling is the SDE: (1 - sigma') x0 + sigma' fresh noise.
    """
    return _flow_match(1.0 if sampling.shift is None else sampling.shift, None, sampling)


def plain_call_scheduler(sampling: StudentSampling) -> dict[str, Any]:
    """As above, for pipelines that name the number of steps and no sigmas (SD3, Wan): N steps, and only N, give the
    values of `sigma_grid(N, shift)` to one fp32 rounding. Without a shift it is the same config as above. ValueError:
    see `plain_call_shift`.
    """
    return _flow_match(*plain_call_shift(sampling), sampling)


def plain_call_shift(sampling: StudentSampling) -> tuple[float, float | None]:
    """(shift, terminal sigma) of the config that `plain_call_scheduler` makes.

    FlowMatchEuler shifts linspace(1, m, N), where m is its own shifted 1/1000, and stretches the result so that it
    ends at `shift_terminal`. In the step i that is 1 - i / (a + b i), and so is the grid: a shift s' and the last sigma
    of the grid as the terminal make them the same. With c = (1 - 1/s)(N - 1)/N / 0.999, s' is the smaller root of
    0.001 c s'^2 - (1 - 0.999 c) s' + 1 = 0. ValueError: there is none, for long grids with a large shift.
    """
    num_steps, shift = sampling.num_steps, sampling.shift
    if shift is None or num_steps == 1:
        return (1.0 if shift is None else shift), None
    c = (1 - 1 / shift) * (num_steps - 1) / num_steps / 0.999
    middle = 1 - 0.999 * c
    if middle <= 0 or middle**2 < 0.004 * c:
        raise ValueError(f"no scheduler config gives {num_steps} steps with shift {shift:g}: lower one of them")
    return 2 / (middle + math.sqrt(middle**2 - 0.004 * c)), sampling.sigmas[-2]


def _flow_match(shift: float, terminal: float | None, sampling: StudentSampling) -> dict[str, Any]:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=shift,
        use_dynamic_shifting=False,
        shift_terminal=terminal,
        stochastic_sampling=sampling.sample_type == "sde",
    )
    config: dict[str, Any] = json.loads(scheduler.to_json_string())
    return config


def write_student(
    checkpoint: Path,
    weights: Mapping[str, Tensor],
    sampling: StudentSampling,
    scheduler_config: Mapping[str, Any],
    call: Mapping[str, Any],
    directory: Path,
) -> None:
    """`write_pipeline` for a student; `call`: what its pipeline's call needs beside the sampling. student.json holds
    both.
    """
    student = {**sampling.described(), **call}
    write_pipeline(checkpoint, "transformer", weights, scheduler_config, student, directory)


def write_pipeline(
    checkpoint: Path,
    transformer: str,
    weights: Mapping[str, Tensor],
    scheduler_config: Mapping[str, Any] | None,
    student: Mapping[str, Any],
    directory: Path,
    *,
    index_changes: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Copy `checkpoint` file by file (links followed) with these weights for component `transformer`, this scheduler
    config (None: a family without one), `student` as student.json, and these entries of model_index.json instead of its
    own. The directory appears under its name only when it is complete.

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
        if scheduler_config is not None:
            _write_json(aside / "scheduler" / "scheduler_config.json", scheduler_config)
            index["scheduler"] = ["diffusers", scheduler_config["_class_name"]]
        _write_weights(weights, aside / transformer)
        _write_json(aside / "model_index.json", {**index, **index_changes})
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
