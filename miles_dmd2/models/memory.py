"""The memory plan of a run's checkpoint: from its headers, as its family is trained and served."""

from __future__ import annotations

from collections.abc import Sequence

from miles_dmd2.config import Config, TrainerSpec
from miles_dmd2.config.headers import read_components
from miles_dmd2.config.memory import MemoryPlan, build_memory
from miles_dmd2.models.registry import build_adapter


def plan_memory(config: Config, trainers: Sequence[TrainerSpec]) -> MemoryPlan:
    """ConfigError: files that cannot be read. Nothing is loaded."""
    adapter = build_adapter(config.model.hf_checkpoint, *config.canvas)
    serving = adapter.serving if config.rollout.rollout_engine == "sglang" else None
    started = trainers if config.rollout.debug_rollout_only is None else ()
    components = read_components(config.model.hf_checkpoint)
    width = None if serving is None else serving.served_width
    return build_memory(config, started, components, width, adapter.weight_shapes())
