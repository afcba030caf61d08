"""A model family small enough for closed forms: latents of six numbers, one label, two residual blocks, any dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from miles_dmd2.algo import initial_noise, key_seed, normal
from miles_dmd2.models.base import Components, ModelAdapter
from miles_dmd2.models.export import StudentSampling
from miles_dmd2.types import Conditioning, RolloutSample, WeightVersion

LATENT = (2, 3)
LABELS = 4
WIDTH = 8


class TimeEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, WIDTH)

    def forward(self, sigma: Tensor) -> Tensor:
        angles = torch.stack([torch.cos(3 * sigma), torch.sin(3 * sigma)], dim=1)
        return self.linear(angles.to(self.linear.weight.dtype))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 5)  # 5 rows: uneven over two ranks
        self.outer = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x + time)))


class ToyTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = LATENT[0] * LATENT[1]
        self.entry = nn.Linear(size + LABELS, WIDTH)
        self.time = TimeEmbedding()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.exit = nn.Linear(WIDTH, size)
        self.scale = nn.Parameter(torch.ones(1))  # one row: rank 1 has none of it
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied_too = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied_too.weight = self.tied.weight
        self.unused = nn.Parameter(torch.full((3,), 0.5))
        self.register_buffer("offset", torch.tensor([0.25]))

    def forward(self, x: Tensor, sigma: Tensor, label: Tensor) -> Tensor:
        dtype = self.entry.weight.dtype
        h = self.entry(torch.cat([x.flatten(1).to(dtype), label.to(dtype)], dim=1)) + self.offset.to(dtype)
        time = self.time(sigma)
        for block in self.blocks:
            h = block(h, time)
        h = self.tied_too(torch.tanh(self.tied(h)))
        return (self.exit(h) * self.scale.to(dtype)).view(x.shape)


class ToyAdapter(ModelAdapter):
    family = "toy"
    pipeline_classes = ("ToyPipeline",)

    def __init__(self, seed: int = 0) -> None:
        super().__init__(Path("toy"), 1, 1)
        self.seed = seed

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return LATENT

    @classmethod
    def default_size(cls, checkpoint: Path) -> tuple[int, int]:
        return 1, 1

    def initial_noise(self, seed: int) -> Tensor:
        return initial_noise(seed, LATENT)

    def load_transformer(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Weights that depend on the adapter's seed only, all drawn in fp32."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return ToyTransformer().to(dtype)

    def load_components(self, dtype: torch.dtype = torch.float32) -> Components:
        raise NotImplementedError

    def encode_prompts(self, components: Components, prompts: Sequence[str]) -> list[Conditioning]:
        raise NotImplementedError

    def decode(self, components: Components, latents: Tensor) -> Tensor:
        raise NotImplementedError

    def collate(self, conds: Sequence[Conditioning]) -> dict[str, Tensor]:
        return {"label": torch.stack([cond["label"] for cond in conds])}

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        velocity = transformer(x, sigma, cond["label"])
        return velocity if velocity.dtype == torch.float64 else velocity.float()

    def probe_conditioning(self) -> Conditioning:
        return {"label": torch.eye(LABELS)[0]}

    def time_embedding(self, transformer: nn.Module) -> nn.Module:
        return transformer.get_submodule("time")

    def shard_units(self, transformer: nn.Module) -> list[nn.Module]:
        return list(transformer.get_submodule("blocks").children())

    def idle_parameters(self, transformer: nn.Module) -> dict[str, str]:
        return {"unused": "none"}

    def export_pipeline(self, weights: Mapping[str, Tensor], sampling: StudentSampling, directory: Path) -> None:
        raise NotImplementedError


GRID = (1.0, 0.75, 0.5, 0.25, 0.0)


def make_sample(sample_id: int, *, rollout_id: int = 0, step: int = 0) -> RolloutSample:
    """A sample with numbers from its id: not the student's own, which no trainer assumes."""
    key = key_seed(7, "probe", rollout_id, sample_id)
    return RolloutSample(
        sample_id=sample_id,
        prompt=f"prompt {sample_id}",
        seed=sample_id,
        stop_step=sample_id % (len(GRID) - 1),
        sigmas=torch.tensor(GRID),
        x_k=normal(key, LATENT),
        x0=0.5 * normal(key_seed(7, "order", rollout_id, sample_id), LATENT) + 0.3,
        cond={"label": torch.eye(LABELS)[sample_id % LABELS]},
        weight_version=WeightVersion(step),
    )


def make_windows(rollout_id: int, count: int, size: int) -> tuple[tuple[int, ...], ...]:
    """`count` windows of `size` ids; ids are global to the run."""
    first = rollout_id * count * size
    return tuple(tuple(range(first + w * size, first + (w + 1) * size)) for w in range(count))
