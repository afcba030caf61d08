"""What differs between model families on the wire of an SGLang diffusion server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from miles_dmd2.types import Conditioning, Probe


class ServingFormat(ABC):
    """How one family at one canvas is asked for, and how a reply becomes the project's records.

    model_id: SGLang's short name, which picks the family's config whatever the checkpoint's directory is called.
    complete_reply: a whole rollout's reply holds all that training needs, so that a server without the plugin will do.
    exact_names: what a bf16 engine keeps in fp32 of the weights as sent; the rest is sent in bf16. None: not known.
    """

    model_id: str
    complete_reply: bool
    exact_names: ClassVar[frozenset[str] | None] = None

    @abstractmethod
    def launch_arguments(self, dtype: Literal["fp32", "bf16"]) -> list[str]:
        """Flags that give every component its dtype."""

    def served_width(self, component: str, name: str, dtype: Literal["fp32", "bf16"]) -> int:
        """Bytes of a value of this tensor in a server with `launch_arguments(dtype)`; 0: the server leaves it out."""
        return {"fp32": 4, "bf16": 2}[dtype]

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

    def start(self, latent: Tensor) -> Tensor:
        """A latent `[*latent]` that a rollout is to begin with, as the server lays it out. Default: as it is."""
        return latent

    @abstractmethod
    def probe(self, probe: Probe) -> dict[str, Tensor]:
        """A probe request's tensors: "x" without a batch axis, and conditioning under the request's own names."""

    @abstractmethod
    def media(self, output: Tensor) -> Tensor:
        """`generated_output` -> uint8, or fp32 in [0, 1], `[frames, height, width, 3]`. ValueError: other sizes."""

    def sound(self, output: Tensor, sample_rate: int) -> Tensor:
        """`generated_audio` `[channels, samples]` -> fp32 in [-1, 1]. ValueError: not of this clip; by default, any."""
        raise ValueError("this family has no sound")

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The exporter's tensors in the names and layout that the server takes. Default: as they are."""
        return dict(tensors)

    def predicted(self, tensors: Mapping[str, Tensor], dtype: Literal["fp32", "bf16"]) -> tuple[str, int] | None:
        """SGLang's own checksum of the transformer that serves the exporter's tensors, and its number of parameters.

        For families whose weights load in a wrong layout without an error. Default: None, nothing is predicted.
        """
        return None


class CanvasServing(ServingFormat):
    """What most families share: latents cross the wire as they are here, one precision flag per text encoder."""

    text_encoders: ClassVar[int] = 1
    guidance: ClassVar[dict[str, object]] = {"guidance_scale": 1.0}  # one forward a step

    def __init__(self, height: int, width: int, latent_shape: tuple[int, ...], num_frames: int = 1) -> None:
        self._height, self._width, self._num_frames = height, width, num_frames
        self._latent_shape = latent_shape

    def launch_arguments(self, dtype: Literal["fp32", "bf16"]) -> list[str]:
        # All of them: an fp32 transformer does not take a bf16 text encoder's output.
        encoders = [dtype] * self.text_encoders
        return ["--dit-precision", dtype, "--vae-precision", dtype, "--text-encoder-precisions", *encoders]

    def request_fields(self) -> dict[str, object]:
        return {"height": self._height, "width": self._width, **self.guidance}

    def latent(self, tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) != self._latent_shape:
            raise ValueError(f"a latent must be {list(self._latent_shape)}, got {list(tensor.shape)}")
        return tensor.to(torch.float32)

    def media(self, output: Tensor) -> Tensor:
        shown = pictures(output, self._height, self._width)
        if len(shown) != self._num_frames:
            raise ValueError(f"generated_output must have {self._num_frames} frames, got {len(shown)}")
        return shown


def only_tensor(fields: Mapping[str, object], name: str, shape: tuple[int | None, ...]) -> Tensor:
    """The tensor `name` of a reply, alone or in a list of one, as fp32. None: any length >= 1. ValueError: another."""
    value = fields.get(name)
    (tensor,) = value if isinstance(value, list) and len(value) == 1 else (value,)
    found = list(tensor.shape) if isinstance(tensor, Tensor) else None
    wanted = ["L" if length is None else length for length in shape]
    if found is None or len(found) != len(shape) or not all(map(_fits, found, shape)):
        other = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
        got = other if found is None else found
        raise ValueError(f"{name} must be {wanted}, alone or in a list of one, got {got}")
    assert isinstance(tensor, Tensor)
    return tensor.to(torch.float32)


def _fits(length: int, wanted: int | None) -> bool:
    return length >= 1 if wanted is None else length == wanted


def pictures(output: Tensor, height: int, width: int) -> Tensor:
    """SGLang's decoded `[3, (frames,) height, width]`, uint8 or in [0, 1] -> `[frames, height, width, 3]`. ValueError.

    uint8 stays uint8, all else becomes fp32.
    """
    if output.ndim == 3:
        output = output.unsqueeze(1)
    if output.ndim != 4 or output.shape[0] != 3 or tuple(output.shape[2:]) != (height, width):
        raise ValueError(f"generated_output must be [3, frames, {height}, {width}], got {list(output.shape)}")
    frames = output.permute(1, 2, 3, 0)
    if frames.dtype != torch.uint8:
        frames = frames.float().clamp(0, 1)
    return frames.contiguous()
