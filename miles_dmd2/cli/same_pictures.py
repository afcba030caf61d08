"""The pictures of an exported student, by plain diffusers, beside those of the local engine."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.engines.sglang.server import ManagedServer, SGLangLaunch
from miles_dmd2.media.gallery import contact_sheet, shown_frames
from miles_dmd2.media.pixels import eight_bit
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.export import ADAPTER_DIRECTORY, STUDENT_FILE
from miles_dmd2.models.loading import quiet
from miles_dmd2.types import RolloutRequest, RolloutSample, WeightVersion

NOT_OF_THE_CALL = ("shift", "sigmas", "sample_type")


@dataclass(frozen=True, slots=True)
class Made:
    """A final latent fp32 `[*latent]`, and its picture in [0, 1], fp32 `[frames, height, width, 3]`."""

    latent: Tensor
    picture: Tensor


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest of a value: of the latents in units of their largest value, and of the pixels in [0, 1]."""

    latents: float
    pixels: float

    def within(self, tolerance: float) -> bool:
        """False also where one of them is not a number."""
        return self.latents <= tolerance and self.pixels <= tolerance


def difference(ours: Sequence[Made], theirs: Sequence[Made]) -> Difference:
    latents, pixels = (
        [torch.stack([getattr(made, name) for made in side]) for side in (ours, theirs)]
        for name in ("latent", "picture")
    )
    scale = latents[0].abs().max()
    return Difference(*(float((a - b).abs().max() / of) for (a, b), of in ((latents, scale), (pixels, 1.0))))


def write_sheet(rows: Sequence[Sequence[Made]], path: Path) -> None:
    """A contact sheet, one row a side. What is not a number is black."""
    frames = [shown_frames(eight_bit(made.picture.nan_to_num())) for row in rows for made in row]
    Image.fromarray(contact_sheet(frames, columns=len(rows[0]))).save(path)


def by_engine(
    adapter: ModelAdapter, weights: Mapping[str, Tensor], requests: Sequence[RolloutRequest], device: str
) -> list[Made]:
    """These weights on the run's own pipeline, one sample at a time."""
    engine = LocalEngine(adapter, device, batch_size=1, checkpoint_version=WeightVersion(0), weights=weights)
    try:
        return _made(engine.generate(requests))
    finally:
        engine.close()


def by_sglang(exported: ModelAdapter, requests: Sequence[RolloutRequest], python: Path, log: Path) -> list[Made]:
    """What was exported, by a server of its own, with the plugin, in fp32. EngineError: it does not start or serve."""
    serving = exported.serving
    arguments = tuple(serving.launch_arguments("fp32"))
    settings = SGLangSettings(require_plugin=True, allow_untested_version=True)
    launch = SGLangLaunch(python, exported.checkpoint, serving.model_id, arguments=arguments, log=log)
    with ManagedServer(launch) as server:
        engine = SGLangEngine(exported, [server], settings, checkpoint_version=WeightVersion(0))
        try:
            return _made(engine.generate(requests))
        finally:
            engine.close()


def _made(samples: Sequence[RolloutSample]) -> list[Made]:
    return [Made(sample.x0, sample.media) for sample in samples if sample.media is not None]


def by_diffusers(
    exported: Path, requests: Sequence[RolloutRequest], device: str, *, base: Path | None = None
) -> list[Made]:
    """What was exported, by the pipeline's own class, called with what student.json says. `base`: a pipeline whose
    transformer, with the exported adapter loaded, is in the place of the merged one.
    """
    import diffusers

    notes: dict[str, Any] = json.loads((exported / STUDENT_FILE).read_text())
    name = json.loads((exported / "model_index.json").read_text())["_class_name"]
    with quiet():
        pipeline: Any = getattr(diffusers, name).from_pretrained(
            exported, dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
        if base is not None:
            pipeline.transformer = type(pipeline.transformer).from_pretrained(
                base, subfolder="transformer", dtype=torch.float32, use_safetensors=True, local_files_only=True
            )
            pipeline.load_lora_weights(exported / ADAPTER_DIRECTORY, local_files_only=True)
    pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    _start_at(pipeline, notes["sigmas"][0])
    call = {key: value for key, value in notes.items() if key not in NOT_OF_THE_CALL}
    if notes["shift"] is None:
        call |= _own_grid(pipeline, notes["sigmas"][:-1])
    return [_one(pipeline, request, call) for request in requests]


def _one(pipeline: Any, request: RolloutRequest, call: Mapping[str, Any]) -> Made:
    """The sample's generator draws its first noise and, for SDE, that of the hops, as in rollouts."""
    generator = torch.Generator().manual_seed(request.seed)
    hop = type(pipeline.scheduler).step
    latents: list[Tensor] = []

    def step(*args: Any, **options: Any) -> Any:
        made = hop(pipeline.scheduler, *args, **options, generator=generator)
        latents.append(made[0])
        return made

    pipeline.scheduler.step = step
    shown = pipeline(prompt=request.prompt, generator=generator, output_type="pt", return_dict=False, **call)[0]
    planes = shown[0].float().cpu()  # [3, height, width], of a clip [frames, 3, height, width]
    return Made(latents[-1][0].float().cpu(), (planes if planes.ndim == 4 else planes.unsqueeze(0)).movedim(1, -1))


def _own_grid(pipeline: Any, sigmas: list[float]) -> dict[str, Any]:
    """What the call takes beside the rest for a grid of its own; else the scheduler gets it, as docs/export.md says."""
    if "sigmas" in inspect.signature(pipeline.__call__).parameters:
        return {"sigmas": sigmas}
    set_timesteps = pipeline.scheduler.set_timesteps
    pipeline.scheduler.set_timesteps = lambda _, device: set_timesteps(sigmas=sigmas, device=device)
    return {}


def _start_at(pipeline: Any, sigma: float) -> None:
    """Noise scaled by the grid's first sigma, as rollouts start."""
    if sigma == 1:
        return
    prepare = pipeline.prepare_latents

    def prepared(*args: Any, **options: Any) -> Any:
        made = prepare(*args, **options)
        return (made[0] * sigma, *made[1:]) if isinstance(made, tuple) else made * sigma

    pipeline.prepare_latents = prepared
