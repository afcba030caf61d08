"""Distil the digits teacher into a few-step student, and show what was reached.

    python recipes/digits/run.py                  the default demo: minutes on two cores
    python recipes/digits/run.py --steps 4        students of 1, 2 or 4 steps
    python recipes/digits/run.py --smoke          seconds, to see that everything works

Any option of train_diffusion.py may follow and overrides the recipe's own. Settings are in configs/.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import train_diffusion
from recipes.digits import data, report

DEFAULT_STEPS = 4
SMOKE = {"--num-rollout": "3", "--eval-samples-per-prompt": "2", "--save-interval": "2"}


def main(argv: Sequence[str] | None = None) -> int:
    """Train, then measure and draw. Returns train_diffusion's exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, choices=(1, 2, 4), default=DEFAULT_STEPS, help="student steps")
    parser.add_argument("--run-dir", type=Path, help="default: runs/digits-<steps>-steps-<time>")
    parser.add_argument("--smoke", action="store_true", help="3 rollouts and a small report")
    chosen, options = parser.parse_known_args(argv)
    if "--help" in options or "-h" in options:
        parser.print_help()
        return 0
    run_dir = chosen.run_dir or Path("runs") / f"digits-{chosen.steps}-steps-{time.strftime('%Y%m%d-%H%M%S')}"
    code = train_diffusion.main([*flags(chosen.steps, run_dir, chosen.smoke, options), *options])
    if code or "--dry-run" in options:
        return code
    print("\nmeasuring teacher and student", flush=True)
    report.report(run_dir, limit=report.SMOKE_LIMIT if chosen.smoke else data.COUNT)
    print(f"\npictures: {run_dir / 'report.png'}")
    return 0


def flags(steps: int, run_dir: Path, smoke: bool, given: Sequence[str]) -> list[str]:
    """The recipe as train_diffusion flags; those that the user gives are left out here."""
    chosen = {
        "--config": HERE / "configs" / f"{steps}_steps.yaml",
        "--run-dir": run_dir,
        "--hf-checkpoint": report.PIPELINE,
        "--prompt-data": HERE / "prompts.txt",
        "--eval-prompt-data": HERE / "prompts.txt",
        "--eval-metrics-path": f"{HERE / 'metrics.py'}:evaluate",
        **(SMOKE if smoke else {}),
    }
    own = {flag: value for flag, value in chosen.items() if flag not in {option.split("=")[0] for option in given}}
    return [str(part) for pair in own.items() for part in pair]


if __name__ == "__main__":
    sys.exit(main())
