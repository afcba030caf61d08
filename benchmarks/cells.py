"""Finished cells of a benchmark as lines of a JSONL file: appended one by one, skipped at the next start.

Each line has the cell's key and all settings that it was made with. A file whose lines were made with other settings
than those asked for is refused, so that no table mixes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_dmd2.config.errors import ConfigError, show


class CellFile:
    """`rows`: key -> row, in the order of the file. One process writes a file at a time."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Reads what is there; a last line that was being written when the process died is cut off.

        ConfigError: a line that is no cell, or of other settings.
        """
        self.path = path
        self._settings = json.loads(json.dumps(settings))
        self.rows = {row["key"]: row for row in self._read()}

    def append(self, key: str, row: Mapping[str, Any]) -> None:
        """On the disk when this returns. ConfigError: the file cannot be written."""
        line = json.dumps({"key": key, "settings": self._settings, **row})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{show(self.path)}: cannot be written ({error.strerror}); give another --out") from None
        self.rows[key] = json.loads(line)

    def _read(self) -> list[dict[str, Any]]:
        rows = read_rows(self.path, missing_ok=True)
        for row in rows:
            if row["settings"] != self._settings:
                raise ConfigError(
                    f"{show(self.path)}: cell {show(row['key'])} was made with other settings "
                    f"({_difference(row['settings'], self._settings)}); give another --out, or remove the file"
                )
        return rows


def read_rows(path: Path, *, missing_ok: bool = False) -> list[dict[str, Any]]:
    """All finished cells of a file. ConfigError: not readable, or a line that is no cell."""
    if missing_ok and not path.exists():
        return []
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{show(path)}: not readable ({error}); give a file that this benchmark wrote") from None
    whole, newline, torn = text.rpartition("\n")
    if torn:
        os.truncate(path, len((whole + newline).encode()))
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict) or not {"key", "settings"} <= row.keys():
            raise ConfigError(f"{show(path)}: line {number} is no finished cell; remove the line, or give another file")
        rows.append(row)
    return rows


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first setting that differs, in words."""
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            return f"{name} {show(before.get(name))}, now {show(now.get(name))}"
    return "nothing"  # not reached for mappings that differ
