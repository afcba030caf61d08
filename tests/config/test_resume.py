"""What may differ when a run goes on: each option by name, what it was and what it is."""

from collections.abc import Callable
from pathlib import Path

import pytest
from config_commands import run

from miles_dmd2.config import flatten
from miles_dmd2.config.resume import changes

Write = Callable[..., Path]
COSINE_ACTOR = "- {name: critic, role: critic}\n- {name: actor, role: actor, args: {lr_schedule: cosine}}\n"


def refused(saved: dict[str, object], *flags: str) -> list[str]:
    return [text for text, counts in changes(saved, run(*flags).config).values() if counts]


def test_a_schedule_depends_on_the_length_of_the_run(write: Write) -> None:
    for flags in (("--lr-schedule", "cosine"), ("--trainer-config", str(write(COSINE_ACTOR)))):
        saved = flatten(run(*flags).config)
        assert refused(saved, *flags, "--num-rollout", "20") == ["--num-rollout was 10 and is 20"]


def test_each_option_is_named() -> None:
    saved = flatten(run().config)
    assert refused(saved, "--num-rollout", "20", "--load", "x", "--prompt-data", "moved") == []
    assert refused(saved, "--lr", "1e-5", "--seed", "1") == [
        "--rollout-seed was 0 and is 1",
        "--lr was 2e-06 and is 1e-05",
        "--seed was 0 and is 1",
    ]
    assert refused({**saved, "old_option": 3}) == ["--old-option was 3 and is null"]


def test_a_trainer_is_told_by_name_and_option(write: Write) -> None:
    saved = flatten(run("--trainer-config", str(write(COSINE_ACTOR))).config)
    other = write(COSINE_ACTOR.replace("critic}", "critic, args: {lr: 0.5}}"), "other.yaml")
    found = changes(saved, run("--trainer-config", str(other)).config)
    assert found == {"trainer_config": ("trainer critic: lr was null and is 0.5", True)}


@pytest.mark.parametrize("flags", [("--actor-num-gpus-per-node", "2"), ("--actor-num-nodes", "2")])
def test_another_number_of_ranks_is_told_and_not_refused(flags: tuple[str, ...]) -> None:
    found = changes(flatten(run().config), run(*flags).config)
    assert [counts for _, counts in found.values()] == [False]
    ((text, _),) = found.values()
    assert text == f"{flags[0]} was 1 and is 2: state is cut anew, bits differ by rounding"


def test_so_are_the_ranks_of_a_trainer(write: Write) -> None:
    two = ("--actor-num-gpus-per-node", "2")
    saved = flatten(run(*two).config)
    fewer = write("- {name: critic, role: critic, args: {num_gpus: 1}}\n- {name: actor, role: actor}\n")
    found = changes(saved, run(*two, "--trainer-config", str(fewer)).config)
    assert found == {
        "num_gpus": ("trainer critic: num_gpus was null and is 1: state is cut anew, bits differ by rounding", False)
    }
