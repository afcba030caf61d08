"""docs/cli.md is what the schema says: all options, each once, with the default that a run gets."""

from __future__ import annotations

import re

import pytest

from miles_dmd2.config.flags import help_text
from miles_dmd2.config.options import OPTIONS
from miles_dmd2.config.sections import AlgorithmSection
from scripts.write_cli_reference import DOCUMENT, reference

ROWS = {
    match[1]: match[0].split(" | ")
    for match in re.finditer(r"^\| `(--[\w-]+)`.*$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
}


def test_the_page_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == reference(), "run: python scripts/write_cli_reference.py"


def test_every_flag_of_help_is_there_once_and_no_other() -> None:
    flags = re.findall(r"^  (?:-h, )?(--[\w-]+)", help_text(), re.MULTILINE)
    assert len(flags) == len(OPTIONS) + 3
    assert sorted(ROWS) == sorted(flags)
    assert len(re.findall(r"^\| `", reference(), re.MULTILINE)) == len(flags)


@pytest.mark.parametrize(
    ("flag", "kind", "default"),
    [
        ("--hf-checkpoint", "a path", "required"),
        ("--lr", "a number > 0", "2e-06"),
        ("--adam-beta1", "a number >= 0 and < 1", "0.9"),
        ("--forward-dtype", "one of fp32, bf16", "fp32"),
        ("--dmd2-score-sigma-range", "two numbers", "0.02 0.98"),
        ("--diffusion-height", "a whole number > 0", "the checkpoint's own"),
        ("--max-x0-drift", "a number > 0", "1e-3 with fp32 forwards, 0.05 with bf16"),
        ("--rollout-engine-url", "one or more words", "none"),
        ("--use-wandb", "on or off", "off"),
        ("--colocate", "on or off", "on"),
        ("--eval-prompt-data", "a path", "none"),
        ("--sglang-NAME", "one or more words", "none"),
    ],
)
def test_rows(flag: str, kind: str, default: str) -> None:
    """Written down here from the documentation of the options, not read from them."""
    assert ROWS[flag][1:3] == [kind, default]


def test_no_row_is_broken_by_what_it_says() -> None:
    for flag, cells in ROWS.items():
        assert len(re.findall(r"(?<!\\)\|", " | ".join(cells))) == 5, flag
    assert r"mean \|x0 - x0_real\|" in " ".join(ROWS["--dmd2-normalizer"])


# -- docs/options.md ---------------------------------------------------------------------------------------------

BY_NAME = (DOCUMENT.parent / "options.md").read_text(encoding="utf-8")


def test_options_are_all_there_and_their_flags_are_real() -> None:
    """The first cell of a row names flags of this project; the others, those of other projects."""
    first = [line.split(" | ")[0] for line in BY_NAME.splitlines() if line.startswith("| `--")]
    named = {flag for cell in first for flag in re.findall(r"--[\w-]+", cell)}
    assert named <= ROWS.keys()
    fields = {f"--{name.replace('_', '-')}" for name in AlgorithmSection.model_fields} - {"--loss-type"}
    assert fields <= named


def test_whoever_comes_from_another_implementation_finds_every_option_of_the_algorithm() -> None:
    """Each in a row of the table of names, or in the text below it that says that nobody else has it."""
    _, _, table = BY_NAME.partition("## From another implementation")
    rows = [line for line in table.splitlines() if line.startswith("| `--")]
    assert all(len(line.strip("| ").split(" | ")) == 6 for line in rows)
    fields = {f"--{name.replace('_', '-')}" for name in AlgorithmSection.model_fields} - {"--loss-type"}
    assert [flag for flag in sorted(fields) if f"`{flag}`" not in table] == []
