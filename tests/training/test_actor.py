"""The student's step against formulas written out here, its average, and its bookkeeping."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from miles_dmd2.observability.declared import without_machine
from miles_dmd2.training import ActorTrainer, DriftError, Ranks, wanted_ids
from miles_dmd2.training.trainer import Trainer
from miles_dmd2.types import RolloutSample, ScoreBatch, ScoreRow
from tests.training.pool import RankPool
from tests.training.runs import Setup, distance, make_actor, make_critic, same_bits, samples_of, weights, windows_of
from tests.training.toy import GRID, ToyAdapter, make_sample

SETUP = Setup(windows=1)
WINDOW = windows_of(SETUP, 0)


def fake_scores(ids: Iterable[int], rollout_id: int = 0) -> dict[int, ScoreRow]:
    """x0_real and x0_fake from the ids, so that no critic is needed."""
    samples = {i: make_sample(i + 1000, rollout_id=rollout_id) for i in ids}
    return {i: ScoreRow(s.x0.double(), (s.x0 + 0.1 * s.x_k).double(), 0.5) for i, s in samples.items()}


def train_actor(actor: ActorTrainer, rollout_id: int = 0, setup: Setup = SETUP) -> dict[str, float]:
    windows = windows_of(setup, rollout_id)
    ids = wanted_ids(windows, actor.ranks.rank, actor.ranks.world_size)
    return actor.train(rollout_id, windows, samples_of(setup, rollout_id, ids), [fake_scores(windows[0], rollout_id)])


def by_hand(actor: ActorTrainer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x0 with gradient `[8, 2, 3]`, the DMD gradient, and mean |x0 - x0_real| per sample."""
    samples, scores = samples_of(SETUP, 0, WINDOW[0]), fake_scores(WINDOW[0])
    x_k, label = (torch.stack(v) for v in ([s.x_k.double() for s in samples], [s.cond["label"] for s in samples]))
    sigma = torch.tensor([GRID[s.stop_step] for s in samples], dtype=torch.float64)
    x0 = x_k - sigma.view(-1, 1, 1) * actor.network.module(x_k, sigma, label)
    real, fake = (torch.stack([getattr(scores[i], f) for i in WINDOW[0]]) for f in ("x0_real", "x0_fake"))
    normalizer = (x0.detach() - real).abs().mean(dim=(1, 2))
    return x0, (fake - real) / normalizer.view(-1, 1, 1), normalizer


