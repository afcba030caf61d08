"""The same numbers however the work is cut: micro-batches, ranks, repetition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from miles_dmd2.config.sections import AlgorithmSection, TrainerSection
from miles_dmd2.data.requests import TrainingRequests
from miles_dmd2.training import Ranks
from miles_dmd2.training.trainer import Trainer
from tests.training.pool import RankPool
from tests.training.runs import OPTIONS, Run, Setup, distance, same_bits, train
from tests.training.toy import GRID


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Run:
    """One rank, a window in one forward, fp64, plain modules."""
    return train(ranks, Setup())


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_accumulated_gradients_are_the_gradient_of_one_large_batch(ranks: Ranks, reference: Run, micro: int) -> None:
    run = train(ranks, Setup(micro=micro))
    assert distance(run.critic, reference.critic) < 1e-12
    assert distance(run.student, reference.student) < 1e-12


@pytest.mark.parametrize("micro", [None, 3])
def test_two_ranks_are_one_rank(two_ranks: RankPool, reference: Run, micro: int | None) -> None:
    """Sharded modules against the plain one, after 9 critic and 3 student steps with sleep."""
    for run in two_ranks.run(train, Setup(micro=micro)):
        assert distance(run.critic, reference.critic) < 1e-12
        assert distance(run.student, reference.student) < 1e-12
        for ours, theirs in zip(run.metrics, reference.metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)
    first, second = two_ranks.run(train, Setup(micro=micro))
    assert distance(first.exported["ema"], reference.exported["ema"]) < 1e-7  # exported in fp32
    assert second.exported == {"raw": {}, "ema": {}}


# Of each option of the schema the runs above that are away from its default.
RUNS_OF = {
    "dmd2_critic_loss_space": ("x0 space", "eps space"),
    "dmd2_critic_conditioning": ("plain critic",),  # the other runs' critics are told
    "dmd2_normalizer": ("batch normalizer",),
    "dmd2_normalizer_eps": ("large eps",),
    "dmd2_teacher_guidance_scale": ("guided teacher",),
    "dmd2_negative_prompt": ("guided teacher",),
    "dmd2_critic_scoring": ("original scoring",),
    "dmd2_score_sigma_law": ("logit-normal sigma",),
    "dmd2_score_sigma_logit_mean": ("another logit-normal",),
    "dmd2_score_sigma_logit_std": ("another logit-normal",),
    "dmd2_score_sigma_range": ("narrow sigma",),
    "fsdp_flow_shift": ("shifted sigma",),
    "dmd2_part_weights": ("part weight",),
    "dmd2_critic_steps_per_student_step": ("a step on every second rollout",),
    "dmd2_critic_warmup_rollouts": ("critic alone at first",),
    "student_ema_decay": ("another decay",),
    "student_ema_start": ("a late average",),
    "lr": ("another rate",),
    "lr_schedule": ("linear rate", "cosine rate"),
    "lr_warmup_updates": ("warm-up",),
    "adam_beta1": ("other moments",),
    "adam_beta2": ("other moments",),
    "adam_eps": ("other moments",),
    "weight_decay": ("weight decay",),
    "clip_grad": ("clipping",),
    "num_steps_per_rollout": ("two windows",),
    "lora_rank": ("adapter of the student", "adapter of the critic"),
    "lora_alpha": ("another alpha",),
    "lora_target_modules": ("named targets",),
}
# Decided before a trainer sees a sample: by keys (below, tests/data) and by engines (tests/engines/test_local.py).
OF_SAMPLES = {"dmd2_student_input", "dmd2_latents", "dmd2_student_sample_type", "dmd2_stop_step"}
OF_THE_CUT = {"loss_type", "micro_batch_size"}


def test_the_runs_cover_every_option() -> None:
    fields = {*AlgorithmSection.model_fields, *TrainerSection.model_fields}
    assert RUNS_OF.keys() | OF_SAMPLES | OF_THE_CUT == fields
    assert {name for names in RUNS_OF.values() for name in names} == OPTIONS.keys()


def changes(run: Run, other: Run) -> float:
    """Of the student or its average, as they are exported: an adapter is merged there."""
    return max(distance(run.exported[kind], other.exported[kind]) for kind in ("raw", "ema"))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_blind_to_the_cut(ranks: Ranks, two_ranks: RankPool, reference: Run, option: str) -> None:
    """Micro-batches and ranks change nothing, the option does change the student or its average."""
    setup = Setup(**OPTIONS[option])
    alone = train(ranks, setup)
    assert changes(alone, reference) > 1e-6
    first, second = two_ranks.run(train, replace(setup, micro=3))
    for run in (train(ranks, replace(setup, micro=3)), first, second):
        assert distance(run.critic, alone.critic) < 1e-12
        assert distance(run.student, alone.student) < 1e-12
    assert distance(first.exported["ema"], alone.exported["ema"]) < 1e-7  # exported in fp32


@pytest.mark.parametrize("option", ["another alpha", "named targets"])
def test_an_adapter_s_options_change_it(ranks: Ranks, option: str) -> None:
    """Against an adapter, not against all parameters as above."""
    run, other = (train(ranks, Setup(**OPTIONS[name])) for name in (option, "adapter of the student"))
    assert changes(run, other) > 1e-6


def draws(_: Ranks, law: str) -> list[tuple[int, int, int | None]]:
    """Of two samples of each of 40 rollouts, in this process."""
    source = TrainingRequests(["a", "b"], 2, 1, 1, GRID, law, 3, real_latents={"a": (0, 1), "b": (2, 3)})
    return [(r.seed, r.stop_step, r.real_latent) for i in range(40) for r in source(i)[0]]


@pytest.mark.parametrize("law", ["per_sample", "shared", "round_robin", "full"])
def test_draws_are_the_same_in_every_process(two_ranks: RankPool, ranks: Ranks, law: str) -> None:
    """Whoever makes a rollout's requests: nothing is broadcast, nothing depends on the process."""
    here = draws(ranks, law)
    assert two_ranks.run(draws, law) == [here, here]
    stops = [stop for _, stop, _ in here]
    if law != "per_sample":
        assert stops[::2] == stops[1::2]
    assert set(stops) == ({3} if law == "full" else {0, 1, 2, 3})


