"""What differs between model families on the wire of an SGLang diffusion server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from miles_dmd2.types import Conditioning, Probe


class ServingFormat(ABC):
    """How one family at one canvas is asked for, and how a reply becomes the project's records.

    model_id: SGLang's short name, which picks the family's config whatever the checkpoint's directory is called.
    complete_reply: a whole rollout's reply holds all that training needs, so that a server without the plugin will do.
    """

    model_id: str
    complete_reply: bool

    @abstractmethod
    def launch_arguments(self, dtype: Literal["fp32", "bf16"]) -> list[str]:
        """Flags that give every component its dtype."""

    @abstractmethod
    def request_fields(self) -> dict[str, object]:
        """Canvas and guidance fields of a request."""

    @property
    @abstractmethod
    def conditioning_names(self) -> tuple[str, ...]:
        """The parts of `pos_cond_kwargs` that `conditioning` reads."""

    @abstractmethod
    def conditioning(self, fields: Mapping[str, object]) -> Conditioning:
        """Parsed `pos_cond_kwargs` (tensors and lists of them) as the adapter's record. ValueError: not of its form."""

    @abstractmethod
    def latent(self, tensor: Tensor) -> Tensor:
        """One latent as the server lays it out -> fp32 `[*latent]`. ValueError: another shape."""

    @abstractmethod
    def probe(self, probe: Probe) -> dict[str, Tensor]:
        """A probe request's tensors: "x" without a batch axis, and conditioning under the request's own names."""

    @abstractmethod
    def media(self, output: Tensor) -> Tensor:
        """`generated_output` -> uint8 `[frames, height, width, 3]`. ValueError: not a picture of this canvas."""

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The exporter's tensors in the names and layout that the server takes. Default: as they are."""
        return dict(tensors)


def pictures(output: Tensor, height: int, width: int) -> Tensor:
    """SGLang's decoded `[3, frames, height, width]` in [0, 1] -> uint8 `[frames, height, width, 3]`. ValueError."""
    if output.ndim != 4 or output.shape[0] != 3 or tuple(output.shape[2:]) != (height, width):
        raise ValueError(f"generated_output must be [3, frames, {height}, {width}], got {list(output.shape)}")
    frames = output.permute(1, 2, 3, 0)
    if frames.dtype != torch.uint8:
        frames = (frames.float().clamp(0, 1) * 255).round().to(torch.uint8)
    return frames.contiguous()
