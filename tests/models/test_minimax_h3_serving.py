"""MiniMax H3 on the wire without a server: replies laid out by hand as SGLang lays them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_dmd2.algo import normal
from miles_dmd2.models.minimax_h3 import MiniMaxH3Adapter
from miles_dmd2.models.minimax_h3_layout import packed_sequence
from miles_dmd2.models.minimax_h3_weights import NATIVE_CLASS
from miles_dmd2.types import Probe
from tests.tiny_h3 import TEXT_DIM, h3_checkpoint, tiny_h3

__all__ = ["h3_checkpoint"]

FRAMES, ALIGNMENT = 5, 64


@pytest.fixture(scope="module")
def adapter(h3_checkpoint: Path) -> MiniMaxH3Adapter:
    return MiniMaxH3Adapter(h3_checkpoint, 32, 64, FRAMES)


def reply_of(adapter: MiniMaxH3Adapter, text_rows: int) -> dict[str, Any]:
    """`pos_cond_kwargs` as the server sends it: padded to a multiple of 64, axes of length one dropped."""
    packed = packed_sequence(text_rows, adapter.canvas)
    padding = -packed.length % ALIGNMENT
    fields: dict[str, Any] = {
        "encoder_hidden_states": normal(3, (text_rows, TEXT_DIM)).to(torch.bfloat16),
        "h3_token_tags": torch.cat([packed.token_tags, torch.full((padding,), -1)]),
        "h3_video_target_start": 0,
        "h3_packed_layout": {
            "seq_len": packed.length + padding,
            "img_pos": packed.video,
            "audio_pos": packed.audio,
            "text_pos": packed.text,
            "img_position_ids": torch.cat([packed.position_ids, torch.zeros(padding, 3, dtype=torch.float64)]),
            "cu_seqlens": torch.tensor([0, packed.length, packed.length + padding], dtype=torch.int32),
        },
    }
    if text_rows == 1:
        fields["encoder_hidden_states"] = fields["encoder_hidden_states"][0]
        fields["h3_packed_layout"]["text_pos"] = fields["h3_packed_layout"]["text_pos"][0]
    return fields


@pytest.mark.parametrize("text_rows", [1, 2, 7, 60])
def test_a_record_is_the_texts_states_without_padding(adapter: MiniMaxH3Adapter, text_rows: int) -> None:
    record = adapter.serving.conditioning(reply_of(adapter, text_rows))
    assert record.keys() == {"encoder_hidden_states"}
    expected = normal(3, (text_rows, TEXT_DIM)).to(torch.bfloat16).float()
    assert torch.equal(record["encoder_hidden_states"], expected)


def layout(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def edit(fields: dict[str, Any]) -> None:
        fields["h3_packed_layout"][name] = change(fields["h3_packed_layout"][name])

    return edit


def top(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def edit(fields: dict[str, Any]) -> None:
        fields[name] = change(fields[name])

    return edit


def one_off(tensor: Tensor) -> Tensor:
    moved = tensor.clone()
    moved.view(-1)[0] += 1
    return moved


FAULTS = {
    "one token less": (top("encoder_hidden_states", lambda t: t[:-1]), "6 rows of text on this canvas make"),
    "another width": (top("encoder_hidden_states", lambda t: t[:, :8]), r"must be \[L, 5120\], got \[7, 8\]"),
    "no text": (top("encoder_hidden_states", lambda t: t[:0]), r"must be \[L, 5120\], got \[0, 5120\]"),
    "no states": (top("encoder_hidden_states", lambda _: None), "got NoneType"),
    "no layout": (top("h3_packed_layout", lambda _: None), "must be a map"),
    "conditions before the target": (top("h3_video_target_start", lambda _: 2), "h3_video_target_start differ"),
    "another tag": (top("h3_token_tags", one_off), "h3_token_tags differ"),
    "video elsewhere": (layout("img_pos", one_off), "img_pos differ"),
    "sound elsewhere": (layout("audio_pos", one_off), "audio_pos differ"),
    "text elsewhere": (layout("text_pos", one_off), "text_pos differ"),
    "another position": (layout("img_position_ids", one_off), "img_position_ids differ"),
    "another length": (layout("cu_seqlens", lambda t: t + 1), "rows"),
    "no length": (layout("cu_seqlens", lambda _: None), "cu_seqlens must be a row of whole numbers"),
    "positions as text": (layout("img_position_ids", lambda _: "0"), "img_position_ids are missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_packed_sequence_is_refused(adapter: MiniMaxH3Adapter, fault: str) -> None:
    edit, message = FAULTS[fault]
    fields = reply_of(adapter, 7)
    edit(fields)
    with pytest.raises(ValueError, match=message):
        adapter.serving.conditioning(fields)


def test_a_request_names_its_canvas(adapter: MiniMaxH3Adapter) -> None:
    """And nothing that SGLang would take for another model's: no sizes, frames or guidance."""
    fields = adapter.serving.request_fields()
    assert fields.keys() == {"extra_sampling_params"}
    assert fields["extra_sampling_params"] == {
        "task": "t2va",
        "conditions": [],
        "target": adapter.canvas.request_target(),
    }
    assert adapter.canvas.request_target()["duration_seconds"] == FRAMES / 24


