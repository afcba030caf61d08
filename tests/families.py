"""Every registered family as a tiny pipeline: what the suites of models, engines and the SGLang server run over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.registry import build_adapter
from tests import tiny_klein, tiny_parts, tiny_qwen, tiny_sd3, tiny_wan, tiny_z_image


@dataclass(frozen=True)
class Tiny:
    """One family's tiny pipeline.

    prompts: three, of different token lengths. call: what makes the pipeline's call one forward a step. one_block: the
    transformer's config with a single block. layers: further configs that change which parameters are idle. bf16: the
    greatest error of a bf16 forward in units of the greatest velocity.
    """

    name: str
    build: Callable[[Path], Path]
    one_block: Mapping[str, Any]
    prompts: tuple[str, ...] = tiny_parts.PROMPTS
    size: tuple[int, int] = (48, 32)
    num_frames: int = 1
    default: tuple[int, int, int] = (1024, 1024, 1)
    multiple: int = 16
    call: Mapping[str, Any] = field(default_factory=lambda: {"guidance_scale": 1.0})
    variants: tuple[Mapping[str, Any], ...] = ()
    bf16: float = 0.05
    label: str = ""  # of a second pipeline of one family

    def __str__(self) -> str:
        return self.label or self.name

    def adapter(self, checkpoint: Path) -> ModelAdapter:
        return build_adapter(checkpoint, *self.size, self.num_frames)

    def pipeline_class(self) -> Any:
        """The class that a user would load the checkpoint with."""
        import diffusers

        from miles_dmd2.models.registry import FAMILIES

        (family,) = (family for family in FAMILIES if family.name == self.name)
        return getattr(diffusers, family.pipeline_classes[0])


TINY = (
    Tiny(
        "qwen_image",
        tiny_qwen.build,
        {"num_layers": 1},
        prompts=tiny_qwen.PROMPTS,
        call={"true_cfg_scale": 1.0},
        variants=({"num_layers": 3},),
    ),
    Tiny(
        "sd3",
        tiny_sd3.build,
        {"num_layers": 1},
        default=(64, 64, 1),
        variants=({"qk_norm": "rms_norm", "dual_attention_layers": (0,)},),
    ),
    Tiny("flux2_klein", tiny_klein.build, {"num_layers": 1, "num_single_layers": 1}),
    Tiny("z_image", tiny_z_image.build, {"n_layers": 1}, call={"guidance_scale": 0.0}),
    Tiny("wan", tiny_wan.build, {"num_layers": 1}, num_frames=5, default=(480, 832, 81)),
    Tiny(
        "wan",
        tiny_wan.build_ti2v,
        {"num_layers": 1},
        label="wan_ti2v",
        size=(96, 64),
        num_frames=5,
        default=(480, 832, 81),
        multiple=32,
    ),
)


@pytest.fixture(scope="session", params=TINY, ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return request.param


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tiny], Path]:
    """Each family's pipeline directory, written once a session."""
    written: dict[str, Path] = {}

    def checkpoint_of(tiny: Tiny) -> Path:
        if str(tiny) not in written:
            written[str(tiny)] = tiny.build(tmp_path_factory.mktemp("families") / str(tiny))
        return written[str(tiny)]

    return checkpoint_of


@pytest.fixture(scope="session")
def checkpoint(tiny: Tiny, checkpoints: Callable[[Tiny], Path]) -> Path:
    return checkpoints(tiny)


@pytest.fixture(scope="session")
def adapter(tiny: Tiny, checkpoint: Path) -> ModelAdapter:
    return tiny.adapter(checkpoint)
