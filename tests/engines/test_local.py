"""What is the embedded engine's own: batches, caches, memory, dtypes. test_families.py runs it by the contract."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.models.base import Components
from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.models.weights import checksum
from miles_dmd2.types import WeightVersion
from tests.engines.contract import GRID, Harness, real_latents, stacked
from tests.tiny_qwen import PROMPTS, SIZE


class Counting(QwenImageAdapter):
    """Counts what the engine asks of the adapter."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint, SIZE, SIZE)
        self.decoded, self.encoded, self.batches = 0, [], []
        self.poison = False

    def decode(self, components: Components, latents: Tensor) -> Tensor:
        self.decoded += len(latents)
        return super().decode(components, latents)

    def encode_prompts(self, components: Components, prompts: list[str]) -> list[dict[str, Tensor]]:
        self.encoded += prompts
        return super().encode_prompts(components, prompts)

    def velocity(self, transformer: torch.nn.Module, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        self.batches.append(len(x))
        velocity = super().velocity(transformer, x, sigma, cond)
        if self.poison:
            velocity[-1] = float("nan")
        return velocity


@pytest.fixture
def adapter(tiny_qwen: Path) -> Counting:
    return Counting(tiny_qwen)


def harness_of(adapter: Counting, **options: object) -> Harness:
    reference = adapter.load_transformer().requires_grad_(False)
    engine = LocalEngine(adapter, **{"real_latents": real_latents(adapter), **options})
    return Harness(engine, adapter, reference, PROMPTS, decodes=lambda: adapter.decoded)


@pytest.fixture(scope="module")
def shared(tiny_qwen: Path) -> Harness:
    return harness_of(Counting(tiny_qwen))


@pytest.fixture
def own(adapter: Counting) -> Iterator[Harness]:
    """An engine for one test, with the checkpoint's weights loaded."""
    harness = harness_of(adapter, batch_size=4)
    harness.load(0)
    adapter.batches.clear()
    yield harness
    harness.engine.close()


def test_batches_are_cut_by_stop_step_and_size(own: Harness, adapter: Counting) -> None:
    samples = own.engine.generate(own.requests(*[1] * 6, *[0] * 3))
    assert adapter.batches == [4, 4, 2, 2, 3]
    assert len(samples) == 9


@pytest.mark.parametrize("way", ["ode", "sde", "real latents"])
def test_the_cut_into_batches_changes_rounding_only(own: Harness, adapter: Counting, way: str) -> None:
    requests = own.requests(*[2] * 7)
    if way == "sde":
        requests = [replace(request, sample_type="sde") for request in requests]
    elif way == "real latents":
        requests = [replace(request, real_latent=i % 3) for i, request in enumerate(requests)]
    at_once = harness_of(adapter, batch_size=64)
    at_once.load(0)
    cut, whole = (stacked(harness.engine.generate(requests), "x0") for harness in (own, at_once))
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-5)


def test_a_prompt_is_encoded_once_until_the_cache_is_full(adapter: Counting) -> None:
    harness = harness_of(adapter, prompt_cache_size=2)
    harness.load(0)
    first, second, third = PROMPTS
    harness.prompts = (first, second)
    harness.engine.generate(harness.requests(0, 0, 0, 0))
    assert adapter.encoded == [first, second]
    harness.engine.generate(harness.requests(0))  # uses the first again: the second is now the oldest
    harness.prompts = (third,)
    harness.engine.generate(harness.requests(0))
    harness.prompts = PROMPTS
    assert len(harness.engine.generate(harness.requests(0, 0, 0))) == 3  # more prompts than the cache holds
    assert adapter.encoded == [first, second, third, second]


def test_asleep_no_weight_is_on_the_device(own: Harness) -> None:
    held = own.engine.device_bytes()
    engine_parameters = sum(p.nbytes for p in own.reference.parameters())
    assert held > engine_parameters
    own.engine.sleep()
    assert own.engine.device_bytes() == 0
    own.engine.wake()
    assert own.engine.device_bytes() == held


def test_each_sample_owns_its_bytes(own: Harness) -> None:
    """A view of the batch would be pickled with the whole batch behind it."""
    for sample in own.engine.generate(own.requests(1, 1, 1, decode=True)):
        for value in (sample.x_k, sample.x0, sample.media, *sample.cond.values()):
            assert value.untyped_storage().nbytes() == value.nbytes


def test_samples_that_are_not_finite_are_named(own: Harness, adapter: Counting) -> None:
    adapter.poison = True
    with pytest.raises(EngineError, match=r"2 of 6 samples are not finite, ids \[13, 15\]"):
        own.engine.generate(own.requests(*[1] * 6))
    adapter.poison = False
    own.engine.generate(own.requests(1))