def test_a_latent_has_both_parts(adapter: MiniMaxH3Adapter) -> None:
    """2 latent frames of 1 x 2 rows of 96, and 8 latents of sound for each ear, 32 each: 384 + 512."""
    x = normal(1, (896,))
    assert torch.equal(adapter.serving.latent(x.double()), x)
    with pytest.raises(ValueError, match=r"must be \[896\], got \[384\]"):
        adapter.serving.latent(x[:384])


def test_a_probe_is_the_latent_and_the_texts_states(adapter: MiniMaxH3Adapter) -> None:
    x, cond = normal(1, (1, *adapter.latent_shape)), adapter.probe_conditioning()
    sent = adapter.serving.probe(Probe(x, torch.tensor([0.5]), cond, x))
    assert sent.keys() == {"x", "encoder_hidden_states"}
    assert torch.equal(sent["x"], x[0])
    assert sent["encoder_hidden_states"] is cond["encoder_hidden_states"]


def test_sound_has_two_channels_and_the_clips_length(adapter: MiniMaxH3Adapter) -> None:
    """5 frames are 0.208 s, 8 latents of 25 ms 0.2 s: they may differ by one latent."""
    sound = adapter.serving.sound(2 * normal(1, (2, 6400)).double(), 32000)
    assert (sound.dtype, sound.abs().max().item()) == (torch.float32, 1.0)
    for samples, rate, message in (
        (7600, 32000, r"lasts 0\.237 s, the clip 0\.208 s"),
        (5600, 32000, r"lasts 0\.175 s"),
        (6400, 16000, r"lasts 0\.400 s"),
    ):
        with pytest.raises(ValueError, match=message):
            adapter.serving.sound(torch.zeros(2, samples), rate)
    with pytest.raises(ValueError, match=r"must be \[2, samples\], got \[6400\]"):
        adapter.serving.sound(torch.zeros(6400), 32000)


def test_media_is_the_whole_clip(adapter: MiniMaxH3Adapter) -> None:
    assert adapter.serving.media(torch.zeros(3, FRAMES, 32, 64)).shape == (FRAMES, 32, 64, 3)
    with pytest.raises(ValueError, match="must have 5 frames, got 4"):
        adapter.serving.media(torch.zeros(3, FRAMES - 1, 32, 64))


def test_weights_go_in_the_layout_that_the_engine_was_started_on(adapter: MiniMaxH3Adapter, tmp_path: Path) -> None:
    """Row 32 of a fused matrix, heads of 32 rows: k of the first head in a native file, q of the second in memory."""
    other = MiniMaxH3Adapter(tiny_h3(tmp_path, layout="diffusers"), 32, 64, FRAMES)
    tensors = dict(adapter.load_transformer().named_parameters())
    fused, prefix = "blocks.0.attn.qkv_proj.weight", "transformer_blocks.0.attn"
    assert adapter.serving.weights(tensors)["rope.inv_freq"].shape == (4,)
    assert torch.equal(adapter.serving.weights(tensors)[fused][32], tensors[f"{prefix}.to_k.weight"][0])
    assert torch.equal(other.serving.weights(tensors)[fused][32], tensors[f"{prefix}.to_q.weight"][32])


def test_the_prediction_is_of_what_the_engine_holds_in_either_layout(adapter: MiniMaxH3Adapter, tmp_path: Path) -> None:
    other = MiniMaxH3Adapter(tiny_h3(tmp_path, layout="diffusers"), 32, 64, FRAMES)
    tensors = {name: value.detach() for name, value in adapter.load_transformer().named_parameters()}
    found = [a.serving.predicted(tensors, dtype) for a in (adapter, other) for dtype in ("fp32", "bf16")]
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[0][0] != found[1][0]
    assert {count for _, count in found} == {sum(value.numel() for value in tensors.values()) + 4}
    assert NATIVE_CLASS == "MiniMaxH3DiTModel"
