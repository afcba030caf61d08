"""What is sent to an SGLang server, exactly; and one fault in a good reply each, which has to be found."""

import base64
import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from miles_dmd2.algo import normal, sigma_grid
from miles_dmd2.data.requests import TrainingRequests, eval_requests
from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang.wire import (
    Answer,
    Ask,
    StaleWeightsError,
    WireError,
    error_text,
    parse_conditioning,
    parse_json,
    parse_probe,
    parse_rollout,
    probe_request,
    rollout_body,
)
from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.types import Probe, RolloutRequest
from tests.engines.fake_sglang import FakeSGLang, packed
from tests.tiny_qwen import SIZE, TEXT_WIDTH

GRID = tuple(sigma_grid(4, 3.0).tolist())  # 1, 0.9, 0.75, 0.5, 0 in fp32
REQUEST = RolloutRequest(7, "the digit seven", 507, GRID, 2)
ASK = Ask(REQUEST, "7.0.abc", None)
EVAL = Ask(dataclasses.replace(REQUEST, stop_step=3, decode=True), "7.0.abc", None, conditioning=True)
STOCK = dataclasses.replace(EVAL, plugin=False)
Reply = dict[str, Any]


@pytest.fixture(scope="module")
def adapter(tiny_qwen: Path) -> QwenImageAdapter:
    return QwenImageAdapter(tiny_qwen, SIZE, SIZE)


@pytest.fixture(scope="module")
def replies(adapter: QwenImageAdapter) -> Callable[[Ask], Reply]:
    """A good reply to an ask, to be spoilt."""
    good: dict[Ask, Reply] = {}

    def reply(ask: Ask) -> Reply:
        if ask not in good:
            good[ask] = FakeSGLang(adapter, plugin=ask.plugin).reply_to(rollout_body(ask, adapter))
        return copy.deepcopy(good[ask])

    return reply


def parsed(reply: Reply, ask: Ask, adapter: QwenImageAdapter) -> Answer:
    return parse_rollout(msgpack.packb([reply]), ask, adapter)


# -- requests ------------------------------------------------------------------------------------------------

COMMON = {
    "prompt": "the digit seven",
    "seed": 507,
    "generator_device": "cpu",
    "height": 32,
    "width": 32,
    "guidance_scale": 1.0,
    "true_cfg_scale": 1.0,
    "num_inference_steps": 4,
    "num_outputs_per_prompt": 1,
    "rollout": True,
    "rollout_sde_type": "ode",
    "rollout_noise_level": 0.0,
    "rollout_log_prob_no_const": True,
    "rollout_return_dit_trajectory": True,
    "suppress_logs": True,
}


def test_a_training_request_asks_for_two_latents_and_nothing_else(adapter: QwenImageAdapter) -> None:
    assert rollout_body(ASK, adapter) == {
        **COMMON,
        "rollout_debug_mode": False,
        "rollout_return_denoising_env": False,
        "rollout_return_step_indices": [2, 3],
        "rollout_sigmas": list(GRID[:-1]),
        "rollout_stop_step": 2,
        "rollout_return_generated_output": False,
        "rollout_client_id": "7.0.abc",
    }


def test_an_eval_request_decodes_and_the_first_of_a_prompt_asks_for_its_conditioning(adapter: QwenImageAdapter) -> None:
    assert rollout_body(EVAL, adapter) == {
        **COMMON,
        "rollout_debug_mode": False,
        "rollout_return_denoising_env": True,
        "rollout_return_step_indices": [3, 4],
        "rollout_sigmas": list(GRID[:-1]),
        "rollout_stop_step": 3,
        "rollout_return_generated_output": True,
        "rollout_video_dtype": "uint8",
        "rollout_client_id": "7.0.abc",
        "rollout_conditioning": ["encoder_hidden_states"],
    }


@pytest.mark.parametrize("rewards", [False, True])
def test_training_asks_for_media_only_when_a_reward_reads_them(adapter: QwenImageAdapter, rewards: bool) -> None:
    """What --rm-type none without --custom-rm-path saves: the decode, and the pixels on the wire."""
    source = TrainingRequests(["a", "b"], 2, 2, 2, GRID, "per_sample", 0, scored=rewards, unscored=frozenset({"b"}))
    for request in (request for window in source(0) for request in window):
        body = rollout_body(Ask(request, "x", None), adapter)
        wanted = rewards and request.prompt == "a"
        assert body["rollout_return_generated_output"] is wanted
        assert body.get("rollout_video_dtype") == ("uint8" if wanted else None)


