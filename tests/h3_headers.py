"""The shapes of MiniMax H3 as released, as a checkpoint of headers: sparse files that hold no weight."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

DIT_VALUES = 33_122_992_896  # MiniMaxH3Transformer3DModel() of diffusers 0.42.1


def build(root: Path) -> Path:
    """From the default configs of diffusers' classes, and Qwen3-VL-32B whole, of which H3 reads 50 layers."""
    for name, module in modules().items():
        write_component(root / name, {key: tuple(value.shape) for key, value in module.state_dict().items()})
    parts = {name: ["diffusers", "Any"] for name in ("transformer", "text_encoder", "video_vae", "audio_vae")}
    shifts = {"sigma_shift_scales": {"video": 12.0, "audio": 3.0}}
    release = {"schema_version": 1, "partition": "fl2va", "tasks": ["t2va"], "task_aliases": {}, **shifts}
    index = {"_class_name": "MiniMaxH3Pipeline", "_minimax_h3": release, **parts}
    (root / "model_index.json").write_text(json.dumps(index))
    config = {"_class_name": "MiniMaxH3Transformer3DModel", "text_dim": 5120}
    (root / "transformer" / "config.json").write_text(json.dumps(config))
    return root


def modules() -> dict[str, nn.Module]:
    """On the meta device: shapes without memory."""
    import warnings

    from accelerate import init_empty_weights
    from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text: dict[str, Any] = {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    config = Qwen3VLConfig(text_config=text, vision_config={"out_hidden_size": 5120})
    with init_empty_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sound's VAE uses a deprecated weight norm
        return {
            "transformer": MiniMaxH3Transformer3DModel(),
            "text_encoder": Qwen3VLForConditionalGeneration(config),
            "video_vae": AutoencoderKLMiniMaxH3(),
            "audio_vae": AutoencoderKLMiniMaxH3Audio(),
        }


def write_component(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    directory.mkdir(parents=True)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
