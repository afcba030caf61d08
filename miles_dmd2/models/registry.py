"""Which adapter serves which checkpoint. Importing this module loads neither torch nor diffusers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from miles_dmd2.models.checkpoint import FLAG, read_config

if TYPE_CHECKING:
    from miles_dmd2.models.base import ModelAdapter


@dataclass(frozen=True, slots=True)
class Family:
    """One family: its name, the `_class_name` values of model_index.json that it serves, and where its adapter is."""

    name: str
    pipeline_classes: tuple[str, ...]
    adapter: str  # module:class
    components: tuple[str, ...] = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")  # at the least


FAMILIES = (
    Family("qwen_image", ("QwenImagePipeline",), "miles_dmd2.models.qwen_image:QwenImageAdapter"),
    Family("sd3", ("StableDiffusion3Pipeline",), "miles_dmd2.models.sd3:SD3Adapter"),
    Family("flux2_klein", ("Flux2KleinPipeline",), "miles_dmd2.models.flux2_klein:Flux2KleinAdapter"),
    Family("z_image", ("ZImagePipeline",), "miles_dmd2.models.z_image:ZImageAdapter"),
    Family("wan", ("WanPipeline",), "miles_dmd2.models.wan:WanAdapter"),
    Family(
        "minimax_h3",
        ("MiniMaxH3Pipeline",),
        "miles_dmd2.models.minimax_h3:MiniMaxH3Adapter",
        ("transformer", "video_vae", "audio_vae", "text_encoder", "tokenizer", "processor"),
    ),
)


def known_pipelines() -> dict[str, tuple[str, ...]]:
    """Every `_class_name` that some adapter serves, and the components that such a pipeline must have."""
    return {name: family.components for family in FAMILIES for name in family.pipeline_classes}


def family_of(checkpoint: Path) -> Family:
    """The family of a pipeline directory. ValueError: no such directory or file, unknown pipeline class."""
    name = read_config(checkpoint, "model_index.json").get("_class_name")
    for family in FAMILIES:
        if name in family.pipeline_classes:
            return family
    known = ", ".join(known_pipelines())
    raise ValueError(f"{FLAG} {checkpoint}: model_index.json has _class_name {name!r}; supported are {known}")


def adapter_class(family: Family) -> type[ModelAdapter]:
    """Import the family's adapter (torch, but no weights)."""
    module, _, name = family.adapter.partition(":")
    return cast("type[ModelAdapter]", getattr(importlib.import_module(module), name))


def build_adapter(
    checkpoint: Path | str,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    seconds: float | None = None,
) -> ModelAdapter:
    """The adapter of a pipeline directory at a canvas size; None takes the family's own default. `seconds`: instead
    of `num_frames`.

    ValueError, one line with flag, value and remedy: missing or malformed directory, unknown family, invalid size.
    """
    checkpoint = Path(checkpoint)
    adapter = adapter_class(family_of(checkpoint))
    if height is None or width is None:
        default_height, default_width = adapter.default_size(checkpoint)
        height = default_height if height is None else height
        width = default_width if width is None else width
    if num_frames is None:
        num_frames = adapter.default_frames(checkpoint) if seconds is None else adapter.frames_of(seconds)
    return adapter(checkpoint, height, width, num_frames)