@pytest.mark.parametrize("dtype", ["uint8", "fp32"])
def test_evals_ask_for_media_of_the_run_s_dtype(
    adapter: QwenImageAdapter, replies: Callable[[Ask], Reply], dtype: str
) -> None:
    (request,) = eval_requests(["the digit one"], 1, GRID, 0, video_dtype=dtype)
    ask = Ask(request, "x", None)
    body = rollout_body(ask, adapter)
    assert (body["rollout_return_generated_output"], body["rollout_video_dtype"]) == (True, dtype)
    media = parsed(replies(ask), ask, adapter).media
    assert media is not None
    assert media.dtype == {"uint8": torch.uint8, "fp32": torch.float32}[dtype]
    assert media.shape == (1, SIZE, SIZE, 3)
    exact = Ask(dataclasses.replace(request, video_dtype="fp32"), "x", None)
    in_fp32 = parsed(replies(exact), exact, adapter)
    assert in_fp32.media is not None
    assert 0 <= in_fp32.media.min() < in_fp32.media.max() <= 1
    rounded = (in_fp32.media * 255).round().to(torch.uint8)
    assert torch.equal(rounded, media if dtype == "uint8" else (media * 255).round().to(torch.uint8))


def test_a_stock_server_is_sent_its_own_fields_only(adapter: QwenImageAdapter) -> None:
    assert rollout_body(STOCK, adapter) == {
        **COMMON,
        "rollout_debug_mode": True,
        "rollout_return_denoising_env": True,
        "rollout_return_step_indices": [3],
    }


def test_the_grid_is_sent_in_fp32(adapter: QwenImageAdapter) -> None:
    ask = dataclasses.replace(ASK, request=dataclasses.replace(REQUEST, sigmas=(1.0, 0.7, 0.0), stop_step=1))
    assert rollout_body(ask, adapter)["rollout_sigmas"] == [1.0, 0.699999988079071044921875]


def probe_of(adapter: QwenImageAdapter) -> Probe:
    x = normal(5, (1, *adapter.latent_shape))
    return Probe(x, torch.tensor([0.7]), adapter.probe_conditioning(), torch.zeros_like(x))


def test_published_hops_are_sglangs_cps_at_noise_level_one(adapter: QwenImageAdapter) -> None:
    body = rollout_body(dataclasses.replace(ASK, request=dataclasses.replace(REQUEST, sample_type="sde")), adapter)
    assert (body["rollout_sde_type"], body["rollout_noise_level"]) == ("cps", 1.0)
    assert body.keys() == rollout_body(ASK, adapter).keys()


def test_a_latent_to_start_from_travels_alone(adapter: QwenImageAdapter) -> None:
    start = normal(3, adapter.latent_shape)
    body = rollout_body(dataclasses.replace(ASK, start=start), adapter)
    sent = load(base64.b64decode(str(body["rollout_probe"])))
    assert sent.keys() == {"x"}
    assert torch.equal(sent["x"], start)


def test_a_probe_request_carries_its_input(adapter: QwenImageAdapter) -> None:
    probe = probe_of(adapter)
    body = rollout_body(Ask(probe_request(probe), "probe.x", None, probe=probe), adapter)
    sent = load(base64.b64decode(body.pop("rollout_probe")))
    assert torch.equal(sent["x"], probe.x[0])
    assert torch.equal(sent["prompt_embeds.0"], probe.cond["prompt_embeds"].unsqueeze(0))
    assert body["rollout_sigmas"] == [0.699999988079071044921875]
    assert (body["rollout_stop_step"], body["num_inference_steps"]) == (0, 1)
    assert body["rollout_return_generated_output"] is False
    assert body["prompt"].strip()


# -- good replies --------------------------------------------------------------------------------------------


def test_a_good_reply_is_the_sample(adapter: QwenImageAdapter, replies: Callable[[Ask], Reply]) -> None:
    """By hand: three Euler steps of the checkpoint's network."""
    answer = parsed(replies(ASK), ASK, adapter)
    (cond,) = adapter.encode_prompts(adapter.load_components(), [REQUEST.prompt])
    module, x = adapter.load_transformer(), adapter.initial_noise(507)
    for k in range(3):
        with torch.no_grad():
            velocity = adapter.velocity(module, x.unsqueeze(0), torch.tensor([GRID[k]]), adapter.collate([cond]))[0]
        if k < 2:
            x = x + (torch.tensor(GRID)[k + 1] - torch.tensor(GRID)[k]) * velocity
    torch.testing.assert_close(answer.x_k, x, rtol=0, atol=1e-6)
    torch.testing.assert_close(answer.x0, x - GRID[2] * velocity, rtol=0, atol=1e-6)
    assert (answer.forwards, answer.cond, answer.media) == (3, None, None)


