"""What may differ between a checkpoint's options and those of the run that continues it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_dmd2.config.errors import show
from miles_dmd2.config.options import flag_of, flatten, may_change
from miles_dmd2.config.schema import Config

# How many ranks share the work: trainer state is cut anew, and numbers differ by rounding. Told, not refused.
LAYOUT = frozenset({"actor_num_nodes", "actor_num_gpus_per_node", "num_gpus"})

_OTHER = {
    "prompt_data": "holds other prompts than",
    "eval_prompt_data": "holds other prompts than",
    "trainer_config": "names a model directory that is not",
}


def changes(saved: Mapping[str, Any], config: Config) -> dict[str, tuple[str, bool]]:
    """Option -> (what changed, whether it has to be allowed by name), against a saved `flatten(config.resolved())`."""
    now = flatten(config.resolved())
    free = may_change(saved, now)
    names = [name for name in (*now, *(name for name in saved if name not in now)) if name not in free]
    found: dict[str, tuple[str, bool]] = {}
    for name in names:
        was, now_is = saved.get(name), now.get(name)
        if was == now_is:
            continue
        if name == "trainer_config":
            found |= _trainers(was or [], now_is or [])
        else:
            found[name] = (_differs(flag_of(name), was, now_is), name not in LAYOUT)
    return {
        name: (text if counts else f"{text}: state is cut anew, bits differ by rounding", counts)
        for name, (text, counts) in found.items()
    }


def other_contents(saved: Mapping[str, str], now: Mapping[str, str], config: Config) -> dict[str, str]:
    """Option -> how what it names is not what the checkpoint's run read; both as option -> SHA-256."""
    values = flatten(config)
    found: dict[str, str] = {}
    for name in dict.fromkeys([*saved, *now]):
        flag = flag_of(name)
        if name in now and name != "trainer_config":
            flag += f" {show(Path(values[name]))}"
        if name not in now:
            found[name] = f"{flag} was given to the checkpoint's run and is not here"
        elif name not in saved:
            found[name] = f"{flag} was not given to the checkpoint's run"
        elif saved[name] != now[name]:
            found[name] = f"{flag} {_OTHER.get(name, 'is not')} what the checkpoint's run read"
    return found


def _trainers(before: list[Any], now: list[Any]) -> dict[str, tuple[str, bool]]:
    """One entry for what is refused (`trainer_config`), one for other numbers of ranks (`num_gpus`)."""
    settings = [dict(_settings(entries)) for entries in (before, now)]
    refused: list[str] = []
    layout: list[str] = []
    for key in dict.fromkeys([*settings[0], *settings[1]]):
        was, now_is = (one.get(key) for one in settings)
        if was != now_is:
            (layout if key[1] in LAYOUT else refused).append(_differs(f"trainer {key[0]}: {key[1]}", was, now_is))
    texts = {"trainer_config": (refused, True), "num_gpus": (layout, False)}
    return {name: ("; ".join(parts), counts) for name, (parts, counts) in texts.items() if parts}


def _settings(entries: list[Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    for entry in entries:
        yield (entry["name"], "role"), entry["role"]
        for name, value in entry["args"].items():
            yield (entry["name"], name), value


def _differs(what: str, was: Any, now_is: Any) -> str:
    return f"{what} was {show(was)} and is {show(now_is)}"
