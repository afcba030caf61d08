"""The plugin on an unmodified SGLang server, asked directly. Counts and equalities are of the real engine."""

import base64
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from miles_dmd2.algo import normal, sigma_grid
from miles_dmd2.engines.sglang_plugin import protocol
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.loading import eight_bit
from miles_dmd2.models.registry import build_adapter
from miles_dmd2.types import Probe
from tests.sglang.raw import CANVAS, STOCK, Server, content, encoded, tensors_of
from tests.tiny_qwen import PROMPTS

pytestmark = pytest.mark.sglang

GRID = sigma_grid(4, 3.0)[:-1].tolist()
WITH_0 = torch.tensor([*GRID, 0.0])
FP32 = 2e-5  # other kernels in the engine: rotary embedding, attention, layer norm


@pytest.fixture(scope="module")
def adapter(qwen_pipeline: Path) -> ModelAdapter:
    return build_adapter(qwen_pipeline, CANVAS, CANVAS)


@pytest.fixture(scope="module")
def student(adapter: ModelAdapter) -> nn.Module:
    """In float64: the independent second implementation that the engine is held against."""
    return adapter.load_transformer(torch.float64).requires_grad_(False)


@pytest.fixture
def raw(server: Any) -> Server:
    return Server(server.url)


@pytest.fixture(scope="module", autouse=True)
def weights_of_checkpoint(server: Any, adapter: ModelAdapter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint's own weights, received through an update: other modules leave others on this server."""
    directory = write(tmp_path_factory.mktemp("checkpoint") / "weights", checkpoint(adapter))
    assert Server(server.url).json("/update_weights_from_disk", update(directory))["success"]
    return directory


@pytest.fixture
def restored(raw: Server, weights_of_checkpoint: Path) -> Iterator[Path]:
    """A test that changes them."""
    yield weights_of_checkpoint
    assert raw.json("/update_weights_from_disk", update(weights_of_checkpoint))["success"]


def ask(raw: Server, stop: int, **fields: object) -> dict[str, Any]:
    return raw.rollout(
        rollout_sigmas=GRID, rollout_stop_step=stop, rollout_return_step_indices=[stop, stop + 1], **fields
    )


def latents(reply: dict[str, Any]) -> Tensor:
    return reply["dit_trajectory"]["latents"]


def velocity(adapter: ModelAdapter, student: nn.Module, reply: dict[str, Any], x: Tensor, sigma: float) -> Tensor:
    """Of one latent, in float64, with the conditioning that the engine returned."""
    cond = adapter.collate([adapter.serving.conditioning(reply["denoising_env"]["pos_cond_kwargs"])])
    cond = {name: value.double() if value.is_floating_point() else value for name, value in cond.items()}
    with torch.no_grad():
        return adapter.velocity(student, x.double().unsqueeze(0), torch.tensor([sigma], dtype=torch.float64), cond)[0]


def checkpoint(adapter: ModelAdapter) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in adapter.load_transformer().state_dict().items()}


def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value + 0.05 * normal(100 + i, value.shape) for i, (name, value) in enumerate(tensors.items())}


def write(directory: Path, tensors: dict[str, Tensor]) -> Path:
    (directory / "transformer").mkdir(parents=True)
    save_file(tensors, directory / "transformer" / "diffusion_pytorch_model.safetensors")
    return directory


def update(directory: Path) -> dict[str, object]:
    return {"model_path": str(directory), "target_modules": ["transformer"]}


def digest_of(tensors: dict[str, Tensor]) -> str:
    return protocol.weights_digest(
        {
            name: protocol.tensor_digest(str(value.dtype), list(value.shape), content(value))
            for name, value in tensors.items()
        }
    )


# -- handshake ---------------------------------------------------------------------------------------------------


