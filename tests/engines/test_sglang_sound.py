"""Sound in the replies of an SGLang server, and its checksum of weights whose layout names and shapes do not show."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor

from miles_dmd2.algo import normal, sigma_grid
from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang.weights import MODULE, check_checksum, in_memory
from miles_dmd2.engines.sglang.wire import Answer, Ask, WireError, parse_rollout, rollout_body
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.minimax_h3 import MiniMaxH3Adapter
from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.types import Probe, RolloutRequest, WeightUpdate, WeightVersion
from tests.engines.fake_sglang import FakeSGLang, packed
from tests.tiny_h3 import h3_checkpoint
from tests.tiny_qwen import SIZE, tiny_qwen

__all__ = ["h3_checkpoint", "tiny_qwen"]

SIGMAS = sigma_grid(4, 12.0)
EVAL = Ask(RolloutRequest(7, "a red circle", 507, tuple(SIGMAS.tolist()), 0, decode=True), "7.0.abc", None)
TRAIN = Ask(RolloutRequest(7, "a red circle", 507, tuple(SIGMAS.tolist()), 0), "7.0.abc", None)
SOUND = 0.5 * normal(1, (2, 6400)).clamp(-1, 1)


@pytest.fixture(scope="module")
def adapter(h3_checkpoint: Path) -> MiniMaxH3Adapter:
    return MiniMaxH3Adapter(h3_checkpoint, 32, 32, 5)


def reply_to(ask: Ask, adapter: ModelAdapter) -> dict[str, Any]:
    """A good reply, by hand; with a picture where one is asked for, and without sound."""
    x = adapter.initial_noise(ask.request.seed)
    decode = ask.request.decode
    return {
        "prompt": ask.request.prompt,
        "seed": ask.request.seed,
        "generated_output": packed(torch.rand(3, 5, 32, 32)) if decode else None,
        "generated_audio": None,
        "audio_sample_rate": None,
        "denoising_env": None,
        "dit_trajectory": {
            "latents": packed(torch.stack([x, 0.5 * x])),
            "timesteps": packed(torch.tensor([1000.0, 0.0])),
            "sigmas": packed(SIGMAS.clone()),
        },
        "miles_dmd2": {
            "protocol": 1,
            "client_id": ask.client_id,
            "stop_step": 0,
            "forwards": 1,
            "weights": None,
            "decoded": decode,
            "velocity": None,
        },
    }


def parsed(reply: dict[str, Any], ask: Ask, adapter: ModelAdapter) -> Answer:
    return parse_rollout(msgpack.packb([reply]), ask, adapter)


def test_the_sound_and_its_rate_come_with_the_picture(adapter: MiniMaxH3Adapter) -> None:
    answer = parsed(
        {**reply_to(EVAL, adapter), "generated_audio": packed(SOUND), "audio_sample_rate": 32000}, EVAL, adapter
    )
    assert answer.audio is not None
    assert torch.equal(answer.audio, SOUND)
    assert answer.audio_sample_rate == 32000


@pytest.mark.parametrize("ask", [EVAL, TRAIN], ids=["eval", "training"])
@pytest.mark.parametrize("absent", [False, True])
def test_without_sound_both_are_none(adapter: MiniMaxH3Adapter, ask: Ask, absent: bool) -> None:
    """Also where a server does not even name them."""
    reply = reply_to(ask, adapter)
    if absent:
        del reply["generated_audio"], reply["audio_sample_rate"]
    answer = parsed(reply, ask, adapter)
    assert (answer.audio, answer.audio_sample_rate) == (None, None)
    assert (answer.media is not None) == ask.request.decode


def bad(value: float) -> Tensor:
    sound = SOUND.clone()
    sound[1, 5] = value
    return sound


FAULTS: dict[str, tuple[Ask, object, object, str]] = {
    "not asked for": (TRAIN, packed(SOUND), 32000, "generated_audio was not asked for"),
    "no rate": (EVAL, packed(SOUND), None, "audio_sample_rate must be a positive whole number"),
    "rate True": (EVAL, packed(SOUND), True, "audio_sample_rate must be a positive whole number"),
    "rate 0": (EVAL, packed(SOUND), 0, "audio_sample_rate must be a positive whole number"),
    "a rate alone": (EVAL, None, 32000, "generated_audio must be a tensor"),
    "NaN": (EVAL, packed(bad(float("nan"))), 32000, "generated_audio must be finite"),
    "whole numbers": (EVAL, packed(SOUND.to(torch.int16)), 32000, "floating point, got torch.int16"),
    "one channel": (EVAL, packed(SOUND[0].clone()), 32000, r"generated_audio: .* must be \[2, samples\]"),
    "another length": (EVAL, packed(SOUND[:, :3200].clone()), 32000, r"lasts 0\.100 s, the clip 0\.208 s"),
    "another rate": (EVAL, packed(SOUND), 44100, r"lasts 0\.145 s, the clip 0\.208 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sound_with_a_fault_is_refused(adapter: MiniMaxH3Adapter, fault: str) -> None:
    ask, sound, rate, message = FAULTS[fault]
    reply = {**reply_to(ask, adapter), "generated_audio": sound, "audio_sample_rate": rate}
    with pytest.raises(WireError, match=message):
        parsed(reply, ask, adapter)


def test_a_family_of_pictures_takes_no_sound(tiny_qwen: Path) -> None:
    adapter = QwenImageAdapter(tiny_qwen, SIZE, SIZE)
    reply = FakeSGLang(adapter).reply_to(rollout_body(EVAL, adapter))
    assert parsed(copy.deepcopy(reply), EVAL, adapter).audio is None
    with pytest.raises(WireError, match="generated_audio: this family has no sound"):
        parsed({**reply, "generated_audio": packed(SOUND), "audio_sample_rate": 32000}, EVAL, adapter)


def test_the_engines_checksum_must_be_the_predicted_one() -> None:
    x = torch.zeros(1, 2)
    update = WeightUpdate(WeightVersion(3), "", Probe(x, x, {}, x), None)
    push = replace(in_memory(update, {"a": x}), predicted=("12ab", 2))
    check_checksum(push, {MODULE: "12ab"})
    for answer in ({MODULE: "34cd"}, {MODULE: "not_found"}, {}):
        with pytest.raises(
            EngineError, match=r"weights raw@3 refused: the engine's checksum is .*, predicted was 12ab"
        ):
            check_checksum(push, answer)
