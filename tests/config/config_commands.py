"""A command line that is complete, and what a command line is told."""

import pytest

from miles_dmd2.config import ConfigError, ParsedRun, parse

REQUIRED = {"hf-checkpoint": "teacher", "num-rollout": "10", "rollout-batch-size": "20", "prompt-data": "prompts.txt"}


def command(*flags: str) -> list[str]:
    """The required flags, but those that `flags` gives, then `flags`."""
    given = {flag.partition("=")[0] for flag in flags}
    words = [w for name, v in REQUIRED.items() if f"--{name}" not in given for w in (f"--{name}", v)]
    return [*words, *flags]


def run(*flags: str) -> ParsedRun:
    return parse(command(*flags))


def complaint(argv: list[str]) -> str:
    """What the command line is refused with: one line."""
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    text = str(caught.value)
    assert text.splitlines() == [text]
    return text
