"""One run of the ring: the product's driver, engine, requests and trainers in one process, and what it reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from benchmarks.in_process import Engines, Group
from benchmarks.ring import PROMPT, ExactVelocity, Judge, Ring, RingAdapter, RingNetwork, fitted
from miles_dmd2.algo import rollout
from miles_dmd2.data.requests import TrainingRequests, grid
from miles_dmd2.driver import Weights, train
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.stopping import StopRequest
from miles_dmd2.training import ActorTrainer, CriticTrainer, OptimizerSettings, TrainerSettings, init_ranks
from miles_dmd2.training.scoring import ScoreSigma, Scoring
from miles_dmd2.types import Engines as EnginesProtocol
from miles_dmd2.types import SampleType, TrainerGroup

Input = Literal["simulation_ode", "simulation_sde", "forward_noise"]
CriticKind = Literal["shared", "told"]
INPUTS: tuple[Input, ...] = get_args(Input)
CRITICS: tuple[CriticKind, ...] = get_args(CriticKind)
SCORINGS: tuple[Scoring, ...] = get_args(Scoring)
HOPS: tuple[SampleType, ...] = get_args(SampleType)


@dataclass(frozen=True, slots=True)
class RingSettings:
    """All that the cells have in common. Windows are in samples; `real`: real points that forward_noise draws from."""

    rollouts: int = 250
    windows: int = 5
    window: int = 64
    num_steps: int = 4
    flow_shift: float = 3.0
    critic_lr: float = 2e-3
    student_lr: float = 3e-4
    ema_decay: float = 0.98
    score_lo: float = 0.02
    score_hi: float = 0.98
    score_shift: float = 1.0
    normalizer: Literal["sample", "batch"] = "batch"
    real: int = 16384
    width: int = 128
    depth: int = 3
    fit_steps: int = 2000
    judged: int = 2048
    reference: int = 4096
    ring: Ring = field(default_factory=Ring)

    @property
    def sigmas(self) -> tuple[float, ...]:
        return grid(self.num_steps, self.flow_shift)


@dataclass(frozen=True, slots=True)
class Cell:
    input: Input
    critic: CriticKind
    scoring: Scoring
    seed: int

    @property
    def key(self) -> str:
        return f"{self.input}/{self.critic}/{self.scoring}/seed {self.seed}"


class Bench:
    """What the cells share: the network that they start from, the judge and its noise."""

    def __init__(self, settings: RingSettings) -> None:
        self.settings = settings
        self.start, self.fit_error = fitted(settings.ring, settings.width, settings.depth, settings.fit_steps, seed=0)
        self.adapter = RingAdapter(settings.width, settings.depth, self.start)
        self.judge = Judge(settings.ring, settings.ring.samples(settings.reference, seed=1))
        generator = torch.Generator().manual_seed(2)
        self.noise = torch.randn(settings.judged, 2, generator=generator)
        self.hop_noise = torch.randn(settings.num_steps - 1, settings.judged, 2, generator=generator)

    def figures(self, weights: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
        """Hop -> quality of a student's samples, all from the same noise."""
        network = self._network(weights)
        return {hop: self.sampled(network, hop) for hop in HOPS}

    def by_step(self, weights: Mapping[str, Tensor]) -> dict[str, list[dict[str, float]]]:
        """Hop -> quality of a student's x0 at each stop step; the last is what it is used for."""
        network = self._network(weights)
        return {hop: [self.sampled(network, hop, stop) for stop in range(self.settings.num_steps)] for hop in HOPS}

    @torch.no_grad()
    def sampled(self, network: nn.Module, hop: SampleType, stop: int | None = None) -> dict[str, float]:
        sigmas, stop = torch.tensor(self.settings.sigmas), self.settings.num_steps - 1 if stop is None else stop
        _, x0 = rollout(network, self.noise, sigmas, stop, hop_noise=self.hop_noise if hop == "sde" else None)
        return asdict(self.judge(x0))

    def _network(self, weights: Mapping[str, Tensor]) -> nn.Module:
        network = RingNetwork(self.settings.width, self.settings.depth)
        network.load_state_dict(weights)
        return network

    def references(self, draws: int = 16) -> dict[str, Any]:
        """What to compare with: true samples, the exact teacher in the student's steps and in 50, and the start."""
        settings = self.settings
        floor = [asdict(self.judge(settings.ring.samples(settings.judged, seed=100 + i))) for i in range(draws)]
        exact = ExactVelocity(settings.ring)
        with torch.no_grad():
            _, many = rollout(exact, self.noise, torch.tensor(grid(50, 1.0)), 49)
        return {
            "floor": floor,
            "teacher_50": asdict(self.judge(many)),
            "teacher": {hop: self.sampled(exact, hop) for hop in HOPS},
            "start": self.figures(self.start),
            "fit_error": self.fit_error,
        }


