"""What critic and actor trainers share: one trained network, its optimizer and average, sleep, and its checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from miles_dmd2.config.lora import Lora
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.offload import Entry, Residence
from miles_dmd2.observability.declared import reductions
from miles_dmd2.training.bad_batch import dtype_name, write_facts, write_samples
from miles_dmd2.training.batching import MicroBatch, TrainInputHook, Windows, collate, cut, prepare
from miles_dmd2.training.checkpoint import rank_file, read_tensors, write_tensors
from miles_dmd2.training.device_memory import DeviceMemory
from miles_dmd2.training.distributed import Ranks
from miles_dmd2.training.ema import Ema
from miles_dmd2.training.lora import add_lora
from miles_dmd2.training.metrics import MetricBuffer, Reduction, per_step
from miles_dmd2.training.network import BaseNetwork, Network
from miles_dmd2.training.optimizer import AdamW, OptimizerSettings, clip_gradients, gradient_norm, learning_rate
from miles_dmd2.training.parts import PICTURE_ALONE, silent_heads, trained_parts
from miles_dmd2.training.sharding import row_range
from miles_dmd2.types import GroupState, Role, RolloutSample, ScoreRow

logger = logging.getLogger(__name__)
MOST_DUMPS = 3  # bad batches that one process keeps: each has the group's whole state


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Values that both roles need. `micro_batch_size` None: a rank's share of a window in one forward.

    Master weights, moments and averages are `master_dtype`, forwards of the transformers `forward_dtype`.
    `lora`: None trains all parameters. `bad_batch_directory`: where the first steps that are not finite are kept; None:
    nowhere.
    """

    name: str
    seed: int
    optimizer: OptimizerSettings
    micro_batch_size: int | None = None
    forward_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype = torch.float32
    gradient_checkpointing: bool = False
    lora: Lora | None = None
    train_input_hook: TrainInputHook | None = None
    bad_batch_directory: Path | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step as this rank saw it: losses by sample id, the gradient norm over all ranks, whether it was taken."""

    losses: Mapping[int, float]
    gradient_norm: float
    taken: bool


@dataclass(slots=True)
class _Inputs:
    """What the rollout in work is trained on, for a bad batch."""

    rollout_id: int
    samples: Mapping[int, RolloutSample]
    scores: Mapping[int, ScoreRow] = field(default_factory=dict)


class Trainer:
    """One rank of one trainer group. Awake after construction; every method but wake, sleep, save and load needs it.

    Counters are in *successful* updates: the learning rate and the average follow them, so a skipped step changes
    nothing but the count of skipped steps.
    """

    role: ClassVar[Role]
    network_role: ClassVar[str]  # the trained network's name in metrics and files
    metric_names: ClassVar[Mapping[str, Reduction]]  # reported as they are
    metric_names_per_step: ClassVar[Mapping[str, Reduction]]  # and also per stop step

    def __init__(
        self,
        settings: TrainerSettings,
        adapter: ModelAdapter,
        module: nn.Module,
        ranks: Ranks,
        *,
        part_weights: Mapping[str, float] = PICTURE_ALONE,
        ema_decay: float = 0.0,
        ema_start: int = 0,
        frozen: Callable[[Network], Network | BaseNetwork] | None = None,
        before_sharding: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """`frozen`: makes the frozen network beside the trained one, which it is given. `before_sharding`: as
        `Network` has it.
        """
        self.settings, self.adapter, self.ranks = settings, adapter, ranks
        self.parts = trained_parts(adapter, part_weights)
        self.network = Network(
            self.network_role,
            adapter,
            module,
            ranks,
            trainable=True,
            forward_dtype=settings.forward_dtype,
            master_dtype=settings.master_dtype,
            silent=silent_heads(adapter, self.parts),
            gradient_checkpointing=settings.gradient_checkpointing,
            adapt=None if settings.lora is None else partial(self._adapt, settings.lora),
            before_sharding=before_sharding,
        )
        self.optimizer = AdamW(self.network.trained, settings.optimizer)
        self.ema = Ema(self.optimizer.shards, ema_decay, ema_start) if ema_decay else None
        self.updates = 0
        self.skipped_steps = 0
        self._skipped_in_a_row = 0
        self.last_step: StepReport | None = None
        self._inputs: _Inputs | None = None
        self._dumps = 0
        self._memory = DeviceMemory(ranks.device)
        self._networks: list[Network | BaseNetwork] = [self.network]
        if frozen is not None:
            self._networks.append(frozen(self.network))
        self.residence = Residence(self._entries())
        for network in self._networks:
            network.refuse_while_asleep(self.residence)

    @property
    def is_awake(self) -> bool:
        return self.residence.awake

    def wake(self) -> None:
        self.residence.wake()

    def sleep(self) -> None:
        """Drops gradients, then frees the device: parameters, moments, averages and frozen networks hold no byte."""
        self.optimizer.zero_grad()
        self.residence.sleep()

    def save(self, directory: Path) -> GroupState:
        """Write this rank's shards below `directory`, awake or asleep (then from host copies, without waking)."""
        name = rank_file(self.settings.name, self.ranks.rank, self.ranks.world_size)
        digest = write_tensors(directory / name, self._state())
        return GroupState({name: digest}, self.counters())

    def load(self, directory: Path, counters: Mapping[str, int], world_size: int | None = None) -> None:
        """Continue from what `world_size` ranks (default: as many as now) saved, awake or asleep.

        ValueError: no such file, or names, shapes, dtypes or counters other than this trainer's.
        """
        if counters.keys() != self.counters().keys():
            raise ValueError(f"{directory}: counters of {self.settings.name} are {sorted(counters)}, not as expected")
        own = self.ranks
        if world_size in (None, own.world_size):
            read_tensors([directory / rank_file(self.settings.name, own.rank, own.world_size)], self._state(), {})
        else:
            files = [directory / rank_file(self.settings.name, rank, world_size) for rank in range(world_size)]
            read_tensors(files, self._state(), self._rows())
        self.updates = counters["updates"]
        self.skipped_steps = counters["skipped_steps"]
        self._skipped_in_a_row = counters["skipped_in_a_row"]

    def counters(self) -> dict[str, int]:
        return {
            "updates": self.updates,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def _adapt(self, lora: Lora, module: nn.Module, untrained: Collection[str]) -> None:
        add_lora(module, lora, self.role, self.settings.seed, untrained)

    def _entries(self) -> list[Entry]:
        state = {"exp_avg": self.optimizer.exp_avg, "exp_avg_sq": self.optimizer.exp_avg_sq}
        if self.ema is not None:
            state["ema"] = self.ema.average
        entries = [entry for network in self._networks for entry in network.entries()]
        for kind, tensors in state.items():
            entries += [Entry(f"{kind}/{name}", tensor) for name, tensor in tensors.items()]
        return entries

    def _state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, by name: all that sleeps and is not frozen."""
        return {name: self.residence.view(name) for name, entry in self.residence.entries.items() if not entry.frozen}

    def _rows(self) -> dict[str, tuple[int, int]]:
        """Of each tensor of the state, this rank's first row and the rows of all ranks."""
        parameters = dict(self.network.module.named_parameters())
        return {name: row_range(parameters[name.partition("/")[2]]) for name in self._state()}

    def _prepare(
        self, rollout_id: int, windows: Windows, samples: Iterable[RolloutSample]
    ) -> tuple[list[list[MicroBatch]], MetricBuffer]:
        """This rank's micro-batches per window, and an empty buffer of the metrics that the role declares."""
        self.residence.require_awake(f"{self.settings.name}.train")
        facts = {"rollout id": rollout_id, "micro-batch size": self.settings.micro_batch_size}
        shares = prepare(samples, windows, self.ranks, self.settings.train_input_hook, facts=facts)
        self._inputs = _Inputs(rollout_id, {sample.sample_id: sample for share in shares for sample in share})
        device, dtype = self.ranks.device, self.settings.master_dtype
        batches = [
            [collate(self.adapter, part, device, dtype) for part in cut(share, self.settings.micro_batch_size)]
            for share in shares
        ]
        for network in self._networks:
            network.forwards = 0
        return batches, self._metrics(len(batches[0][0].sigmas) - 1)

    def _metrics(self, num_steps: int) -> MetricBuffer:
        declared: dict[str, Reduction] = {**self.metric_names, **reductions("group")}
        for name, reduction in self.metric_names_per_step.items():
            declared |= per_step(name, reduction, num_steps)
        return MetricBuffer(declared)

    def _backward(self, sample_losses: Tensor, window: Sequence[int]) -> None:
        """Accumulate the gradient of the window's mean loss. FSDP averages over ranks, hence the factor."""
        (sample_losses.sum() * (self.ranks.world_size / len(window))).backward()

    def _update(
        self, losses: Sequence[Tensor], ids: Sequence[int], window: Sequence[int], metrics: MetricBuffer
    ) -> bool:
        """One optimizer step on the accumulated gradients, unless a loss or their norm is not finite on any rank.

        `losses` are the `[batch]` losses of this rank's micro-batches, `ids` their samples. Returns whether the step
        was taken. RuntimeError after `max_skipped_steps` skipped ones in a row.
        """
        gradients = list(self.optimizer.gradients().values())
        norm = gradient_norm(gradients, self.ranks)
        values = torch.cat([loss.detach() for loss in losses]).tolist()
        bad = [i for i, value in zip(ids, values, strict=True) if not math.isfinite(value)]
        taken = self.ranks.all_true(not bad and math.isfinite(norm))
        self.last_step = StepReport(dict(zip(ids, values, strict=True)), norm, taken)
        if taken:
            clip_gradients(gradients, norm, self.settings.optimizer.clip_grad)
            self.optimizer.step(self.updates)
            self.updates += 1
            self._skipped_in_a_row = 0
            if self.ema is not None:
                self.ema.update(self.updates)
            metrics.add(f"grad_norm/{self.network_role}", norm)
            metrics.add(f"grad_norm_max/{self.network_role}", norm)
        self._memory.step()
        self.optimizer.zero_grad()
        if not taken:
            self._skip([i for part in self.ranks.gather(bad) for i in part], ids, window, norm)
        return taken

    def _skip(self, bad: Sequence[int], ids: Sequence[int], window: Sequence[int], norm: float) -> None:
        kept = self._dump(bad, ids, window, norm)
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        where = f"loss of samples {bad}" if bad else f"gradient norm {norm} of samples {window[0]} to {window[-1]}"
        text = f"{self.settings.name}: step {self.updates} skipped, not finite: {where}{kept}"
        logger.warning("%s; %d in a row", text, self._skipped_in_a_row)
        if self._skipped_in_a_row >= self.settings.optimizer.max_skipped_steps:
            raise RuntimeError(f"{text}; {self._skipped_in_a_row} in a row, so the run stops")

    def _dump(self, bad: Sequence[int], ids: Sequence[int], window: Sequence[int], norm: float) -> str:
        """Keep the step's batch and state, if asked for; where, in words. A full disk does not end a run here."""
        root, inputs = self.settings.bad_batch_directory, self._inputs
        if root is None or inputs is None or self._dumps == MOST_DUMPS:
            return ""
        self._dumps += 1
        directory = root / f"{self.settings.name}_rollout_{inputs.rollout_id:06d}_update_{self.updates:06d}"
        try:
            write_samples(directory, self.ranks.rank, [inputs.samples[i] for i in ids], inputs.scores)
            self.save(directory)
            if self.ranks.rank == 0:
                write_facts(directory, self._facts(bad, window, norm))
        except OSError as error:
            logger.warning("%s: the bad batch could not be kept: %s", self.settings.name, error)
            return ""
        return f" (kept in {directory})"

    def _facts(self, bad: Sequence[int], window: Sequence[int], norm: float) -> dict[str, Any]:
        """What `training/replay.py` needs beside tensors."""
        assert self._inputs is not None
        settings = {
            "name": self.settings.name,
            "seed": self.settings.seed,
            "optimizer": asdict(self.settings.optimizer),
            "micro_batch_size": self.settings.micro_batch_size,
            "forward_dtype": dtype_name(self.settings.forward_dtype),
            "master_dtype": dtype_name(self.settings.master_dtype),
            "lora": None if self.settings.lora is None else asdict(self.settings.lora),
        }
        return {
            "role": self.role,
            "rollout_id": self._inputs.rollout_id,
            "window": list(window),
            "not_finite": list(bad),
            "gradient_norm": str(norm),
            "counters": self.counters(),
            "world_size": self.ranks.world_size,
            "checkpoint": self.adapter.checkpoint,
            "height": self.adapter.height,
            "width": self.adapter.width,
            "num_frames": self.adapter.num_frames,
            "settings": settings,
            "own": self._own_facts(),
        }

    def _own_facts(self) -> dict[str, Any]:
        """The role's own arguments of construction, as JSON has them."""
        raise NotImplementedError

    def _reduce(self, metrics: MetricBuffer, skipped: int, planned: int) -> dict[str, float]:
        """The rollout's figures over all ranks. `planned`: forwards of this rank that the options ask for."""
        self._inputs = None
        metrics.add("skipped_steps", skipped)
        metrics.add("lr", learning_rate(self.settings.optimizer, max(0, self.updates - 1)))
        for network in self._networks:
            metrics.add(f"{network.role}_forwards", network.forwards)
        metrics.add("forwards_over_plan", sum(network.forwards for network in self._networks) - planned)
        for name, value in self._memory.take().items():
            metrics.add(name, value)
        return metrics.reduce(self.ranks)
