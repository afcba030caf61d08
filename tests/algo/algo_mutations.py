"""Checks and mutations.

A check is a function of an `algo` namespace that asserts what the paper says. A mutation is the same namespace with one
mistake in it, mostly one that was really made somewhere (DMD2.md sections 1 and 4), and the check must fail on it.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import miles_dmd2.algo

Algo = Any
Check = Callable[[Algo], None]


def true_algo(**changes: Any) -> SimpleNamespace:
    """The public functions of `miles_dmd2.algo`, some of them replaced, and the wiring of the trainers around them."""
    names = {name: getattr(miles_dmd2.algo, name) for name in miles_dmd2.algo.__all__}
    wiring = {
        "teacher_input": lambda x_sigma, noise, sigma: x_sigma,
        "critic_steps": 5,
        "critic_of_step": lambda step: step,
    }
    unknown = set(changes) - set(names) - set(wiring)
    assert not unknown, f"mutations of functions that do not exist: {unknown}"
    return SimpleNamespace(**{**names, **wiring, **changes})


def mutation(check: Check, name: str, **changes: Any) -> Any:
    """One row of a table of mutations: `check` must fail when `changes` replace the public functions of these names."""
    return pytest.param(check, changes, id=f"{check.__name__}-{name}")


def assert_caught(check: Check, changes: dict[str, Any]) -> None:
    mutant = true_algo(**changes)
    with pytest.raises(AssertionError):
        check(mutant)


def assert_each_has_a_mutation(checks: Sequence[Check], mutations: Sequence[Any]) -> None:
    assert {check.__name__ for check in checks} == {row.values[0].__name__ for row in mutations}
