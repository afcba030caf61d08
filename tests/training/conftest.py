from collections.abc import Iterator

import pytest
import torch

from tests.tiny_qwen import tiny_qwen
from tests.training.pool import RankPool

__all__ = ["tiny_qwen"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()