def test_conditioning_and_picture_come_when_asked_for(
    adapter: QwenImageAdapter, replies: Callable[[Ask], Reply]
) -> None:
    answer = parsed(replies(EVAL), EVAL, adapter)
    assert answer.cond is not None
    assert answer.cond.keys() == {"prompt_embeds"}
    assert answer.cond["prompt_embeds"].shape == (8, TEXT_WIDTH)
    assert answer.media is not None
    assert (answer.media.dtype, tuple(answer.media.shape)) == (torch.uint8, (1, SIZE, SIZE, 3))
    for value in (answer.x_k, answer.x0, answer.media, *answer.cond.values()):
        assert value.untyped_storage().nbytes() == value.nbytes


def test_a_stock_reply_is_cut_to_the_same_bits(adapter: QwenImageAdapter, replies: Callable[[Ask], Reply]) -> None:
    for stop in range(4):
        request = dataclasses.replace(REQUEST, stop_step=stop)
        ask = Ask(request, "c", None)
        stock = dataclasses.replace(ask, plugin=False)
        whole, cut = parsed(replies(ask), ask, adapter), parsed(replies(stock), stock, adapter)
        assert torch.equal(whole.x_k, cut.x_k)
        assert torch.equal(whole.x0, cut.x0)
        assert (whole.forwards, cut.forwards) == (stop + 1, 4)


def test_unknown_fields_of_sglangs_own_are_no_fault(adapter: QwenImageAdapter, replies: Callable[[Ask], Reply]) -> None:
    parsed({**replies(ASK), "new_in_0_5_24": [1]}, ASK, adapter)


# -- one fault each ------------------------------------------------------------------------------------------


def tensor_of(value: Reply) -> Tensor:
    return load(value["data"])["t"]


def put(*path: str) -> Callable[[object], Callable[[Reply], None]]:
    """put("a", "b")(value): an edit that sets reply["a"]["b"], to what a function makes of it."""

    def with_value(value: object) -> Callable[[Reply], None]:
        def edit(reply: Reply) -> None:
            where: Any = reply
            for key in path[:-1]:
                where = where[key]
            where[path[-1]] = value(where.get(path[-1])) if callable(value) else value

        return edit

    return with_value


def drop(*path: str) -> Callable[[Reply], None]:
    def edit(reply: Reply) -> None:
        where: Any = reply
        for key in path[:-1]:
            where = where[key]
        del where[path[-1]]

    return edit


def redone(change: Callable[[Tensor], Tensor]) -> Callable[[Reply], Reply]:
    """The same tensor after a change, packed as a server packs it."""
    return lambda value: packed(change(tensor_of(value)))


def with_one(value: float, index: int = 3) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[index] = value
        return tensor

    return change


def one_ulp(tensor: Tensor) -> Tensor:
    tensor[2] = float(np.nextafter(np.float32(tensor[2].item()), np.float32(1)))
    return tensor


def said(**fields: object) -> Callable[[Reply], Reply]:
    return lambda value: {**value, **fields}


LATENTS, SIGMAS = put("dit_trajectory", "latents"), put("dit_trajectory", "sigmas")
TIMES = put("dit_trajectory", "timesteps")
EMBEDS = put("denoising_env", "pos_cond_kwargs", "encoder_hidden_states")
PICTURE = put("generated_output")
NAN, INF = float("nan"), float("inf")
OTHER = "0" * 64

