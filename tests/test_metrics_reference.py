"""The declarations, the table of docs/metrics.md and what a run logs are the same."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from miles_dmd2.config import build_plan, parse
from miles_dmd2.observability.declared import METRICS, is_of_machine, reductions, without_machine
from miles_dmd2.training import Ranks
from scripts.write_metrics_reference import DOCUMENT, table, with_table
from tests.in_process import Outcome, run

STEPS = 3
FLAGS = {
    "num-rollout": "4",
    "rollout-batch-size": "4",
    "n-samples-per-prompt": "6",
    "num-steps-per-rollout": "2",
    "diffusion-num-steps": str(STEPS),
    "cpu-threads": "1",
}
# The names that the metrics of this kind of training have elsewhere.
AGREED = [
    "dmd2_score_gap_abs_mean",
    "dmd2_teacher_dist_abs_mean",
    "dmd2_grad_abs_mean",
    "dmd2_x0_mean",
    "dmd2_x0_std",
    "x0_mean_abs_diff",
    "dmd_loss",
    "critic_loss",
    "grad_norm/critic",
    "grad_norm/student",
    "lr",
    "skipped_steps",
    "peak_memory_allocated_gb",
    "device_memory_used_gb",
]
PER_STEP = AGREED[:6]


def words(**changes: str) -> list[str]:
    flags = {**FLAGS, **{name.replace("_", "-"): value for name, value in changes.items()}}
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def outcome(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    torch.set_num_threads(1)
    return run(ranks, tmp_path_factory.mktemp("run"), words(), save_at=4)


def expected() -> set[str]:
    """Of a run on cpu with the local engine and no eval whose windows have every stop step."""
    keys = set()
    for metric in METRICS:
        if metric.where not in ("", "--device cpu", "rows with a checkpoint"):
            continue
        names = [metric.name] + [f"{metric.name}_step{i}" for i in range(STEPS) if metric.per_step]
        for group in ("critic", "actor"):
            source = group if metric.source == "group" else metric.source
            keys |= {f"{source}/{name.replace('<group>', group)}" for name in names}
    return keys


def test_a_run_logs_exactly_what_is_declared(outcome: Outcome) -> None:
    logged = {key for row in outcome.logged for key in row}
    assert logged == expected()
    always = logged - {"time/export", "time/save"}
    assert [set(row) >= always for row in outcome.logged] == [True] * 4


def test_the_names_are_those_agreed_on() -> None:
    declared = {metric.name: metric for metric in METRICS}
    assert set(AGREED) <= declared.keys()
    assert {name for name in AGREED if declared[name].per_step} == {*PER_STEP, "dmd_loss", "critic_loss"}


def test_no_name_is_declared_twice_or_for_two_kinds_of_reduction() -> None:
    keys = [(metric.source, metric.name) for metric in METRICS]
    assert len(set(keys)) == len(keys)
    trainers = {"critic", "actor", "group"}
    assert all((metric.reduction == "driver") <= (metric.source not in trainers) for metric in METRICS)
    assert reductions("group")["lr"] == "same"


def test_the_document_has_the_table() -> None:
    """`python scripts/write_metrics_reference.py` brings it up to date."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_table(text)
    assert len(re.findall(r"^\| `", table(), re.MULTILINE)) == len(METRICS)
    with pytest.raises(ValueError, match="has lost the lines"):
        with_table("no table")


def test_no_other_document_names_a_key_that_is_not_there(outcome: Outcome) -> None:
    """`group/name` in backquotes, of the sources of metrics."""
    keys = {key for row in outcome.logged for key in row} | {f"{m.source}/{m.name}" for m in METRICS}
    named = r"`((?:critic|actor|rollout|throughput|time)/[a-z0-9_/]+)`"
    for document in DOCUMENT.parent.glob("*.md"):
        assert set(re.findall(named, document.read_text(encoding="utf-8"))) <= keys, document


def test_seconds_and_bytes_are_told_apart() -> None:
    row = {
        "time/sync": 1.0,
        "throughput/samples_per_second": 2.0,
        "critic/peak_memory_resident_gb": 3.0,
        "device_memory_used_gb": 4.0,
        "critic/grad_norm/critic": 5.0,
        "rollout/samples": 6.0,
    }
    assert without_machine(row) == {"critic/grad_norm/critic": 5.0, "rollout/samples": 6.0}
    assert is_of_machine("any_name/peak_memory_allocated_gb")


@pytest.mark.parametrize(
    "changes",
    [
        {"diffusion_step_strategy": "full"},
        {"diffusion_step_strategy": "full", "dmd2_critic_scoring": "original"},
        {"diffusion_step_strategy": "full", "dmd2_teacher_guidance_scale": "3", "micro_batch_size": "3"},
        {"diffusion_step_strategy": "full", "dmd2_critic_steps_per_student_step": "4"},
        {"dmd2_stop_step": "per_sample"},
    ],
    ids=lambda changes: " ".join(changes.values()),
)
def test_forwards_are_those_of_the_plan(ranks: Ranks, tmp_path: Path, changes: dict[str, str]) -> None:
    """Counted minus planned is 0 in every row; with the full law the sums are the printed plan's, to the last one."""
    flags = words(**changes)
    rows = run(ranks, tmp_path, flags).rows
    over = [value for row in rows for key, value in row.items() if key.endswith("forwards_over_plan")]
    assert len(over) == sum(2 + ("actor/lr" in row) for row in rows)
    assert set(over) == {0.0}
    parsed = parse(["--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "prompts.txt"), *flags])
    plan = asdict(build_plan(parsed.config, parsed.trainers).forwards_per_update)
    updates = sum("actor/lr" in row for row in rows)
    keys = {
        "critic": "critic/critic_forwards",
        "teacher": "critic/teacher_forwards",
        "student": "actor/student_forwards",
        "engine": "rollout/forwards",
    }
    counted = {name: sum(row.get(key, 0.0) for row in rows) / updates for name, key in keys.items()}
    planned = {name: plan[name] for name in keys}
    planned["critic"] += plan["scoring"]
    if "dmd2_stop_step" in changes:
        assert 4 * 24 <= 4 * counted.pop("engine") <= 4 * 24 * STEPS
        del planned["engine"]
    assert counted == planned
