"""MiniMax H3's engine against the contract of all engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.engines.sglang.server import ManagedServer
from miles_dmd2.models.minimax_h3 import MiniMaxH3Adapter
from tests.engines.contract import EngineContract, Harness
from tests.sglang.h3.bench import CLIP, SAME, SERVED, SIDE, Served
from tests.tiny_h3 import PROMPTS

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def shared(running: ManagedServer, checkpoint: Path, served: Served) -> Iterator[Harness]:
    adapter = MiniMaxH3Adapter(checkpoint, SIDE, SIDE, CLIP)
    settings = SGLangSettings(require_plugin=True, forward_dtype=served.dtype)
    engine = SGLangEngine(adapter, [running], settings)
    reference = adapter.load_transformer().requires_grad_(False)
    yield Harness(engine, adapter, reference, PROMPTS, same=SAME, exact=False)
    engine.close()


class TestEngineContract(EngineContract):
    @pytest.fixture
    def harness(self, shared: Harness, served: Served) -> Harness:
        if served != SERVED[0]:
            pytest.skip("the contract is tested on one way of serving it")
        return shared
