"""Checkpoints of a whole run: one directory with every group's files, and a manifest that is written last.

`step_000123` is the state after 123 rollouts. It is written beside itself (`.step_000123.partial`), flushed to disk
and renamed, so a directory of that name is complete or does not exist, and all groups in it are of the same moment.
Tensors are safetensors, everything else is JSON: nothing in a checkpoint is ever unpickled.
"""

from miles_dmd2.checkpointing.manifest import (
    CheckpointError,
    Manifest,
    RunFacts,
    SavedGroup,
    config_hash,
    package_versions,
    read_manifest,
)
from miles_dmd2.checkpointing.resuming import Continued, continue_from, sound_beside
from miles_dmd2.checkpointing.retention import Retention
from miles_dmd2.checkpointing.saving import IntervalCheckpoints, merge_states, sweep

__all__ = [
    "CheckpointError",
    "Continued",
    "IntervalCheckpoints",
    "Manifest",
    "Retention",
    "RunFacts",
    "SavedGroup",
    "config_hash",
    "continue_from",
    "merge_states",
    "package_versions",
    "read_manifest",
    "sound_beside",
    "sweep",
]