def test_the_gradient_is_the_dmd_gradient_over_the_number_of_elements(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: dict[str, torch.Tensor] = {}

    def capture(self: Trainer, *_: object) -> bool:
        captured.update({name: g.clone() for name, g in self.optimizer.gradients().items()})
        return False

    monkeypatch.setattr(Trainer, "_update", capture)
    train_actor(make_actor(ranks, replace(SETUP, micro=3)))
    fresh = make_actor(ranks, SETUP)
    x0, gradient, _ = by_hand(fresh)
    x0.backward(gradient / x0.numel())
    assert captured.keys() == fresh.network.trained.keys()
    for name, parameter in fresh.network.trained.items():
        torch.testing.assert_close(captured[name], parameter.grad, rtol=1e-10, atol=1e-14)


def test_metrics_are_those_of_the_formulas(ranks: Ranks) -> None:
    actor = make_actor(ranks, replace(SETUP, micro=3))
    x0, gradient, normalizer = by_hand(make_actor(ranks, SETUP))
    x0 = x0.detach()
    rollout_x0 = torch.stack([s.x0 for s in samples_of(SETUP, 0, WINDOW[0])])
    gap = torch.stack([(row.x0_fake - row.x0_real).abs().mean() for row in fake_scores(WINDOW[0]).values()])
    metrics = train_actor(actor)
    expected = {
        "dmd_loss": 0.5 * gradient.square().mean(),
        "dmd2_score_gap_abs_mean": gap.mean(),
        "dmd2_teacher_dist_abs_mean": normalizer.mean(),
        "dmd2_grad_abs_mean": gradient.abs().mean(),
        "dmd2_x0_mean": x0.mean(),
        "dmd2_x0_std": x0.std(correction=0),
        "x0_mean_abs_diff": (x0 - rollout_x0).abs().mean(),
        "dmd2_x0_std_step1": x0[1::4].std(correction=0),
        "dmd2_teacher_dist_abs_mean_step3": normalizer[3::4].mean(),
        "dmd2_degenerate_samples": 0,
        "skipped_steps": 0,
        "student_forwards": 8,
        "lr": 1e-2,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-9), name


def own_x0(actor: ActorTrainer) -> list[RolloutSample]:
    """Samples whose x0 is the student's own, as those of a rollout are."""
    x0, _, _ = by_hand(actor)
    return [replace(s, x0=x0[n].detach()) for n, s in enumerate(samples_of(SETUP, 0, WINDOW[0]))]


@pytest.mark.parametrize("eps", [1e-6, 3.0])
@pytest.mark.parametrize("kind", ["sample", "batch"])
def test_the_normalizer_is_of_each_sample_or_of_the_window(ranks: Ranks, kind: str, eps: float) -> None:
    """dmd_loss = mean (gap / N)^2 / 2 with N written out; where N is below eps it is eps, and counted."""
    setup = replace(SETUP, micro=3, normalizer=kind, normalizer_eps=eps)
    fresh = make_actor(ranks, SETUP)
    _, gradient, of_each = by_hand(fresh)
    gap = gradient * of_each.view(-1, 1, 1)
    n = of_each if kind == "sample" else of_each.mean().expand(8)
    expected = 0.5 * (gap / n.clamp(min=eps).view(-1, 1, 1)).square().mean()
    metrics = make_actor(ranks, setup).train(0, WINDOW, own_x0(fresh), [fake_scores(WINDOW[0])])
    assert metrics["dmd_loss"] == pytest.approx(expected.item(), rel=1e-9)
    assert metrics["dmd2_degenerate_samples"] == (n < eps).sum()
    assert eps < 1 or (of_each < eps).sum() > 0


def test_a_batch_normalizer_of_each_micro_batch_would_be_another(ranks: Ranks) -> None:
    """Why it is taken over the whole window beforehand (DMD2.md 1.5)."""
    fresh = make_actor(ranks, SETUP)
    _, gradient, of_each = by_hand(fresh)
    gap = gradient * of_each.view(-1, 1, 1)
    cut = torch.cat([part.mean().expand(len(part)) for part in of_each.split(3)])
    mutation = 0.5 * (gap / cut.view(-1, 1, 1)).square().mean()
    metrics = make_actor(ranks, replace(SETUP, micro=3, normalizer="batch")).train(
        0, WINDOW, own_x0(fresh), [fake_scores(WINDOW[0])]
    )
    assert abs(metrics["dmd_loss"] - mutation.item()) > 1e-4


def test_steps_without_samples_log_nothing(ranks: Ranks) -> None:
    window = ((0, 4, 1, 5),)  # stop steps 0 and 1
    samples = samples_of(SETUP, 0, window[0])
    metrics = make_actor(ranks, SETUP).train(0, window, samples, [fake_scores(window[0])])
    assert {name for name in metrics if name.startswith("dmd_loss")} == {"dmd_loss", "dmd_loss_step0", "dmd_loss_step1"}


def test_the_drift_is_zero_for_samples_of_these_very_weights(ranks: Ranks) -> None:
    actor = make_actor(ranks, SETUP)
    x0, _, _ = by_hand(actor)
    samples = [replace(s, x0=x0[n].detach()) for n, s in enumerate(samples_of(SETUP, 0, WINDOW[0]))]
    metrics = actor.train(0, WINDOW, samples, [fake_scores(WINDOW[0])])
    assert metrics["x0_mean_abs_diff"] < 1e-15


# -- engine against trainer -----------------------------------------------------------------------------------


def exact_x0() -> torch.Tensor:
    """The student's own x0 of the window, `[8, 2, 3]`, on a plain module."""
    samples = samples_of(SETUP, 0, WINDOW[0])
    x_k, label = (torch.stack(v) for v in ([s.x_k.double() for s in samples], [s.cond["label"] for s in samples]))
    sigma = torch.tensor([GRID[s.stop_step] for s in samples], dtype=torch.float64)
    with torch.no_grad():
        return x_k - sigma.view(-1, 1, 1) * ToyAdapter().load_transformer(torch.float64)(x_k, sigma, label)


def train_with_drift(ranks: Ranks, setup: Setup, offsets: Sequence[float]) -> tuple[str, int, bool]:
    """One step on samples whose x0 is off by `offsets[sample_id]`: the error's text or "", updates, weights kept."""
    exact, actor = exact_x0(), make_actor(ranks, setup)
    before = state(actor)
    ids = wanted_ids(WINDOW, ranks.rank, ranks.world_size)
    samples = [replace(s, x0=exact[s.sample_id] + offsets[s.sample_id]) for s in samples_of(setup, 0, ids)]
    text = ""
    try:
        actor.train(0, WINDOW, samples, [fake_scores(WINDOW[0])])
    except DriftError as error:
        text = str(error)
    return text, actor.updates, same_bits(state(actor), before)


OFFSETS = (0.5, -0.25, 0.125, 0.0625) * 2  # of stop steps 0 to 3; the mean is 0.234375


def test_a_drift_above_the_limit_stops_before_the_step_with_the_numbers_of_each_stop_step(
    ranks: Ranks, two_ranks: RankPool
) -> None:
    setup = replace(SETUP, micro=3, max_drift=0.2)
    texts = {train_with_drift(ranks, setup, OFFSETS), *two_ranks.run(train_with_drift, setup, OFFSETS)}
    ((text, updates, kept),) = texts  # one rank, and both of two
    assert (updates, kept) == (0, True)
    assert text.startswith("engine and trainer disagree on rollout 0: mean |x0 - x0 of the engine| is 0.234 ")
    assert "(0.5 at stop step 0, 0.25 at stop step 1, 0.125 at stop step 2, 0.0625 at stop step 3)" in text
    assert "0.5 in the worst sample; --max-x0-drift is 0.2, " in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("limit", [0.2344, None])
def test_a_drift_below_the_limit_or_without_one_trains(ranks: Ranks, two_ranks: RankPool, limit: float | None) -> None:
    setup = replace(SETUP, max_drift=limit)
    for result in (train_with_drift(ranks, setup, OFFSETS), *two_ranks.run(train_with_drift, setup, OFFSETS)):
        assert result == ("", 1, False)


def test_a_drift_on_one_rank_alone_stops_both(two_ranks: RankPool) -> None:
    offsets = [float(i == 3) for i in range(8)]  # 1 / 8 in the mean of the window
    first, second = two_ranks.run(train_with_drift, replace(SETUP, max_drift=0.1), offsets)
    assert first == second
    assert "is 0.125 (" in first[0]


@pytest.mark.parametrize(("offset", "stopped"), [(0.41, True), (0.39, False)])
def test_one_sample_may_be_four_times_as_far_off(two_ranks: RankPool, offset: float, stopped: bool) -> None:
    """Its share of the window's mean is half the limit."""
    offsets = [offset * (i == 3) for i in range(8)]
    for text, updates, _ in two_ranks.run(train_with_drift, replace(SETUP, max_drift=0.1), offsets):
        assert (bool(text), updates) == (stopped, 1 - stopped)


def test_a_figure_that_is_not_finite_skips_the_step_as_ever(ranks: Ranks) -> None:
    actor = make_actor(ranks, replace(SETUP, max_drift=0.2))
    scores = fake_scores(WINDOW[0])
    with torch.no_grad():
        actor.network.trained["scale"].fill_(math.inf)
    assert actor.train(0, WINDOW, samples_of(SETUP, 0, WINDOW[0]), [scores])["skipped_steps"] == 1


def test_a_sample_that_is_the_teacher_s_prediction_is_counted_and_harmless(ranks: Ranks) -> None:
    x0, _, _ = by_hand(make_actor(ranks, SETUP))
    scores = fake_scores(WINDOW[0])
    scores[5] = ScoreRow(x0[5].detach(), x0[5].detach(), 0.5)
    metrics = make_actor(ranks, SETUP).train(0, WINDOW, samples_of(SETUP, 0, WINDOW[0]), [scores])
    assert metrics["dmd2_degenerate_samples"] == 1
    assert metrics["skipped_steps"] == 0
    assert metrics["dmd_loss"] > 0


# -- what the critic's ranks hand over ------------------------------------------------------------------------


def shuffled_halves(scores: dict[int, ScoreRow]) -> list[ScoreBatch]:
    ids = list(scores)
    random.Random(0).shuffle(ids)
    return [{i: scores[i] for i in ids[:3]}, {i: scores[i] for i in ids[3:]}]


def test_any_split_and_order_of_the_scores_is_the_same(ranks: Ranks) -> None:
    samples = samples_of(SETUP, 0, WINDOW[0])
    whole, split = make_actor(ranks, SETUP), make_actor(ranks, SETUP)
    whole.train(0, WINDOW, samples, [fake_scores(WINDOW[0])])
    split.train(0, WINDOW, samples[::-1], shuffled_halves(fake_scores(WINDOW[0])))
    assert same_bits(weights(whole), weights(split))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda first, second: first.pop(next(iter(first))), r"scores with wrong sample ids; missing: \d"),
        (lambda first, second: second.update({i: first[i] for i in list(first)[:1]}), r"more than once: \d"),
        (lambda first, second: second.update({77: next(iter(first.values()))}), r"not asked for: 77"),
    ],
)
def test_wrong_ids_in_the_scores_are_errors_that_name_them(ranks: Ranks, change, message: str) -> None:
    actor = make_actor(ranks, SETUP)
    parts = shuffled_halves(fake_scores(WINDOW[0]))
    change(*parts)
    with pytest.raises(ValueError, match=message):
        actor.train(0, WINDOW, samples_of(SETUP, 0, WINDOW[0]), parts)
    assert actor.updates == 0


