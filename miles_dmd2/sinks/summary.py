"""A finished run in one JSON object.

Everything is read off the metrics file, so a resumed run adds up like one that was never interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miles_dmd2.config import Config, Plan, TrainerSpec, flatten, student_clock
from miles_dmd2.sinks.jsonl import read_jsonl

Row = Mapping[str, float]


def summary(metrics: Path, config: Config, trainers: Sequence[TrainerSpec], plan: Plan) -> dict[str, Any]:
    """Options, first and last eval, training seconds, forwards planned and counted.

    `train_seconds` is generate, train and sync; start-up, eval and save are not in it.
    """
    rows = read_jsonl(metrics)
    trained = [row for row in rows if "rollout/forwards" in row]
    phases = ("sync", "generate", *(spec.name for spec in trainers))
    evals = [row for row in rows if any(key.startswith("eval/") for key in row)]
    return {
        "steps": config.num_steps,
        "seed": config.run.seed,
        "rollouts": len(trained),
        "train_seconds": sum(row.get(f"time/{phase}", 0.0) for row in trained for phase in phases),
        "seconds_per_phase": {
            phase: sum(row.get(f"time/{phase}", 0.0) for row in rows) for phase in (*phases, "eval", "save")
        },
        "forwards_per_update": {
            "planned": asdict(plan.forwards_per_update),
            "counted": _counted(trained, trainers, config),
        },
        "eval": _eval_figures(evals[-1]) if evals else {},
        "eval_at_rollout_0": _eval_figures(evals[0]) if evals else {},
        "options": json.loads(json.dumps(flatten(config.resolved()), default=str)),
    }


def _eval_figures(row: Row) -> dict[str, float]:
    return {key.removeprefix("eval/"): value for key, value in row.items() if key.startswith("eval/")}


def _counted(rows: Sequence[Row], trainers: Sequence[TrainerSpec], config: Config) -> dict[str, float]:
    """Transformer passes per student update, in samples, as the processes counted them, without the critic's warm-up.

    The critic's are those that train it and those of a scoring pass together.
    """
    critic = next(spec.name for spec in trainers if spec.role == "critic")
    actor = next(spec.name for spec in trainers if spec.role == "actor")
    keys = {
        "engine": "rollout/forwards",
        "critic": f"{critic}/critic_forwards",
        "teacher": f"{critic}/teacher_forwards",
        "student": f"{actor}/student_forwards",
    }
    clock = student_clock(config, trainers)
    last = clock.warmup + clock.interval * clock.steps(len(rows))  # rollouts after it lead to no update
    counted = rows[clock.warmup : last]
    steps = max(1, clock.steps(len(rows)))
    return {name: sum(row.get(key, 0.0) for row in counted) / steps for name, key in keys.items()}
