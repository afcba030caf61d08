import pytest
import torch

from tests.tiny_qwen import tiny_qwen

__all__ = ["tiny_qwen"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
