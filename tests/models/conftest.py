import pytest
import torch

from tests.families import adapter, checkpoint, checkpoints, tiny
from tests.tiny_qwen import tiny_qwen

__all__ = ["adapter", "checkpoint", "checkpoints", "tiny", "tiny_qwen"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
