from pathlib import Path

import pytest
import torch

from miles_dmd2.models.qwen_image import QwenImageAdapter
from tests.tiny_qwen import TALL, tiny_qwen

__all__ = ["tiny_qwen"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def adapter(tiny_qwen: Path) -> QwenImageAdapter:
    return QwenImageAdapter(tiny_qwen, *TALL)