def test_every_hook_is_in_place_in_both_processes(raw: Server, server: Any) -> None:
    told = raw.json("/miles_dmd2/capabilities")
    assert told["protocol"] == protocol.PROTOCOL
    assert told["launch_id"] == server.launch_id
    assert len(told["hooks"]) == 5
    assert len(told["worker"]["hooks"]) == 20
    assert all(told["hooks"].values())
    assert all(told["worker"]["hooks"].values())
    assert told["worker"]["bypassed"] == []
    assert told["worker"]["dtype"] == "torch.float32"
    assert told["worker"]["offloaded"] is False


def test_the_digest_of_a_reply_is_of_its_bytes(raw: Server) -> None:
    status, body, headers = raw.call("/rollout/generate", {"prompt": "the digit one"})  # refused: also digested
    assert status == 422
    assert headers[protocol.DIGEST_HEADER] == protocol.body_digest(body)


# -- stop step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", range(4))
def test_a_stopped_rollout_is_the_beginning_of_the_whole(
    raw: Server, adapter: ModelAdapter, student: nn.Module, stop: int
) -> None:
    """k + 1 forwards; x_k bit for bit; x0 = x_k - sigma_k v with v in float64; x_{k+1} bit for bit when asked for."""
    whole = latents(raw.rollout(rollout_sigmas=GRID, rollout_return_step_indices=[0, 1, 2, 3, 4]))
    reply = ask(raw, stop, rollout_client_id=f"k{stop}", rollout_return_generated_output=False)
    x_k, x0 = latents(reply)
    assert reply["miles_dmd2"]["forwards"] == stop + 1
    assert reply["miles_dmd2"]["client_id"] == f"k{stop}"
    assert torch.equal(x_k, whole[stop])
    expected = x_k.double() - WITH_0[stop].double() * velocity(adapter, student, reply, x_k, GRID[stop])
    torch.testing.assert_close(x0.double(), expected, rtol=0, atol=FP32)
    following = ask(raw, stop, rollout_stop_output="next")
    assert torch.equal(latents(following)[1], whole[stop + 1])
    assert following["dit_trajectory"]["timesteps"].tolist() == (1000 * WITH_0)[stop : stop + 2].tolist()


def test_noise_and_grid_are_the_ones_asked_for(raw: Server, adapter: ModelAdapter) -> None:
    for seed in (0, 7, 2**32 - 1):
        reply = ask(raw, 0, seed=seed)
        assert torch.equal(latents(reply)[0], adapter.initial_noise(seed))
        assert torch.equal(reply["dit_trajectory"]["sigmas"], WITH_0)


def test_a_grid_that_starts_below_one_scales_the_noise(raw: Server, adapter: ModelAdapter) -> None:
    first = torch.tensor(0.9)
    reply = raw.rollout(
        rollout_sigmas=[first.item()], num_inference_steps=1, rollout_stop_step=0, rollout_return_step_indices=[0, 1]
    )
    assert torch.equal(latents(reply)[0], first * adapter.initial_noise(5))


def test_nothing_of_a_request_stays_for_the_next(raw: Server) -> None:
    """A server that others use too: the scheduler's own grid is back at once."""
    before = raw.rollout(rollout_return_step_indices=[0, 4])
    ask(raw, 2)
    after = raw.rollout(rollout_return_step_indices=[0, 4])
    assert not torch.equal(before["dit_trajectory"]["sigmas"], WITH_0)
    assert torch.equal(before["dit_trajectory"]["sigmas"], after["dit_trajectory"]["sigmas"])
    assert torch.equal(latents(before), latents(after))
    assert before["miles_dmd2"] is None


# -- what comes back ---------------------------------------------------------------------------------------------


def test_the_picture_is_of_x0_and_only_when_asked(raw: Server, adapter: ModelAdapter) -> None:
    without = ask(raw, 1, rollout_return_generated_output=False)
    assert without["generated_output"] is None
    assert without["miles_dmd2"]["decoded"] is False
    reply = ask(raw, 1)
    assert torch.equal(latents(reply), latents(without))
    drawn = adapter.serving.media(reply["generated_output"])
    expected = adapter.decode(adapter.load_components(), latents(reply)[1].unsqueeze(0))[0]
    assert len(eight_bit(expected).unique()) > 2
    assert drawn.dtype == torch.float32
    assert (drawn - expected).abs().max() <= 1 / 255
    rounded = adapter.serving.media(ask(raw, 1, rollout_video_dtype="uint8")["generated_output"])
    assert torch.equal(rounded, eight_bit(drawn))


