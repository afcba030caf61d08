"""Rollouts of a tiny MiniMax H3 on real servers, in fp32 and in bf16, against diffusers' transformer in the same dtype.

Each measured difference is a property of its test: `--junitxml` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from miles_dmd2.algo import normal
from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.engines.sglang.server import ManagedServer
from miles_dmd2.models.minimax_h3 import MiniMaxH3Adapter
from miles_dmd2.models.minimax_h3_layout import Canvas, join, packed_sequence, split
from miles_dmd2.types import Probe, RolloutRequest
from tests.sglang.h3.bench import (
    CLIP,
    GRID,
    SAME,
    SIDE,
    SOUND_GRID,
    WRONG,
    Ask,
    Served,
    body,
    cond_of,
    latents,
    levels,
    push,
    velocity,
)
from tests.sglang.raw import Server, encoded
from tests.tiny_h3 import PROMPTS

pytestmark = pytest.mark.sglang


# -- handshake ---------------------------------------------------------------------------------------------------


def test_every_hook_is_in_place_in_both_processes(raw: Server, served: Served, student: nn.Module) -> None:
    told = raw.json("/miles_dmd2/capabilities")
    worker = told["worker"]
    assert (len(told["hooks"]), len(worker["hooks"])) == (6, 27)
    assert all(told["hooks"].values())
    assert all(worker["hooks"].values())
    assert (worker["bypassed"], worker["pipeline"]) == ([], "MiniMaxH3Pipeline")
    assert worker["dtype"] == ("torch.float32" if served.dtype == "fp32" else "mixed")
    assert worker["parameters"] == sum(value.numel() for value in student.parameters()) + 4  # and rope.inv_freq


# -- a rollout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", range(4))
def test_a_stopped_rollout_is_the_beginning_of_the_whole_and_agrees_with_diffusers(
    ask: Ask, adapter: MiniMaxH3Adapter, student: nn.Module, close: Callable[..., None], stop: int
) -> None:
    """k + 1 forwards; x_k and x_{k+1} of video and sound bit for bit; x0 and x_{k+1} with diffusers' velocity."""
    whole = latents(ask(None))
    reply = ask(stop)
    assert reply["miles_dmd2"]["forwards"] == stop + 1
    assert reply["generated_output"] is None
    assert torch.equal(reply["dit_trajectory"]["sigmas"], GRID)
    assert reply["dit_trajectory"]["timesteps"].tolist() == [1000 * GRID[stop], 0]
    x_k, x0 = latents(reply)
    assert x_k.shape == adapter.latent_shape
    assert torch.equal(x_k, whole[stop])
    assert torch.equal(latents(ask(stop, rollout_stop_output="next"))[1], whole[stop + 1])
    v = velocity(adapter, student, cond_of(adapter, reply), x_k, GRID[stop])
    here, there = levels(adapter, GRID[stop]), levels(adapter, GRID[stop + 1])
    close(torch.cat([x0, whole[stop + 1]]), torch.cat([x_k - here * v, x_k + (there - here) * v]))


CONTROLS = {
    "as it is": {},
    "flipped sign": {"sign": 1.0},
    "initial audio noise": {"audio": "noise"},
    "zero audio": {"audio": "zero"},
    "audio clock = video clock": {"clocks": "video"},
    "sigma as clock": {"clocks": "sigma"},
    "clock x 1000": {"clocks": "thousand"},
    "zero text": {"words": 0.0},
    "zero positions": {"positions": 0.0},
    "audio tag = video": {"audio_tag": 0},
}


@pytest.mark.parametrize("control", CONTROLS)
def test_every_input_of_the_network_counts(
    ask: Ask,
    adapter: MiniMaxH3Adapter,
    student: nn.Module,
    record_property: Callable[[str, object], None],
    control: str,
) -> None:
    """x0 at step 2 with diffusers' transformer, called here argument by argument: as it is, and with one mistake."""
    reply = ask(2)
    x_k, x0 = latents(reply)
    text = cond_of(adapter, reply)["encoder_hidden_states"]
    v = direct(student, adapter.canvas, x_k, text, 2, adapter.initial_noise(5), **CONTROLS[control])
    difference = (x_k - levels(adapter, GRID[2]) * v - x0).abs().max().item()
    record_property("difference", difference)
    assert difference < SAME if control == "as it is" else difference > WRONG


