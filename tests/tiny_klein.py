"""A complete FLUX.2 klein pipeline with random weights, small enough to run on one core in milliseconds."""

from pathlib import Path

import torch

from tests.tiny_parts import word_tokenizer

TEXT_WIDTH = 16


def build(directory: Path, seed: int = 0, *, is_distilled: bool = False) -> Path:
    """Write the pipeline to `directory`. The text encoder has 28 layers: three of its hidden states are read."""
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = word_tokenizer(512)
        text_encoder = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=16,
            num_hidden_layers=28,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.2,  # the default makes all prompts nearly the same
        )
        transformer = Flux2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=3 * TEXT_WIDTH,
            timestep_guidance_channels=32,
            axes_dims_rope=(8, 8, 8, 8),
            guidance_embeds=False,
        )
        vae = AutoencoderKLFlux2(
            block_out_channels=(8, 8, 8, 8), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=64
        )
        vae.bn.running_mean.normal_()  # it normalises the latents: the default, 0 and 1, would hide a mistake
        vae.bn.running_var.uniform_(0.5, 2.0)
        pipeline = Flux2KleinPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=vae,
            text_encoder=Qwen3ForCausalLM(text_encoder),
            tokenizer=tokenizer,
            transformer=transformer,
            is_distilled=is_distilled,
        )
    pipeline.save_pretrained(directory)
    return directory