def test_only_the_conditioning_that_is_asked_for(raw: Server, adapter: ModelAdapter) -> None:
    reply = ask(raw, 0, rollout_conditioning=list(adapter.serving.conditioning_names))
    assert set(reply["denoising_env"]["pos_cond_kwargs"]) == set(adapter.serving.conditioning_names)
    everything = ask(raw, 0)
    assert len(everything["denoising_env"]["pos_cond_kwargs"]) > 1
    status, text = raw.refusal(
        rollout_sigmas=GRID, rollout_stop_step=0, rollout_return_step_indices=[0, 1], rollout_conditioning=["nope"]
    )
    assert (status, "this model has no ['nope']" in text) == (500, True)


def test_prompts_are_encoded_as_diffusers_does(raw: Server, adapter: ModelAdapter) -> None:
    for prompt, expected in zip(PROMPTS, adapter.encode_prompts(adapter.load_components(), PROMPTS), strict=True):
        found = adapter.serving.conditioning(ask(raw, 0, prompt=prompt)["denoising_env"]["pos_cond_kwargs"])
        torch.testing.assert_close(found["prompt_embeds"], expected["prompt_embeds"], rtol=0, atol=FP32)


def test_a_probe_runs_the_network_on_what_it_is_given(raw: Server, adapter: ModelAdapter, student: nn.Module) -> None:
    x, sigma, cond = normal(5, adapter.latent_shape).unsqueeze(0), torch.tensor([0.5]), adapter.probe_conditioning()
    double = {name: value.double() for name, value in adapter.collate([cond]).items()}
    with torch.no_grad():
        expected = adapter.velocity(student, x.double(), sigma.double(), double)[0]
    sent = encoded(adapter.serving.probe(Probe(x, sigma, cond, expected)))
    probe = {"rollout_sigmas": [0.5], "num_inference_steps": 1, "rollout_stop_step": 0, "rollout_probe": sent}
    reply = raw.rollout(rollout_return_step_indices=[0, 1], **probe)
    assert torch.equal(latents(reply)[0], x[0])
    torch.testing.assert_close(reply["miles_dmd2"]["velocity"].double(), expected, rtol=0, atol=FP32)
    assert torch.equal(latents(reply)[1], x[0] - 0.5 * reply["miles_dmd2"]["velocity"])


# -- strict requests ---------------------------------------------------------------------------------------------

