"""Four cells of the ablation on the digits recipe: where the student's inputs come from, and how it hops.

The critic is told the stop step and scores are fused in all of them: what the two change is on the ring, and telling
the critic is measured on the digits in docs/digits.md. A student of forward_noise never hops in training, so one run
makes both of its cells: it is measured with either hop.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_dmd2.models.export import STUDENT_FILE
from miles_dmd2.types import SampleType
from recipes.digits import data, latents, report, table

FIGURES = ("fd", "fd_deviation", "accuracy")


@dataclass(frozen=True, slots=True)
class DigitsRun:
    """One training, with options of the recipe. `hops`: those that its student is measured with, its own first."""

    name: str
    hops: tuple[SampleType, ...]
    options: tuple[str, ...]
    real: bool = False  # trained on real latents

    def flags(self, directory: Path) -> tuple[str, ...]:
        """Its options, and where its real latents are: encoded now, where it needs any and there are none."""
        return (*self.options, "--dmd2-latents", str(real_latents(directory))) if self.real else self.options


def runs() -> list[DigitsRun]:
    sde = ("--dmd2-student-sample-type", "sde")
    return [
        DigitsRun("simulation_ode", ("ode",), ()),
        DigitsRun("simulation_sde", ("sde",), sde),
        DigitsRun("forward_noise", ("sde", "ode"), (*sde, "--dmd2-student-input", "forward_noise"), real=True),
    ]


def settings(steps: int, rollouts: int) -> dict[str, Any]:
    """What the cells have in common: the recipe's own options, those of the runs, and which teacher."""
    manifest = json.loads((report.PIPELINE / "manifest.json").read_text())
    recipe = (report.PIPELINE.parent / "configs" / f"{steps}_steps.yaml").read_text()
    options = {run.name: run.options for run in runs()}
    return {"steps": steps, "rollouts": rollouts, "recipe": recipe, "teacher": manifest["files"], "options": options}


def run_name(run: DigitsRun, steps: int, rollouts: int, seed: int) -> str:
    """Of its directory: other settings, or other options of this run, have another."""
    made_with = {**settings(steps, rollouts), "options": run.options}
    digest = hashlib.sha256(json.dumps(made_with).encode()).hexdigest()[:8]
    return f"{run.name}-{steps}-steps-seed-{seed}-{digest}"


def real_latents(directory: Path) -> Path:
    """The file of all digits as latents, encoded unless it is there. It is there when it is whole."""
    path = directory / "latents.safetensors"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="latents-", dir=directory) as aside:
            latents.build(Path(aside) / path.name)
            (Path(aside) / path.name).replace(path)
    return path


def key_of(run: DigitsRun, hop: SampleType, seed: int) -> str:
    return f"{run.name}/{hop}/seed {seed}"


def cells(
    run: DigitsRun, hops: Collection[SampleType], steps: int, rollouts: int, seed: int, directory: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train, unless a finished run is there, and measure with `hops`: key and row of each. Interrupted runs continue.

    table.RunFailed: the training failed. ConfigError: another process trains it.
    """
    run_dir = directory / run_name(run, steps, rollouts, seed)
    if not (run_dir / "summary.json").is_file():
        table.train(run_dir, steps, "told", seed, rollouts, run.flags(directory))
    summary = json.loads((run_dir / "summary.json").read_text())
    if "columns" not in summary:
        summary = report.report(run_dir)
    sampling = json.loads((run_dir / "student_raw" / STUDENT_FILE).read_text())
    for hop in hops:
        columns = summary["columns"] if hop == sampling["sample_type"] else measured(run_dir, sampling, hop)
        yield (
            key_of(run, hop, seed),
            {
                "input": run.name,
                "hop": hop,
                "seed": seed,
                "columns": {name: {key: column[key] for key in FIGURES} for name, column in columns.items()},
                "floor": summary["floor"],
                "forwards_per_update": summary["forwards_per_update"]["counted"],
                "seconds": {"wall": summary["train_seconds"], "phases": summary["seconds_per_phase"]},
            },
        )


def measured(run_dir: Path, sampling: Mapping[str, Any], hop: SampleType) -> dict[str, dict[str, float]]:
    """The report's columns for a student that hops in another way than it was exported with."""
    columns, _ = report.measure(run_dir, {**sampling, "sample_type": hop}, 0, data.load())
    return {name: column.figures() for name, column in columns.items()}


def missing(run: DigitsRun, seed: int, done: Collection[str]) -> list[SampleType]:
    """The hops whose cells are not among the keys `done`."""
    return [hop for hop in run.hops if key_of(run, hop, seed) not in done]
