"""Requests are pure functions of seed and rollout; stop steps follow the law they were promised."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from miles_dmd2.config.clock import StudentClock
from miles_dmd2.data.requests import TrainingRequests, eval_requests, explicit_grid, grid
from miles_dmd2.types import RolloutRequest

PROMPTS = [f"prompt {i}" for i in range(7)]


def training(law: str = "per_sample", *, seed: int = 3, steps: int = 4) -> TrainingRequests:
    return TrainingRequests(PROMPTS, 10, 4, 5, grid(steps, 1.0), law, seed)


def test_windows_are_equal_and_ids_run_through() -> None:
    windows = training()(2)
    assert [len(window) for window in windows] == [8] * 5
    assert [r.sample_id for window in windows for r in window] == list(range(80, 120))
    flat = [r for window in windows for r in window]
    assert all(len({r.prompt for r in flat[i : i + 4]}) == 1 for i in range(0, 40, 4))


def test_seeds_differ_between_samples_and_rollouts_and_repeat_with_the_key() -> None:
    source = training()
    seeds = [r.seed for rollout_id in range(5) for window in source(rollout_id) for r in window]
    assert len(set(seeds)) == 200
    assert source(1) == training()(1)
    assert source(1) != training(seed=4)(1)
    assert all(0 <= seed < 2**32 for seed in seeds)  # a CPU generator reads no more bits


def test_per_sample_stop_steps_are_uniform() -> None:
    source = training()
    counts = Counter(r.stop_step for i in range(100) for window in source(i) for r in window)
    assert set(counts) == {0, 1, 2, 3}
    # 4000 draws: standard deviation of a count is sqrt(4000 * 1/4 * 3/4) = 27.4
    assert all(abs(count - 1000) < 4 * 27.4 for count in counts.values()), counts


def test_a_shared_stop_step_is_one_per_rollout_and_covers_all_steps() -> None:
    source = training("shared")
    per_rollout = [{r.stop_step for window in source(i) for r in window} for i in range(60)]
    assert all(len(steps) == 1 for steps in per_rollout)
    assert set.union(*per_rollout) == {0, 1, 2, 3}


def test_round_robin_takes_the_steps_in_turn_by_the_student_s_clock() -> None:
    """With a student step on every second rollout, the student still sees all steps: 0 1 2 3 0 1."""
    source = training("round_robin")
    assert [{r.stop_step for window in source(i) for r in window} for i in range(6)] == [{0}, {1}, {2}, {3}, {0}, {1}]
    clock = StudentClock(warmup=1, interval=2)
    slow = replace(source, clock=clock)
    due = [i for i in range(13) if clock.due(i)]
    assert due == [2, 4, 6, 8, 10, 12]
    assert [slow(i)[0][0].stop_step for i in due] == [0, 1, 2, 3, 0, 1]


def test_every_request_says_how_its_sample_hops() -> None:
    flat = [r for window in replace(training(), sample_type="sde")(0) for r in window]
    flat += eval_requests(["a"], 1, grid(4, 1.0), 3, "sde")
    assert {r.sample_type for r in flat} == {"sde"}


def test_real_latents_are_of_the_prompt_and_uniform_over_its_rows() -> None:
    rows = {prompt: [10 * i, 10 * i + 1, 10 * i + 2] for i, prompt in enumerate(PROMPTS)}
    source = replace(training(), real_latents=rows)
    flat = [r for i in range(100) for window in source(i) for r in window]
    assert all(r.real_latent in rows[r.prompt] for r in flat)
    counts = Counter(r.real_latent % 10 for r in flat)
    assert all(abs(count - 4000 / 3) < 4 * 29.8 for count in counts.values()), counts  # sqrt(4000 * 1/3 * 2/3)
    assert all(r.real_latent is None for r in eval_requests(PROMPTS, 1, grid(4, 1.0), 3))
    plain = [r for i in range(100) for window in training()(i) for r in window]
    assert [replace(r, real_latent=None) for r in flat] == plain, "seeds and stop steps do not depend on real data"


def test_an_explicit_grid_is_rounded_to_fp32() -> None:
    """0.757 in fp32 is 0.75700002908..., what an engine computes with (DMD2.md 4, item 26)."""
    assert explicit_grid((1.0, 0.757, 0.0)) == (1.0, 0.7570000290870667, 0.0)


@pytest.mark.parametrize("steps", [1, 4])
def test_full_runs_every_sample_to_its_last_step(steps: int) -> None:
    assert {r.stop_step for window in training("full", steps=steps)(0) for r in window} == {steps - 1}


def test_training_requests_never_ask_for_media_and_eval_requests_always_do() -> None:
    assert not any(r.decode for window in training()(0) for r in window)
    requests = eval_requests(["a", "b"], 3, grid(4, 1.0), seed=3)
    assert all(r.decode and r.stop_step == 3 for r in requests)
    assert [r.prompt for r in requests] == ["a"] * 3 + ["b"] * 3
    assert len({r.seed for r in requests}) == 6
    assert requests == eval_requests(["a", "b"], 3, grid(4, 1.0), seed=3)


def test_the_grid_is_the_published_one() -> None:
    assert grid(4, 1.0) == (1.0, 0.75, 0.5, 0.25, 0.0)
    assert grid(4, 12.0) == pytest.approx((1.0, 0.972973, 0.923077, 0.8, 0.0), abs=1e-6)


# -- media and rewards -------------------------------------------------------------------------------------------


def flat(source: TrainingRequests, rollout_id: int = 0) -> list[RolloutRequest]:
    return [request for window in source(rollout_id) for request in window]


def test_without_a_reward_function_no_training_request_asks_for_media() -> None:
    assert not any(request.decode or request.scored for i in range(3) for request in flat(training(), i))


def test_with_one_every_request_does_but_those_of_prompts_that_are_not_scored() -> None:
    source = replace(training(), scored=True, unscored=frozenset({"prompt 3"}), video_dtype="fp32")
    requests = [request for i in range(3) for request in flat(source, i)]
    assert {request.prompt for request in requests} == set(PROMPTS)
    for request in requests:
        assert request.decode == request.scored == (request.prompt != "prompt 3")
        assert request.video_dtype == "fp32"


def test_rewards_move_neither_seeds_nor_stop_steps() -> None:
    scored = replace(training(), scored=True)
    plain = [replace(request, decode=False, scored=False) for request in flat(scored, 2)]
    assert plain == flat(training(), 2)


@pytest.mark.parametrize("scored", [False, True])
def test_evals_always_decode(scored: bool) -> None:
    requests = eval_requests(
        PROMPTS, 2, grid(4, 1.0), 3, scored=scored, unscored=frozenset({"prompt 0"}), video_dtype="fp32"
    )
    assert all(request.decode and request.video_dtype == "fp32" for request in requests)
    assert [request.scored for request in requests] == [False, False, *[scored] * 12]
