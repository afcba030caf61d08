"""What the critic trains on, what it hands over, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from miles_dmd2.algo import (
    Purpose,
    add_noise,
    key_seed,
    normal_batch,
    sample_score_sigma,
    uniform_batch,
    x0_from_velocity,
)
from miles_dmd2.training import CriticTrainer, Ranks, wanted_ids
from miles_dmd2.training.scoring import ScoreSigma
from miles_dmd2.training.trainer import Trainer
from miles_dmd2.types import RolloutSample, ScoreRow
from tests.training.pool import RankPool
from tests.training.runs import Setup, make_actor, make_critic, same_bits, samples_of, settings, weights, windows_of
from tests.training.toy import LATENT, ToyAdapter

ONE_STEP = Setup(windows=1, dtype=torch.float32)
BF16 = replace(ONE_STEP, forward_dtype=torch.bfloat16)


def run_critic(ranks: Ranks, setup: Setup, rollout_id: int = 0) -> tuple[CriticTrainer, dict[str, float], dict]:
    critic = make_critic(ranks, setup)
    windows = windows_of(setup, rollout_id)
    ids = wanted_ids(windows, ranks.rank, ranks.world_size)
    return critic, *critic.train(rollout_id, windows, samples_of(setup, rollout_id, ids))


def first_scores(ranks: Ranks, setup: Setup) -> dict[int, ScoreRow]:
    return run_critic(ranks, setup)[2]


def check_zero_gap(scores: dict[int, ScoreRow]) -> None:
    for row in scores.values():
        assert torch.equal(row.x0_fake, row.x0_real)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("setup", [ONE_STEP, BF16])
def test_a_critic_that_is_the_teacher_has_no_gap_at_all(
    ranks: Ranks, setup: Setup, micro: int | None, told: bool
) -> None:
    """Then the student's loss is 0, and AdamW changes its weights by their decay only."""
    setup = replace(setup, micro=micro, told=told)
    scores = first_scores(ranks, setup)
    check_zero_gap(scores)
    actor = make_actor(ranks, setup)
    before = weights(actor)
    windows = windows_of(setup, 0)
    metrics = actor.train(0, windows, samples_of(setup, 0, windows[0]), [scores])
    assert metrics["dmd_loss"] == metrics["dmd2_score_gap_abs_mean"] == metrics["grad_norm/student"] == 0
    assert metrics["dmd2_teacher_dist_abs_mean"] > 0.1
    decay = 1 - setup.lr * 0.01
    for name, value in weights(actor).items():
        expected = before[name] if name == "unused" else before[name] * decay
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("setup", [ONE_STEP, BF16])
def test_no_gap_on_two_ranks(two_ranks: RankPool, setup: Setup) -> None:
    parts = two_ranks.run(first_scores, setup)
    assert [sorted(part) for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for part in parts:
        check_zero_gap(part)


def test_after_critic_steps_there_is_a_gap(ranks: Ranks) -> None:
    setup = Setup(dtype=torch.float32)
    _, _, scores = run_critic(ranks, setup)
    actor = make_actor(ranks, setup)
    window = windows_of(setup, 0)[-1:]
    metrics = actor.train(0, window, samples_of(setup, 0, window[0]), [scores])
    assert metrics["dmd_loss"] > 0
    assert metrics["grad_norm/student"] > 0


def test_teacher_and_idle_parameters_never_change(ranks: Ranks) -> None:
    critic, _, _ = run_critic(ranks, Setup())
    fresh = make_critic(ranks, Setup())
    assert same_bits(dict(critic.teacher.module.named_parameters()), dict(fresh.teacher.module.named_parameters()))
    assert not same_bits(weights(critic), weights(fresh))
    assert torch.equal(weights(critic)["unused"], torch.full((3,), 0.5, dtype=torch.float64))
    assert "unused" not in critic.optimizer.parameters
    owned = {id(p) for p in critic.optimizer.parameters.values()}
    assert owned == {id(p) for p in critic.network.module.parameters() if p.requires_grad}


def test_critic_and_teacher_are_two_modules(ranks: Ranks) -> None:
    adapter = ToyAdapter()
    module = adapter.load_transformer()
    with pytest.raises(ValueError, match="must be two modules"):
        CriticTrainer(settings(ONE_STEP, "critic"), adapter, module, module, ranks)


def scores_by_hand(
    critic: CriticTrainer,
    samples: list[RolloutSample],
    seed: int,
    purposes: tuple[Purpose, Purpose] = ("score_sigma", "score_noise"),
    guidance: float = 1.0,
) -> dict[int, ScoreRow]:
    """With the critic's present weights, from the formulas; without the trainer's code."""
    ids = [s.sample_id for s in samples]
    uniform = uniform_batch([key_seed(seed, purposes[0], 0, i) for i in ids]).double()
    sigma = sample_score_sigma(uniform, 0.02, 0.98)
    noise = normal_batch([key_seed(seed, purposes[1], 0, i) for i in ids], LATENT).double()
    x0 = torch.stack([s.x0 for s in samples]).double()
    label = torch.stack([s.cond["label"] for s in samples])
    x = add_noise(x0, noise, sigma)
    with torch.no_grad(), critic.conditioning.told(torch.tensor([s.stop_step for s in samples])):
        fake = x0_from_velocity(x, critic.network.module(x, sigma, label), sigma)
        real = x0_from_velocity(x, critic.teacher.module(x, sigma, label), sigma)
        if guidance != 1:
            nobody = torch.full_like(label, 0.25)
            uncond = x0_from_velocity(x, critic.teacher.module(x, sigma, nobody), sigma)
            real = uncond + guidance * (real - uncond)
    return {i: ScoreRow(real[n], fake[n], sigma[n].item()) for n, i in enumerate(ids)}


def worst(a: dict[int, ScoreRow], b: dict[int, ScoreRow], field: str) -> float:
    assert a.keys() == b.keys()
    return max((getattr(a[i], field) - getattr(b[i], field)).abs().max().item() for i in a)


def test_scores_are_of_the_last_window_before_its_update(ranks: Ranks) -> None:
    setup = Setup(windows=2, micro=3)
    critic, _, scores = run_critic(ranks, setup)
    last = samples_of(setup, 0, windows_of(setup, 0)[1])

    one_step = make_critic(ranks, setup)
    first = windows_of(setup, 0)[:1]
    one_step.train(0, first, samples_of(setup, 0, first[0]))

    before, after = scores_by_hand(one_step, last, setup.seed), scores_by_hand(critic, last, setup.seed)
    assert worst(scores, before, "x0_fake") < 1e-12
    assert worst(scores, before, "x0_real") < 1e-12
    assert [scores[i].score_sigma for i in before] == pytest.approx([row.score_sigma for row in before.values()])
    assert worst(scores, after, "x0_fake") > 1e-4, "mutation: scored after the last update"
    assert worst(scores, scores_by_hand(one_step, last, setup.seed + 1), "x0_real") > 1e-2, "mutation: other draws"


def test_teacher_and_critic_see_the_same_noised_student_sample(ranks: Ranks) -> None:
    critic = make_critic(ranks, Setup(windows=1, micro=3))
    seen: dict[str, list[tuple[torch.Tensor, ...]]] = {"critic": [], "teacher": []}
    for name, network in (("critic", critic.network), ("teacher", critic.teacher)):
        network.module.register_forward_pre_hook(lambda _m, inputs, name=name: seen[name].append(inputs))
    windows = windows_of(Setup(windows=1), 0)
    critic.train(0, windows, samples_of(Setup(), 0, windows[0]))
    assert len(seen["critic"]) == len(seen["teacher"]) == 3
    for ours, theirs in zip(seen["critic"], seen["teacher"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_guided_teacher_is_the_standard_convention_and_runs_twice(ranks: Ranks) -> None:
    """uncond + w (cond - uncond) against the formula written out; w = 1 never runs the unconditional forward."""
    setup = Setup(windows=1, micro=3, guidance=4.5)
    _, metrics, scores = run_critic(ranks, setup)
    samples = samples_of(setup, 0, windows_of(setup, 0)[0])
    by_hand = scores_by_hand(make_critic(ranks, setup), samples, setup.seed, guidance=4.5)
    assert worst(scores, by_hand, "x0_real") < 1e-12
    assert worst(scores, by_hand, "x0_fake") < 1e-12, "the critic is not guided"
    assert metrics["teacher_forwards"] == 16
    assert run_critic(ranks, replace(setup, guidance=1.0))[1]["teacher_forwards"] == 8
    offset = scores_by_hand(make_critic(ranks, setup), samples, setup.seed, guidance=5.5)
    assert worst(scores, offset, "x0_real") > 1e-3, "mutation: cond + w (cond - uncond)"


def test_without_a_student_step_nothing_is_scored_and_the_critic_learns_the_same(ranks: Ranks) -> None:
    setup = Setup(micro=3)
    scored, _, _ = run_critic(ranks, setup)
    alone = make_critic(ranks, setup)
    windows = windows_of(setup, 0)
    ids = [i for window in windows for i in window]
    metrics, scores = alone.train(0, windows, samples_of(setup, 0, ids), score=False)
    assert scores == {}
    assert metrics["teacher_forwards"] == 0
    assert same_bits(weights(alone), weights(scored))


def test_original_scoring_has_its_own_draws_before_the_last_update(ranks: Ranks) -> None:
    setup = Setup(windows=2, micro=3, scoring="original")
    critic, metrics, scores = run_critic(ranks, setup)
    last = samples_of(setup, 0, windows_of(setup, 0)[1])
    one_step = make_critic(ranks, setup)
    first = windows_of(setup, 0)[:1]
    one_step.train(0, first, samples_of(setup, 0, first[0]))
    own = ("scoring_pass_sigma", "scoring_pass_noise")
    before, after = (scores_by_hand(trainer, last, setup.seed, own) for trainer in (one_step, critic))
    assert worst(scores, before, "x0_fake") < 1e-12
    assert worst(scores, before, "x0_real") < 1e-12
    assert worst(scores, after, "x0_fake") > 1e-4, "mutation: scored after the last update"
    assert worst(scores, scores_by_hand(one_step, last, setup.seed), "x0_real") > 1e-2, "mutation: the training draws"
    assert (metrics["critic_forwards"], metrics["teacher_forwards"]) == (24.0, 8.0)
    fused = run_critic(ranks, replace(setup, scoring="fused"))
    assert same_bits(weights(critic), weights(fused[0])), "how the window is scored does not touch the critic"


def gaps(ranks: Ranks, setup: Setup, count: int, shift: float = 1.0) -> torch.Tensor:
    """x0_fake - x0_real `[count, *latent]` of samples with one x0, under a critic that is not the teacher."""
    adapter = ToyAdapter(seed=1)
    critic = make_critic(ranks, setup, adapter)
    critic.score_sigma = ScoreSigma(0.02, 0.98, shift)
    with torch.no_grad():
        for parameter in critic.network.trained.values():
            parameter.mul_(0.5)
    (like,) = samples_of(setup, 0, [0])
    ids = tuple(range(count))
    _, scores = critic.train(0, (ids,), [replace(like, sample_id=i) for i in ids])
    return torch.stack([scores[i].x0_fake - scores[i].x0_real for i in ids])


def test_both_scorings_are_equal_in_expectation(ranks: Ranks) -> None:
    """Two independent sets of draws of one law: the means agree within five standard errors, the draws do not."""
    setup = Setup(windows=1, told=False)
    count = 4096
    fused, original = (gaps(ranks, replace(setup, scoring=s), count) for s in ("fused", "original"))
    error = ((fused.var(0) + original.var(0)) / count).sqrt()
    assert ((fused.mean(0) - original.mean(0)).abs() < 5 * error).all()
    assert (fused.mean(0).abs() > 20 * error).any(), "a gap of zero would prove nothing"
    shifted = gaps(ranks, replace(setup, scoring="original"), count, shift=3.0)
    assert ((fused.mean(0) - shifted.mean(0)).abs() > 5 * error).any(), "mutation: another law of sigma"
    centred = torch.stack([(part - part.mean(0)).flatten() for part in (fused, original)])
    assert torch.corrcoef(centred)[0, 1].abs() < 0.05, "mutation: the two share their draws"


@pytest.mark.parametrize("space", ["velocity", "x0", "eps"])
def test_the_loss_is_the_mean_over_the_window_in_the_space_asked_for(ranks: Ranks, space: str) -> None:
    """By the identities L_x0 = sigma^2 L_v and L_eps = (1 - sigma)^2 L_v per sample."""
    setup = Setup(windows=1, micro=3, space=space)
    _, metrics, _ = run_critic(ranks, setup)
    fresh = make_critic(ranks, setup)
    samples = samples_of(setup, 0, windows_of(setup, 0)[0])
    rows = scores_by_hand(fresh, samples, setup.seed)
    noise = normal_batch([key_seed(setup.seed, "score_noise", 0, s.sample_id) for s in samples], LATENT).double()
    losses = {}
    for sample, eps in zip(samples, noise, strict=True):
        row = rows[sample.sample_id]
        s, x0 = row.score_sigma, sample.x0.double()
        velocity = ((1 - s) * x0 + s * eps - row.x0_fake) / s
        weight = {"velocity": 1, "x0": s**2, "eps": (1 - s) ** 2}[space]
        losses[sample.sample_id] = weight * (velocity - (eps - x0)).square().mean().item()
    assert metrics["critic_loss"] == pytest.approx(sum(losses.values()) / len(losses), rel=1e-9)
    of_step_2 = [loss for i, loss in losses.items() if i % 4 == 2]
    assert metrics["critic_loss_step2"] == pytest.approx(sum(of_step_2) / len(of_step_2), rel=1e-9)


def levels_of(ranks: Ranks, setup: Setup) -> dict[int, float]:
    """Score sigma by sample id, of this rank's part of the window."""
    return {i: row.score_sigma for i, row in run_critic(ranks, setup)[2].items()}


def test_each_sample_has_a_noise_level_of_its_own_on_each_rank(ranks: Ranks, two_ranks: RankPool) -> None:
    """No level is broadcast to a batch or to the ranks (FastVideo#885); together they are those of one rank."""
    setup = Setup(windows=1, window=32, micro=4)
    alone = levels_of(ranks, setup)
    first, second = two_ranks.run(levels_of, setup)
    assert (len(first), len(second)) == (16, 16)
    assert first | second == alone
    assert len({*alone.values()}) == 32
    assert max(alone.values()) - min(alone.values()) > 0.8  # of the range (.02, .98)


def test_forwards_are_counted_per_sample(ranks: Ranks, two_ranks: RankPool) -> None:
    expected = {"critic_forwards": 24.0, "teacher_forwards": 8.0}
    alone = run_critic(ranks, Setup(micro=3))[1]
    assert expected.items() <= alone.items()
    for metrics in two_ranks.run(metrics_of, Setup(micro=3)):
        assert expected.items() <= metrics.items()


def metrics_of(ranks: Ranks, setup: Setup) -> dict[str, float]:
    return run_critic(ranks, setup)[1]


def test_the_gradient_is_that_of_the_mean_loss(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd on the whole window at once, written out here."""
    captured: dict[str, torch.Tensor] = {}

    def capture(self: Trainer, *_: object) -> bool:
        captured.update({name: g.clone() for name, g in self.optimizer.gradients().items()})
        return False

    monkeypatch.setattr(Trainer, "_update", capture)
    setup = Setup(windows=1, micro=3)
    run_critic(ranks, setup)
    fresh = make_critic(ranks, setup)
    samples = samples_of(setup, 0, windows_of(setup, 0)[0])
    ids = [s.sample_id for s in samples]
    noise = normal_batch([key_seed(setup.seed, "score_noise", 0, i) for i in ids], LATENT).double()
    uniform = uniform_batch([key_seed(setup.seed, "score_sigma", 0, i) for i in ids]).double()
    sigma = sample_score_sigma(uniform, 0.02, 0.98)
    x0, label = (torch.stack(v) for v in ([s.x0.double() for s in samples], [s.cond["label"] for s in samples]))
    with fresh.conditioning.told(torch.tensor([s.stop_step for s in samples])):
        velocity = fresh.network.module(add_noise(x0, noise, sigma), sigma, label)
    (velocity - (noise - x0)).square().mean().backward()
    assert captured.keys() == fresh.network.trained.keys()
    for name, parameter in fresh.network.trained.items():
        torch.testing.assert_close(captured[name], parameter.grad, rtol=1e-10, atol=1e-14)


def test_bf16_forwards_get_their_noise_level_in_fp32(ranks: Ranks) -> None:
    """FSDP would cast every input: 0.999 becomes 1.0 in bf16 (DMD2.md 4, item 31)."""
    critic = make_critic(ranks, BF16)
    seen: list[torch.dtype] = []
    critic.network.module.time.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].dtype))
    weights_seen: list[torch.dtype] = []
    critic.network.module.time.register_forward_hook(lambda module, *_: weights_seen.append(module.linear.weight.dtype))
    windows = windows_of(BF16, 0)
    critic.train(0, windows, samples_of(BF16, 0, windows[0]))
    assert seen == [torch.float32]
    assert weights_seen == [torch.bfloat16]
