"""Single frames through a video VAE whose convolutions are causal in time.

A causal kernel pads time in front with zeros, so a single frame only ever meets the kernel's last slice in time: the
three-dimensional convolution is a two-dimensional one. On a CPU that is five times faster and the same sum up to
rounding (a test compares it with the VAE's own `decode`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional


@contextmanager
def planar_convolutions(vae: nn.Module) -> Iterator[None]:
    """Inside, every causal convolution of a Qwen-Image VAE runs as a 2-d one. Single frames only."""
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d

    convolutions: list[Any] = [module for module in vae.modules() if isinstance(module, QwenImageCausalConv3d)]
    for convolution in convolutions:
        convolution.forward = lambda x, cache_x=None, convolution=convolution: _planar(convolution, x)
    try:
        yield
    finally:
        for convolution in convolutions:
            del convolution.forward


def decode_frame(vae: Any, latents: Tensor) -> Tensor:
    """VAE latents `[batch, C, h, w]` -> pixels `[batch, 3, height, width]`, clamped to [-1, 1] as `vae.decode` does."""
    with planar_convolutions(vae):
        return vae.decoder(vae.post_quant_conv(latents.unsqueeze(2))).squeeze(2).clamp(-1, 1)


def encode_frame(vae: Any, pixels: Tensor) -> Tensor:
    """Pixels `[batch, 3, height, width]` in [-1, 1] -> the posterior's mode `[batch, C, h, w]`, as of `vae.encode`."""
    with planar_convolutions(vae):
        moments = vae.quant_conv(vae.encoder(pixels.unsqueeze(2))).squeeze(2)
    mean: Tensor = moments.chunk(2, dim=1)[0]
    return mean


def _planar(convolution: Any, x: Tensor) -> Tensor:
    if x.shape[2] != 1:
        raise ValueError(f"planar convolutions take a single frame, got {x.shape[2]}")
    padding = (convolution._padding[2], convolution._padding[0])
    weight = convolution.weight[:, :, -1]
    return functional.conv2d(x[:, :, 0], weight, convolution.bias, padding=padding).unsqueeze(2)
