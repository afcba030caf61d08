"""A complete Z-Image pipeline with random weights, small enough to run on one core in milliseconds."""

import json
from pathlib import Path

import torch

from tests.tiny_parts import image_vae, word_tokenizer

TEXT_WIDTH = 32


def build(directory: Path, seed: int = 0) -> Path:
    """Write the pipeline to `directory`. SGLang reads the numbers of heads and layers under other names than diffusers
    and takes the real model's where it does not find them, so both are written.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3Model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = word_tokenizer(512)
        text_encoder = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=1024,
            initializer_range=0.2,  # the default makes all prompts nearly the same
        )
        transformer = ZImageTransformer2DModel(
            dim=64,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=TEXT_WIDTH,
            axes_dims=[8, 12, 12],
            axes_lens=[1024, 512, 512],
        )
        for token in (transformer.x_pad_token, transformer.cap_pad_token):
            torch.nn.init.normal_(token)
        pipeline = ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=image_vae(scaling_factor=0.3611, shift_factor=0.1159),
            text_encoder=Qwen3Model(text_encoder),
            tokenizer=tokenizer,
            transformer=transformer,
        )
    pipeline.save_pretrained(directory)
    file = directory / "transformer/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_attention_heads": 2, "num_layers": 2}, indent=2))
    return directory