def direct(
    student: nn.Module,
    canvas: Canvas,
    x: Tensor,
    text: Tensor,
    step: int,
    noise: Tensor,
    *,
    sign: float = -1.0,
    audio: str = "",
    clocks: str = "",
    words: float = 1.0,
    positions: float = 1.0,
    audio_tag: int = 2,
) -> Tensor:
    """noise - x0 of the transformer; the changes are the mistakes of CONTROLS."""
    packed = packed_sequence(len(text), canvas)
    video_rows, audio_rows = split(x, canvas)
    if audio:
        audio_rows = split(noise, canvas)[1] if audio == "noise" else torch.zeros_like(audio_rows)
    sigmas = torch.stack([GRID[step], SOUND_GRID[step]])
    clock = {
        "": 1 - sigmas,
        "video": (1 - sigmas[:1]).expand(2),
        "sigma": sigmas,
        "thousand": 1000 * (1 - sigmas),
    }[clocks]
    tags = torch.where(packed.token_tags == 2, audio_tag, packed.token_tags)
    with torch.no_grad():
        answer = student(
            hidden_states=video_rows[None],
            audio_hidden_states=audio_rows[None],
            encoder_hidden_states=words * text[None],
            timestep=clock,
            timestep_indices=packed.clock_of_row,
            token_tags=tags,
            position_ids=positions * packed.position_ids,
            video_indices=packed.video,
            audio_indices=packed.audio,
            text_indices=packed.text,
            return_dict=False,
        )
    return sign * join(*answer)[0].float()


def test_the_noise_is_the_one_of_the_seed_at_the_grids_first_levels(ask: Ask, adapter: MiniMaxH3Adapter) -> None:
    for seed in (0, 7, 2**32 - 1):
        assert torch.equal(latents(ask(0, seed=seed))[0], adapter.initial_noise(seed))
    first = torch.tensor(0.9)
    x = latents(ask(0, rollout_sigmas=[first.item()], num_inference_steps=1))[0]
    assert torch.equal(x, levels(adapter, first) * adapter.initial_noise(5))
    # odds of the sound: a quarter of 0.9 / 0.1, which is sigma 2.25 / 3.25
    assert x[-1].item() == pytest.approx(2.25 / 3.25 * adapter.initial_noise(5)[-1].item(), rel=1e-6)


def test_the_sounds_grid_is_the_releases(ask: Ask) -> None:
    """Without a grid of ours the engine takes its own two: the same video levels bit for bit, the same rollout."""
    own = ask(None, rollout_sigmas=None, rollout_client_id="own")
    assert torch.equal(own["dit_trajectory"]["sigmas"], GRID)
    ours = ask(None)
    torch.testing.assert_close(latents(own), latents(ours), rtol=0, atol=1e-5)


def test_nothing_of_a_request_stays_for_the_next(ask: Ask) -> None:
    before = latents(ask(None))
    ask(1, rollout_sigmas=[0.9, 0.5], num_inference_steps=2)
    assert torch.equal(latents(ask(None)), before)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_conditioning_is_the_texts_states(ask: Ask, adapter: MiniMaxH3Adapter, prompt: str) -> None:
    """Of one token too, where SGLang drops an axis; the last prompt is one."""
    reply = ask(0, prompt=prompt, rollout_conditioning=list(adapter.serving.conditioning_names))
    record = cond_of(adapter, reply)
    assert record.keys() == {"encoder_hidden_states"}
    states = record["encoder_hidden_states"]
    assert states.shape == (reply["denoising_env"]["pos_cond_kwargs"]["h3_packed_layout"]["text_pos"].numel(), 5120)
    assert (len(states) == 1) == (prompt == PROMPTS[-1])


def test_a_layout_of_another_canvas_is_refused(ask: Ask, checkpoint: Path) -> None:
    other = MiniMaxH3Adapter(checkpoint, SIDE, SIDE, CLIP)
    with pytest.raises(ValueError, match="has 21 rows, 3 rows of text on this canvas make 84"):
        cond_of(other, ask(0))