FAULTS = {
    # which request it answers
    "another prompt": (put("prompt")("digit seven"), "prompt is 'digit seven'"),
    "no prompt": (drop("prompt"), "prompt is None"),
    "another seed": (put("seed")(508), "seed is 508, expected 507"),
    "seed as a float": (put("seed")(507.0), "seed is 507.0"),
    "no report": (drop("miles_dmd2"), "miles_dmd2 must be a map, got NoneType"),
    "report lacks a key": (drop("miles_dmd2", "forwards"), "miles_dmd2 must have"),
    "report has a key more": (put("miles_dmd2", "extra")(lambda _: 1), "miles_dmd2 must have"),
    "another protocol": (put("miles_dmd2", "protocol")(2), "protocol is 2"),
    "another client's": (put("miles_dmd2", "client_id")("7.1.abc"), "client_id is '7.1.abc', expected '7.0.abc'"),
    "another stop step": (put("miles_dmd2", "stop_step")(1), "stop_step is 1"),
    "stop step True": (put("miles_dmd2", "stop_step")(True), "stop_step is True"),
    "too many forwards": (put("miles_dmd2", "forwards")(4), "forwards is 4, expected 3"),
    "decoded unasked": (put("miles_dmd2", "decoded")(True), "decoded is True"),
    # grid and steps
    "no trajectory": (put("dit_trajectory")(None), "dit_trajectory must be a map"),
    "sigmas one ulp off": (SIGMAS(redone(one_ulp)), "bit for bit"),
    "sigmas in fp64": (SIGMAS(redone(Tensor.double)), "bit for bit"),
    "terminal -0": (SIGMAS(redone(with_one(-0.0, 4))), "bit for bit"),
    "sigmas without the terminal 0": (SIGMAS(redone(lambda t: t[:-1].clone())), "bit for bit"),
    "sigmas missing": (drop("dit_trajectory", "sigmas"), "sigmas must be a tensor, got NoneType"),
    "steps of another index": (TIMES(redone(lambda t: t + 1)), "timesteps are"),
    "one step": (TIMES(redone(lambda t: t[:1].clone())), "timesteps are"),
    "steps NaN": (TIMES(redone(with_one(NAN, 0))), "timesteps are"),
    # latents
    "latents missing": (drop("dit_trajectory", "latents"), "latents must be a tensor"),
    "latents in fp16": (LATENTS(redone(Tensor.half)), "latents must be float32 of 2 steps, got torch.float16"),
    "latents in fp64": (LATENTS(redone(Tensor.double)), "latents must be float32"),
    "three latents": (LATENTS(redone(lambda t: torch.cat([t, t[:1]]))), r"2 steps, got torch.float32 \[3, 4, 64\]"),
    "a scalar": (LATENTS(redone(lambda t: t[0, 0, 0].clone())), "of 2 steps"),
    "another canvas": (LATENTS(redone(lambda t: t[:, :3].clone())), r"x_k: a latent must be \[4, 64\], got \[3, 64\]"),
    "x_k NaN": (LATENTS(redone(with_one(NAN))), "x_k is not finite"),
    "x0 infinite": (LATENTS(redone(with_one(-INF, -1))), "x0 is not finite"),
    # a tensor's own packing
    "no tensor": (LATENTS([1.0]), "latents must be a tensor, got list"),
    "key missing": (drop("dit_trajectory", "latents", "shape"), "latents must be a tensor, got"),
    "key more": (LATENTS(said(strides=[1])), "latents must be a tensor, got"),
    "flag false": (LATENTS(said(__tensor__=False)), "tensor of bytes"),
    "data as text": (LATENTS(said(data="AAAA")), "tensor of bytes, got str"),
    "not safetensors": (LATENTS(said(data=b"\x80\x04pickle")), "latents: not safetensors"),
    "data cut": (LATENTS(lambda v: {**v, "data": v["data"][:-4]}), "latents: not safetensors"),
    "data longer": (LATENTS(lambda v: {**v, "data": v["data"] + b"\0\0\0\0"}), "latents: not safetensors"),
    "header of 2^63 bytes": (
        LATENTS(lambda v: {**v, "data": b"\xff" * 7 + b"\x7f" + v["data"][8:]}),
        "not safetensors",
    ),
    "another name": (LATENTS(lambda v: {**v, "data": save({"u": tensor_of(v)})}), "the one tensor 't', got"),
    "two tensors": (LATENTS(lambda v: {**v, "data": save({"t": tensor_of(v), "u": tensor_of(v)})}), "the one tensor"),
    "said to be larger": (LATENTS(said(shape=[2, 1 << 40, 64])), "is said to be"),
    "said to be of another dtype": (LATENTS(said(dtype="torch.float64")), "said to be torch.float64"),
    # what was not asked for
    "a picture": (PICTURE(packed(torch.zeros(3, 1, 32, 32))), "generated_output was not asked for"),
    "conditioning": (put("denoising_env")({"pos_cond_kwargs": {}}), "denoising_env was not asked for"),
}

