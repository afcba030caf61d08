"""Values per part of a latent, as flags write them: K, or visual=K,audio=K. Which parts there are the family says."""

from __future__ import annotations

import math

VISUAL = "visual"  # the picture: every family has it


def parse_parts(text: str) -> dict[str, float]:
    """ValueError: not numbers >= 0 by name, a name twice, or no picture."""
    values: dict[str, float] = {}
    for entry in text.split(","):
        name, equals, number = entry.strip().rpartition("=")
        name = name.strip() if equals else VISUAL
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not (name.isidentifier() and 0 <= value < math.inf):
            raise ValueError("must be a finite number, or numbers by part as visual=5,audio=1.25")
        if name in values:
            raise ValueError(f"names {name} twice")
        values[name] = value
    if VISUAL not in values:
        raise ValueError(f"must name {VISUAL} too, for example visual=5,{next(iter(values))}=1")
    return values


def written(values: dict[str, float]) -> str:
    """The normal form: one number where there is only the picture."""
    if values.keys() == {VISUAL}:
        return str(values[VISUAL])
    return ",".join(f"{name}={value}" for name, value in sorted(values.items(), key=lambda item: item[0] != VISUAL))
