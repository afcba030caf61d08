"""Complete Wan pipelines with random weights, 2.1 T2V and 2.2 TI2V, small enough to run on one core in milliseconds."""

from pathlib import Path
from typing import Any

import torch

from tests.tiny_parts import word_tokenizer

TEXT_WIDTH = 32


def build(directory: Path, seed: int = 0, *, ti2v: bool = False) -> Path:
    """Write the pipeline to `directory`. TI2V has another VAE, 16 x 16 pixels to one latent one, and a time a token."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = word_tokenizer(512, "</s>", append_eos=True)
        text_encoder = UMT5Config(
            vocab_size=len(tokenizer),
            d_model=TEXT_WIDTH,
            d_kv=8,
            d_ff=64,
            num_layers=1,
            num_heads=4,
            feed_forward_proj="gated-gelu",
        )
        channels = 48 if ti2v else 16
        transformer = WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=channels,
            out_channels=channels,
            text_dim=TEXT_WIDTH,
            freq_dim=32,
            ffn_dim=64,
            num_layers=2,
        )
        pipeline = WanPipeline(
            tokenizer=tokenizer,
            text_encoder=UMT5EncoderModel(text_encoder),
            vae=AutoencoderKLWan(**vae(ti2v)),
            scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
            transformer=transformer,
            expand_timesteps=ti2v,
        )
    pipeline.save_pretrained(directory)
    return directory


def build_ti2v(directory: Path) -> Path:
    return build(directory, ti2v=True)


def vae(ti2v: bool) -> dict[str, Any]:
    common = {"base_dim": 8, "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    if not ti2v:
        return {**common, "z_dim": 16, "dim_mult": [1, 1, 1, 1]}
    return {
        **common,
        "decoder_base_dim": 8,
        "z_dim": 48,
        "dim_mult": [1, 1, 1, 1],
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": [0.1] * 48,
        "latents_std": [0.5] * 48,
    }
