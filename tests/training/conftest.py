import os
from collections.abc import Iterator

import pytest
import torch

from miles_dmd2.training import Ranks, init_ranks
from tests.tiny_qwen import tiny_qwen
from tests.training.pool import RankPool

__all__ = ["tiny_qwen"]

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """One rank, in this process."""
    return init_ranks()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()
