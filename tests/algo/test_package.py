"""`miles_dmd2.algo` from outside: what it imports, what it offers, what it refuses and in which words."""

import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from closed_forms import randn

from miles_dmd2 import algo

ROOT = Path(__file__).parents[2]
NEW_MODULES = """
import sys
import torch
before = set(sys.modules)
import miles_dmd2.algo
names = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(names - set(sys.stdlib_module_names)))
"""


def test_imports_torch_and_nothing_else():
    """And torch brings none of the heavy ones: a reader of the paper needs `pip install torch` only."""
    out = subprocess.run(
        [sys.executable, "-c", NEW_MODULES], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    assert out.split() == ["miles_dmd2"]


def test_public_names_are_documented():
    for name in algo.__all__:
        if inspect.isfunction(getattr(algo, name)):
            assert inspect.getdoc(getattr(algo, name)), name


X, V = randn(3, 4), randn(3, 4, seed=1)
SIGMA = torch.tensor([0.2, 0.5, 0.9])
GRID = algo.sigma_grid(4, 5.0)
REFUSED = [
    (lambda: algo.add_noise(X, V, torch.tensor([0.2, 0.5, 1.2])), r"sigma must be in \[0, 1\].*max 1.2"),
    (lambda: algo.add_noise(X, V, torch.tensor([0.2, 0.5, -0.1])), r"sigma must be in \[0, 1\].*min -0.1"),
    (lambda: algo.add_noise(X, V, torch.tensor([0.2, math.nan, 0.1])), r"sigma must be in \[0, 1\].*nan"),
    (
        lambda: algo.add_noise(X, V, SIGMA[:2]),
        r"sigma must be one per sample, \[3\], or one per element, got shape \[2\]",
    ),
    (lambda: algo.add_noise(X, V, torch.tensor(0.5)), r"one per sample, \[3\], or one per element, got shape \[\]"),
    (lambda: algo.add_noise(X, V, SIGMA[:, None]), r"one per sample, \[3\], or one per element, got shape \[3, 1\]"),
    (lambda: algo.add_noise(X, V[:, :2], SIGMA), r"noise has shape \[3, 2\], but x0 has \[3, 4\]"),
    (lambda: algo.add_noise(X, V[:1], SIGMA), r"noise has shape \[1, 4\], but x0 has \[3, 4\]"),
    (lambda: algo.add_noise(X[:0], V[:0], SIGMA[:0]), r"x0 must be \[batch, \*latent\] and not empty.*\[0, 4\]"),
    (lambda: algo.add_noise(X.long(), V, SIGMA), r"x0 must be a float tensor, got torch.int64"),
    (lambda: algo.add_noise(X, V, torch.tensor([0, 1, 1])), r"sigma must be a float tensor, got torch.int64"),
    (lambda: algo.velocity_from_x0(X, V, torch.tensor([0.0, 0.5, 0.9])), r"sigma must be > 0, got 0"),
    (lambda: algo.guide(X, V[:2], 2.0), r"cond has shape \[2, 4\], but uncond has \[3, 4\]"),
    (lambda: algo.shift_sigma(SIGMA, 0.0), r"shift must be a finite number > 0, got 0.0"),
    (lambda: algo.shift_sigma(SIGMA, math.nan), r"shift must be a finite number > 0, got nan"),
    (lambda: algo.shift_sigma(SIGMA + 1, 3.0), r"sigma must be in \[0, 1\]"),
    (lambda: algo.sigma_grid(0, 3.0), r"num_steps must be at least 1, got 0"),
    (lambda: algo.sigma_grid(4, -1.0), r"shift must be a finite number > 0, got -1.0"),
    (lambda: algo.sample_score_sigma(SIGMA, 0.98, 0.02), r"0 <= lo < hi <= 1, got lo=0.98 and hi=0.02"),
    (lambda: algo.sample_score_sigma(SIGMA, 0.02, 1.5), r"0 <= lo < hi <= 1, got lo=0.02 and hi=1.5"),
    (lambda: algo.sample_score_sigma(SIGMA + 1, 0.02, 0.98), r"uniform must be in \[0, 1\), got min 1.2"),
    (lambda: algo.dmd_gradient(X, V, V[:, :1]), r"x0_fake has shape \[3, 1\], but x0 has \[3, 4\]"),
    (lambda: algo.sample_score_sigma(SIGMA, 0.02, 0.98, law="cosine"), r"law must be one of .*got 'cosine'"),
    (lambda: algo.logit_normal(SIGMA, 0.0, 0.0), r"finite std > 0, got 0.0 and 0.0"),
    (lambda: algo.logit_normal(SIGMA, math.inf, 1.0), r"finite mean and a finite std > 0, got inf"),
    (lambda: algo.dmd_gradient(X, V, X, eps=0.0), r"eps must be > 0, got 0.0"),
    (lambda: algo.student_loss(X, V[:1]), r"gradient has shape \[1, 4\], but x0 has \[3, 4\]"),
    (lambda: algo.student_loss(X, V, reduction="sum"), r"reduction must be one of .*got 'sum'"),
    (lambda: algo.critic_loss(V, X, SIGMA, V, X, space="v"), r"space must be one of .*got 'v'"),
    (lambda: algo.critic_loss(V, X, SIGMA + 1, V, X), r"sigma must be in \[0, 1\]"),
    (lambda: algo.critic_loss(V, X, SIGMA, V, X[:1], space="x0"), r"x0 has shape \[1, 4\]"),
    (lambda: algo.rollout(torch.add, X, GRID, 4), r"stop_step must be in \[0, 4\), got \[4\]"),
    (lambda: algo.rollout(torch.add, X, GRID, -1), r"stop_step must be in \[0, 4\), got \[-1\]"),
    (lambda: algo.rollout(torch.add, X, GRID, [0, 1]), r"one int or one per sample, \[3\], got shape \[2\]"),
    (
        lambda: algo.rollout(torch.add, X, GRID, torch.tensor([0.0, 1, 2])),
        r"stop_step must be integer, got torch.float32",
    ),
    (lambda: algo.rollout(torch.add, X, GRID[:-1], 0), r"sigmas must decrease to a terminal 0, got"),
    (
        lambda: algo.rollout(torch.add, X, GRID, 2, hop_noise=X[None]),
        r"hop_noise must be \[at least 2, 3, 4\]",
    ),
    (lambda: algo.rollout(torch.add, X, GRID, 1, hop_noise=X), r"hop_noise must be \[at least 1, 3, 4\], got"),
    (lambda: algo.rollout(torch.add, X, GRID.flip(0), 0), r"sigmas must decrease to a terminal 0, got"),
    (lambda: algo.rollout(torch.add, X, GRID[-1:], 0), r"sigmas must be \[N \+ 1\] with N >= 1, got shape \[1\]"),
    (lambda: algo.rollout(torch.add, X, 1000 * GRID, 0), r"sigma must be in \[0, 1\]"),
    (lambda: algo.euler_step(X, V, SIGMA, SIGMA + 1), r"sigma must be in \[0, 1\]"),
    (lambda: algo.key_seed(0, "noise", 0, 0), r"purpose must be one of .*got 'noise'"),
    (lambda: algo.key_seed(0, "stop_step", 0, 1.0), r"must be ints, got 1.0"),
    (lambda: algo.normal(-1, (2,)), r"a key or seed must be in \[0, 2\^63\), got -1"),
    (lambda: algo.uniform(2**63), r"a key or seed must be in \[0, 2\^63\)"),
    (lambda: algo.integer(5, 0), r"high must be at least 1, got 0"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused_with_the_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2,), (2, 7), (2, 4, 8, 8), (2, 16, 3, 4, 4)])
