"""Every figure that a run logs, declared once: its source, name, reduction and meaning. See docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "sum", "max", "same", "std"]
Source = Literal["critic", "actor", "group", "rollout", "throughput", "time", "eval"]


@dataclass(frozen=True, slots=True)
class Metric:
    """`<source>/<name>`; of a trainer group the source is the group's name, and "group" stands for any of them.

    per_step: also logged as `<name>_step{i}`, over the samples that stopped at step i. where: not in every run, but
    with this. of_machine: seconds and bytes, which differ between two runs of the same bits. reduction: over the ranks
    of the group and the steps of the rollout; "driver" is one figure of the driver, which is not reduced.
    """

    source: Source
    name: str
    reduction: Reduction | Literal["driver"]
    meaning: str
    per_step: bool = False
    where: str = ""
    of_machine: bool = False


METRICS = (
    Metric("critic", "critic_loss", "mean", "of the critic, in --dmd2-critic-loss-space", per_step=True),
    Metric("critic", "grad_norm/critic", "mean", "norm of the gradient over all ranks, before clipping"),
    Metric("critic", "grad_norm_max/critic", "max", "the largest of the rollout's updates"),
    Metric("critic", "critic_forwards", "sum", "of the critic, in samples, counted as they happen"),
    Metric("critic", "teacher_forwards", "sum", "of the teacher, in samples; a guided one has two per sample"),
    Metric("actor", "dmd_loss", "mean", "half the mean square of the DMD gradient", per_step=True),
    Metric("actor", "dmd2_score_gap_abs_mean", "mean", "mean abs(x0_fake - x0_real)", per_step=True),
    Metric(
        "actor",
        "dmd2_teacher_dist_abs_mean",
        "mean",
        "mean abs(x0 - x0_real): student and teacher, the normalizer of the gradient",
        per_step=True,
    ),
    Metric("actor", "dmd2_grad_abs_mean", "mean", "mean abs of the DMD gradient", per_step=True),
    Metric("actor", "dmd2_x0_mean", "mean", "mean of the student's x0", per_step=True),
    Metric("actor", "dmd2_x0_std", "std", "standard deviation of all values of the student's x0", per_step=True),
    Metric(
        "actor",
        "x0_mean_abs_diff",
        "mean",
        "drift: mean abs(x0 of the trainer - x0 of the engine) at the same x_k; see the drift gate",
        per_step=True,
    ),
    Metric("actor", "x0_mean_abs_diff_max", "max", "the drift of the worst sample"),
    Metric("actor", "dmd2_degenerate_samples", "sum", "samples whose normalizer is below --dmd2-normalizer-eps"),
    Metric("actor", "grad_norm/student", "mean", "norm of the gradient over all ranks, before clipping"),
    Metric("actor", "grad_norm_max/student", "max", "the same: one update a rollout"),
    Metric("actor", "student_forwards", "sum", "of the student, in samples, counted as they happen"),
    Metric("group", "lr", "same", "learning rate of the last update"),
    Metric("group", "skipped_steps", "same", "updates of this rollout that were not finite and not taken"),
    Metric("group", "forwards_over_plan", "sum", "forwards counted minus those that the options ask for: 0"),
    Metric(
        "group",
        "peak_memory_allocated_gb",
        "max",
        "most that torch had allocated on a rank's device since its last step",
        where="--device cuda",
        of_machine=True,
    ),
    Metric(
        "group",
        "peak_memory_resident_gb",
        "max",
        "most resident memory of a rank's process since its last step: tensors, but also code, libraries, free blocks",
        where="--device cpu",
        of_machine=True,
    ),
    Metric(
        "group",
        "device_memory_used_gb",
        "max",
        "in use on the whole device after a step, by whomever: engines, other groups, other programs. On cpu the "
        "device is the host",
        of_machine=True,
    ),
    Metric("rollout", "samples", "sum", "samples generated"),
    Metric("rollout", "forwards", "sum", "student forwards of the engines, in samples, counted as they happen"),
    Metric(
        "rollout",
        "forwards_over_plan",
        "sum",
        "forwards counted minus the stop step + 1 of each request (1 on real latents): 0. A server without the plugin "
        "runs every sample to the end",
    ),
    Metric("rollout", "reward_mean", "mean", "of the rollout's samples; 0 without --custom-rm-path"),
    Metric("rollout", "weight_step", "driver", "student updates behind the weights that generated"),
    Metric("rollout", "faults", "sum", "failed attempts at a sample", where="--rollout-engine sglang"),
    Metric("rollout", "retries", "sum", "samples asked for again", where="--rollout-engine sglang"),
    Metric("rollout", "restarts", "sum", "servers started again", where="--rollout-engine sglang"),
    Metric("rollout", "dropped", "sum", "servers given up", where="--rollout-engine sglang"),
    Metric(
        "throughput",
        "samples_per_second",
        "driver",
        "samples over the seconds of sync, generate and all groups; evals and checkpoints are not in it",
        of_machine=True,
    ),
    Metric("throughput", "generated_per_second", "driver", "samples over the seconds of generate", of_machine=True),
    Metric("time", "export", "driver", "seconds of the first export, in the first row", of_machine=True),
    Metric("time", "sync", "driver", "seconds until the engines serve and have proven the weights", of_machine=True),
    Metric("time", "generate", "driver", "seconds of the engines", of_machine=True),
    Metric("time", "<group>", "driver", "seconds of a group: wake, train, export, sleep", of_machine=True),
    Metric(
        "time", "eval", "driver", "seconds of an eval", where="--eval-prompt-data, rows with an eval", of_machine=True
    ),
    Metric(
        "time",
        "save",
        "driver",
        "seconds of a checkpoint; those of its renaming are in the next row",
        where="rows with a checkpoint",
        of_machine=True,
    ),
    Metric(
        "eval",
        "<figure>_raw, <figure>_ema",
        "driver",
        "what --eval-metrics-path returns, by the weights that generated",
        where="--eval-metrics-path, rows with an eval",
    ),
    Metric(
        "eval",
        "reward_raw, reward_ema",
        "driver",
        "mean reward of the eval's samples",
        where="--custom-rm-path, rows with an eval",
    ),
)


def reductions(source: Source, *, per_step: bool = False) -> dict[str, Reduction]:
    """Name -> reduction of a source's metrics: of those that are also logged per stop step, or of the others."""
    chosen = (m for m in METRICS if m.source == source and m.per_step == per_step)
    return {m.name: m.reduction for m in chosen if m.reduction != "driver"}


def is_of_machine(key: str) -> bool:
    """Whether a logged key is seconds or bytes, so that it may differ between two runs of the same bits."""
    if key.startswith(("time/", "throughput/")):
        return True
    name = key.rpartition("/")[2]
    return any(m.name == name for m in METRICS if m.of_machine and m.source == "group")


def without_machine(values: Mapping[str, float]) -> dict[str, float]:
    """The figures that two runs of the same bits share."""
    return {key: value for key, value in values.items() if not is_of_machine(key)}