def test_in_fp32_two_ranks_differ_by_rounding_only(ranks: Ranks, two_ranks: RankPool) -> None:
    setup = Setup(dtype=torch.float32, micro=3)
    alone = train(ranks, setup)
    for run in two_ranks.run(train, setup):
        moved = distance(alone.student, train(ranks, setup, rollouts=0).student)
        assert distance(run.critic, alone.critic) < 1e-4 * moved + 2e-6
        assert distance(run.student, alone.student) < 1e-4 * moved + 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_command_twice_gives_the_same_bits(ranks: Ranks, two_ranks: RankPool, dtype: torch.dtype) -> None:
    setup = Setup(dtype=torch.float32, forward_dtype=dtype, micro=3)
    runs: list[Callable[[], Run]] = [lambda: train(ranks, setup), lambda: two_ranks.run(train, setup)[0]]
    for run in runs:
        first, second = run(), run()
        assert same_bits(first.critic, second.critic)
        assert same_bits(first.student, second.student)
        assert same_bits(first.exported["ema"], second.exported["ema"])
        assert first.metrics == second.metrics


def test_another_seed_gives_other_numbers(ranks: Ranks, reference: Run) -> None:
    assert distance(train(ranks, Setup(seed=4)).critic, reference.critic) > 1e-4


def test_mutation_a_loss_divided_by_the_rank_s_share_is_found(
    ranks: Ranks, reference: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each micro-batch's mean instead of its part of the window's mean: the clip hides the scale, the cut shows."""

    def wrong(self: Trainer, sample_losses: torch.Tensor, window: object) -> None:
        sample_losses.mean().backward()

    monkeypatch.setattr(Trainer, "_backward", wrong)
    assert distance(train(ranks, Setup(micro=3)).critic, reference.critic) > 1e-6
