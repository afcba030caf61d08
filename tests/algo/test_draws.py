"""Keyed draws: golden values, independence of everything but the key, and the right distributions."""

import math
from collections import Counter
from itertools import product

import pytest
import torch
from algo_mutations import Algo, assert_caught, assert_each_has_a_mutation, mutation, true_algo
from closed_forms import midpoints

TOP = 2**63 - 1


GOLDEN = (1203639707637010266, 2631309213531933750, 6098065952171547544, 3706310152)


def check_key_golden(algo: Algo) -> None:
    """A run of last year is continued with the same draws: the encoding must not change unseen."""
    assert algo.key_seed(0, "sample_seed", 0, 0) == GOLDEN[0]
    assert algo.key_seed(17, "stop_step", 3, 319) == GOLDEN[1]
    assert algo.key_seed(-5, "score_noise", 2**40, -1) == GOLDEN[2]
    assert algo.sample_seed(17, 3, 319) == GOLDEN[3]


def check_keys_differ(algo: Algo) -> None:
    """All four parts count, and no two splits of the same digits meet (1, 23) and (12, 3)."""
    parts = (0, 1, 2, 3, 11, 12, 21, 23, 112, 123, -1)
    keys = {algo.key_seed(*key) for key in product(parts, ("stop_step", "score_sigma", "score_noise"), parts, parts)}
    assert len(keys) == 3 * 11**3
    assert min(keys) >= 0
    assert max(keys) <= TOP
    seeds = [algo.sample_seed(0, rollout, sample) for rollout in range(20) for sample in range(320)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0
    assert max(seeds) < 2**32


def check_uniform(algo: Algo) -> None:
    """Uniform on [0, 1) as fp32, ends included; Kolmogorov-Smirnov at one in a million."""
    assert algo.uniform(0) == 0.0
    keys = [algo.key_seed(0, "score_sigma", 5, sample) for sample in range(4000)]
    values = algo.uniform_batch([*keys, TOP])
    assert values.dtype == torch.float32
    assert values.max() < 1
    assert values.tolist()[:-1] == [algo.uniform(key) for key in keys]
    distance = (values[:-1].double().sort().values - midpoints(4000)).abs().max().item()
    assert distance < math.sqrt(math.log(2e6) / 2 / 4000)


def check_integer(algo: Algo) -> None:
    """Stop steps: every one of 0..N-1 equally often, none else (chi square at one in a million)."""
    for high, limit in ((1, 0.0), (2, 24.0), (4, 30.7), (8, 40.5)):
        keys = [algo.key_seed(0, "stop_step", sample // 320, sample) for sample in range(6400)]
        counts = Counter(algo.integer(key, high) for key in keys)
        assert set(counts) == set(range(high))
        assert sum((count - 6400 / high) ** 2 for count in counts.values()) / (6400 / high) <= limit
        assert algo.integer(0, high) == 0
        assert algo.integer(TOP, high) == high - 1


def check_normal(algo: Algo) -> None:
    """The first draw of a CPU generator with that seed, in fp32, a row of a batch like the row alone."""
    keys = [algo.key_seed(0, "score_noise", 1, sample) for sample in range(300)]
    batch = algo.normal_batch(keys, (4, 8, 8))
    assert batch.shape == (300, 4, 8, 8)
    assert batch.dtype == torch.float32
    assert torch.equal(batch[17], algo.normal(keys[17], (4, 8, 8)))
    assert torch.equal(batch[17], torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(keys[17])))
    assert torch.equal(algo.normal_batch(keys[16:19], (4, 8, 8))[1], batch[17])
    assert abs(batch.mean()) < 5 / math.sqrt(batch.numel())
    assert abs(batch.var() - 1) < 5 * math.sqrt(2 / batch.numel())
    correlation = torch.corrcoef(batch.flatten(1)[:40]) - torch.eye(40)
    assert correlation.abs().max() < 6 / 16


def check_initial_noise(algo: Algo) -> None:
    """As SGLang's server: a sample's initial noise is the first draw of its generator, hop noise would be the next."""
    generator = torch.Generator().manual_seed(algo.sample_seed(3, 1, 7))
    first, second = (torch.randn(4, 6, 6, generator=generator) for _ in range(2))
    noise = algo.initial_noise(algo.sample_seed(3, 1, 7), (4, 6, 6))
    assert torch.equal(noise, first)
    assert not torch.equal(noise, second)


def joined(seed, purpose, rollout_id, sample_id):
    return true_algo().key_seed(0, purpose, 0, int(f"{seed}{rollout_id}{sample_id}".replace("-", "9")))


def check_normal_stream(algo: Algo) -> None:
    """Successive draws of one generator: the first is the initial noise, and no later one depends on the count."""
    generator = torch.Generator().manual_seed(77)
    drawn = torch.stack([torch.randn(4, 6, generator=generator) for _ in range(3)])
    assert torch.equal(algo.normal_stream(77, (4, 6), 3), drawn)
    assert torch.equal(algo.normal_stream(77, (4, 6), 2), drawn[:2])


CHECKS = [
    check_normal_stream,
    check_key_golden,
    check_keys_differ,
    check_uniform,
    check_integer,
    check_normal,
    check_initial_noise,
]
MUTATIONS = [
    mutation(
        check_normal_stream,
        "one_large_draw",
        normal_stream=lambda s, shape, n: true_algo().normal(s, (*shape, n)).movedim(-1, 0),
    ),
    mutation(
        check_normal_stream,
        "a_generator_for_each",
        normal_stream=lambda s, shape, n: true_algo().normal_batch([s + i for i in range(n)], shape),
    ),
    mutation(check_key_golden, "another_hash", key_seed=lambda *key: hash(key) & TOP),
    mutation(check_key_golden, "parts_in_another_order", key_seed=lambda s, p, r, i: true_algo().key_seed(s, p, i, r)),
    mutation(check_keys_differ, "rollout_forgotten", key_seed=lambda s, p, r, i: true_algo().key_seed(s, p, 0, i)),
    mutation(
        check_keys_differ, "purpose_forgotten", key_seed=lambda s, p, r, i: true_algo().key_seed(s, "stop_step", r, i)
    ),
    mutation(check_keys_differ, "seed_plus_sample", key_seed=lambda s, p, r, i: true_algo().key_seed(s + i, p, r, 0)),
    mutation(check_keys_differ, "no_separator", key_seed=joined),
    mutation(check_keys_differ, "16_bits", sample_seed=lambda s, r, i: true_algo().sample_seed(s, r, i) & 0xFFFF),
    mutation(
        check_uniform, "double_rounds_to_1", uniform_batch=lambda keys: torch.tensor([key / 2**63 for key in keys])
    ),
    mutation(check_uniform, "one_bit_lost", uniform_batch=lambda keys: torch.tensor([key / 2**64 for key in keys])),
    mutation(check_integer, "up_to_high", integer=lambda key, high: key * (high + 1) >> 63),
    mutation(check_integer, "never_the_last", integer=lambda key, high: key * max(high - 1, 1) >> 63),
    mutation(check_integer, "rounded", integer=lambda key, high: min(round(key / 2**63 * high), high - 1)),
    mutation(
        check_normal,
        "one_generator_for_the_batch",
        normal_batch=lambda keys, shape: torch.randn(
            len(keys), *shape, generator=torch.Generator().manual_seed(keys[0])
        ),
    ),
    mutation(check_normal, "fp64", normal_batch=lambda keys, shape: true_algo().normal_batch(keys, shape).double()),
    mutation(
        check_initial_noise,
        "second_draw",
        initial_noise=lambda seed, shape: torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))[1],
    ),
    mutation(
        check_initial_noise,
        "bf16",
        initial_noise=lambda seed, shape: true_algo().initial_noise(seed, shape).bfloat16().float(),
    ),
]


@pytest.mark.parametrize("check", CHECKS)
def test_closed_form(check):
    check(true_algo())


@pytest.mark.parametrize(("check", "changes"), MUTATIONS)
def test_mutation_is_caught(check, changes):
    assert_caught(check, changes)


def test_each_check_has_a_mutation():
    assert_each_has_a_mutation(CHECKS, MUTATIONS)


def test_cpu_generator_reads_32_bits_of_its_seed():
    """Why a sample seed has 32 bits. Should this fail with a newer torch, seeds may have more."""
    algo = true_algo()
    assert torch.equal(algo.normal(5, (8,)), algo.normal(5 + 2**32, (8,)))
    assert not torch.equal(algo.normal(5, (8,)), algo.normal(5 + 2**31, (8,)))