def critic_part(ranks: Ranks, setup: Setup) -> dict[int, ScoreRow]:
    windows = windows_of(setup, 0)
    ids = wanted_ids(windows, ranks.rank, ranks.world_size)
    return make_critic(ranks, setup).train(0, windows, samples_of(setup, 0, ids))[1]


def test_two_critic_ranks_and_one_actor_rank(ranks: Ranks, two_ranks: RankPool) -> None:
    setup = Setup()
    parts = two_ranks.run(critic_part, setup)
    last = windows_of(setup, 0)[-1:]
    samples = samples_of(setup, 0, last[0])
    mixed, alone = make_actor(ranks, setup), make_actor(ranks, setup)
    mixed.train(0, last, samples, parts[::-1])
    alone.train(0, last, samples, [critic_part(ranks, setup)])
    assert distance(weights(mixed), weights(alone)) < 1e-12


def test_the_actor_takes_exactly_one_window(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"one step, on the last window; got 3 windows"):
        make_actor(ranks, SETUP).train(0, windows_of(Setup(), 0), [], [])


# -- average, skipped steps, precision ------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 2])
def test_the_average_has_its_closed_form_after_j_updates(ranks: Ranks, start: int) -> None:
    """From the weights at its start on, one step of it per update; before, it is the student (FastVideo#1440)."""
    actor, decay, updates = make_actor(ranks, replace(SETUP, ema_start=start)), SETUP.decay, 6
    history = [weights(actor)]
    assert same_bits(actor.ema.average, {name: history[0][name] for name in actor.network.trained})
    for rollout_id in range(updates):
        train_actor(actor, rollout_id)
        history.append(weights(actor))
        if actor.updates <= start:
            assert same_bits(actor.ema.average, {name: history[-1][name] for name in actor.network.trained})
    for name, average in actor.ema.average.items():
        expected = decay ** (updates - start) * history[start][name]
        for j in range(start + 1, updates + 1):
            expected = expected + (1 - decay) * decay ** (updates - j) * history[j][name]
        torch.testing.assert_close(average, expected, rtol=1e-12, atol=1e-14)


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: entry.tensor.clone() for name, entry in trainer.residence.entries.items()}


