"""MiniMax H3's two layouts. tests/sglang/test_h3.py compares them with SGLang's own converter and a live checksum."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from miles_dmd2.models import minimax_h3_weights as layout
from tests import tiny_h3
from tests.tiny_h3 import TRANSFORMER, h3_checkpoint

__all__ = ["h3_checkpoint"]

HEADS, HEAD_DIM, WIDTH = 2, 32, 48


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """diffusers' own names and shapes."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return {name: value.clone() for name, value in tiny_h3.transformer().state_dict().items()}


def test_there_and_back(tensors: dict[str, Tensor]) -> None:
    back = layout.from_native(layout.to_native(tensors, TRANSFORMER), TRANSFORMER)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], value) for name, value in tensors.items())


def test_the_layout_row_by_row(tensors: dict[str, Tensor]) -> None:
    """Written out for single rows: head h, row r of q, k and v; the SwiGLU halves; the other parameters untouched."""
    native = layout.to_native(tensors, TRANSFORMER)
    memory = layout.to_native(tensors, TRANSFORMER, grouped=False)
    for theirs, ours in (
        ("blocks.1", "transformer_blocks.1"),
        ("token_refiner.blocks.0", "token_refiner.refiner_blocks.0"),
    ):
        for part, name in enumerate(("to_q", "to_k", "to_v")):
            for head in range(HEADS):
                for row in (0, HEAD_DIM - 1):
                    expected = tensors[f"{ours}.attn.{name}.weight"][head * HEAD_DIM + row]
                    fused = f"{theirs}.attn.qkv_proj.weight"
                    assert torch.equal(native[fused][(3 * head + part) * HEAD_DIM + row], expected)
                    assert torch.equal(memory[fused][part * HEADS * HEAD_DIM + head * HEAD_DIM + row], expected)
        value, gate = tensors[f"{ours}.ff.net.0.proj.weight"].split(64)
        assert torch.equal(native[f"{theirs}.mlp.fc1.weight"], torch.cat([gate, value]))
        assert torch.equal(native[f"{theirs}.attn.out_proj.weight"], tensors[f"{ours}.attn.to_out.0.weight"])
        assert torch.equal(native[f"{theirs}.attn.q_norm.weight"], tensors[f"{ours}.attn.norm_q.weight"])
    assert torch.equal(native["final_layer.audio_out.bias"], tensors["audio_proj_out.bias"])
    assert torch.equal(native["final_layer.adaln_proj.linear.weight"], tensors["norm_out.linear.weight"])
    assert torch.equal(
        native["blocks.0.adaln_proj.linear.bias"], tensors["transformer_blocks.0.adaln_proj.linear.bias"]
    )
    torch.testing.assert_close(native["rope.inv_freq"], torch.tensor([1.0, 0.1, 0.01, 0.001]))  # 10000^(-i/4)
    assert (len(tensors), len(native)) == (52, 52 - 3 * 2 + 1)  # three blocks fuse three into one


def test_the_frequencies_are_those_that_diffusers_computes_with(tensors: dict[str, Tensor]) -> None:
    module = tiny_h3.transformer()
    assert torch.equal(layout.to_native(tensors, TRANSFORMER)["rope.inv_freq"], module.rope.inv_freq)


def test_either_config_will_do(h3_checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """The native config.json and diffusers' name the sizes in two ways."""
    config = json.loads((h3_checkpoint / "transformer" / "config.json").read_text())
    assert config["_class_name"] == layout.NATIVE_CLASS
    file = load_file(h3_checkpoint / "transformer" / tiny_h3.WEIGHTS)
    ours = layout.from_native(file, config)
    assert ours.keys() == tensors.keys()
    shapes = layout.native_shapes({name: tuple(value.shape) for name, value in file.items()}, config)
    assert shapes == {name: tuple(value.shape) for name, value in tensors.items()}
    assert all(torch.equal(value, file[name]) for name, value in layout.to_native(ours, TRANSFORMER).items())


def test_what_the_engine_holds(tensors: dict[str, Tensor]) -> None:
    """bf16 but for the projections in and out, the time embedder and the frequencies: 13 of 47."""
    held = layout.engine_tensors(tensors, TRANSFORMER, "bf16")
    fp32 = {name for name, value in held.items() if value.dtype == torch.float32}
    assert len(fp32) == 13
    assert {name.rsplit(".", 1)[0] for name in fp32 - {"rope.inv_freq"}} == {
        *("video_patch_proj", "audio_patch_proj", "time_embedder.proj_in", "time_embedder.proj_out"),
        *("final_layer.video_out", "final_layer.audio_out"),
    }
    assert {value.dtype for name, value in held.items() if name not in fp32} == {torch.bfloat16}
    assert {value.dtype for value in layout.engine_tensors(tensors, TRANSFORMER, "fp32").values()} == {torch.float32}


def test_the_checksum_is_of_names_and_bytes_in_the_order_of_names() -> None:
    tensors = {"b": torch.tensor([1.0]), "a": torch.tensor([2.0], dtype=torch.bfloat16)}
    expected = hashlib.sha256(b"a\x00\x40b\x00\x00\x80\x3f").hexdigest()  # little-endian 2.0 in bf16, 1.0 in fp32
    assert layout.engine_checksum(tensors) == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"proj_in.weight": None}, "1 missing: proj_in.weight"),
        ({"nobody": torch.zeros(1)}, "1 unexpected: nobody"),
        ({"transformer_blocks.0.attn.to_k.weight": torch.zeros(65, WIDTH)}, r"q, k and v must be \[64, width\]"),
        ({"transformer_blocks.0.ff.net.0.proj.weight": torch.zeros(3, WIDTH)}, r"must be \[2 x width, width\]"),
    ],
)
def test_other_weights_are_refused(tensors: dict[str, Tensor], change: dict[str, Tensor | None], named: str) -> None:
    given = {name: value for name, value in {**tensors, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=named):
        layout.to_native(given, TRANSFORMER)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"blocks.1.norm1.weight": None}, "1 missing: blocks.1.norm1.weight"),
        ({"transformer_blocks.0.norm1.weight": torch.zeros(1)}, "1 unexpected: transformer_blocks.0.norm1.weight"),
        ({"blocks.0.attn.qkv_proj.weight": torch.zeros(128, WIDTH)}, r"must be \[192, width\], got \[128, 48\]"),
        ({"rope.inv_freq": torch.tensor([1.0, 0.1, 0.01, 0.002])}, "rope.inv_freq is not"),
    ],
)
def test_other_files_are_refused(tensors: dict[str, Tensor], change: dict[str, Tensor | None], named: str) -> None:
    native = layout.to_native(tensors, TRANSFORMER)
    given = {name: value for name, value in {**native, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=named):
        layout.from_native(given, TRANSFORMER)


@pytest.mark.parametrize("value", [None, 0, "2", True])
def test_a_config_without_its_sizes_is_refused(tensors: dict[str, Tensor], value: object) -> None:
    config = {**TRANSFORMER, "num_attention_heads": value}
    with pytest.raises(ValueError, match="positive num_attention_heads, got"):
        layout.to_native(tensors, config)
