"""Trainer groups that save a few bytes, for tests of checkpoints as a whole."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from miles_dmd2.types import GroupState, Role


@dataclass
class FileGroup:
    """`fail`: what its save raises after it has written."""

    name: str
    role: Role
    fail: Exception | None = None
    updates: int = 7

    def save(self, directory: Path) -> GroupState:
        path = directory / self.name / "rank_00000_of_00001.safetensors"
        path.parent.mkdir()
        path.write_bytes(self.name.encode() * 10)
        if self.fail:
            raise self.fail
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return GroupState({str(path.relative_to(directory)): digest}, {"updates": self.updates})
