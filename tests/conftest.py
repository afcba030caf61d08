"""Settings of every test process; the children of a test inherit the environment variables."""

import os

# Before anything imports torch or a Hugging Face library.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # bitwise promises hold for one thread count; tests use one thread
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that would download fails at once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from miles_dmd2.training import Ranks

# No deadline per example: CI machines stall. In CI the examples are always the same.
hypothesis.settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("project")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")


@pytest.fixture(scope="session")
def ranks() -> "Ranks":
    """One rank, in this process: the only default process group that a test may start here, since torch has one."""
    from miles_dmd2.training import init_ranks

    return init_ranks()