EVAL_FAULTS = {
    "no conditioning": (put("denoising_env")(None), "denoising_env must be a map"),
    "no positive conditioning": (put("denoising_env", "pos_cond_kwargs")(None), "pos_cond_kwargs must be a map"),
    "conditioning lacks a name": (
        put("denoising_env", "pos_cond_kwargs")({}),
        r"must have \['encoder_hidden_states'\]",
    ),
    "conditioning has a name more": (
        put("denoising_env", "pos_cond_kwargs", "guidance")(lambda _: None),
        r"must have \['encoder_hidden_states'\], got \['encoder_hidden_states', 'guidance'\]",
    ),
    "no embedding": (EMBEDS(lambda v: []), "in a list of one, got a list of 0"),
    "two embeddings": (EMBEDS(lambda v: v * 2), "in a list of one, got a list of 2"),
    "embedding of no token": (EMBEDS(lambda v: [redone(lambda t: t[:0].clone())(v[0])]), r"got \[0, 32\]"),
    "embedding of another width": (EMBEDS(lambda v: [redone(lambda t: t[:, :16].clone())(v[0])]), r"got \[8, 16\]"),
    "embedding NaN": (EMBEDS(lambda v: [redone(with_one(NAN))(v[0])]), "conditioning .* is not finite"),
    "embedding garbled": (EMBEDS(lambda v: [{**v[0], "data": b""}]), r"encoder_hidden_states\[0\]: not safetensors"),
    "no picture": (PICTURE(None), "generated_output must be a tensor"),
    "picture of another size": (PICTURE(redone(lambda t: t[..., :16].clone())), r"must be \[3, frames, 32, 32\]"),
    "picture NaN": (PICTURE(redone(lambda t: with_one(NAN)(t.float()))), "generated_output is not finite"),
    "not decoded": (put("miles_dmd2", "decoded")(False), "decoded is False"),
}

STOCK_FAULTS = {
    "no debug tensors": (put("rollout_debug_tensors")(None), "rollout_debug_tensors must be a map"),
    "velocities of fewer steps": (
        put("rollout_debug_tensors", "rollout_model_outputs")(redone(lambda t: t[:3].clone())),
        "must hold 4 steps",
    ),
    "velocity NaN": (
        put("rollout_debug_tensors", "rollout_model_outputs")(redone(with_one(NAN, -1))),
        "velocity is not finite",
    ),
    "latents of two steps": (LATENTS(redone(lambda t: torch.cat([t, t]))), "of 1 steps"),
    "another seed": (put("seed")(1), "seed is 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reply_with_a_fault_is_refused(
    adapter: QwenImageAdapter, replies: Callable[[Ask], Reply], fault: str
) -> None:
    check(FAULTS[fault], ASK, adapter, replies)


@pytest.mark.parametrize("fault", EVAL_FAULTS)
def test_an_eval_reply_with_a_fault_is_refused(
    adapter: QwenImageAdapter, replies: Callable[[Ask], Reply], fault: str
) -> None:
    check(EVAL_FAULTS[fault], EVAL, adapter, replies)


@pytest.mark.parametrize("fault", STOCK_FAULTS)
def test_a_stock_reply_with_a_fault_is_refused(
    adapter: QwenImageAdapter, replies: Callable[[Ask], Reply], fault: str
) -> None:
    check(STOCK_FAULTS[fault], STOCK, adapter, replies)


def check(
    fault: tuple[Callable[[Reply], None], str], ask: Ask, adapter: QwenImageAdapter, replies: Callable[[Ask], Reply]
) -> None:
    edit, message = fault
    reply = replies(ask)
    parsed(reply, ask, adapter)
    edit(reply)
    with pytest.raises(WireError, match=message):
        parsed(reply, ask, adapter)


def test_noise_of_another_seed_is_noticed(adapter: QwenImageAdapter, replies: Callable[[Ask], Reply]) -> None:
    ask = Ask(dataclasses.replace(REQUEST, stop_step=0), "7.0.abc", None)
    other = dataclasses.replace(ask, request=dataclasses.replace(ask.request, seed=508))
    reply = {**replies(other), "seed": 507}
    with pytest.raises(WireError, match="not the noise of its seed"):
        parsed(reply, ask, adapter)


@pytest.mark.parametrize(("found", "loaded"), [(None, OTHER), (OTHER, None), (OTHER, "1" * 64)])
def test_other_weights_are_an_error_of_their_own(
    adapter: QwenImageAdapter, replies: Callable[[Ask], Reply], found: str | None, loaded: str | None
) -> None:
    reply = replies(ASK)
    reply["miles_dmd2"]["weights"] = found
    with pytest.raises(StaleWeightsError, match="answered by weights"):
        parsed(reply, dataclasses.replace(ASK, weights=loaded), adapter)
    parsed(reply, dataclasses.replace(ASK, weights=found), adapter)


def test_conditioning_alone_may_come_from_any_weights(
    adapter: QwenImageAdapter, replies: Callable[[Ask], Reply]
) -> None:
    ask = dataclasses.replace(EVAL, weights=OTHER)
    record = parse_conditioning(msgpack.packb([replies(EVAL)]), ask, adapter)
    assert record["prompt_embeds"].shape == (8, TEXT_WIDTH)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda body: b"", "not msgpack"),
        (lambda body: b'{"detail": "no"}', "not msgpack"),
        (lambda body: body[:-1], "not msgpack"),
        (lambda body: body + b"\xc0", "not msgpack"),
        (lambda body: body + body, "not msgpack"),
        (lambda body: b"\xdd\xff\xff\xff\xff" + body[1:], "not msgpack"),  # says it has 2^32 - 1 responses
        (lambda body: b"\x91\xc6\xff\xff\xff\xff" + body[1:], "not msgpack"),  # a string of 2^32 - 1 bytes
        (lambda body: b"\x91" * 5000 + body, "not msgpack"),  # nested without end
        (lambda body: b"\x90", "expected 1 response, got 0"),
        (lambda body: b"\x92" + body[1:] * 2, "expected 1 response, got 2"),  # duplicated
        (lambda body: body[1:], "expected a list of responses, got dict"),
        (lambda body: b"\x91\x01", "expected a list of responses"),
        (lambda body: msgpack.packb([{"seed": 1}])[:1] + b"\x82\xa4seed\x01\xa4seed\x02", "occurs twice"),
        (lambda body: b"\x91\x81\x91\x01\x02", "not msgpack"),  # a list as a key
        (lambda body: b"\x91\x81\xa1\xff\x01", "not msgpack"),  # a key that is not UTF-8
    ],
)
def test_a_body_that_is_not_one_response_is_refused(
    adapter: QwenImageAdapter, replies: Callable[[Ask], Reply], spoil: Callable[[bytes], bytes], message: str
) -> None:
    with pytest.raises(WireError, match=message):
        parse_rollout(spoil(msgpack.packb([replies(ASK)])), ASK, adapter)


