"""Which checkpoints stay: the last few, and the one whose student did best in an eval."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_dmd2.checkpointing.manifest import MANIFEST, CheckpointError

BEST = "best.json"  # beside the checkpoints: which is the best so far, by which figure


@dataclass(frozen=True, slots=True)
class Retention:
    """`keep_last`: None keeps all. `figure`: of an eval, without `eval/`; None for no best. The newest stays."""

    root: Path
    keep_last: int | None
    figure: str | None = None
    mode: Literal["max", "min"] = "max"

    def evaluated(self, completed: int, figures: Mapping[str, float]) -> None:
        """The student after `completed` rollouts has these eval figures (`eval/<name>`); what is not kept goes.

        CheckpointError: the figure is not among them. An eval of a student without a checkpoint counts for nothing.
        """
        if self.figure is None:
            return
        found = {name.removeprefix("eval/"): value for name, value in figures.items()}
        if self.figure not in found:
            known = ", ".join(sorted(found)) or "none (--eval-metrics-path)"
            raise CheckpointError(f"--keep-best {self.figure}: evals give no such figure; use one of: {known}")
        step, value = f"step_{completed:06d}", found[self.figure]
        if not (self.root / step / MANIFEST).is_file() or not math.isfinite(value):
            return
        best = self.best()
        if best is None or (value > best[1] if self.mode == "max" else value < best[1]):
            aside = self.root / f".{BEST}.partial"
            content = {"checkpoint": step, "figure": self.figure, "mode": self.mode, "value": value}
            aside.write_text(json.dumps(content) + "\n")
            aside.replace(self.root / BEST)
        self.prune()

    def best(self) -> tuple[Path, float] | None:
        """The best checkpoint so far by this figure, and its value; None if there is none."""
        try:
            content = json.loads((self.root / BEST).read_text())
            if (content["figure"], content["mode"]) != (self.figure, self.mode):
                return None
            path, value = self.root / Path(content["checkpoint"]).name, float(content["value"])
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None
        return (path, value) if (path / MANIFEST).is_file() else None

    def prune(self) -> None:
        """Remove all checkpoints but the last ones and the best. Renamed first: a name never stands for a half."""
        if self.keep_last is None:
            return
        best = self.best()
        steps = sorted((path for path in self.root.glob("step_*") if (path / MANIFEST).is_file()), key=_number)
        for path in steps[: -self.keep_last]:
            if best is None or path != best[0]:
                removed = path.with_name(f".{path.name}.removed")
                path.rename(removed)
                shutil.rmtree(removed, ignore_errors=True)


def _number(path: Path) -> int:
    digits = path.name.removeprefix("step_")
    return int(digits) if digits.isdigit() else -1
