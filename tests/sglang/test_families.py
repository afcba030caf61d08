"""Every family but Qwen-Image (test_plugin.py, test_contract.py) on a real server in fp32: the server's own requests
against the adapter in float64, and the engine over it against what all engines must do.

One server a family, one at a time. Each measured difference is a property of its test: `--junitxml` lists them.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from miles_dmd2.algo import normal, sigma_grid
from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.engines.sglang.server import ManagedServer, SGLangLaunch
from miles_dmd2.engines.sglang_plugin import protocol
from miles_dmd2.models.base import Components, ModelAdapter
from miles_dmd2.models.loading import eight_bit
from miles_dmd2.types import Probe
from tests.engines.contract import Harness, SamplingContract, real_latents
from tests.engines.simulation import WAYS, Another, SimulationContract, beside_the_local_engine
from tests.families import TINY, Tiny, checkpoints
from tests.sglang.raw import STOCK, Server, content, encoded

__all__ = ["checkpoints"]
pytestmark = pytest.mark.sglang

GRID = sigma_grid(4, 3.0)[:-1].tolist()
WITH_0 = torch.tensor([*GRID, 0.0])
FP32 = 1e-5  # latents and velocities here are of size 1 to 5
START_SECONDS = 240.0

Close = Callable[..., None]


@pytest.fixture(scope="module", params=[tiny for tiny in TINY if tiny.name != "qwen_image"], ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return request.param


@pytest.fixture(scope="module")
def adapter(tiny: Tiny, checkpoints: Callable[[Tiny], Path]) -> ModelAdapter:
    return tiny.adapter(checkpoints(tiny))


@pytest.fixture(scope="module")
def components(adapter: ModelAdapter) -> Components:
    return adapter.load_components()


@pytest.fixture(scope="module")
def student(adapter: ModelAdapter) -> nn.Module:
    """In float64: the independent second implementation that the engine is held against."""
    return adapter.load_transformer().requires_grad_(False).to(torch.float64)


@pytest.fixture(scope="module")
def running(
    adapter: ModelAdapter, sglang_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ManagedServer]:
    launch = SGLangLaunch(
        python=sglang_python,
        model=adapter.checkpoint,
        model_id=adapter.serving.model_id,
        arguments=tuple(adapter.serving.launch_arguments("fp32")),
        log=tmp_path_factory.mktemp("logs") / f"{adapter.family}.log",
        start_timeout=START_SECONDS,
        threads=1,
    )
    with ManagedServer(launch) as server:
        yield server


@pytest.fixture(scope="module")
def raw(running: ManagedServer) -> Server:
    return Server(running.url)


@pytest.fixture
def close(record_property: Callable[[str, object], None]) -> Close:
    def compare(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
        record_property("difference", (found.double() - expected.double()).abs().max().item() / scale)
        torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=FP32 * scale)

    return compare


@pytest.fixture
def ask(raw: Server, tiny: Tiny, adapter: ModelAdapter) -> Callable[..., dict[str, Any]]:
    """A rollout with this family's own fields; `stop` or the whole."""
    own = {"guidance_scale", "true_cfg_scale", "height", "width"}
    stock = {name: value for name, value in STOCK.items() if name not in own}

    def request(stop: int | None, **fields: object) -> dict[str, Any]:
        steps = list(range(5)) if stop is None else [stop, stop + 1]
        ours = {} if stop is None else {"rollout_stop_step": stop}
        body = {
            **stock,
            **adapter.serving.request_fields(),
            "prompt": tiny.prompts[0],
            "rollout": True,
            "rollout_sigmas": GRID,
            "rollout_return_step_indices": steps,
            **ours,
            **fields,
        }
        return raw.exchange(body)

    return request


def latents(adapter: ModelAdapter, reply: dict[str, Any]) -> list[Tensor]:
    return [adapter.serving.latent(latent) for latent in reply["dit_trajectory"]["latents"]]


def cond_of(adapter: ModelAdapter, reply: dict[str, Any]) -> dict[str, Tensor]:
    return adapter.serving.conditioning(reply["denoising_env"]["pos_cond_kwargs"])


def velocity(adapter: ModelAdapter, student: nn.Module, cond: dict[str, Tensor], x: Tensor, sigma: float) -> Tensor:
    """Of one latent, in float64."""
    batch = {
        name: value.double() if value.is_floating_point() else value for name, value in adapter.collate([cond]).items()
    }
    with torch.no_grad():
        return adapter.velocity(student, x.double()[None], torch.tensor([sigma], dtype=torch.float64), batch)[0]


