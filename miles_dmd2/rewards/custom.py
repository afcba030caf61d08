"""`--custom-rm-path`: many samples in, a number for each out."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from miles_dmd2.config.functions import load_function
from miles_dmd2.types import RolloutRequest, RolloutSample


class RewardError(RuntimeError):
    """The reward function raised, or returned something else than a finite number for each sample."""


class Rewards:
    """Scores samples whose requests are `scored`; all others have the reward 0, and the function does not see them."""

    def __init__(self, path: str | None) -> None:
        """path: module:function or file.py:function, None for no scorer."""
        self._path = path
        self._function = None if path is None else check_reward(path)

    @property
    def active(self) -> bool:
        return self._function is not None

    def score(self, requests: Sequence[RolloutRequest], samples: Sequence[RolloutSample]) -> list[RolloutSample]:
        """The samples with their rewards, in one call of the function. RewardError."""
        scored = [i for i, request in enumerate(requests) if request.scored]
        answer = list(samples)
        if self._function is None or not scored:
            return answer
        for i, reward in zip(scored, self._ask(self._function, [samples[i] for i in scored]), strict=True):
            answer[i] = replace(samples[i], reward=reward)
        return answer

    def _ask(self, function: Callable[..., Any], samples: list[RolloutSample]) -> list[float]:
        try:
            said = function(samples)
            if inspect.isawaitable(said):
                said = asyncio.run(_awaited(said))
        except Exception as error:
            raise RewardError(f"--custom-rm-path {self._path}: raised {error!r} on {len(samples)} samples") from error
        try:
            rewards = [float(reward) for reward in said]
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"--custom-rm-path {self._path}: must return a number for each sample, returned {said!r:.80}"
            ) from error
        if len(rewards) != len(samples):
            raise RewardError(f"--custom-rm-path {self._path}: returned {len(rewards)} for {len(samples)} samples")
        bad = next((i for i, reward in enumerate(rewards) if not math.isfinite(reward)), None)
        if bad is not None:
            raise RewardError(
                f"--custom-rm-path {self._path}: returned {rewards[bad]} for sample {samples[bad].sample_id}"
            )
        return rewards


def check_reward(path: str) -> Callable[..., Any]:
    """The function. ValueError: it cannot be imported, or called with one list of samples."""
    try:
        function = load_function(path)
    except ValueError as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        raise ValueError(f"cannot be imported ({error!r})") from error
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError("yields; it must return (or as `async def` be awaited for) a list of numbers")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C: only a call will tell
        return function
    try:
        signature.bind([])
    except TypeError:
        raise ValueError(
            f"takes {signature}; it is called with one argument, list[RolloutSample], and returns list[float]"
        ) from None
    return function


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
