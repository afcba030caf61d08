"""The memory plan against what trainers and the local engine really hold, on a real transformer class."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from miles_dmd2.config import parse
from miles_dmd2.config.headers import read_components
from miles_dmd2.config.lora import Lora
from miles_dmd2.config.memory import build_memory, unit_values
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.offload import held_bytes
from miles_dmd2.models.registry import build_adapter
from miles_dmd2.training import ActorTrainer, CriticTrainer, OptimizerSettings, Ranks, TrainerSettings
from miles_dmd2.training.trainer import Trainer
from tests.families import Tiny, adapter, checkpoint, checkpoints, tiny
from tests.tiny_wan import build
from tests.training.pool import RankPool

__all__ = ["adapter", "checkpoint", "checkpoints", "tiny"]

CANVAS = (48, 32, 5)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family without idle parameters, which have no moments and are not told apart by the plan."""
    return build(tmp_path_factory.mktemp("tiny") / "wan")


def planned(checkpoint: Path, *flags: str) -> dict[str, dict[str, dict[str, int]]]:
    """Phase -> place -> parts, of the first node."""
    required = ["--hf-checkpoint", "p", "--num-rollout", "1", "--prompt-data", "p", "--rollout-batch-size", "320"]
    parsed = parse([*required, "--device", "cuda", "--student-ema-decay", "0.9", *flags])
    plan = build_memory(parsed.config, parsed.trainers, read_components(checkpoint))
    return {phase.name: {"device": phase.device, "host": phase.host} for phase in plan.nodes[0].phases}


def measured(ranks: Ranks, checkpoint: Path, lora: Lora | None = None) -> dict[str, dict[str, int]]:
    """Bytes of rank 0's state, awake, and of its host copy, asleep."""
    adapter = build_adapter(checkpoint, *CANVAS)
    settings = TrainerSettings("critic", 0, OptimizerSettings(lr=1e-3), lora=lora)
    load = adapter.load_transformer
    critic = CriticTrainer(settings, adapter, load(), load() if lora is None else None, ranks)
    actor = ActorTrainer(settings, adapter, load(), ranks, ema_decay=0.9)
    found = {"critic": _state(critic), "actor": _state(actor)}
    if lora is None:
        found["critic"]["teacher"] = _local(critic.teacher.module.parameters())
    assert actor.ema is not None
    found["actor"]["average"] = sum(part.nbytes for part in actor.ema.average.values())
    for name, trainer in (("critic", critic), ("actor", actor)):
        buffers = sum(e.tensor.nbytes for e in trainer.residence.entries.values() if " buffer/" in e.name)
        trainer.sleep()
        slots = trainer.residence._slots.values()
        found[name]["host"] = sum(slot.host.nbytes for slot in slots if slot.host is not None) - buffers
    return found


def _state(trainer: Trainer) -> dict[str, int]:
    optimizer = trainer.optimizer
    moments = [*optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()]
    own = trainer.network.trained
    found = {"master weights": _local(own.values()), "moments": sum(part.nbytes for part in moments)}
    if trainer.settings.lora is not None:
        found["frozen base"] = _local(p for name, p in trainer.network.module.named_parameters() if name not in own)
    return found


def _local(parameters: Iterable[torch.nn.Parameter]) -> int:
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    return sum(part.nbytes for part in parts)


@pytest.mark.parametrize("lora", [None, Lora(3, 3)], ids=["all parameters", "adapters"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_trainer_holds_what_the_plan_says(
    ranks: Ranks, two_ranks: RankPool, wan: Path, count: int, lora: Lora | None
) -> None:
    found = measured(ranks, wan, lora) if count == 1 else two_ranks.run(measured, wan, lora)[0]
    rank = [] if lora is None else ["--lora-rank", str(lora.rank)]
    plan = planned(wan, "--actor-num-gpus-per-node", str(count), *rank)
    assert ("teacher" in plan["critic"]["device"]) == (lora is None), "with an adapter its base is the teacher"
    for name in ("critic", "actor"):
        for what, size in found[name].items():
            if what == "host":
                copies = plan[name]["host"][f"host copy of {name}"] // count
                assert copies == size, "buffers, which do not grow with the model, are all that the plan leaves out"
            else:
                assert plan[name]["device"][what] == size, what
    if count == 1:
        module = build_adapter(wan, *CANVAS).load_transformer()
        buffers = sum(buffer.nbytes for buffer in module.buffers())
        whole = "master weights" if lora is None else "frozen base"
        assert found["critic"][whole] == held_bytes(module) - buffers


def test_gradients_are_as_large_as_the_plan_says(ranks: Ranks, wan: Path) -> None:
    adapter = build_adapter(wan, *CANVAS)
    settings = TrainerSettings("actor", 0, OptimizerSettings(lr=1e-3))
    actor = ActorTrainer(settings, adapter, adapter.load_transformer(), ranks)
    for parameter in actor.network.module.parameters():
        parameter.sum().backward()
    held = sum(gradient.nbytes for gradient in actor.optimizer.gradients().values())
    assert planned(wan)["actor"]["device"]["gradients"] == held


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_local_engine_holds_what_the_plan_says(wan: Path, name: str, dtype: torch.dtype) -> None:
    engine = LocalEngine(build_adapter(wan, *CANVAS), dtype=dtype)
    buffers = sum(buffer.nbytes for module in engine._modules() for buffer in module.buffers())
    planned_bytes = sum(planned(wan, "--forward-dtype", name)["generate"]["device"].values())
    kept = 0 if name == "fp32" else 0.03 * planned_bytes  # a few that the class keeps in fp32
    assert planned_bytes <= engine.device_bytes() - buffers <= planned_bytes + kept
    engine.close()


def test_blocks_are_told_by_their_numbers(tiny: Tiny, adapter: ModelAdapter, checkpoint: Path) -> None:
    """The largest numbered block of the headers is the largest unit that FSDP2 gathers."""
    transformer = adapter.load_transformer()
    units = [sum(p.numel() for p in unit.parameters()) for unit in adapter.shard_units(transformer)]
    assert unit_values(read_components(checkpoint)["transformer"])[0] == max(units)
