"""What every engine checks before it answers: one mutation of a good answer each."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from miles_dmd2.engines.base import EngineError, check_requests, check_samples, check_update
from miles_dmd2.models.weights import checksum
from miles_dmd2.types import Probe, RolloutRequest, RolloutSample, WeightUpdate, WeightVersion

GRID = (1.0, 0.5, 0.0)
REQUESTS = [RolloutRequest(i, f"digit {i}", 100 + i, GRID, i % 2, decode=i == 2) for i in range(3)]


def answer(request: RolloutRequest) -> RolloutSample:
    return RolloutSample(
        sample_id=request.sample_id,
        prompt=request.prompt,
        seed=request.seed,
        stop_step=request.stop_step,
        sigmas=torch.tensor(request.sigmas),
        x_k=torch.ones(2, 3),
        x0=torch.ones(2, 3),
        cond={},
        weight_version=WeightVersion(3),
        media=torch.zeros(1, 2, 2, 3, dtype=torch.uint8) if request.decode else None,
    )


def good() -> list[RolloutSample]:
    return [answer(request) for request in REQUESTS]


def changed(**fields: object) -> list[RolloutSample]:
    return [*good()[:2], dataclasses.replace(good()[2], **fields)]


def test_good_ones_pass() -> None:
    check_requests(REQUESTS)
    check_samples(REQUESTS, good())
    check_samples([], [])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: good()[:2], r"asked for 3 samples, got 2: lost \[2\], twice \[\], not asked for \[\]"),
        (lambda: [*good(), good()[0]], r"got 4: lost \[\], twice \[0\]"),
        (lambda: [*good()[:2], good()[1]], r"lost \[2\], twice \[1\]"),
        (lambda: changed(sample_id=9), r"lost \[2\], twice \[\], not asked for \[9\]"),
        (lambda: good()[::-1], "in another order"),
        (lambda: changed(prompt="digit"), r"samples \[2\] do not carry their request's prompt"),
        (lambda: changed(seed=0), r"samples \[2\] do not carry"),
        (lambda: changed(stop_step=1), r"samples \[2\] do not carry"),
        (lambda: changed(sigmas=torch.tensor([1.0, 0.6, 0.0])), r"samples \[2\] do not carry"),
        (lambda: changed(sigmas=torch.tensor([1.0, 0.0])), r"samples \[2\] do not carry"),
        (lambda: changed(media=None), r"samples \[2\] do not carry"),
        (lambda: changed(x_k=torch.full((2, 3), float("nan"))), r"1 of 3 samples are not finite, ids \[2\]"),
        (lambda: changed(x0=torch.full((2, 3), float("inf"))), r"1 of 3 samples are not finite, ids \[2\]"),
        (lambda: changed(weight_version=WeightVersion(3, "ema")), r"several weights: \['ema@3', 'raw@3'\]"),
    ],
)
def test_an_answer_with_one_fault_is_an_error(make: Callable[[], list[RolloutSample]], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check_samples(REQUESTS, make())


def test_media_that_nobody_asked_for_is_an_error() -> None:
    samples = good()
    samples[0] = dataclasses.replace(samples[0], media=samples[2].media)
    with pytest.raises(EngineError, match=r"samples \[0\]"):
        check_samples(REQUESTS, samples)


def test_an_update_must_be_what_its_checksum_says() -> None:
    tensors = {"w": torch.ones(2)}
    probe = Probe(torch.zeros(1, 2), torch.ones(1), {}, torch.zeros(1, 2))
    update = WeightUpdate(WeightVersion(1), checksum(tensors), probe, None)
    check_update(update, tensors, {"w": (2,)})
    with pytest.raises(EngineError, match="raw@1 refused: checksum"):
        check_update(update, {"w": torch.ones(2) * 2}, {"w": (2,)})
    with pytest.raises(EngineError, match="raw@1 refused: names differ, 1 missing: v"):
        check_update(update, tensors, {"w": (2,), "v": (2,)})