def test_average_rate_and_counter_stand_still_with_a_skipped_step(ranks: Ranks) -> None:
    """The clock of each is the student's successful update, never the rollout (DMD2.md 4, 10 and 11)."""
    setup = replace(SETUP, schedule="linear", total_updates=4, max_skipped=9)
    actor, rates = make_actor(ranks, setup), []
    for rollout_id in range(6):
        bad = rollout_id in (1, 2)
        kept = {name: value.clone() for name, value in actor.ema.average.items()}
        if bad:
            poisoned(actor, rollout_id, setup)
            assert same_bits(actor.ema.average, kept)
            continue
        rates.append(train_actor(actor, rollout_id, setup)["lr"])
        assert not same_bits(actor.ema.average, kept)
    assert rates == pytest.approx([SETUP.lr * (1 - j / 4) for j in range(4)])
    assert (actor.updates, actor.skipped_steps) == (4, 2)


def skip_then_go_on(
    ranks: Ranks, setup: Setup, factor: float
) -> tuple[dict[str, float], bool, int, dict[str, torch.Tensor]]:
    """One rollout with a bad x0_fake in one sample's scores, then a good one."""
    actor = make_actor(ranks, setup)
    before = state(actor)
    windows = windows_of(setup, 0)
    scores = fake_scores(windows[0])
    scores[6] = replace(scores[6], x0_fake=scores[6].x0_fake * factor)
    ids = wanted_ids(windows, ranks.rank, ranks.world_size)
    metrics = actor.train(0, windows, samples_of(setup, 0, ids), [scores])
    unchanged = same_bits(state(actor), before)
    train_actor(actor, 1, setup)
    return metrics, unchanged, actor.updates, weights(actor)


