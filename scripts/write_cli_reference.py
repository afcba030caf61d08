"""Write docs/cli.md from the schema of the options, in place. `make test` says when it has to be run again."""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path

from miles_dmd2.config.options import OPTIONS, Option

DOCUMENT = Path(__file__).parent.parent / "docs" / "cli.md"
HEAD = """# Command line

All options of `train_diffusion.py`, as `--help` has them; this page is written by `scripts/write_cli_reference.py`
from the schema in `miles_dmd2/config/`. In a `--config` file the same names stand without the dashes before them.
Defaults < `--config` < flags. [options.md](options.md) says more of the algorithm's, [running.md](running.md) of
engines, checkpoints and failures.

## General

| flag | type | default | meaning |
|---|---|---|---|
| `--help` | | | print the options and exit |
| `--config` | a path | none | options in YAML; what `--dry-run` prints is one |
| `--dry-run` | | off | check everything, print the resolved options and the plan as YAML, stop |
"""
_OWN_DEFAULT = re.compile(r"\s*\(default: (.*)\)$")


def main() -> int:
    DOCUMENT.write_text(reference(), encoding="utf-8")
    return 0


def reference() -> str:
    """The whole page: one table per section, in the order of the schema."""
    sections = [HEAD]
    for title, options in groupby(OPTIONS.values(), key=lambda option: option.title):
        head = (f"## {title}\n", "| flag | type | default | meaning |", "|---|---|---|---|")
        sections.append("\n".join([*head, *map(_row, options), ""]))
    return "\n".join(sections)


def _row(option: Option) -> str:
    meaning, own = _meaning(option)
    flag = f"`{option.flag}`"
    if option.is_switch:
        flag += f", `--no-{option.name.replace('_', '-')}`"
    cells = (flag, "on or off" if option.is_switch else option.valid, own, meaning)
    return f"| {' | '.join(_cell(text) for text in cells)} |"


def _meaning(option: Option) -> tuple[str, str]:
    """What an option does, and its default in words: of one that is worked out, those of its description."""
    said = _OWN_DEFAULT.search(option.description)
    meaning = _OWN_DEFAULT.sub("", option.description)
    default = option.info.default
    if option.info.is_required():
        return meaning, "required"
    if said:
        return meaning, said[1]
    if default is None or default == ():
        return meaning, "none"
    return meaning, option.default_in_words


def _cell(text: str) -> str:
    return re.sub(r"<(?=[A-Za-z/])", r"\<", text.replace("|", r"\|"))


if __name__ == "__main__":
    sys.exit(main())
