"""The whole table of the digits demo: students of 1, 2 and 4 steps, seeds 0, 1 and 2, at their budget and at twice it.

    python recipes/digits/table.py                        hours; cells that are done are not run again
    python recipes/digits/table.py --steps 1 --seeds 0    one cell

Each cell trains to its budget, is measured, goes on from its checkpoint to twice the budget, and is measured again.
Ctrl-C lets the running cell save first; the same command goes on from there.
`published` cells have the plain critic of the published recipes, beside ours, which is told the stop step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from miles_dmd2.config.checks import RUN_MARKER
from miles_dmd2.config.errors import ConfigError, show
from miles_dmd2.run_directory import LOCK, in_use

KINDS = {"told": [], "published": ["--dmd2-critic-conditioning", "none"]}


class RunFailed(RuntimeError):
    """A training ended with an error, which it has told itself. One line."""


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 where a training failed and 2 for a directory in use, told in one line; 130 after Ctrl-C."""
    try:
        return run_table(argv)
    except (RunFailed, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt:
        print("\nstopped: finished cells are kept; the same command goes on from what was saved", file=sys.stderr)
        return 130


def run_table(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", choices=(1, 2, 4), default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--output", type=Path, default=Path("runs/digits-table"))
    chosen, options = parser.parse_known_args(argv)  # others are train_diffusion's, for every cell
    cells = []
    for steps in chosen.steps:
        kinds = ["told"] if steps == 1 else chosen.kinds  # with one step there is nothing to tell
        for kind in kinds:
            for seed in chosen.seeds:
                cells += run_cell(steps, kind, seed, chosen.output, options)
                write_table(cells, chosen.output)
    print((chosen.output / "table.md").read_text())
    return 0


def run_cell(steps: int, kind: str, seed: int, output: Path, options: Sequence[str]) -> list[dict[str, Any]]:
    """The two summaries of a cell, at its budget and at twice it; runs what is missing."""
    settings = yaml.safe_load((HERE / "configs" / f"{steps}_steps.yaml").read_text())
    settings["options"] = list(options)
    run_dir = output / f"{steps}-steps-{kind}-seed-{seed}"
    found = []
    for factor in (1, 2):
        kept = output / f"{run_dir.name}-x{factor}.json"
        if not kept.is_file():
            train(run_dir, steps, kind, seed, settings["num-rollout"] * factor, options)
            summary = json.loads((run_dir / "summary.json").read_text())
            shutil.copy(run_dir / "report.png", kept.with_suffix(".png"))
            cell = {"kind": kind, "factor": factor, "settings": settings, **summary}
            kept.write_text(json.dumps(cell, indent=2) + "\n")
        cell = json.loads(kept.read_text())
        if cell["settings"] != settings:
            raise SystemExit(f"{kept} was made with other settings; remove it and {run_dir}, or use another --output")
        found.append(cell)
    return found


def train(run_dir: Path, steps: int, kind: str, seed: int, rollouts: int, more: Sequence[str]) -> None:
    """In a process of its own, as a user would; goes on from a checkpoint.

    RunFailed: it failed. ConfigError: another process trains there. KeyboardInterrupt: after it has saved and stopped.
    """
    options = ["--steps", steps, "--seed", seed, "--num-rollout", rollouts, "--run-dir", run_dir, *KINDS[kind], *more]
    if any((run_dir / "checkpoints").glob("step_*/manifest.json")):
        options += ["--load", run_dir]
    elif not any(option.split("=")[0] == "--save" for option in more):  # else its checkpoints are elsewhere
        clear_unsaved(run_dir)
    command = [sys.executable, str(HERE / "run.py"), *map(str, options)]
    print(" ".join(command), flush=True)
    code = ended(subprocess.Popen(command))
    if code:
        raise RunFailed(f"the training in {show(run_dir)} ended with exit code {code}; see what it said above")


def clear_unsaved(run_dir: Path) -> None:
    """Empty the directory of a run that died before its first checkpoint: another run is refused there.

    A finished run is left alone. ConfigError: the run is going on.
    """
    if not (run_dir / RUN_MARKER).is_file() or (run_dir / "summary.json").is_file():
        return
    with in_use([("--run-dir", run_dir)]):
        for path in run_dir.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()


def ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the exit code. Ctrl-C reaches the run too, which saves at the end of its rollout: it is waited for,
    where subprocess.run would kill it after a quarter of a second. A second Ctrl-C ends the wait.
    """
    try:
        return process.wait()
    except KeyboardInterrupt:
        print("\nwaiting for the training to save and stop; once more ends the wait", file=sys.stderr, flush=True)
        process.wait()
        raise


def write_table(cells: Sequence[dict[str, Any]], output: Path) -> None:
    """`table.md`: the samplers to compare with, then a row per (steps, critic, budget): mean over seeds, and range."""
    lines = [
        "| sampler | distance | accuracy |",
        "|---|---|---|",
    ]
    for steps in dict.fromkeys(cell["steps"] for cell in cells):
        columns = next(cell for cell in cells if cell["steps"] == steps)["columns"]
        many = [("teacher, 50 steps", columns["teacher_50"])] if len(lines) == 2 else []
        for name, column in [*many, (f"teacher, {steps} step{'s' * (steps > 1)}", columns["teacher"])]:
            distance = f"{column['fd']:.2f} ± {column['fd_deviation']:.2f}"
            lines.append(f"| {name} | {distance} | {column['accuracy']:.1%} |")
    floor = cells[0]["floor"]
    lines += [
        f"| floor: data against data | {floor['fd']:.2f} ± {floor['fd_deviation']:.2f} | |",
        "",
        "| steps | critic | rollouts | seconds | seeds | distance, EMA | gap closed, EMA | gap closed, raw "
        "| accuracy, EMA | accuracy, raw | distance by stop step, EMA |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((cell["steps"], cell["kind"], cell["factor"]) for cell in cells):
        rows = [cell for cell in cells if (cell["steps"], cell["kind"], cell["factor"]) == key]
        lines.append(f"| {' | '.join(map(str, row_of(key, rows)))} |")
    output.mkdir(parents=True, exist_ok=True)
    (output / "table.md").write_text("\n".join(lines) + "\n")


def row_of(key: tuple[int, str, int], rows: Sequence[dict[str, Any]]) -> list[object]:
    """One line of the table."""
    steps, kind, _ = key
    ema, raw = ([row["columns"][f"student_{name}"] for row in rows] for name in ("ema", "raw"))
    by_step = [[row["columns"][f"student_ema_step{k}"]["fd"] for row in rows] for k in range(steps - 1)]
    by_step.append([column["fd"] for column in ema])
    return [
        steps,
        kind if steps > 1 else "plain",
        rows[0]["rollouts"],
        f"{statistics.mean(row['train_seconds'] for row in rows):.0f}",
        " ".join(str(row["seed"]) for row in rows),
        spread([column["fd"] for column in ema], ".2f"),
        spread([row["gap_closed_ema"] for row in rows], ".0%"),
        spread([row["gap_closed_raw"] for row in rows], ".0%"),
        spread([column["accuracy"] for column in ema], ".1%"),
        spread([column["accuracy"] for column in raw], ".1%"),
        " / ".join(f"{statistics.mean(values):.2f}" for values in by_step),
    ]


def spread(values: Sequence[float], form: str) -> str:
    """Mean, and the range over seeds where there are several."""
    mean = f"{statistics.mean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    sys.exit(main())
