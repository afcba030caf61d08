"""MiniMax H3's engine against the contract of all engines."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.engines.sglang.server import ManagedServer
from miles_dmd2.models.minimax_h3 import MiniMaxH3Adapter
from tests.engines.contract import EngineContract, Harness, real_latents
from tests.sglang.h3.bench import CLIP, SAME, SERVED, SIDE, Served
from tests.tiny_h3 import PROMPTS

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def shared(running: ManagedServer, checkpoint: Path, served: Served) -> Iterator[Harness]:
    adapter = MiniMaxH3Adapter(checkpoint, SIDE, SIDE, CLIP)
    settings = SGLangSettings(require_plugin=True, forward_dtype=served.dtype)
    engine = SGLangEngine(adapter, [running], settings, real_latents=real_latents(adapter))
    reference = adapter.load_transformer().requires_grad_(False)
    yield Harness(engine, adapter, reference, PROMPTS, same=SAME, exact=False, further="left")
    engine.close()


@pytest.mark.parametrize("served", SERVED[:1], ids=str, indirect=True, scope="session")
class TestEngineContract(EngineContract):
    @pytest.fixture
    def harness(self, shared: Harness) -> Harness:
        return shared

    def test_sde_hops_are_noised_afresh_from_the_samples_own_seed(self, harness: Harness) -> None:
        """Refused: SGLang hops the sound by Euler, whatever the video does."""
        (request,) = harness.requests(1)
        with pytest.raises(ValueError, match="request for sample 10: minimax_h3 is rolled out by ode, not sde"):
            harness.engine.generate([dataclasses.replace(request, sample_type="sde")])