def test_a_probe_runs_the_network_on_what_it_is_given(
    ask: Ask, adapter: MiniMaxH3Adapter, student: nn.Module, close: Callable[..., None]
) -> None:
    """Of another length than the prompt's."""
    x, cond, sigma = normal(5, adapter.latent_shape), adapter.probe_conditioning(), torch.tensor(0.5)
    expected = velocity(adapter, student, cond, x, sigma)
    sent = encoded(adapter.serving.probe(Probe(x[None], sigma[None], cond, expected[None])))
    reply = ask(0, rollout_sigmas=[0.5], num_inference_steps=1, rollout_probe=sent)
    assert torch.equal(latents(reply)[0], x)
    close(adapter.serving.latent(reply["miles_dmd2"]["velocity"]), expected)


# -- requests that are refused -----------------------------------------------------------------------------------

TARGET = {"short_edge": SIDE, "aspect_ratio": "1:1", "duration_seconds": 5 / 24}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"extra_sampling_params": None}, "must have ['conditions', 'target', 'task']"),
        ({"target": {**TARGET, "duration_seconds": 15.5}}, "duration_seconds"),
        ({"target": {**TARGET, "duration_seconds": 0}}, "duration_seconds must be positive"),
        ({"target": {**TARGET, "duration_seconds": "5"}}, "duration_seconds must be a number"),
        ({"target": {**TARGET, "short_edge": 0}}, "short_edge must be positive"),
        ({"target": {**TARGET, "short_edge": 32.5}}, "short_edge must be an integer"),
        ({"target": {**TARGET, "aspect_ratio": "2:1"}}, "aspect_ratio"),
        ({"target": {**TARGET, "fps": 30}}, "target must have"),
        ({"target": {"short_edge": SIDE}}, "target must have"),
        (
            {"conditions": [{"type": "image", "uri": "a.png", "role": "keyframe", "frame_index": 0}]},
            "without conditions",
        ),
        ({"task": "fl2va"}, "of task 't2va'"),
        ({"flow_shift": 5.0}, "must have ['conditions', 'target', 'task']"),
        ({"width": SIDE, "height": SIDE}, "width, height: not of MiniMax H3"),
        ({"num_frames": 5}, "num_frames: not of MiniMax H3"),
        ({"guidance_scale": 2.0}, "guidance_scale: not of MiniMax H3"),
        ({"rollout_sde_type": "sde", "rollout_noise_level": 0.7}, "rollout_sde_type must be 'ode'"),
        ({"num_inference_steps": 3}, "num_inference_steps must be 4"),
        ({"num_outputs_per_prompt": 2}, "num_outputs_per_prompt must be 1"),
    ],
)
def test_a_wrong_canvas_is_refused_with_its_reason(
    raw: Server, adapter: MiniMaxH3Adapter, fields: dict[str, object], says: str
) -> None:
    known = set(body(adapter, 0)) | {"width", "height", "num_frames", "guidance_scale"}
    extra = {"task": "t2va", "conditions": [], "target": TARGET}
    extra |= {name: value for name, value in fields.items() if name not in known}
    top = {name: value for name, value in fields.items() if name in known}
    status, text, _ = raw.call("/rollout/generate", body(adapter, 0, **{"extra_sampling_params": extra, **top}))
    assert status == 422, text
    assert says in text.decode()


# -- pictures and sound ------------------------------------------------------------------------------------------


def test_a_decoded_sample_has_pictures_and_sound(running: ManagedServer, checkpoint: Path, served: Served) -> None:
    """Only when asked for; through the client, which makes the sample of them."""
    clip = MiniMaxH3Adapter(checkpoint, SIDE, SIDE, CLIP)
    grid = tuple(GRID.tolist())
    engine = SGLangEngine(clip, [running], SGLangSettings(forward_dtype=served.dtype))
    push(engine, clip, served)
    plain, shown = engine.generate(
        [RolloutRequest(0, PROMPTS[0], 5, grid, 3), RolloutRequest(1, PROMPTS[1], 6, grid, 3, decode=True)]
    )
    engine.close()
    assert (plain.media, plain.audio, plain.audio_sample_rate) == (None, None, None)
    assert shown.media is not None
    assert shown.media.shape == (CLIP, SIDE, SIDE, 3)
    assert len(shown.media.unique()) > 16
    assert shown.audio is not None
    assert (shown.audio.shape[0], shown.audio_sample_rate) == (2, 32000)
    assert shown.audio.shape[1] == round(CLIP / 24 * 40) * 800  # 800 samples to a latent
    assert shown.audio.std() > 1e-4
    assert shown.audio.abs().max() <= 1
