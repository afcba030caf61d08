"""The SGLang engine on a real server against the contract of all engines, and against the local engine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_dmd2.algo import rollout
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.models.qwen_image import QwenImageAdapter
from tests.engines.contract import GRID, EngineContract, Harness, real_latents, stacked
from tests.engines.simulation import WAYS, Another, SimulationContract, beside_the_local_engine
from tests.tiny_qwen import PROMPTS, SIZE

pytestmark = pytest.mark.sglang

# fp32 on both sides, other kernels: rotary embedding, layer norm, attention. Measured: up to 6e-7.
SAME = 1e-5


@pytest.fixture(scope="module")
def shared(server: Any, qwen_pipeline: Path) -> Iterator[Harness]:
    adapter = QwenImageAdapter(qwen_pipeline, SIZE, SIZE)
    engine = SGLangEngine(adapter, [server], SGLangSettings(require_plugin=True), real_latents=real_latents(adapter))
    reference = adapter.load_transformer().requires_grad_(False)
    yield Harness(engine, adapter, reference, PROMPTS, same=SAME, exact=False)
    engine.close()


class TestSGLangEngine(EngineContract, SimulationContract):
    @pytest.fixture
    def harness(self, shared: Harness) -> Harness:
        return shared

    @pytest.fixture
    def another(self, shared: Harness, server: Any) -> Another:
        settings = SGLangSettings(require_plugin=True)
        return lambda real: SGLangEngine(shared.adapter, [server], settings, real_latents=real)


@pytest.fixture
def awake(shared: Harness) -> Harness:
    shared.engine.wake()
    return shared


@pytest.mark.parametrize("stop", range(4))
@pytest.mark.parametrize("step", [0, 1])
def test_both_engines_agree_with_each_other_and_with_float64(awake: Harness, step: int, stop: int) -> None:
    """x_k and x0 of the same seeds, prompts and weights. The reference sampler is in float64, in this process."""
    local = LocalEngine(awake.adapter)
    requests = awake.requests(stop, stop, stop)
    update, tensors = awake.weights(step)
    for engine in (awake.engine, local):
        engine.load_weights(update, tensors)
    ours, theirs = local.generate(requests), awake.engine.generate(requests)
    student = awake.student(step).double()
    cond = {
        name: value.double() if value.is_floating_point() else value
        for name, value in awake.adapter.collate([sample.cond for sample in theirs]).items()
    }
    noise = torch.stack([awake.adapter.initial_noise(request.seed) for request in requests]).double()
    with torch.no_grad():
        x_k, x0 = rollout(
            lambda x, sigma: awake.adapter.velocity(student, x, sigma, cond),
            noise,
            torch.tensor(GRID, dtype=torch.float64),
            stop,
        )
    for samples in (ours, theirs):
        torch.testing.assert_close(stacked(samples, "x_k").double(), x_k, rtol=0, atol=SAME)
        torch.testing.assert_close(stacked(samples, "x0").double(), x0, rtol=0, atol=SAME)
    torch.testing.assert_close(stacked(ours, "x0"), stacked(theirs, "x0"), rtol=0, atol=SAME)
    local.close()


@pytest.mark.parametrize("way", WAYS)
def test_server_and_local_engine_make_the_same_samples(
    awake: Harness, way: str, record_property: Callable[[str, object], None]
) -> None:
    found, expected = beside_the_local_engine(awake, way)
    record_property("difference", (found - expected).abs().max().item())
    torch.testing.assert_close(found, expected, rtol=0, atol=SAME)


def test_pictures_of_both_engines_are_the_same(awake: Harness) -> None:
    local = LocalEngine(awake.adapter)
    update, tensors = awake.weights(0)
    for engine in (awake.engine, local):
        engine.load_weights(update, tensors)
    requests = awake.requests(3, 1, decode=True)
    for mine, theirs in zip(local.generate(requests), awake.engine.generate(requests), strict=True):
        assert mine.media is not None
        assert theirs.media is not None
        assert (mine.media.int() - theirs.media.int()).abs().max() <= 1
    local.close()


def test_weights_as_tensors_are_served_and_proven(awake: Harness, server: Any) -> None:
    engine = SGLangEngine(awake.adapter, [server], SGLangSettings(weight_sync="tensor"))
    update, tensors = awake.weights(1)
    engine.load_weights(update, tensors)
    requests = awake.requests(2, 2)
    by_tensor = stacked(engine.generate(requests), "x0")
    engine.close()
    awake.load(1)
    assert torch.equal(stacked(awake.engine.generate(requests), "x0"), by_tensor)


def test_another_client_that_changes_the_weights_is_noticed(awake: Harness, server: Any) -> None:
    """A reply names its weights: the engine loads its own again instead of training on somebody else's."""
    awake.load(0)
    before = awake.engine.generate(awake.requests(2, 1))
    intruder = SGLangEngine(awake.adapter, [server])
    intruder.load_weights(*awake.weights(3))
    intruder.close()
    after = awake.engine.generate(awake.requests(2, 1))
    assert torch.equal(stacked(after, "x0"), stacked(before, "x0"))
    assert awake.engine.faults["faults"] >= 1
