"""What the tests of a tiny MiniMax H3 on a real server share: canvases, grids, requests, weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from miles_dmd2.algo import normal, sigma_grid
from miles_dmd2.engines.sglang.engine import SGLangEngine
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.weights import checksum
from tests.engines.contract import Harness
from tests.sglang.raw import STOCK, Server
from tests.tiny_h3 import PROMPTS

SIDE = 32
SHORT, CLIP = 5, 22  # frames; SGLang's video VAE decodes no fewer than 22
GRID = sigma_grid(4, 12.0)
SOUND_GRID = sigma_grid(4, 3.0)
# Latents and velocities are of size 1 to 10. Measured: up to 1.2e-5, in bf16 as in fp32.
SAME = 5e-5
WRONG = 0.5  # the least of the mistakes in these tests moves a latent by 2
UPDATE = "/update_weights_from_disk"


@dataclass(frozen=True)
class Served:
    """The engine's dtype, and the layout of the checkpoint that it was started on."""

    dtype: Any
    layout: str

    def __str__(self) -> str:
        return f"{self.dtype}-{self.layout}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "fp32" else torch.bfloat16


SERVED = (Served("fp32", "native"), Served("bf16", "native"), Served("fp32", "diffusers"))


Ask = Callable[..., dict[str, Any]]  # (stop step or None for the whole, fields of the request) -> the reply


def body(adapter: ModelAdapter, stop: int | None, **fields: object) -> dict[str, object]:
    """A rollout without decoding; `stop` or the whole."""
    steps = list(range(5)) if stop is None else [stop, stop + 1]
    ours = {} if stop is None else {"rollout_stop_step": stop}
    own = {"guidance_scale", "true_cfg_scale", "height", "width"}
    return {
        **{name: value for name, value in STOCK.items() if name not in own},
        **adapter.serving.request_fields(),
        "prompt": PROMPTS[0],
        "rollout_sigmas": GRID[:-1].tolist(),
        "rollout_return_step_indices": steps,
        "rollout_return_generated_output": False,
        **ours,
        **fields,
    }


def latents(reply: dict[str, Any]) -> Tensor:
    return reply["dit_trajectory"]["latents"]


def cond_of(adapter: ModelAdapter, reply: dict[str, Any]) -> dict[str, Tensor]:
    found = reply["denoising_env"]["pos_cond_kwargs"]
    return adapter.serving.conditioning({name: found[name] for name in adapter.serving.conditioning_names})


def levels(adapter: ModelAdapter, sigma: Tensor) -> Tensor:
    return adapter.spread(adapter.part_sigmas(sigma.reshape(1)))[0]


def velocity(adapter: ModelAdapter, student: nn.Module, cond: dict[str, Tensor], x: Tensor, sigma: Tensor) -> Tensor:
    with torch.no_grad():
        return adapter.velocity(student, x[None], sigma.reshape(1), adapter.collate([cond]))[0]


def weights_of(adapter: ModelAdapter, move: float = 0.0) -> dict[str, Tensor]:
    named = adapter.load_transformer().named_parameters()
    return {name: (p + move * normal(100 + i, p.shape)).detach().clone() for i, (name, p) in enumerate(named)}


def moved(adapter: ModelAdapter, served: Served, move: float = 0.0) -> nn.Module:
    """diffusers' transformer with `weights_of`, in the served dtype."""
    student = adapter.load_transformer(served.torch_dtype).requires_grad_(False)
    dtypes = {name: value.dtype for name, value in student.named_parameters()}
    student.load_state_dict({name: value.to(dtypes[name]) for name, value in weights_of(adapter, move).items()})
    return student


def push(engine: SGLangEngine, adapter: ModelAdapter, served: Served, move: float = 0.0) -> nn.Module:
    """Load `weights_of` through the client, with the probe of `moved`, which is returned."""
    student = moved(adapter, served, move)
    update, _ = Harness(engine, adapter, student, PROMPTS).weights(0)
    tensors = weights_of(adapter, move)
    engine.load_weights(replace(update, checksum=checksum(tensors)), tensors)
    return student


def write(directory: Path, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    (directory / "transformer").mkdir(parents=True)
    own = {name: value.contiguous() for name, value in tensors.items()}
    save_file(own, directory / "transformer" / "diffusion_pytorch_model.safetensors")
    return {"model_path": str(directory), "target_modules": ["transformer"]}


def live_checksum(raw: Server) -> str:
    return raw.json("/get_weights_checksum", {"module_names": ["transformer"]})["transformer"]