def test_a_stock_servers_own_grid_is_refused_with_the_remedy(
    adapter: QwenImageAdapter, replies: Callable[[Ask], Reply]
) -> None:
    asked = dataclasses.replace(STOCK, request=dataclasses.replace(STOCK.request, sigmas=(1.0, 0.75, 0.5, 0.25, 0.0)))
    with pytest.raises(EngineError, match=r"(?s)own grid .*install the plugin, or give .* static shift"):
        parsed(replies(STOCK), asked, adapter)


def test_a_probes_velocity(adapter: QwenImageAdapter) -> None:
    probe = probe_of(adapter)
    ask = Ask(probe_request(probe), "probe.x", None, probe=probe)
    reply = FakeSGLang(adapter).reply_to(rollout_body(ask, adapter))
    with torch.no_grad():
        expected = adapter.velocity(
            adapter.load_transformer(), probe.x, torch.tensor([0.7]), adapter.collate([probe.cond])
        )
    found = parse_probe(msgpack.packb([reply]), ask, adapter)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    reply["miles_dmd2"]["velocity"] = redone(with_one(NAN))(reply["miles_dmd2"]["velocity"])
    assert parse_probe(msgpack.packb([reply]), ask, adapter).isnan().any()  # for the probe's own check to refuse
    reply["miles_dmd2"]["velocity"] = None
    with pytest.raises(WireError, match="velocity must be a tensor"):
        parse_probe(msgpack.packb([reply]), ask, adapter)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"detail": [{"loc": ["body", "foo"]}]}', "[{'loc': ['body', 'foo']}]"),
        (b'{"error": "Scheduler worker exited"}', "Scheduler worker exited"),
        (b'{"success": false, "message": "2 names are unknown"}', "2 names are unknown"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"", "no reason given"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"x" * 5000, "x" * 2000),
    ],
)
def test_what_a_server_says_is_passed_on(body: bytes, text: str) -> None:
    assert error_text(body) == text


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100000])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="not JSON"):
        parse_json(body)
