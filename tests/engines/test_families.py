"""The embedded engine serves every registered family by the contract."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.offload import held_bytes
from tests.engines.contract import EngineContract, Harness, real_latents
from tests.engines.simulation import Another, SimulationContract
from tests.families import Tiny, adapter, checkpoint, checkpoints, tiny

__all__ = ["adapter", "checkpoint", "checkpoints", "tiny"]


@pytest.fixture(scope="module")
def served(tiny: Tiny, checkpoint: Path) -> Iterator[Harness]:
    torch.set_num_threads(1)
    adapter = tiny.adapter(checkpoint)
    decoded = 0
    decode = adapter.decode

    def counting(*arguments: object) -> torch.Tensor:
        nonlocal decoded
        media = decode(*arguments)
        decoded += len(media)
        return media

    adapter.decode = counting
    reference = adapter.load_transformer().requires_grad_(False)
    engine = LocalEngine(adapter, real_latents=real_latents(adapter))
    yield Harness(engine, adapter, reference, tiny.prompts, decodes=lambda: decoded)
    engine.close()


class TestLocalEngine(EngineContract, SimulationContract):
    @pytest.fixture
    def harness(self, served: Harness) -> Harness:
        return served

    @pytest.fixture
    def another(self, adapter: ModelAdapter) -> Another:
        return lambda real_latents: LocalEngine(adapter, real_latents=real_latents)


def test_every_byte_leaves_the_device(served: Harness, adapter: ModelAdapter) -> None:
    served.engine.wake()
    held = held_bytes(adapter.load_transformer(), *adapter.load_components().modules())
    assert served.engine.device_bytes() == held
    served.engine.sleep()
    assert served.engine.device_bytes() == 0
    served.engine.wake()