def test_any_float_dtype_and_latent_shape(dtype, shape):
    """Every function once: fp32 out (fp64 for fp64), the shape kept."""
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    x, v = randn(*shape).to(dtype), randn(*shape, seed=1).to(dtype)
    sigma = torch.tensor([0.3, 0.7])
    latents = [
        algo.add_noise(x, v, sigma),
        algo.x0_from_velocity(x, v, sigma),
        algo.noise_from_velocity(x, v, sigma),
        algo.velocity_from_x0(x, v, sigma),
        algo.guide(x, v, 2.0),
        algo.dmd_gradient(x, v, x),
        algo.euler_step(x, v, sigma, sigma / 2),
        *algo.rollout(lambda x, s: x.to(dtype), x, GRID, 2),
    ]
    assert {(tuple(tensor.shape), tensor.dtype) for tensor in latents} == {(shape, expected)}
    losses = [
        algo.student_loss(x, v),
        algo.flow_matching_loss(v, x, x),
        *(algo.critic_loss(v, x, sigma, v, x, space=space) for space in algo.CRITIC_SPACES),
    ]
    assert {(tensor.ndim, tensor.dtype) for tensor in losses} == {(0, expected)}
    assert algo.student_loss(x, v, reduction="sample").shape == (2,)
    assert algo.mean_abs_difference(x, v).shape == (2,)
