"""A whole run in this process, from flags to weights, on the toy family: the product's own wiring without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import train_diffusion
from benchmarks.in_process import Engines, Group
from miles_dmd2.checkpointing import IntervalCheckpoints
from miles_dmd2.cluster.launch import trainer_job, worker_settings
from miles_dmd2.cluster.process import dtype_of
from miles_dmd2.cluster.trainer_group import build_trainer
from miles_dmd2.config import build_plan, parse, student_clock
from miles_dmd2.data.latents import read_latents
from miles_dmd2.driver import train
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.evaluation import NoEvaluation
from miles_dmd2.models.base import Components
from miles_dmd2.models.registry import build_adapter
from miles_dmd2.observability.declared import without_machine
from miles_dmd2.stopping import StopRequest
from miles_dmd2.training import Ranks
from miles_dmd2.types import Conditioning, RolloutRequest
from tests.training.toy import LABELS, ToyAdapter, ToyTransformer

PROMPTS = ("one", "two", "three")


class PlainTransformer(ToyTransformer):
    """The toy with no tied weight and no buffer in its state: what an engine can be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.tied_too.weight = nn.Parameter(self.tied.weight.detach().clone())
        del self.offset
        self.register_buffer("offset", torch.tensor([0.25]), persistent=False)


class PlainAdapter(ToyAdapter):
    """Prompts become labels by their length; the empty prompt has one of its own."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self.checkpoint = checkpoint

    def load_transformer(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return PlainTransformer().to(dtype)

    def load_components(self, dtype: torch.dtype = torch.float32) -> Components:
        return Components(nn.Linear(1, 1), None, nn.Linear(1, 1))

    def encode_prompts(self, components: Components, prompts: Sequence[str]) -> list[Conditioning]:
        return [{"label": torch.eye(LABELS)[len(prompt) % LABELS]} for prompt in prompts]


class Rows:
    """A sink that keeps the figures: all in `logged`, in `rows` those that do not depend on the machine."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.rows: list[dict[str, float]] = []

    def phase(self, rollout_id: int, name: str) -> None:
        pass

    def metrics(self, rollout_id: int, values: Mapping[str, float]) -> None:
        self.logged.append(dict(values))
        self.rows.append(without_machine(values))

    def close(self) -> None:
        pass


class Checkpoints:
    """Writes after rollout `at` and keeps the counters."""

    def __init__(self, directory: Path, at: int | None) -> None:
        self.directory, self.at = directory, at
        self.counters: dict[str, Mapping[str, int]] = {}

    def due(self, completed: int) -> bool:
        return completed == self.at

    def __call__(self, completed: int, groups: Sequence[Group], before: Callable[[], None] = lambda: None) -> None:
        self.counters = {group.name: group.save(self.directory).counters for group in groups}
        before()


@dataclass(frozen=True)
class Outcome:
    """All that a run can differ in."""

    weights: dict[str, Tensor]
    rows: list[dict[str, float]]
    requests: list[RolloutRequest]
    counters: dict[str, Mapping[str, int]]
    logged: list[dict[str, float]]

    def differs(self, other: Outcome) -> list[str]:
        """In what: weights, counts (figures of a rollout), draws (requests)."""
        same = self.weights.keys() == other.weights.keys() and all(
            torch.equal(value, other.weights[name]) for name, value in self.weights.items()
        )
        found = {"weights": not same, "counts": self.rows != other.rows, "draws": self.requests != other.requests}
        return [name for name, differ in found.items() if differ]


def run(
    ranks: Ranks,
    directory: Path,
    flags: Sequence[str],
    *,
    start: int = 0,
    save_at: int | None = None,
    counters: Mapping[str, Mapping[str, int]] | None = None,
    pipeline: Path | None = None,
) -> Outcome:
    """`directory` holds prompts.txt and, for a continued run, what `save_at` wrote there. `pipeline`: train this one
    instead of the toy, and write sealed checkpoints at each --save-interval, as a run does.
    """
    (directory / "prompts.txt").write_text("\n".join(PROMPTS))
    required = ["--hf-checkpoint", str(pipeline or directory), "--prompt-data", str(directory / "prompts.txt")]
    parsed = parse([*required, *flags])
    config, trainers = parsed.config, parsed.trainers
    adapter = PlainAdapter(directory.resolve()) if pipeline is None else build_adapter(pipeline, *config.canvas)
    latents = config.algorithm.dmd2_latents
    real = None if latents is None else read_latents(latents).latents
    engine = LocalEngine(adapter, dtype=dtype_of(config.model.forward_dtype), real_latents=real)
    engines = Engines(engine)
    guided = config.algorithm.dmd2_teacher_guidance_scale != 1
    (uncond,) = engine.conditioning([config.algorithm.dmd2_negative_prompt or ""])
    engine.sleep()
    groups = []
    for spec in trainers:
        job = trainer_job(config, spec, worker_settings(config))
        trainer = build_trainer(job, adapter, ranks, uncond if guided else None)
        if counters is not None:
            trainer.load(directory, counters[trainer.role])
        trainer.sleep()
        groups.append(Group(trainer, keeps_ema=config.keeps_ema))
    source = train_diffusion.training_requests(config, trainers, build_plan(config, trainers))
    sink, checkpoints = Rows(), Checkpoints(directory, save_at)
    rollouts = range(start, config.rollout.num_rollout)
    clock = student_clock(config, trainers)
    writer: Checkpoints | IntervalCheckpoints = checkpoints
    if pipeline is not None:
        writer = IntervalCheckpoints(
            config.save_dir,
            config.run.save_interval,
            config.rollout.num_rollout,
            train_diffusion.options(config),
            train_diffusion.run_facts(config, trainers),
        )
    exported = train(rollouts, source, engines, groups, NoEvaluation(), writer, sink, StopRequest(), clock)
    weights = {f"{kind}/{name}": value for kind, update in exported.items() for name, value in update.payload.items()}
    critic = groups[0].trainer
    critic.wake()
    weights |= {f"critic/{name}": value.detach().clone() for name, value in critic.network.module.named_parameters()}
    return Outcome(weights, sink.rows, engines.requests, checkpoints.counters, sink.logged)
