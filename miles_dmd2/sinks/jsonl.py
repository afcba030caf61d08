"""One JSON object per rollout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


class JsonlSink:
    """Appends to `path`. A resumed run passes `keep_below`: rows of that rollout and later are dropped first."""

    def __init__(self, path: Path, keep_below: int) -> None:
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                row = _parsed(line)
                if row is not None and row["rollout"] < keep_below:
                    kept.append(line + "\n")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".partial")
        aside.write_text("".join(kept))
        aside.replace(path)
        self._file = path.open("a")

    def phase(self, rollout_id: int, name: str) -> None:
        """Phases are for people."""

    def metrics(self, rollout_id: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"rollout": rollout_id, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, float]]:
    """Every complete row of a metrics file; a line cut off by a crash is left out."""
    return [row for line in path.read_text().splitlines() if (row := _parsed(line)) is not None]


def _parsed(line: str) -> dict[str, float] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("rollout"), int) else None
