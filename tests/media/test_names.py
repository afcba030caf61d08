"""Names of eval samples, for any prompt."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_dmd2.media.names import eval_directory, sample_name

NASTY = [
    "../../etc/passwd",
    "/",
    "\\",
    "..",
    ".",
    "a/b",
    "C:\\x",
    "nul",
    "a\0b",
    "~",
    "-rf",
    "\n",
    "💥",
    "\ud800",
    "*?<>|:",
]
prompts = st.one_of(st.text(), st.text(st.characters(), max_size=400), st.sampled_from(NASTY))
seeds = st.integers(0, 2**63 - 1)
kinds = st.sampled_from(["raw", "ema"])


@given(prompts, seeds, kinds)
def test_a_name_is_safe_on_any_file_system(prompt: str, seed: int, kind: str) -> None:
    name = sample_name(prompt, seed, kind)
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,99}", name)
    for file in (f"{name}.mp4", f"{name}.png"):
        assert PurePosixPath(file).name == PureWindowsPath(file).name == file
        assert not PureWindowsPath(file).is_reserved() if hasattr(PureWindowsPath, "is_reserved") else True
        directory = Path("/media/eval_000000")
        assert (directory / file).resolve().parent == directory


@given(prompts, prompts, seeds, seeds, kinds, kinds)
def test_what_differs_has_another_name_also_without_case(
    prompt: str, other: str, seed: int, other_seed: int, kind: str, other_kind: str
) -> None:
    same = (prompt, seed, kind) == (other, other_seed, other_kind)
    names = {sample_name(prompt, seed, kind).casefold(), sample_name(other, other_seed, other_kind).casefold()}
    assert len(names) == (1 if same else 2)


@pytest.mark.parametrize(
    ("one", "two"),
    [("A cat", "a cat"), ("a cat", "a  cat"), ("x" * 300 + "1", "x" * 300 + "2"), ("é", "e"), ("💥", "✨")],
)
def test_prompts_that_look_alike_are_told_apart(one: str, two: str) -> None:
    assert sample_name(one, 0, "raw") != sample_name(two, 0, "raw")


def test_names_are_what_they_were() -> None:
    """Runs of today and of tomorrow are compared by name; the digest is `printf %s "A cat, É!" | sha256sum`."""
    assert sample_name("A cat, É!", 507, "ema") == "a-cat-e_7b6f730309eeeb93_507_ema"
    assert sample_name("💥", 1, "raw").count("_") == 2
    assert eval_directory(25) == "eval_000025"