def test_whatever_goes_wrong_while_loading_the_old_weights_come_back(own: Harness, adapter: Counting) -> None:
    before = own.engine.generate(own.requests(1))
    update, tensors = own.weights(1)

    def broken(*_: object) -> Tensor:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "velocity", broken)
        with pytest.raises(KeyboardInterrupt):
            own.engine.load_weights(update, tensors)
    assert own.engine.weight_version == WeightVersion(0)
    assert torch.equal(own.engine.generate(own.requests(1))[0].x0, before[0].x0)


def test_without_weights_it_does_not_generate(adapter: Counting) -> None:
    harness = harness_of(adapter)
    assert (harness.engine.weight_version, harness.engine.weight_checksum) == (None, None)
    with pytest.raises(EngineError, match="no weights yet"):
        harness.engine.generate(harness.requests(0))


def test_a_checkpoint_can_be_served_under_a_name(adapter: Counting) -> None:
    harness = harness_of(adapter, checkpoint_version=WeightVersion(0))
    assert harness.engine.weight_checksum == checksum(harness.reference.state_dict())
    served = harness.engine.generate(harness.requests(3, 3))
    harness.load(0)
    assert torch.equal(stacked(harness.engine.generate(harness.requests(3, 3)), "x0"), stacked(served, "x0"))
    harness.engine.sleep()  # the checksum left the storages resizable


def test_a_closed_engine_does_nothing(own: Harness) -> None:
    own.engine.close()
    own.engine.close()
    assert own.engine.device_bytes() == 0
    for call in (own.engine.wake, own.engine.sleep, lambda: own.engine.generate([]), lambda: own.load(0)):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_it_can_be_closed_asleep(own: Harness) -> None:
    own.engine.sleep()
    own.engine.close()
    with pytest.raises(EngineError, match="closed"):
        own.engine.wake()


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"prompt_cache_size": 0}, {"dtype": torch.float16}])
def test_bad_options(adapter: Counting, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        LocalEngine(adapter, **options)


def test_bf16_takes_the_probe_of_a_bf16_exporter_and_is_near_fp32(adapter: Counting, own: Harness) -> None:
    """Hops stay fp32; the weights arrive in fp32 and are rounded once."""
    engine = LocalEngine(adapter, dtype=torch.bfloat16)
    update, tensors = own.weights(1)
    engine.load_weights(update, tensors)  # an fp32 exporter's probe is within the bf16 tolerance too
    own.load(1)
    exact, rounded = (stacked(e.generate(own.requests(3, 3)), "x0") for e in (own.engine, engine))
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.1 * exact.abs().max()
    with pytest.raises(EngineError, match="same forward dtype"):
        LocalEngine(adapter, dtype=torch.bfloat16, probe_tolerance=1e-5).load_weights(update, tensors)


def test_fp64_runs_and_agrees(adapter: Counting, own: Harness) -> None:
    engine = LocalEngine(adapter, dtype=torch.float64)
    engine.load_weights(*own.weights(0))
    samples = engine.generate(own.requests(3, 3))
    assert samples[0].x0.dtype == torch.float32
    torch.testing.assert_close(
        stacked(samples, "x0"), stacked(own.engine.generate(own.requests(3, 3)), "x0"), rtol=0, atol=1e-5
    )


def test_global_randomness_is_neither_used_nor_changed(own: Harness) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = own.engine.generate(own.requests(2))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(own.engine.generate(own.requests(2))[0].x0, first[0].x0)


def test_grid_of_the_contract_is_shifted() -> None:
    assert GRID[0] == 1
    assert GRID[-1] == 0
    assert GRID[1] > 0.75


# -- hops and real latents -------------------------------------------------------------------------------------


def test_an_unknown_hop_is_refused(shared: Harness) -> None:
    shared.load(0)
    (request,) = shared.requests(1)
    with pytest.raises(ValueError, match="sample_type must be one of"):
        shared.engine.generate([replace(request, sample_type="cps")])


@pytest.mark.parametrize(("row", "message"), [(5, "real_latent 5, this engine has 5"), (-1, "must be a row >= 0")])
def test_a_row_that_is_not_there_is_refused(tiny_qwen: Path, row: int, message: str) -> None:
    adapter = Counting(tiny_qwen)
    harness = harness_of(adapter, real_latents=torch.ones(5, *adapter.latent_shape))
    harness.load(0)
    with pytest.raises(ValueError, match=message):
        harness.engine.generate([replace(harness.requests(1)[0], real_latent=row)])