def weights_of(adapter: ModelAdapter, move: float = 0.0) -> dict[str, Tensor]:
    named = adapter.load_transformer().named_parameters()
    return {name: (p + move * normal(100 + i, p.shape)).detach().clone() for i, (name, p) in enumerate(named)}


def write(adapter: ModelAdapter, directory: Path, tensors: dict[str, Tensor]) -> dict[str, object]:
    """A directory for an update from disk, and the request that names it."""
    (directory / "transformer").mkdir(parents=True)
    save_file(adapter.serving.weights(tensors), directory / "transformer" / "diffusion_pytorch_model.safetensors")
    return {"model_path": str(directory), "target_modules": ["transformer"]}


def digest_of(tensors: dict[str, Tensor]) -> str:
    digests = {n: protocol.tensor_digest(str(t.dtype), list(t.shape), content(t)) for n, t in tensors.items()}
    return protocol.weights_digest(digests)


def test_the_engine_runs_its_own_network_with_every_hook(
    raw: Server, running: ManagedServer, adapter: ModelAdapter
) -> None:
    told = raw.json("/miles_dmd2/capabilities")
    worker = told["worker"]
    assert told["launch_id"] == running.launch_id
    assert all(told["hooks"].values())
    assert all(worker["hooks"].values())
    assert worker["bypassed"] == []
    assert worker["dtype"] == "torch.float32"
    assert "falling back" not in "\n".join(
        line for line in running.tail(5000).splitlines() if "text_encoder" not in line
    )
    assert worker["parameters"] == sum(t.numel() for t in adapter.serving.weights(weights_of(adapter)).values())


@pytest.mark.parametrize("stop", range(4))
def test_a_stopped_rollout_is_the_beginning_of_the_whole(
    ask: Callable[..., dict[str, Any]], adapter: ModelAdapter, student: nn.Module, close: Close, stop: int
) -> None:
    """k + 1 forwards, whatever the guidance; x_k and x_{k+1} bit for bit; x0 = x_k - sigma_k v with v in float64."""
    whole = latents(adapter, ask(None))
    reply = ask(stop, rollout_return_generated_output=False)
    assert reply["miles_dmd2"]["forwards"] == stop + 1
    assert reply["generated_output"] is None
    assert torch.equal(reply["dit_trajectory"]["sigmas"], WITH_0)
    x_k, x0 = latents(adapter, reply)
    assert torch.equal(x_k, whole[stop])
    v = velocity(adapter, student, cond_of(adapter, reply), x_k, GRID[stop])
    close(x0, x_k.double() - WITH_0[stop].double() * v)
    following = latents(adapter, ask(stop, rollout_stop_output="next"))
    assert torch.equal(following[1], whole[stop + 1])


def test_guidance_as_other_families_count_it_would_run_the_network_twice(
    ask: Callable[..., dict[str, Any]], tiny: Tiny
) -> None:
    """Why Z-Image is asked for 0.0: at 1.0 it is guided. The counter sees both forwards of a step."""
    assert ask(1, guidance_scale=1.0)["miles_dmd2"]["forwards"] == (4 if tiny.name == "z_image" else 2)


def test_noise_is_the_one_of_the_seed(ask: Callable[..., dict[str, Any]], adapter: ModelAdapter) -> None:
    for seed in (0, 7, 2**32 - 1):
        assert torch.equal(latents(adapter, ask(0, seed=seed))[0], adapter.initial_noise(seed))


def test_prompts_are_encoded_as_diffusers_does(
    ask: Callable[..., dict[str, Any]], tiny: Tiny, adapter: ModelAdapter, components: Components, close: Close
) -> None:
    for prompt, expected in zip(tiny.prompts, adapter.encode_prompts(components, tiny.prompts), strict=True):
        reply = ask(0, prompt=prompt, rollout_conditioning=list(adapter.serving.conditioning_names))
        assert set(reply["denoising_env"]["pos_cond_kwargs"]) == set(adapter.serving.conditioning_names)
        found = cond_of(adapter, reply)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].shape == value.shape
            close(found[name], value, scale=value.abs().max().item())


def test_the_picture_is_of_x0(
    ask: Callable[..., dict[str, Any]], tiny: Tiny, adapter: ModelAdapter, components: Components
) -> None:
    reply = ask(1)
    drawn = adapter.serving.media(reply["generated_output"])
    expected = adapter.decode(components, latents(adapter, reply)[1].unsqueeze(0))[0]
    assert drawn.shape == expected.shape == (tiny.num_frames, *tiny.size, 3)
    assert len(eight_bit(expected).unique()) > 16
    assert (drawn - expected).abs().max() <= 1 / 255


