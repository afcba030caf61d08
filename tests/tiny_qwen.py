"""A complete Qwen-Image pipeline with random weights, small enough to run on one core in milliseconds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.digits.build_teacher import build_tokenizer

TEXT_WIDTH = 32
SIZE = 32  # pixels: 4 x 4 latent pixels, 4 tokens
TALL = (48, 32)
PROMPTS = ("the digit seven", "digit one", "the digit four and the digit nine")  # 8, 7 and 12 tokens


def build(directory: Path, num_layers: int = 2, seed: int = 0) -> Path:
    """Write the pipeline to `directory`. Its scheduler is Qwen-Image's own, with dynamic shift and a terminal shift."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = build_tokenizer()
        text_encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**text_encoder_config(len(tokenizer))))
        transformer = QwenImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=num_layers,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(8, 12, 12),
        )
        vae = AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        max_shift=0.9,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    QwenImagePipeline(scheduler, vae, text_encoder, tokenizer, transformer).save_pretrained(directory)
    return directory


def text_encoder_config(vocabulary: int) -> dict[str, Any]:
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {
        "text_config": {
            "vocab_size": vocabulary,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
            "initializer_range": 0.2,  # the default makes all prompts nearly the same
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "patch_size": 14,
            "fullatt_block_indexes": [0],
        },
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        **{name: vocabulary - 1 - i for i, name in enumerate(special)},  # the pipeline never sees pictures
    }


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "qwen")
