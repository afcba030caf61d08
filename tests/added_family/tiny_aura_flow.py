"""A complete AuraFlow pipeline with random weights: goes with aura_flow.py into a copy of the tree."""

from pathlib import Path
from typing import Any

import torch

from tests.tiny_parts import image_vae, word_tokenizer

WIDTH = 48


def build(directory: Path, seed: int = 0, **options: Any) -> Path:
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler
    from transformers import UMT5Config, UMT5EncoderModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = word_tokenizer(256, "<eos>", append_eos=True)
        encoder = UMT5Config(
            vocab_size=len(tokenizer),
            d_model=WIDTH,
            d_kv=8,
            d_ff=64,
            num_layers=1,
            num_heads=2,
            feed_forward_proj="gated-gelu",
        )
        transformer = {
            "sample_size": 8,
            "in_channels": 16,
            "out_channels": 16,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": 64,
            "pos_embed_max_size": 64,
        }
        pipeline = AuraFlowPipeline(
            tokenizer=tokenizer,
            text_encoder=UMT5EncoderModel(encoder),
            vae=image_vae(scaling_factor=0.6, shift_factor=0.0),
            transformer=AuraFlowTransformer2DModel(**{**transformer, **options}),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        )
    with torch.no_grad():  # at its own scale a random network hardly reads the prompt beside 250 rows of padding
        for name, parameter in pipeline.transformer.named_parameters():
            if "attn" in name or "norm1" in name:
                parameter.mul_(3.0)
    pipeline.save_pretrained(directory)
    return directory