@pytest.mark.parametrize("which", [0, 2])
def test_a_probe_runs_the_network_on_what_it_is_given(
    ask: Callable[..., dict[str, Any]], tiny: Tiny, adapter: ModelAdapter, student: nn.Module, close: Close, which: int
) -> None:
    """Whatever the prompt's own length is."""
    x, cond = normal(5, adapter.latent_shape), adapter.probe_conditioning()
    expected = velocity(adapter, student, cond, x, 0.5)
    sent = encoded(adapter.serving.probe(Probe(x[None], torch.tensor([0.5]), cond, expected[None])))
    reply = ask(0, prompt=tiny.prompts[which], rollout_sigmas=[0.5], num_inference_steps=1, rollout_probe=sent)
    assert torch.equal(latents(adapter, reply)[0], x)
    close(adapter.serving.latent(reply["miles_dmd2"]["velocity"]), expected)


def test_new_weights_are_served_and_proven(
    raw: Server, ask: Callable[..., dict[str, Any]], adapter: ModelAdapter, close: Close, tmp_path: Path
) -> None:
    """From disk and back, bit for bit; then in parts by tensors."""
    before = latents(adapter, ask(2))
    tensors, old = weights_of(adapter, 0.05), weights_of(adapter)
    student = adapter.load_transformer().requires_grad_(False)
    student.load_state_dict(tensors)
    student.to(torch.float64)
    back = write(adapter, tmp_path / "old", old)

    def check(digest: str) -> None:
        told = raw.json("/miles_dmd2/weights")
        assert (told["digest"], told["missing"], told["wrong"]) == (digest, [], [])
        reply = ask(2)
        assert reply["miles_dmd2"]["weights"] == digest
        x_k, x0 = latents(adapter, reply)
        close(x0, x_k.double() - WITH_0[2].double() * velocity(adapter, student, cond_of(adapter, reply), x_k, GRID[2]))
        assert (x0 - before[1]).abs().max() > 1e-2

    sent = adapter.serving.weights(tensors)
    assert raw.json("/update_weights_from_disk", write(adapter, tmp_path / "new", tensors))["success"]
    check(digest_of(sent))
    assert raw.json("/update_weights_from_disk", back)["success"]
    assert all(torch.equal(a, b) for a, b in zip(latents(adapter, ask(2)), before, strict=True))

    named = list(sent.items())
    raw.json("/miles_dmd2/weights/begin", {})
    for part in (named[::2], named[1::2]):
        payload = base64.b64encode(pickle.dumps(part)).decode()  # written here, read by the engine's allow-list
        body = {"serialized_named_tensors": [payload], "target_modules": ["transformer"]}
        assert raw.json("/update_weights_from_tensor", body)["success"]
    check(digest_of(sent))
    assert raw.json("/update_weights_from_disk", back)["success"]


@pytest.mark.parametrize("fault", ["missing", "unknown", "NaN"])
def test_a_wrong_update_is_refused_and_changes_nothing(
    raw: Server, ask: Callable[..., dict[str, Any]], adapter: ModelAdapter, tmp_path: Path, fault: str
) -> None:
    before = latents(adapter, ask(2))
    tensors = weights_of(adapter, 0.05)
    name = max(tensors)
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        tensors["nobody"] = torch.zeros(2)
    else:
        tensors[name].view(-1)[0] = float("nan")
    status, text, _ = raw.call("/update_weights_from_disk", write(adapter, tmp_path / "bad", tensors))
    assert status == 400
    assert {"missing": name, "unknown": "nobody", "NaN": "not finite"}[fault] in text.decode()
    assert all(torch.equal(a, b) for a, b in zip(latents(adapter, ask(2)), before, strict=True))


# -- the engine over this server --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tiny: Tiny, adapter: ModelAdapter, running: ManagedServer) -> Iterator[Harness]:
    settings = SGLangSettings(require_plugin=True)
    engine = SGLangEngine(adapter, [running], settings, real_latents=real_latents(adapter))
    reference = adapter.load_transformer().requires_grad_(False)
    yield Harness(engine, adapter, reference, tiny.prompts, same=FP32, exact=False)
    engine.close()


class TestSGLangEngine(SamplingContract, SimulationContract):
    @pytest.fixture
    def harness(self, served: Harness) -> Harness:
        return served

    @pytest.fixture
    def another(self, adapter: ModelAdapter, running: ManagedServer) -> Another:
        settings = SGLangSettings(require_plugin=True)
        return lambda real: SGLangEngine(adapter, [running], settings, real_latents=real)


@pytest.mark.parametrize("way", WAYS)
def test_server_and_local_engine_make_the_same_samples(served: Harness, close: Close, way: str) -> None:
    close(*beside_the_local_engine(served, way))
