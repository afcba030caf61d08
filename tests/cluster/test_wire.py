"""Records survive the trip bit for bit, and nothing doubled travels."""

from __future__ import annotations

import pickle

import pytest
import torch

from miles_dmd2.cluster.wire import pack_samples, pack_scores, unpack_samples, unpack_scores
from miles_dmd2.types import RolloutSample, ScoreRow, WeightVersion


def sample(i: int, prompt: str, *, step: int = 3, media: bool = False) -> RolloutSample:
    generator = torch.Generator().manual_seed(i)
    length = len(prompt)
    return RolloutSample(
        sample_id=i,
        prompt=prompt,
        seed=1000 + i,
        stop_step=i % 2,
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        x_k=torch.randn(4, 3, generator=generator),
        x0=torch.randn(4, 3, generator=generator),
        cond={"prompt_embeds": torch.full((length, 2), float(length))},
        weight_version=WeightVersion(step),
        media=torch.full((1, 2, 2, 3), i, dtype=torch.uint8) if media else None,
        audio=torch.randn(2, 7, generator=generator) if media else None,
        audio_sample_rate=32000 if media else None,
        reward=0.25 * i,
    )


def same(a: RolloutSample, b: RolloutSample) -> bool:
    plain = ("sample_id", "prompt", "seed", "stop_step", "weight_version", "reward", "audio_sample_rate")
    tensors = ("sigmas", "x_k", "x0")
    return (
        all(getattr(a, name) == getattr(b, name) for name in plain)
        and all(torch.equal(getattr(a, name), getattr(b, name)) for name in tensors)
        and torch.equal(a.cond["prompt_embeds"], b.cond["prompt_embeds"])
        and same_or_none(a.media, b.media)
        and same_or_none(a.audio, b.audio)
    )


def same_or_none(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


@pytest.mark.parametrize("media", [False, True])
def test_samples_round_trip_bitwise(media: bool) -> None:
    samples = [sample(i, ["zero", "eleven"][i % 2], media=media) for i in (5, 2, 9)]
    back = unpack_samples(pickle.loads(pickle.dumps(pack_samples(samples))))
    assert [s.sample_id for s in back] == [5, 2, 9]
    assert all(same(a, b) for a, b in zip(samples, back, strict=True))


def test_conditioning_and_grid_travel_once_per_prompt() -> None:
    packed = pack_samples([sample(i, "zero") for i in range(8)])
    assert len(packed.conds) == len(packed.grids) == 1


def test_unpacked_samples_can_be_written_to_and_do_not_alias_the_store() -> None:
    packed = pack_samples([sample(0, "zero")])
    packed.x0.setflags(write=False)  # as Ray hands it out
    (back,) = unpack_samples(packed)
    back.x0.add_(1.0)
    assert not torch.equal(back.x0, torch.from_numpy(packed.x0[0].copy()))


def test_mixed_students_and_partly_decoded_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"several students: \['raw@3', 'raw@4'\]"):
        pack_samples([sample(0, "zero"), sample(1, "zero", step=4)])
    with pytest.raises(ValueError, match="1 of 2 samples carry decoded media"):
        pack_samples([sample(0, "zero", media=True), sample(1, "zero")])


def test_scores_round_trip_and_none_stays_none() -> None:
    scores = {
        7: ScoreRow(torch.ones(2, 3), torch.zeros(2, 3), 0.3),
        4: ScoreRow(torch.zeros(2, 3), torch.ones(2, 3), 0.9),
    }
    packed = pack_scores(scores)
    assert packed is not None
    back = unpack_scores(packed)
    assert list(back) == [7, 4]
    assert back[4].score_sigma == 0.9
    assert torch.equal(back[7].x0_real, scores[7].x0_real)
    assert torch.equal(back[7].x0_fake, scores[7].x0_fake)
    assert pack_scores({}) is None
