"""What the options of DMD2 that implementations disagree on change: student input, what the critic is told, scoring.

    python benchmarks/ablation.py ring                    36 cells on a ring of Gaussians: 8 minutes of CPU in all
    python benchmarks/ablation.py ring --seeds 0 --rollouts 20 --out /tmp/try.jsonl
    python benchmarks/ablation.py digits                  9 trainings of the digits recipe under Ray, 12 cells
    python benchmarks/ablation.py report docs/results/ablation_ring.jsonl --picture docs/images/ablation-ring.png

Every finished cell is a line of --out; started again, the benchmark goes on after the last. Ctrl-C loses the running
cell of the ring alone; a training of the digits saves first, and goes on from there. See docs/ablation.md for what
was found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks import digits_cells
from benchmarks.ablation_picture import picture
from benchmarks.ablation_report import digits_tables, ring_tables
from benchmarks.cells import CellFile, read_rows
from benchmarks.ring_cells import CRITICS, INPUTS, SCORINGS, Bench, Cell, RingSettings, run_cell
from miles_dmd2.config.errors import ConfigError
from miles_dmd2.models.weights import checksum
from recipes.digits.table import RunFailed

RESULTS = ROOT / "docs" / "results"
STOPPED = {
    "ring": "the running cell is lost, finished ones are kept",
    "digits": "finished cells are kept; the same command goes on, a training from what it saved",
    "report": "the report is not complete",
}


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 where a training failed and 2 for bad input, told in one line; 130 after Ctrl-C."""
    chosen = parser().parse_args(argv)
    try:
        if chosen.command == "ring":
            run_ring(replace(RingSettings(), rollouts=chosen.rollouts), chosen.seeds, chosen.out)
        elif chosen.command == "digits":
            run_digits(chosen.steps, chosen.rollouts, chosen.seeds, chosen.out, chosen.runs)
        else:
            write_report(chosen.file, chosen.picture)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped: {STOPPED[chosen.command]}", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = found.add_subparsers(dest="command", required=True)
    ring = commands.add_parser("ring", help="the whole table on a ring of Gaussians")
    ring.add_argument("--rollouts", type=positive, default=RingSettings().rollouts, help="of each cell")
    ring.add_argument("--out", type=Path, default=RESULTS / "ablation_ring.jsonl")
    digits = commands.add_parser("digits", help="four cells on the digits recipe")
    digits.add_argument("--steps", type=int, choices=(2, 4), default=2, help="student steps")
    digits.add_argument("--rollouts", type=positive, default=300, help="of each training")
    digits.add_argument("--out", type=Path, default=RESULTS / "ablation_digits.jsonl")
    digits.add_argument("--runs", type=Path, default=Path("runs/ablation-digits"), help="where the trainings go")
    for command in (ring, digits):
        command.add_argument("--seeds", type=natural, nargs="+", default=[0, 1, 2])
    shown = commands.add_parser("report", help="print tables of a file of finished cells")
    shown.add_argument("file", type=Path)
    shown.add_argument("--picture", type=Path, help="also draw the ring's cells into this PNG")
    return found


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"want an integer >= 0, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    if natural(text) < 1:
        raise argparse.ArgumentTypeError(f"want an integer >= 1, got {text!r}")
    return int(text)


def run_ring(settings: RingSettings, seeds: Sequence[int], out: Path) -> None:
    """Every cell that `out` lacks, seed by seed, so that what is there early is a whole table. ConfigError: `out`."""
    torch.set_num_threads(1)
    bench = Bench(settings)
    file = CellFile(out, {**asdict(settings), "start": checksum(bench.start)})
    if "references" not in file.rows:
        file.append("references", bench.references())
    for cell in ring_cells(seeds):
        if cell.key not in file.rows:
            began = time.perf_counter()
            row = run_cell(bench, cell)
            file.append(cell.key, {**asdict(cell), **row})
            print(f"{cell.key:44}{time.perf_counter() - began:7.0f} s  {told(row)}", flush=True)


def run_digits(steps: int, rollouts: int, seeds: Sequence[int], out: Path, directory: Path) -> None:
    """Every cell that `out` lacks, seed by seed. ConfigError: `out`, or a run in use. RunFailed: a training."""
    file = CellFile(out, digits_cells.settings(steps, rollouts))
    for seed in seeds:
        for run in digits_cells.runs():
            hops = digits_cells.missing(run, seed, file.rows)
            if hops:
                for key, row in digits_cells.cells(run, hops, steps, rollouts, seed, directory):
                    file.append(key, row)


def write_report(path: Path, picture_path: Path | None) -> None:
    """ConfigError: `path` is no file of finished cells, or a picture of other cells than the ring's."""
    rows = read_rows(path)
    if any("columns" in row for row in rows):
        print(digits_tables(path))
    else:
        print(ring_tables(path))
    if picture_path is not None:
        picture(path, picture_path)


def ring_cells(seeds: Sequence[int]) -> list[Cell]:
    return [
        Cell(input, critic, scoring, seed)
        for seed in seeds
        for input in INPUTS
        for critic in CRITICS
        for scoring in SCORINGS
    ]


def told(row: dict[str, Any]) -> str:
    """The last student in a line."""
    last = row["curve"][-1]["ema"]
    return ", ".join(f"{hop} {figures['energy']:.4f} {figures['on_mode']:.1%}" for hop, figures in last.items())


if __name__ == "__main__":
    sys.exit(main())
