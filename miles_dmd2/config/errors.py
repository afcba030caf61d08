"""The one error that a user's input can cause, and the words it is told in."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from pathlib import Path

_LONGEST_VALUE = 80
_LONGEST_PATH = 1000
_SEARCH = 10_000


class ConfigError(ValueError):
    """Bad input: one line that names the flag or file, the value and the remedy. Entry points exit with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


def show(value: object) -> str:
    """A value as a user would type it; quoted where it would not read as one word, shortened where it is long."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, str | Path):
        text = str(value)
        plain = text.isprintable() and text and not text.isspace()
        longest = _LONGEST_PATH if isinstance(value, Path) else _LONGEST_VALUE
        return text if plain and len(text) <= longest else _short(repr(text))
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(v, int | float | str) for v in value):
        return " ".join(show(v) for v in value)  # a pair
    if isinstance(value, int) and value.bit_length() > 256:
        return "(a number of over 70 digits)"
    return _short(str(value) if isinstance(value, int | float) else reprlib.repr(value))


def nearest(name: str, valid: Iterable[str]) -> str:
    """The valid name that looks most like `name`."""
    return difflib.get_close_matches(name[:_LONGEST_VALUE], sorted(valid), n=1, cutoff=0.0)[0]


def near_divisors(value: int, total: int, *, also: int = 1) -> str:
    """The divisors d of `total` next to `value` for which `also` divides total / d: "4 or 8", or "none" nearby."""

    def fits(divisor: int) -> bool:
        return total % divisor == 0 and (total // divisor) % also == 0

    below = range(min(value - 1, total), max(0, value - _SEARCH, total - _SEARCH if value > total else 0), -1)
    above = range(value + 1, min(total, value + _SEARCH) + 1)
    found = [next((d for d in side if fits(d)), None) for side in (below, above)]
    return " or ".join(str(d) for d in found if d is not None) or "none"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
