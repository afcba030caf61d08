"""What every adapter needs to load a diffusers pipeline's parts: quietly, completely, and ready to sleep and shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles_dmd2.models.checkpoint import FLAG
from miles_dmd2.models.offload import own_storage


def load_transformer(model_class: Any, checkpoint: Path, dtype: torch.dtype, entry: str, clocks: Sequence[str]) -> Any:
    """The checkpoint's transformer on the CPU, in eval mode, each parameter with a storage of its own.

    Its inputs are cast to the dtype that the parameter `entry` has at that moment, except `clocks`, the arguments that
    say the time and keep their precision. That is how a forward under FSDP2 mixed precision (fp32 shards, gathered in
    bf16) gets bf16 inputs: no one else knows the policy, and FSDP gathers before this hook runs.
    ValueError: safetensors files that are missing or do not fit the config; diffusers itself only warns.
    """
    with quiet():
        transformer, report = model_class.from_pretrained(
            checkpoint,
            subfolder="transformer",
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            low_cpu_mem_usage=True,
            output_loading_info=True,
        )
    problems = {key: value for key, value in report.items() if value}
    if problems:
        raise ValueError(f"{FLAG} {checkpoint}: transformer weights do not fit its config: {problems}")
    own_storage(transformer)
    transformer.register_forward_pre_hook(_InputCast(entry, clocks), with_kwargs=True)
    return transformer


class _InputCast:
    """A forward pre-hook; an object, so that it can be copied with its module."""

    def __init__(self, entry: str, clocks: Sequence[str]) -> None:
        self.entry, self.clocks = entry, tuple(clocks)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            raise TypeError(f"{type(module).__name__} takes its inputs by name here: they are cast by name")
        dtype = module.get_parameter(self.entry).dtype
        return args, {name: value if name in self.clocks else _cast(value, dtype) for name, value in kwargs.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_cast(part, dtype) for part in value]
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a component's safetensors files, on the CPU. ValueError if there is no such file."""
    from safetensors.torch import load_file

    files = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
    if not files:
        raise ValueError(f"{FLAG} {directory}: no .safetensors file; other weight formats are not read")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def load_pipeline(pipeline_class: Any, checkpoint: Path, dtype: torch.dtype) -> Any:
    """The pipeline without transformer and scheduler: its text encoders, tokenizers and VAE, frozen, on the CPU."""
    with quiet():
        pipeline = pipeline_class.from_pretrained(
            checkpoint,
            transformer=None,
            scheduler=None,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
        )
    for module in pipeline.components.values():
        if isinstance(module, nn.Module):
            module.eval().requires_grad_(False)
            own_storage(module)
    return pipeline


def refuse(checkpoint: Path, where: str, config: dict[str, Any], supported: dict[str, Any]) -> None:
    """ValueError for a variant that no adapter has met: a key of `supported` with another value; null passes."""
    for key, value in supported.items():
        found = value if config.get(key) is None else config[key]
        if (tuple(found) if isinstance(found, list) else found) != value:
            raise ValueError(f"{FLAG} {checkpoint}: {where} has {key} = {found}; only {value} is supported")


def check_pipeline_class(checkpoint: Path, index: dict[str, Any], known: Sequence[str]) -> None:
    if index.get("_class_name") not in known:
        raise ValueError(f"{FLAG} {checkpoint}: not a {' or '.join(known)}: {index.get('_class_name')!r}")


def check_size(flag: str, value: int, multiple: int) -> None:
    if value < 1 or value % multiple:
        nearest = max(multiple, round(value / multiple) * multiple)
        raise ValueError(f"{flag} {value} must be a positive multiple of {multiple}; the nearest is {nearest}")


def full_precision(tensor: Tensor) -> Tensor:
    """A network's output as an adapter returns it: fp32, or fp64 from a network with fp64 parameters."""
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def pixels_of(decoded: Tensor) -> Tensor:
    """A VAE's `[batch, 3, ..., height, width]` in [-1, 1] -> fp32 in [0, 1] `[batch, ..., height, width, 3]`."""
    return (decoded * 0.5 + 0.5).clamp(0, 1).movedim(1, -1).float()


def eight_bit(media: Tensor) -> Tensor:
    """fp32 in [0, 1] -> the nearest uint8; uint8 as it is."""
    return media if media.dtype == torch.uint8 else (media * 255).round().to(torch.uint8)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of diffusers and transformers, which are global switches."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    switches = (diffusers_logging, transformers_logging)
    shown = [switch.is_progress_bar_enabled() for switch in switches]
    for switch in switches:
        switch.disable_progress_bar()
    try:
        yield
    finally:
        for switch, was in zip(switches, shown, strict=True):
            if was:
                switch.enable_progress_bar()
