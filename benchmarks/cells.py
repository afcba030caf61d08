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

        ConfigError: a line that is no cell, or of other settings, or no whole line at all. The file is then untouched.
        """
        self.path = path
        self._settings = json.loads(json.dumps(settings))
        self.rows = self._read()

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
            raise self._unwritable(error) from None
        self.rows[key] = json.loads(line)

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self.path.exists():
            return {}
        whole, torn = _contents(self.path)
        rows = _rows(self.path, whole)
        for row in rows:
            if row["settings"] != self._settings:
                raise ConfigError(
                    f"{show(self.path)}: cell {show(row['key'])} was made with other settings "
                    f"({_difference(row['settings'], self._settings)}); give another --out, or remove the file"
                )
        if torn:
            self._cut(len(whole), proven=bool(rows))
        return {row["key"]: row for row in rows}

    def _cut(self, length: int, *, proven: bool) -> None:
        """Without a whole line nothing says that the file is one of these, and what is cut may be all that it holds."""
        if not proven:
            raise ConfigError(f"{show(self.path)}: holds no finished cell; give another --out, or remove the file")
        try:
            os.truncate(self.path, length)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"{show(self.path)}: cannot be written ({error.strerror}); give another --out")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All finished cells of a file, which stays as it is. ConfigError: not readable, no cell, or a cell twice."""
    whole, _ = _contents(path)
    return _rows(path, whole)


def _contents(path: Path) -> tuple[bytes, bytes]:
    """Whole lines, and what follows the last newline."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{show(path)}: not readable ({error}); give a file that this benchmark wrote") from None
    end = content.rfind(b"\n") + 1
    return content[:end], content[end:]


def _rows(path: Path, whole: bytes) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        row = _row(line)
        if row is None:
            raise ConfigError(f"{show(path)}: line {number} is no finished cell; remove the line, or give another file")
        if row["key"] in rows:  # a table would count it as two seeds
            raise ConfigError(
                f"{show(path)}: line {number} has cell {show(row['key'])} once more; remove one of the two"
            )
        rows[row["key"]] = row
    return list(rows.values())


def _row(line: bytes) -> dict[str, Any] | None:
    """None: no cell."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # also what is no UTF-8
        return None
    fits = isinstance(row, dict) and isinstance(row.get("key"), str) and isinstance(row.get("settings"), dict)
    return row if fits else None


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first setting that differs, in words."""
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            return f"{name} {show(before.get(name))}, now {show(now.get(name))}"
    return "nothing"  # not reached for mappings that differ
