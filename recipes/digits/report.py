"""What a run reached: Frechet distances, accuracies, one picture. Reads a run directory, writes summary.json into it.

python recipes/digits/report.py runs/digits-4-steps
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from miles_dmd2.algo import eval_seed
from miles_dmd2.data.requests import grid
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.media.gallery import contact_sheet
from miles_dmd2.models.export import STUDENT_FILE
from miles_dmd2.models.planar import decode_frame, planar_convolutions
from miles_dmd2.models.registry import build_adapter
from miles_dmd2.types import RolloutRequest, SampleType, WeightVersion
from recipes.digits import build_teacher, classifier, data, metrics

PIPELINE = Path(__file__).parent / "pipeline"
TEACHER_STEPS = 50
SHOWN_PER_DIGIT = 2
REPORT_SERIES = 1  # of fixed noise; 0 is the evals' during training
SMOKE_LIMIT = 100  # digits: enough to see that every column works, too few for a figure to mean something


@dataclass(frozen=True)
class Column:
    """One sampler's figures over all 1797 prompts, and the pictures of the first few of each digit."""

    name: str
    fd: float
    fd_deviation: float
    fd_to_data: float
    accuracy: float
    pictures: list[Any]

    def figures(self) -> dict[str, float]:
        return {
            "fd": self.fd,
            "fd_deviation": self.fd_deviation,
            "fd_to_data": self.fd_to_data,
            "accuracy": self.accuracy,
        }


class Judge:
    """The reference: every digit as the pipeline's VAE reconstructs it, in the classifier's features."""

    def __init__(self, digits: data.Digits) -> None:
        self.labels = digits.labels
        self.model = metrics.judge()
        self.data_features = classifier.features(self.model, data.enlarge(digits.grey))
        self.features = classifier.features(self.model, reconstruct(digits))

    def floor(self) -> classifier.Distance:
        return classifier.frechet_floor(self.features, self.labels)

    def column(
        self,
        name: str,
        engine: LocalEngine,
        sigmas: tuple[float, ...],
        stop_step: int,
        seed: int,
        sample_type: SampleType = "ode",
    ) -> Column:
        """Sample one picture per digit of the data set (same prompts, same noise in every column) and measure."""
        requests = [
            RolloutRequest(
                i, data.prompt_of(int(label)), eval_seed(seed, REPORT_SERIES, i), sigmas, stop_step, True, sample_type
            )
            for i, label in enumerate(self.labels)
        ]
        samples = engine.generate(requests)
        pictures = metrics.pictures_of(samples)
        found = classifier.features(self.model, pictures)
        distance = classifier.frechet_with_bootstrap(found, self.features)
        first = [(self.labels == digit).nonzero().flatten()[:SHOWN_PER_DIGIT] for digit in range(10)]
        return Column(
            name=name,
            fd=distance.value,
            fd_deviation=distance.deviation,
            fd_to_data=classifier.frechet_distance(found, self.data_features),
            accuracy=classifier.label_accuracy(self.model, pictures, self.labels),
            pictures=[samples[i].media[0].numpy() for i in torch.cat(first).tolist()],  # type: ignore[index]
        )


@torch.no_grad()
def reconstruct(digits: data.Digits) -> Tensor:
    """Digits through the pipeline's VAE and back, `[n, 3, size, size]` in [-1, 1], as an engine would decode them."""
    from diffusers import AutoencoderKLQwenImage

    vae = AutoencoderKLQwenImage.from_pretrained(PIPELINE, subfolder="vae", local_files_only=True).eval()
    parts = []
    for grey in digits.grey.split(64):
        with planar_convolutions(vae):
            latents, _ = build_teacher.encode(vae, data.enlarge(grey))  # the posterior's mode
        pixels = decode_frame(vae, latents)
        parts.append(((pixels * 0.5 + 0.5) * 255).round() / 127.5 - 1)
    return torch.cat(parts)