class Evaluation:
    """`driver.Evaluation`: each quarter of the run, counted from its end, and more often in the last tenth.

    Keeps the figures, and the seconds that they cost.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.found: list[dict[str, Any]] = []
        self.wall = self.cpu = 0.0
        self.by_step: dict[str, Any] = {}
        self.total = bench.settings.rollouts

    def due(self, rollout_id: int) -> bool:
        left, often = self.total - rollout_id, max(1, self.total // 50)
        late = left <= 5 * often and left % often == 0
        return late or left % max(1, self.total // 4) == 0

    def __call__(self, rollout_id: int, engines: EnginesProtocol, weights: Weights) -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        figures: dict[str, Any] = {kind: self.bench.figures(update.payload) for kind, update in weights.items()}
        self.found.append({"rollout": rollout_id, **figures})
        if rollout_id == self.total:
            self.by_step = {kind: self.bench.by_step(update.payload) for kind, update in weights.items()}
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        return {}


class NoCheckpoints:
    """`driver.Checkpoints` of a run that is finished or done again."""

    def due(self, completed: int) -> bool:
        return False

    def __call__(
        self, completed: int, groups: Sequence[TrainerGroup], before: Callable[[], None] = lambda: None
    ) -> None:
        before()


class Counted:
    """`Sink` that sums the forwards of a run, as engine and trainers count them, and the seconds of its phases."""

    FORWARDS: ClassVar[Mapping[str, str]] = {
        "engine": "rollout/forwards",
        "critic": "critic/critic_forwards",
        "teacher": "critic/teacher_forwards",
        "student": "actor/student_forwards",
    }

    def __init__(self) -> None:
        self.forwards = dict.fromkeys(self.FORWARDS, 0)
        self.seconds: dict[str, float] = {}
        self.skipped = 0

    def phase(self, rollout_id: int, name: str) -> None:
        pass

    def metrics(self, rollout_id: int, values: Mapping[str, float]) -> None:
        for name, key in self.FORWARDS.items():
            self.forwards[name] += int(values.get(key, 0))
        for key, value in values.items():
            if key.startswith("time/"):
                phase = key.removeprefix("time/")
                self.seconds[phase] = self.seconds.get(phase, 0.0) + value
            if key.endswith("/skipped_steps"):
                self.skipped += int(value)

    def close(self) -> None:
        pass


def run_cell(bench: Bench, cell: Cell) -> dict[str, Any]:
    """Train one cell and measure it. Forwards are those that were counted, per student update."""
    settings = bench.settings
    critic, actor = trainers(bench, cell)
    engines = Engines(LocalEngine(bench.adapter, batch_size=1024, real_latents=real_points(settings, cell)))
    engines.sleep()
    critic.sleep()
    actor.sleep()
    groups = [Group(critic, keeps_ema=False), Group(actor, keeps_ema=True)]
    evaluation, sink = Evaluation(bench), Counted()
    wall, cpu = time.perf_counter(), time.process_time()
    train(
        range(settings.rollouts),
        requests(settings, cell),
        engines,
        groups,
        evaluation,
        NoCheckpoints(),
        sink,
        StopRequest(),
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "updates": {"critic": critic.updates, "student": actor.updates, "skipped": sink.skipped},
        "forwards_per_update": {name: count / actor.updates for name, count in sink.forwards.items()},
        "seconds": {
            "wall": wall - evaluation.wall,
            "cpu": cpu - evaluation.cpu,
            "phases": {name: value for name, value in sink.seconds.items() if name != "eval"},
        },
        "by_step": evaluation.by_step,
        "curve": evaluation.found,
    }


def trainers(bench: Bench, cell: Cell) -> tuple[CriticTrainer, ActorTrainer]:
    settings, ranks = bench.settings, init_ranks()

    def of(name: str, lr: float) -> TrainerSettings:
        optimizer = OptimizerSettings(lr=lr, beta1=0.0, weight_decay=0.0)
        return TrainerSettings(name=name, seed=cell.seed, optimizer=optimizer)

    critic = CriticTrainer(
        of("critic", settings.critic_lr),
        bench.adapter,
        bench.adapter.load_transformer(),
        ExactVelocity(settings.ring),
        ranks,
        score_sigma=ScoreSigma(settings.score_lo, settings.score_hi, settings.score_shift),
        scoring=cell.scoring,
        told_stop_steps=settings.num_steps if cell.critic == "told" else None,
    )
    actor = ActorTrainer(
        of("actor", settings.student_lr),
        bench.adapter,
        bench.adapter.load_transformer(),
        ranks,
        ema_decay=settings.ema_decay,
        normalizer=settings.normalizer,
    )
    return critic, actor


def real_points(settings: RingSettings, cell: Cell) -> Tensor | None:
    """True samples for forward_noise, others for each seed."""
    return settings.ring.samples(settings.real, seed=1000 + cell.seed) if cell.input == "forward_noise" else None


def requests(settings: RingSettings, cell: Cell) -> TrainingRequests:
    """Stop steps are drawn per sample. The hop of forward_noise is nobody's: it has none in training."""
    return TrainingRequests(
        prompts=[PROMPT],
        prompts_per_rollout=1,
        samples_per_prompt=settings.windows * settings.window,
        num_windows=settings.windows,
        sigmas=settings.sigmas,
        stop_law="per_sample",
        seed=cell.seed,
        sample_type="sde" if cell.input == "simulation_sde" else "ode",
        real_latents={PROMPT: range(settings.real)} if cell.input == "forward_noise" else None,
    )
