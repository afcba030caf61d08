"""Randomness by key: a draw is a function of (seed, purpose, rollout_id, sample_id), never of rank, order or the past.

So a run gives the same numbers on any number of ranks and continues bit for bit after a resume. One key, one draw.

Draws are made on the CPU in fp32; the caller moves them. `torch.Generator` on the CPU reads only the low 32 bits of
its seed (checked in the tests), which is why sample seeds have 32 bits: distinct seeds are distinct noise, and JSON
and NumPy take them.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, get_args

import torch
from torch import Tensor

Purpose = Literal[
    "sample_seed",
    "eval_seed",
    "stop_step",
    "real_latent",
    "score_sigma",
    "score_noise",
    "scoring_pass_sigma",
    "scoring_pass_noise",
    "order",
    "probe",
    "lora_init",
]
PURPOSES: tuple[str, ...] = get_args(Purpose)
_KEY_BITS = 63


def key_seed(seed: int, purpose: Purpose, rollout_id: int, sample_id: int) -> int:
    """The key of a draw, uniform in [0, 2^63): blake2b of the four parts, written out and separated.

    Any ints will do; a draw shared by a whole rollout takes sample_id -1. ValueError: unknown purpose, or a part that
    is not an int.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"purpose must be one of {PURPOSES}, got {purpose!r}")
    for part in (seed, rollout_id, sample_id):
        if not isinstance(part, int) or isinstance(part, bool):
            raise ValueError(f"seed, rollout_id and sample_id must be ints, got {part!r}")
    text = f"miles_dmd2/1|{seed}|{purpose}|{rollout_id}|{sample_id}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - _KEY_BITS)


def sample_seed(seed: int, rollout_id: int, sample_id: int) -> int:
    """The seed of a sample, in [0, 2^32): a CPU `torch.Generator` with it draws its noise, here as in SGLang."""
    return key_seed(seed, "sample_seed", rollout_id, sample_id) >> (_KEY_BITS - 32)


def eval_seed(seed: int, series: int, index: int) -> int:
    """As `sample_seed`, for the fixed noise of an evaluation: no training sample of any rollout shares its key."""
    return key_seed(seed, "eval_seed", series, index) >> (_KEY_BITS - 32)


def uniform(key: int) -> float:
    """A number in [0, 1) with 24 bits: exact in fp32, where more bits could round to 1."""
    return (_checked(key) >> (_KEY_BITS - 24)) / 2**24


def uniform_batch(keys: Sequence[int]) -> Tensor:
    """`[len(keys)]` fp32, each `uniform` of its key."""
    return torch.tensor([uniform(key) for key in keys], dtype=torch.float32)


def integer(key: int, high: int) -> int:
    """An integer uniform in 0..high-1, to within high / 2^63. ValueError: high < 1."""
    if high < 1:
        raise ValueError(f"high must be at least 1, got {high}")
    return _checked(key) * high >> _KEY_BITS


def normal(key: int, shape: Sequence[int]) -> Tensor:
    """Standard normal, fp32: the first draw of a CPU `torch.Generator` seeded with key."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(_checked(key)), dtype=torch.float32)


def normal_batch(keys: Sequence[int], shape: Sequence[int]) -> Tensor:
    """`[len(keys), *shape]` fp32, each row `normal` of its key, whatever the batch around it."""
    return torch.stack([normal(key, shape) for key in keys])


def normal_stream(seed: int, shape: Sequence[int], count: int) -> Tensor:
    """`[count, *shape]` fp32: the first `count` draws of one CPU `torch.Generator`; row 0 is `normal(seed, shape)`."""
    generator = torch.Generator().manual_seed(_checked(seed))
    return torch.stack([torch.randn(tuple(shape), generator=generator, dtype=torch.float32) for _ in range(count)])


def initial_noise(seed: int, shape: Sequence[int]) -> Tensor:
    """The initial noise of the sample with this `sample_seed`, `[*shape]`; a rollout starts at sigmas[0] times it."""
    return normal(seed, shape)


def _checked(key: int) -> int:
    if not 0 <= key < 2**_KEY_BITS:
        raise ValueError(f"a key or seed must be in [0, 2^{_KEY_BITS}), got {key}")
    return key