REFUSED = [
    ({"rollout_stopstep": 1}, "Extra inputs are not permitted"),
    ({"rollout_stop_step": True}, "valid integer"),
    ({"rollout_stop_step": "2"}, "valid integer"),
    ({"rollout_stop_step": 1.0}, "valid integer"),
    ({"rollout_stop_step": 4}, "must be in [0, 4), got 4"),
    ({"rollout_stop_step": -1}, "must be in [0, 4), got -1"),
    ({"rollout_stop_output": "x1"}, "'x0' or 'next'"),
    ({"rollout_return_generated_output": "no"}, "valid boolean"),
    ({"rollout_sigmas": None}, "needs rollout_sigmas"),
    ({"rollout_sigmas": [1.0, 0.5, 0.5, 0.2]}, "decrease"),
    ({"rollout_sigmas": [1.5, 0.9, 0.5, 0.2]}, "at most 1"),
    ({"rollout_sigmas": [1.0, 0.9, 0.5, 0.0]}, "terminal 0 that is left out"),
    ({"num_inference_steps": 3}, "must be 4"),
    ({"num_outputs_per_prompt": 2}, "num_outputs_per_prompt must be 1"),
    ({"seed": None}, "seed is missing"),
    ({"width": 16384}, "width must be in [1, 8192]"),
    ({"width": 8192, "height": 8192, "num_frames": 81}, "more than 1073741824"),
    ({"num_inference_steps": 1001}, "num_inference_steps must be in [1, 1000]"),
    ({"prompt": "seven " * 8000}, "longer than 32768 characters"),
    ({"rollout_client_id": "i" * 65}, "longer than 64"),
    ({"rollout_probe": "!!"}, "rollout_probe needs rollout_stop_step 0"),
    ({"rollout_stop_step": 0, "rollout_probe": "!!"}, "not base64"),
    ({"rollout": False}, "only with rollout"),
    ({"extra_sampling_params": {"progressive_mode": "dct"}}, "cannot be combined"),
    ({"extra_sampling_params": {"diffusers_kwargs": {"miles_dmd2": {}}}}, "use the rollout_* fields"),
    ({"suppress_logs": "yes"}, "valid boolean"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_served_is_422_with_a_reason(raw: Server, fields: dict[str, object], message: str) -> None:
    status, text = raw.refusal(**{"rollout_sigmas": GRID, "rollout_stop_step": 1, **fields})
    assert status == 422, text[:300]
    assert message in text.replace("\\", ""), text[:300]


# -- weights -----------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Tensor]], object]
QUERY = "transformer_blocks.0.attn.add_q_proj.weight"  # SGLang fuses it with its key and value
FAULTS: dict[str, tuple[Change, str]] = {
    "missing": (lambda t: t.pop("img_in.bias"), "missing or incomplete: img_in.bias"),
    "a part of a fused one missing": (lambda t: t.pop(QUERY), "incomplete: transformer_blocks.0.attn.to_added_qkv"),
    "unknown": (lambda t: t.update(extra=torch.zeros(3)), "unknown: extra"),
    "renamed": (lambda t: t.update({"module.img_in.bias": t.pop("img_in.bias")}), "unknown: module.img_in.bias"),
    "NaN": (lambda t: t[QUERY].view(-1)[0].fill_(float("nan")), f"not finite: {QUERY}"),
    "infinite": (lambda t: t["img_in.bias"][0].fill_(float("inf")), "not finite: img_in.bias"),
    "wrong shape": (lambda t: t.update({"img_in.weight": t["img_in.weight"][:1].clone()}), "do not fit img_in.weight"),
    "wrong shape of a fused part": (lambda t: t.update({QUERY: t[QUERY][:1].clone()}), "do not fit"),
}


def test_new_weights_are_served_and_proven(raw: Server, adapter: ModelAdapter, restored: Path, tmp_path: Path) -> None:
    tensors = moved(checkpoint(adapter))
    before = latents(ask(raw, 2))
    assert raw.json("/update_weights_from_disk", update(write(tmp_path / "new", tensors)))["success"]
    told = raw.json("/miles_dmd2/weights")
    assert (told["digest"], told["missing"], told["wrong"]) == (digest_of(tensors), [], [])
    reply = ask(raw, 2)
    assert reply["miles_dmd2"]["weights"] == digest_of(tensors)
    student = adapter.load_transformer(torch.float64)
    student.load_state_dict(tensors)
    x_k, x0 = latents(reply)
    expected = x_k.double() - WITH_0[2].double() * velocity(adapter, student, reply, x_k, GRID[2])
    torch.testing.assert_close(x0.double(), expected, rtol=0, atol=FP32)
    assert (x0 - before[1]).abs().max() > 1e-2
    assert raw.json("/update_weights_from_disk", update(restored))["success"]
    assert torch.equal(latents(ask(raw, 2)), before)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_update_is_refused_and_changes_nothing(
    raw: Server, adapter: ModelAdapter, restored: Path, tmp_path: Path, fault: str
) -> None:
    change, message = FAULTS[fault]
    before, digest = latents(ask(raw, 2)), raw.json("/miles_dmd2/weights")["digest"]
    tensors = moved(checkpoint(adapter))
    change(tensors)
    status, text, _ = raw.call("/update_weights_from_disk", update(write(tmp_path / "bad", tensors)))
    assert status == 400
    assert message in text.decode()
    assert raw.json("/miles_dmd2/weights")["digest"] == digest == digest_of(checkpoint(adapter))
    assert torch.equal(latents(ask(raw, 2)), before)


def in_tensors(tensors: list[tuple[str, Tensor]]) -> dict[str, object]:
    payload = base64.b64encode(pickle.dumps(tensors)).decode()  # written here, read by the engine's allow-list
    return {"serialized_named_tensors": [payload], "target_modules": ["transformer"]}


def test_an_update_in_parts_counts_when_it_is_complete(raw: Server, adapter: ModelAdapter, restored: Path) -> None:
    """Query, key and value of one fused layer come in different requests here."""
    tensors = moved(checkpoint(adapter))
    named = list(tensors.items())
    raw.json("/miles_dmd2/weights/begin", {})
    assert raw.json("/update_weights_from_tensor", in_tensors(named[::2]))["success"]
    told = raw.json("/miles_dmd2/weights")
    assert told["digest"] is None
    assert "transformer_blocks.0.attn.to_added_qkv.weight" in told["missing"]
    assert ask(raw, 0)["miles_dmd2"]["weights"] is None
    assert raw.json("/update_weights_from_tensor", in_tensors(named[1::2]))["success"]
    told = raw.json("/miles_dmd2/weights")
    assert (told["digest"], told["missing"], told["wrong"]) == (digest_of(tensors), [], [])
    assert ask(raw, 0)["miles_dmd2"]["weights"] == digest_of(tensors)


def test_a_refused_part_leaves_the_set_unproven(raw: Server, adapter: ModelAdapter, restored: Path) -> None:
    before = latents(ask(raw, 2))
    status, text, _ = raw.call("/update_weights_from_tensor", in_tensors([("nobody", torch.zeros(2))]))
    assert status == 400
    assert "unknown: nobody" in text.decode()
    assert torch.equal(latents(ask(raw, 2)), before)
    assert ask(raw, 0)["miles_dmd2"]["weights"] is None


# -- sleep -------------------------------------------------------------------------------------------------------


def test_sleep_and_wake_without_cuda(raw: Server) -> None:
    before = latents(ask(raw, 2))
    assert raw.json("/release_memory_occupation", {})["sleeping"] is True
    assert raw.json("/miles_dmd2/capabilities")["worker"]["sleeping"] is True
    status, text = raw.refusal(rollout_sigmas=GRID, rollout_stop_step=0)
    assert (status, "sleeping" in text) == (500, True)
    assert raw.json("/resume_memory_occupation", {})["sleeping"] is False
    assert torch.equal(latents(ask(raw, 2)), before)


def test_replies_hold_little_more_than_what_training_reads(raw: Server, adapter: ModelAdapter) -> None:
    """Two latents, the grid and the embedding are 4 x (2 x 256 + 5 + 8 x 32) bytes here; the rest is names."""
    fields = {"rollout_sigmas": GRID, "rollout_stop_step": 2, "rollout_return_step_indices": [2, 3]}
    names = list(adapter.serving.conditioning_names)
    body = {**STOCK, **fields, "rollout_conditioning": names, "rollout_return_generated_output": False}
    _, lean, _ = raw.call("/rollout/generate", body)
    (reply,) = tensors_of(msgpack.unpackb(lean))
    minimum = sum(t.nbytes for t in (latents(reply), WITH_0, reply["denoising_env"]["pos_cond_kwargs"][names[0]][0]))
    _, full, _ = raw.call("/rollout/generate", {**STOCK, **fields})
    assert len(lean) < minimum + 2500
    assert len(full) > len(lean) + 4 * 3 * CANVAS**2
