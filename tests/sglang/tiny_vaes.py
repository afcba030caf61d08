"""MiniMax H3's two VAEs at a thousandth of their size. Runs in the engine's Python, which does not see this project.

SGLang's constructors have the architecture written into them: `register`, as a plugin beside ours, shrinks what a
server builds, and `python tiny_vaes.py DIRECTORY` writes weights of the same shapes.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS = "sglang.multimodal_gen.runtime.models.vaes."


def small_video(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    decoder = {**kwargs["vit_decoder_kwargs"], "dim_head": 16, "heads": 2, "num_layers": 1}
    small = {"ch": 32, "ch_mult": [1] * 6, "num_res_blocks": 1, "vit_decoder_kwargs": decoder}
    original(self, *args, **{**kwargs, **small})


def small_audio(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """The widths only: 800 samples to a latent stay. The decoder halves its own seven times."""
    original(self, *args, **{**kwargs, "encoder_dim": 2, "latent_dim": 64, "decoder_dim": 128})


def register() -> None:
    if multiprocessing.parent_process() is not None:  # the worker
        add_hooks()


def add_hooks() -> None:
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    for target, hook in (
        ("minimax_h3_video_vae.klvae.AutoencoderKLLegacy.__init__", small_video),
        ("minimax_h3_audio_vae.audio_vae.DacAudioVAE.__init__", small_audio),
    ):
        HookRegistry.register(MODELS + target, hook, HookType.AROUND)


def write(root: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from sglang.multimodal_gen.configs.models.vaes.minimax_h3_audio import MiniMaxH3AudioVAEConfig
    from sglang.multimodal_gen.configs.models.vaes.minimax_h3_video import MiniMaxH3VideoVAEConfig
    from sglang.multimodal_gen.runtime.models.vaes.minimax_h3 import MiniMaxH3AudioVAE, MiniMaxH3VideoVAE
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

    add_hooks()
    HookRegistry.apply_hooks()
    torch.manual_seed(0)
    for name, module, file, config in (
        (
            "video_vae",
            MiniMaxH3VideoVAE(MiniMaxH3VideoVAEConfig()),
            "source/model.safetensors",
            {"_class_name": "MiniMaxH3VideoVAE", "latent_channels": 24},
        ),
        (
            "audio_vae",
            MiniMaxH3AudioVAE(MiniMaxH3AudioVAEConfig()),
            "model.safetensors",
            {"_class_name": "MiniMaxH3AudioVAE", "latent_channels": 32, "sample_rate": 32000},
        ),
    ):
        channels = config["latent_channels"]
        config |= {"latents_mean": [0.0] * channels, "latents_std": [1.0] * channels}
        path = root / name / file
        path.parent.mkdir(parents=True)
        save_file({key: value.detach().clone().contiguous() for key, value in module.state_dict().items()}, path)
        (root / name / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
