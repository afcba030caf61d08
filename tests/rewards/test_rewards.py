"""Rewards: 0 without a scorer, the user's function for those that ask for it, and every way it can be wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from miles_dmd2.rewards import RewardError, Rewards, check_reward
from miles_dmd2.types import RolloutRequest, RolloutSample, WeightVersion

REQUESTS = [RolloutRequest(i, f"p{i}", i, (1.0, 0.0), 0, decode=True, scored=i != 1) for i in range(4)]
SAMPLES = [
    RolloutSample(
        i, f"p{i}", i, 0, torch.tensor([1.0, 0.0]), torch.zeros(1), torch.zeros(1), {}, WeightVersion(0),
        media=torch.full((1, 2, 2, 3), 10 * i, dtype=torch.uint8),
    )
    for i in range(4)
]  # fmt: skip
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A file with a function `score`, by its path."""

    def written(text: str) -> str:
        file = tmp_path / "rewards.py"
        file.write_text(text)
        return f"{file}:score"

    return written


BRIGHTNESS = "    return [float(sample.media.float().mean()) for sample in samples]\n"


def test_without_a_scorer_every_reward_is_0() -> None:
    rewards = Rewards(None)
    assert not rewards.active
    assert [sample.reward for sample in rewards.score(REQUESTS, SAMPLES)] == [0.0] * 4


@pytest.mark.parametrize("form", ["def", "async def"])
def test_the_function_is_asked_once_about_all_that_are_scored(write: Write, form: str) -> None:
    path = write(f"calls = []\n{form} score(samples):\n    calls.append([s.sample_id for s in samples])\n{BRIGHTNESS}")
    rewards = Rewards(path)
    scored = rewards.score(REQUESTS, SAMPLES)
    assert rewards.active
    assert [sample.reward for sample in scored] == [0.0, 0.0, 20.0, 30.0]  # number 1 has metadata rm_type none
    assert [sample.sample_id for sample in scored] == [0, 1, 2, 3]
    assert rewards._function.__globals__["calls"] == [[0, 2, 3]]  # type: ignore[union-attr]
    assert all(sample.reward == 0 for sample in SAMPLES)  # these are replaced, not changed


def test_nothing_is_asked_when_nothing_is_scored(write: Write) -> None:
    rewards = Rewards(write("def score(samples):\n    raise AssertionError\n"))
    unscored = [replace(request, scored=False) for request in REQUESTS]
    assert [sample.reward for sample in rewards.score(unscored, SAMPLES)] == [0.0] * 4


def test_async_functions_may_wait_for_each_other_and_be_called_again(write: Write) -> None:
    rewards = Rewards(
        write(
            "import asyncio\nasync def one(s):\n    await asyncio.sleep(0)\n    return s.sample_id\n"
            "async def score(samples):\n    return await asyncio.gather(*map(one, samples))\n"
        )
    )
    for _ in range(2):
        assert [sample.reward for sample in rewards.score(REQUESTS, SAMPLES)] == [0, 0, 2, 3]


def test_tensors_and_objects_that_can_be_called_will_do(write: Write) -> None:
    path = write(
        "import torch\nclass Score:\n    def __call__(self, samples, scale=2):\n"
        "        return torch.arange(len(samples)) * scale\nscore = Score()\n"
    )
    assert [sample.reward for sample in Rewards(path).score(REQUESTS, SAMPLES)] == [0, 0, 2, 4]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return 1.0", "must return a number for each sample, returned 1.0"),
        ("return ['good'] * 3", "must return a number for each sample"),
        ("return None", "returned None"),
        ("return [1.0, 2.0]", "returned 2 for 3 samples"),
        ("return [1.0, float('nan'), 3.0]", "returned nan for sample 2"),
        ("return [float('-inf'), 2.0, 3.0]", "returned -inf for sample 0"),
        ("raise KeyError('clip')", "raised KeyError('clip') on 3 samples"),
    ],
)
@pytest.mark.parametrize("form", ["def", "async def"])
def test_a_function_that_answers_something_else_is_one_line(write: Write, form: str, body: str, told: str) -> None:
    rewards = Rewards(write(f"{form} score(samples):\n    {body}\n"))
    with pytest.raises(RewardError) as caught:
        rewards.score(REQUESTS, SAMPLES)
    assert str(caught.value).startswith("--custom-rm-path ")
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("score = 3\n", "has no function score"),
        ("other = len\n", "has no function score"),
        ("def score():\n    return []\n", "takes (); it is called with one argument"),
        ("def score(args, samples):\n    return []\n", "takes (args, samples)"),
        ("def score(*, samples):\n    return []\n", "takes (*, samples)"),
        ("def score(samples):\n    yield 1.0\n", "yields"),
        ("async def score(samples):\n    yield 1.0\n", "yields"),
        ("def score(samples:\n", "cannot be imported (SyntaxError"),
        ("import no_such_package_anywhere\n", "cannot be imported (ModuleNotFoundError"),
        ("raise RuntimeError('no GPU')\n", "cannot be imported (RuntimeError('no GPU'))"),
    ],
)
def test_what_cannot_score_is_refused_before_anything_starts(write: Write, text: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared
        check_reward(write(text))
    assert told in str(caught.value)


def test_no_such_module() -> None:
    with pytest.raises(ValueError, match=r"cannot be imported .*no_such_module_anywhere"):
        check_reward("no_such_module_anywhere:score")


def test_a_function_without_a_signature_is_tried() -> None:
    assert check_reward("builtins:sum") is sum
    assert check_reward("math:fsum") is math.fsum
