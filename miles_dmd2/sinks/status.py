"""What a run is doing at the moment, for people and scripts that look from outside."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path


class StatusSink:
    """Keeps `path` up to date: pid of the driver, rollout, phase ("end" at last), and since when (seconds of 1970)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rollout = 0

    def phase(self, rollout_id: int, name: str) -> None:
        self._rollout = rollout_id
        self._write(name)

    def metrics(self, rollout_id: int, values: Mapping[str, float]) -> None:
        """Phases are enough."""

    def close(self) -> None:
        self._write("end")

    def _write(self, phase: str) -> None:
        content = {"pid": os.getpid(), "rollout": self._rollout, "phase": phase, "since": time.time()}
        aside = self._path.with_name(f".{self._path.name}.partial")
        aside.write_text(json.dumps(content) + "\n")
        aside.replace(self._path)