@pytest.mark.parametrize(
    ("dtype", "factor", "tolerance"),
    [(torch.float64, math.nan, 1e-12), (torch.float32, 1e25, 1e-5)],
    ids=["NaN", "loss overflows, gradient does not"],
)
def test_a_bad_loss_on_one_rank_skips_the_step_on_all(
    ranks: Ranks, two_ranks: RankPool, dtype: torch.dtype, factor: float, tolerance: float
) -> None:
    """Sample 6 is rank 1's. The step after equals one of a run that never saw the bad batch."""
    setup = replace(SETUP, dtype=dtype)
    never = make_actor(ranks, setup)
    train_actor(never, 1)
    results = [skip_then_go_on(ranks, setup, factor), *two_ranks.run(skip_then_go_on, setup, factor)]
    for metrics, unchanged, updates, after in results:
        assert without_machine(metrics) == {
            "skipped_steps": 1.0,
            "lr": SETUP.lr,
            "student_forwards": 8.0,
            "forwards_over_plan": 0.0,
        }
        assert unchanged
        assert updates == 1
        assert distance(after, weights(never)) < tolerance


def skip_until_error(ranks: Ranks, setup: Setup) -> str:
    actor = make_actor(ranks, setup)
    for rollout_id in range(setup.max_skipped - 1):
        bad = replace(setup, nan_sample=rollout_id * setup.window)
        poisoned(actor, rollout_id, bad)
    train_actor(actor, 7, setup)  # a good one in between: the count starts again
    for rollout_id in range(setup.max_skipped - 1):
        poisoned(actor, rollout_id, setup)
    try:
        poisoned(actor, 2, setup)
    except RuntimeError as error:
        return str(error)
    return "no error"


def poisoned(actor: ActorTrainer, rollout_id: int, setup: Setup) -> None:
    windows = windows_of(setup, rollout_id)
    scores = fake_scores(windows[0], rollout_id)
    bad = windows[0][6]
    scores[bad] = replace(scores[bad], x0_real=scores[bad].x0_real * torch.inf)
    ids = wanted_ids(windows, actor.ranks.rank, actor.ranks.world_size)
    actor.train(rollout_id, windows, samples_of(setup, rollout_id, ids), [scores])


def test_the_run_stops_after_too_many_in_a_row_and_names_the_samples(ranks: Ranks, two_ranks: RankPool) -> None:
    expected = "actor: step 1 skipped, not finite: loss of samples [22]; 3 in a row, so the run stops"
    assert skip_until_error(ranks, SETUP) == expected
    assert two_ranks.run(skip_until_error, SETUP) == [expected, expected]


def test_with_bf16_forwards_small_steps_move_the_fp32_weights(ranks: Ranks) -> None:
    """bf16 weights would not move at this learning rate (DMD2.md 4, item 30)."""
    setup = Setup(windows=1, dtype=torch.float32, forward_dtype=torch.bfloat16, lr=2e-6)
    actor = make_actor(ranks, setup)
    before = weights(actor)
    train_actor(actor, 0, setup)
    after = weights(actor)
    trained = [name for name in before if name in actor.network.trained]
    moved = sum((after[name] != before[name]).sum().item() for name in trained)
    assert moved / sum(before[name].numel() for name in trained) > 0.99
    assert all(value.dtype == torch.float32 for value in after.values())
    matrices = [name for name in trained if "bias" not in name]
    as_bf16 = sum((after[name].bfloat16() != before[name].bfloat16()).sum().item() for name in matrices)
    assert as_bf16 / sum(before[name].numel() for name in matrices) < 0.05


def double_x0(samples: list[RolloutSample]) -> list[RolloutSample]:
    assert len(samples) == 8, "once on all samples of the rank, before the cut"
    mean = torch.stack([s.x_k for s in samples]).mean(0)  # depends on all of them
    return [replace(s, x_k=s.x_k - mean) for s in samples]


def drop_one(samples: list[RolloutSample]) -> list[RolloutSample]:
    return samples[1:]


def test_the_train_input_hook_does_not_depend_on_the_micro_batch_size(ranks: Ranks) -> None:
    results = []
    for micro in (None, 3):
        actor = make_actor(ranks, replace(SETUP, micro=micro, hook=double_x0))
        train_actor(actor)
        results.append(weights(actor))
    plain = make_actor(ranks, SETUP)
    train_actor(plain)
    assert distance(*results) < 1e-12
    assert distance(results[0], weights(plain)) > 1e-6


def test_a_hook_that_loses_a_sample_is_refused(ranks: Ranks) -> None:
    actor = make_actor(ranks, replace(SETUP, hook=drop_one))
    with pytest.raises(ValueError, match=r"the train-input hook returned with wrong sample ids; missing: 0"):
        train_actor(actor)
