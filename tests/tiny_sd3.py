"""A complete Stable Diffusion 3 pipeline with random weights, small enough to run on one core in milliseconds."""

from pathlib import Path
from typing import Any

import torch

from tests.tiny_parts import image_vae, word_tokenizer

WIDTHS = (16, 24, 48)  # of CLIP, the other CLIP, and T5


def build(directory: Path, seed: int = 0, **options: Any) -> Path:
    """Write the pipeline to `directory`; `options` of the transformer, for example SD3.5's."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer, tokenizer_3 = (word_tokenizer(n, "<eos>", append_eos=True) for n in (77, 256))

        def clip(width: int) -> CLIPTextModelWithProjection:
            config = CLIPTextConfig(
                vocab_size=len(tokenizer),
                hidden_size=width,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                projection_dim=width,
                max_position_embeddings=77,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=1,
                eos_token_id=tokenizer.eos_token_id,
            )
            return CLIPTextModelWithProjection(config)

        t5 = T5Config(
            vocab_size=len(tokenizer),
            d_model=WIDTHS[2],
            d_kv=8,
            d_ff=64,
            num_layers=1,
            num_heads=2,
            feed_forward_proj="gated-gelu",
        )
        transformer = {
            "sample_size": 8,
            "pos_embed_max_size": 12,
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "joint_attention_dim": WIDTHS[2],
            "caption_projection_dim": 64,
            "pooled_projection_dim": WIDTHS[0] + WIDTHS[1],
        }
        pipeline = StableDiffusion3Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=image_vae(scaling_factor=1.5305, shift_factor=0.0609),
            text_encoder=clip(WIDTHS[0]),
            text_encoder_2=clip(WIDTHS[1]),
            text_encoder_3=T5EncoderModel(t5),
            tokenizer=tokenizer,
            tokenizer_2=tokenizer,
            tokenizer_3=tokenizer_3,
            transformer=SD3Transformer2DModel(**{**transformer, **options}),
        )
    pipeline.save_pretrained(directory)
    return directory
