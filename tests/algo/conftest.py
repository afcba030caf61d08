"""Tests of `algo` share closed forms and a mutation harness; both lie beside them and are imported by plain name."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def one_thread_and_untouched_global_rng() -> Iterator[None]:
    """Bitwise checks on one thread. `algo` gets its randomness as arguments, so the global RNG never moves."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