def measure(
    run_dir: Path, sampling: Mapping[str, Any], seed: int, digits: data.Digits
) -> tuple[dict[str, Column], classifier.Distance]:
    """All columns of a run; keys: teacher_50, teacher, student_raw, student_ema, and `<student>_step{k}`.

    `sampling`: the students' student.json. The teacher is sampled with ODE hops.
    """
    judge = Judge(digits)
    student_grid, kind_of_hop = tuple(sampling["sigmas"]), sampling["sample_type"]
    steps = len(student_grid) - 1
    columns: dict[str, Column] = {}
    teacher = engine_of(PIPELINE)
    last = steps - 1
    columns["teacher_50"] = judge.column(
        "teacher, 50 steps", teacher, grid(TEACHER_STEPS, 1.0), TEACHER_STEPS - 1, seed
    )
    name = f"teacher, {steps} step{'s' * (steps > 1)}"
    columns["teacher"] = judge.column(name, teacher, grid(steps, 1.0), last, seed)
    start = columns["teacher"]
    if (student_grid, kind_of_hop) != (grid(steps, 1.0), "ode"):
        start = judge.column("at rollout 0", teacher, student_grid, last, seed, kind_of_hop)
    columns["student_start"] = Column("student, rollout 0", **start.figures(), pictures=start.pictures)
    for kind in ("raw", "ema"):
        directory = run_dir / f"student_{kind}"
        if not directory.is_dir():
            continue
        student = engine_of(directory)
        columns[f"student_{kind}"] = judge.column(f"student {kind}", student, student_grid, last, seed, kind_of_hop)
        for step in range(last if kind == "ema" else 0):
            name = f"student ema, stopped at {step}"
            columns[f"student_ema_step{step}"] = judge.column(name, student, student_grid, step, seed, kind_of_hop)
        student.close()
    teacher.close()
    return columns, judge.floor()


def engine_of(directory: Path) -> LocalEngine:
    adapter = build_adapter(directory, data.IMAGE_SIZE, data.IMAGE_SIZE)
    return LocalEngine(adapter, batch_size=128, checkpoint_version=WeightVersion(0))


def gap_closed(columns: dict[str, Column], student: str) -> float:
    """Share of the Frechet gap between the teacher at N steps (the better of both grids) and at 50 that is gone."""
    baseline = min(columns["teacher"].fd, columns["student_start"].fd)
    return (baseline - columns[student].fd) / (baseline - columns["teacher_50"].fd)


def table(columns: dict[str, Column], floor: classifier.Distance) -> str:
    lines = [f"{'':28}{'Frechet distance':>20}{'gap closed':>12}{'reads as prompted':>20}{'to the data':>14}"]
    for key, column in columns.items():
        closed = f"{gap_closed(columns, key):.0%}" if key in ("student_raw", "student_ema") else ""
        lines.append(
            f"{column.name:28}{f'{column.fd:.2f} +- {column.fd_deviation:.2f}':>20}{closed:>12}"
            f"{f'{column.accuracy:.1%}':>20}{column.fd_to_data:>14.2f}"
        )
    lines.append(f"{'floor (data, same size)':28}{floor!s:>20}")
    return "\n".join(lines)


def save_picture(columns: dict[str, Column], path: Path) -> None:
    """One block per column, same prompts and noise in the same places, its name and distance above."""
    shown = [column for key, column in columns.items() if "_step" not in key]
    blocks = [contact_sheet(column.pictures, columns=2 * SHOWN_PER_DIGIT) for column in shown]
    height, width, _ = blocks[0].shape
    head, gap = 44, 24
    sheet = Image.new("RGB", (len(blocks) * (width + gap) - gap, height + head), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=17)
    for i, (column, block) in enumerate(zip(shown, blocks, strict=True)):
        left = i * (width + gap)
        draw.text((left, 2), column.name, fill="black", font=font)
        draw.text((left, 22), f"distance {column.fd:.2f}", fill="dimgrey", font=font)
        sheet.paste(Image.fromarray(np.ascontiguousarray(block)), (left, head))
    sheet.save(path)


def report(run_dir: Path, seed: int = 0, limit: int = data.COUNT) -> dict[str, Any]:
    """Measure a finished run, print the table, write report.png and complete summary.json; returns the summary.

    `limit`: measure on the first digits only. FileNotFoundError: no summary.json (the run did not finish).
    """
    path = run_dir / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text())
    sampling = json.loads((run_dir / "student_raw" / STUDENT_FILE).read_text())
    columns, floor = measure(run_dir, sampling, seed, data.load(limit))
    summary["columns"] = {key: column.figures() for key, column in columns.items()}
    summary["floor"] = {"fd": floor.value, "fd_deviation": floor.deviation}
    for kind in ("raw", "ema"):
        if f"student_{kind}" in columns:
            summary[f"gap_closed_{kind}"] = gap_closed(columns, f"student_{kind}")
    path.write_text(json.dumps(summary, indent=2) + "\n")
    save_picture(columns, run_dir / "report.png")
    print(table(columns, floor))
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="seed of the measurement's noise")
    arguments = parser.parse_args(argv)
    if not (arguments.run_dir / "summary.json").is_file():
        parser.error(f"{arguments.run_dir} holds no finished run (no summary.json); give a directory that run.py wrote")
    report(arguments.run_dir, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
