"""A MiniMax H3 checkpoint with random weights in its released layout, small enough to run on one core in milliseconds.

The architectures of its two VAEs are hard-coded at full size: what shrinks and writes them, with the engine's own
classes, is in tests/sglang. The rest, which is all that a trainer reads, is written here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from miles_dmd2.models.minimax_h3_weights import DIFFUSERS_CLASS, NATIVE_CLASS, ROPE, TransformerShape, to_native

HIDDEN = 48
TEXT_DIM = 5120  # of H3's text encoder, which a conditioning projection has to end in
ENCODER_WIDTH = 32  # of the tiny one
TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "hidden_size": HIDDEN,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "ffn_dim": 64,
    "in_channels": 24,
    "audio_in_channels": 32,
    "patch_size": (1, 2, 2),
    "text_dim": TEXT_DIM,
    "freq_dim": 32,
    "time_embed_hidden_dim": 48,
    "time_embed_dim": 32,
    "rope_freq_dim": 4,
}
RELEASE: dict[str, Any] = {
    "schema_version": 1,
    "partition": "fl2va",
    "tasks": ["t2va", "fl2va"],
    "task_aliases": {},
    "sigma_shift_scales": {"video": 12.0, "audio": 3.0},
}
_NATIVE_KEYS = {
    "num_refiner_layers": "token_refiner_num_layers",
    "ffn_dim": "ffn_hidden_size",
    "in_channels": "latents_dim",
    "audio_in_channels": "audio_latents_dim",
    "freq_dim": "timestep_input_dim",
    "time_embed_hidden_dim": "time_embed_hidden_size",
    "rope_freq_dim": "rope_inv_freq_len",
}
_ADALN = {"adaln_out_features": 18 * HIDDEN, "final_adaln_out_features": 2 * HIDDEN}
WEIGHTS = "diffusion_pytorch_model.safetensors"
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
PROMPTS = ("a red circle", "a blue square moving left", "up")  # the last is one token


def tiny_h3(directory: Path, seed: int = 0, *, layout: str = "native") -> Path:
    """Write `directory`/MiniMax-H3/FL2VA without its VAEs and return it; layout: of its transformer, or "diffusers".

    `conditioning_projection` beside it is for the engine: --component-paths.conditioning_projection.
    """
    root = directory / "MiniMax-H3" / "FL2VA"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        write_transformer(root / "transformer", transformer().state_dict(), layout)
        _write_text_encoder(root)
        width = ENCODER_WIDTH
        _write(
            root.parent / "conditioning_projection" / "model.safetensors",
            {
                "mean_in": torch.zeros(width),
                "std_in": torch.full((width,), 0.02),
                "mean_out": torch.zeros(TEXT_DIM),
                "std_out": torch.ones(TEXT_DIM),
                "W": torch.randn(width, TEXT_DIM) * width**-0.5,
            },
            metadata={"tap": "2"},
        )
    _write_json(root / "model_index.json", model_index(layout))
    return root


def transformer() -> nn.Module:
    """From the global generator. Its projections are scaled up: with the default init a wrong clock or a dropped text
    moves the velocity by 1e-4, and every tolerance would let it pass."""
    from diffusers import MiniMaxH3Transformer3DModel

    model = MiniMaxH3Transformer3DModel(**TRANSFORMER)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 1:
                value.copy_((1.0 if "norm" in name else 0.0) + 0.1 * torch.randn_like(value))
            elif any(part in name for part in ("adaln_proj", "norm_out.linear", "time_embedder")):
                value.mul_(4)
            elif any(part in name for part in ("to_out", "ff.net.2", "context_embedder", "to_q", "to_k")):
                value.mul_(3)
    return model


def write_transformer(directory: Path, tensors: Mapping[str, Tensor], layout: str) -> Path:
    """A transformer component of diffusers' tensors. In either layout the engine needs rope.inv_freq and two sizes."""
    if layout == "native":
        config = {_NATIVE_KEYS.get(name, name): value for name, value in TRANSFORMER.items()}
        config |= {
            "_class_name": NATIVE_CLASS,
            **_ADALN,
            **dict.fromkeys(("norm_eps", "qk_norm_eps", "final_norm_eps"), 1e-5),
        }
        weights = to_native(tensors, TRANSFORMER)
    else:
        config = {**TRANSFORMER, "_class_name": DIFFUSERS_CLASS, **_ADALN}
        weights = {**tensors, ROPE: TransformerShape.of(TRANSFORMER).rope()}
    _write_json(directory / "config.json", config)
    _write(directory / WEIGHTS, weights, metadata={"format": "pt"})
    return directory


def model_index(layout: str = "native") -> dict[str, Any]:
    return {
        "_class_name": "MiniMaxH3Pipeline",
        "_diffusers_version": "0.42.1",
        "_minimax_h3": RELEASE,
        "processor": ["transformers", "Qwen3VLProcessor"],
        "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", NATIVE_CLASS if layout == "native" else DIFFUSERS_CLASS],
        "video_vae": ["diffusers", "MiniMaxH3VideoVAE"],
        "audio_vae": ["diffusers", "MiniMaxH3AudioVAE"],
        "scheduler": None,
    }


def _write_text_encoder(root: Path) -> None:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = _tokenizer()
    for folder in ("tokenizer", "processor"):
        tokenizer.save_pretrained(root / folder)
    patches = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    _write_json(  # by hand: to make one takes torchvision, which the trainer's environment is kept free of
        root / "processor" / "processor_config.json",
        {
            "processor_class": "Qwen3VLProcessor",
            "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **patches},
            "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor", **patches},
        },
    )
    token = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": ENCODER_WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5e6,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": ENCODER_WIDTH,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    Qwen3VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(root / "text_encoder")


def _tokenizer() -> Any:
    """Byte-level BPE over a few words, with Qwen3-VL's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["a red green blue circle square moving left right up down"] * 20,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    )


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().clone().contiguous() for name, value in tensors.items()}, path, metadata=metadata)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


@pytest.fixture(scope="session")
def h3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released layout, without VAEs."""
    return tiny_h3(tmp_path_factory.mktemp("tiny"))
