"""Latents of two parts: levels, losses and normalizers of their own, against closed forms in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from miles_dmd2.algo import key_seed, normal, sample_score_sigma, shift_sigma, uniform
from miles_dmd2.models.base import LatentPart
from miles_dmd2.models.minimax_h3 import MiniMaxH3Adapter
from miles_dmd2.models.minimax_h3_layout import join, split
from miles_dmd2.training import ActorTrainer, CriticTrainer, OptimizerSettings, Ranks, TrainerSettings, wanted_ids
from miles_dmd2.training.parts import trained_parts
from miles_dmd2.training.scoring import ScoreSigma
from miles_dmd2.types import RolloutSample, ScoreRow, WeightVersion
from tests.tiny_h3 import TEXT_DIM, h3_checkpoint
from tests.training.pool import RankPool
from tests.training.runs import distance
from tests.training.runs import weights as weights_of
from tests.training.toy import GRID, LABELS, ToyAdapter

__all__ = ["h3_checkpoint"]
PICTURE, SOUND = 4, 3
SEED = 3
RATIO = 0.25


class Linear(nn.Module):
    """velocity = scale x + offset, a scale and an offset of each part: every gradient is known."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Parameter(torch.tensor([0.3, 0.1], dtype=torch.float64))
        self.sound = nn.Parameter(torch.tensor([-0.2, 0.4], dtype=torch.float64))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        picture, sound = x[:, :PICTURE], x[:, PICTURE:]
        at = sigma if sigma.ndim == 2 else sigma[:, None].expand_as(x)
        return torch.cat(
            [
                self.picture[0] * picture + self.picture[1] * at[:, :PICTURE],
                self.sound[0] * sound + self.sound[1] * at[:, PICTURE:],
            ],
            dim=1,
        )


class TwoPartAdapter(ToyAdapter):
    latent_shape = (PICTURE + SOUND,)
    parts = (LatentPart("visual", PICTURE), LatentPart("audio", SOUND))

    def load_transformer(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        return Linear()

    def part_sigmas(self, sigma: Tensor) -> tuple[Tensor, ...]:
        return sigma, shift_sigma(sigma, RATIO)

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        self.check_inputs(x, sigma, len(x))
        out: Tensor = transformer(x, sigma)
        return out

    def head_of(self, part: str) -> tuple[str, ...]:
        return ("picture",) if part == "visual" else ("sound",)

    def shard_units(self, transformer: nn.Module) -> list[nn.Module]:
        return []

    def idle_parameters(self, transformer: nn.Module) -> dict[str, str]:
        return {}


def sample(sample_id: int) -> RolloutSample:
    size = TwoPartAdapter.latent_shape
    return RolloutSample(
        sample_id=sample_id,
        prompt="a",
        seed=sample_id,
        stop_step=sample_id % (len(GRID) - 1),
        sigmas=torch.tensor(GRID),
        x_k=normal(key_seed(1, "probe", 0, sample_id), size),
        x0=normal(key_seed(2, "probe", 0, sample_id), size),
        cond={"label": torch.eye(LABELS)[0]},
        weight_version=WeightVersion(0),
    )


def settings(role: str) -> TrainerSettings:
    double = torch.float64
    optimizer = OptimizerSettings(lr=1e-2, weight_decay=0.1, clip_grad=0.0)
    return TrainerSettings(role, SEED, optimizer, forward_dtype=double, master_dtype=double)


def critic(ranks: Ranks, weights: Mapping[str, float], law: ScoreSigma) -> CriticTrainer:
    adapter = TwoPartAdapter()
    networks = adapter.load_transformer(), adapter.load_transformer()
    return CriticTrainer(settings("critic"), adapter, *networks, ranks, score_sigma=law, part_weights=weights)


def levels(sample_id: int, law: ScoreSigma) -> tuple[Tensor, Tensor]:
    """The picture's and the sound's score sigma, from one draw."""
    u = torch.tensor([uniform(key_seed(SEED, "score_sigma", 0, sample_id))], dtype=torch.float64)
    picture = sample_score_sigma(u, law.lo, law.hi, law.shift)
    own = dict(law.part_shifts).get("audio")
    return picture, shift_sigma(picture, RATIO) if own is None else sample_score_sigma(u, law.lo, law.hi, own)


@pytest.mark.parametrize("law", [ScoreSigma(shift=5.0), ScoreSigma(shift=5.0, part_shifts=(("audio", 2.0),))])
@pytest.mark.parametrize("weights", [{"visual": 1.0}, {"visual": 1.0, "audio": 0.5}, {"audio": 2.0}])
def test_the_critics_loss_is_the_weighted_sum_over_parts_at_their_levels(
    ranks: Ranks, weights: dict[str, float], law: ScoreSigma
) -> None:
    ids = (0, 1, 2, 3)
    trainer = critic(ranks, weights, law)
    _, scores = trainer.train(0, (ids,), [sample(i) for i in ids])
    assert trainer.last_step is not None
    for i in ids:
        x0 = sample(i).x0.double()
        noise = normal(key_seed(SEED, "score_noise", 0, i), (PICTURE + SOUND,)).double()
        found, expected_fake = 0.0, []
        for name, part, sigma, (scale, offset) in (
            ("visual", slice(0, PICTURE), levels(i, law)[0], (0.3, 0.1)),
            ("audio", slice(PICTURE, None), levels(i, law)[1], (-0.2, 0.4)),
        ):
            x = (1 - sigma) * x0[part] + sigma * noise[part]
            velocity = scale * x + offset * sigma
            found += weights.get(name, 0.0) * float((velocity - (noise[part] - x0[part])).square().mean())
            expected_fake.append(x - sigma * velocity)
        assert trainer.last_step.losses[i] == pytest.approx(found, rel=1e-12)
        torch.testing.assert_close(scores[i].x0_fake, torch.cat(expected_fake), rtol=1e-12, atol=1e-12)
        assert scores[i].score_sigma == pytest.approx(float(levels(i, law)[0]), rel=1e-12)
    moved = {name for name, value in trainer.network.module.named_parameters() if not unmoved(name, value)}
    assert moved == {head for name, weight in weights.items() if weight for head in TwoPartAdapter().head_of(name)}


def unmoved(name: str, value: Tensor) -> bool:
    return torch.equal(value, Linear().get_parameter(name))


@pytest.mark.parametrize("normalizer", ["sample", "batch"])
def test_each_part_of_the_students_gradient_has_a_normalizer_of_its_own(ranks: Ranks, normalizer: str) -> None:
    """A sound a thousand times as far from the teacher moves no picture, and gets no more weight than it is given."""
    ids, adapter = (0, 1, 2, 3), TwoPartAdapter()
    weights = {"visual": 1.0, "audio": 0.5}
    actor = ActorTrainer(
        settings("actor"), adapter, adapter.load_transformer(), ranks, normalizer=normalizer, part_weights=weights
    )
    samples = [sample(i) for i in ids]
    far = torch.cat([torch.ones(PICTURE), torch.full((SOUND,), 1000.0)]).double()
    scores = {
        i: ScoreRow(s.x0.double() + far, s.x0.double() + 1.5 * far, 0.5) for i, s in zip(ids, samples, strict=True)
    }
    metrics = actor.train(0, (ids,), samples, [scores])
    assert actor.last_step is not None
    parts = (("visual", slice(0, PICTURE), (0.3, 0.1)), ("audio", slice(PICTURE, None), (-0.2, 0.4)))
    figures: dict[str, list[float]] = {"loss": [], "visual": [], "audio": []}
    clean: dict[str, Tensor] = {}
    for name, part, (scale, offset) in parts:
        sigma = torch.tensor(GRID, dtype=torch.float64)[[s.stop_step for s in samples]][:, None]
        sigma = sigma if name == "visual" else shift_sigma(sigma, RATIO)
        x = torch.stack([s.x_k.double()[part] for s in samples])
        clean[name] = x - sigma * (scale * x + offset * sigma)
    for row, i in enumerate(ids):
        loss = 0.0
        for name, part, _ in parts:
            real, fake = scores[i].x0_real[part], scores[i].x0_fake[part]
            distance = (clean[name][row] - real).abs().mean()
            if normalizer == "batch":
                of_rollout = [(s.x0[part] - scores[s.sample_id].x0_real[part]).abs().mean() for s in samples]
                distance = torch.stack(of_rollout).mean()
            gradient = (fake - real) / distance
            figures[name].append(float(gradient.abs().mean()))
            loss += weights[name] * 0.5 * float(gradient.square().mean())
        assert actor.last_step.losses[i] == pytest.approx(loss, rel=1e-12)
    assert metrics["dmd2_score_gap_abs_mean"] == pytest.approx(0.5)
    assert metrics["dmd2_score_gap_abs_mean_audio"] == pytest.approx(500.0)
    assert metrics["dmd2_grad_abs_mean"] == pytest.approx(sum(figures["visual"]) / 4)
    assert metrics["dmd2_grad_abs_mean_audio"] == pytest.approx(sum(figures["audio"]) / 4)
    assert metrics["dmd2_grad_abs_mean_audio_step0"] == pytest.approx(figures["audio"][0])


def test_a_part_without_a_loss_has_no_figures_and_its_head_stays(ranks: Ranks) -> None:
    ids, adapter = (0, 1), TwoPartAdapter()
    actor = ActorTrainer(settings("actor"), adapter, adapter.load_transformer(), ranks)
    samples = [sample(i) for i in ids]
    scores = {s.sample_id: ScoreRow(s.x0 + 1, s.x0 + 2, 0.5) for s in samples}
    metrics = actor.train(0, (ids,), samples, [scores])
    assert not [name for name in metrics if "audio" in name]
    assert unmoved("sound", actor.network.module.get_parameter("sound"))
    assert not unmoved("picture", actor.network.module.get_parameter("picture"))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"visual": 1.0, "depth": 1.0}, "toy has no depth; it has visual, audio"),
        ({"visual": 0.0}, "one of them above"),
        ({"visual": -1.0}, "must be >= 0"),
    ],
)
def test_weights_that_say_nothing_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained_parts(TwoPartAdapter(), weights)


# -- MiniMax H3 itself -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def h3(h3_checkpoint: Path) -> MiniMaxH3Adapter:
    return MiniMaxH3Adapter(h3_checkpoint, 32, 32, 5)


def h3_sample(adapter: MiniMaxH3Adapter, sample_id: int) -> RolloutSample:
    states = normal(key_seed(3, "probe", 0, sample_id), (2 + sample_id % 3, TEXT_DIM))
    shape = adapter.latent_shape
    return replace(
        sample(sample_id),
        x_k=normal(key_seed(1, "probe", 0, sample_id), shape),
        x0=0.5 * normal(key_seed(2, "probe", 0, sample_id), shape),
        cond={"encoder_hidden_states": states},
    )


def h3_settings(role: str, micro: int) -> TrainerSettings:
    return TrainerSettings(role, SEED, OptimizerSettings(lr=1e-3), micro)


@pytest.mark.parametrize("told", [None, 4])
def test_h3s_critic_trains_and_scores_in_any_micro_batch(h3: MiniMaxH3Adapter, ranks: Ranks, told: int | None) -> None:
    ids = (0, 1, 2, 3)
    found = {}
    for micro in (1, 4) if told is None else (1,):
        networks = h3.load_transformer(), h3.load_transformer()
        trainer = CriticTrainer(h3_settings("critic", micro), h3, *networks, ranks, told_stop_steps=told)
        _, scores = trainer.train(0, (ids,), [h3_sample(h3, i) for i in ids])
        for row in scores.values():
            assert torch.equal(row.x0_real, row.x0_fake)  # critic and teacher are one network before the first update
        state = {name: value.detach().clone() for name, value in trainer.network.module.named_parameters()}
        start = dict(h3.load_transformer().named_parameters())
        still = {name for name, value in state.items() if name in start and torch.equal(value, start[name])}
        assert still == set(h3.head_of("audio"))
        found[micro] = state
    for other in found.values():
        for name, value in found[1].items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=2e-5)


@pytest.mark.parametrize("weights", [{"visual": 1.0}, {"visual": 1.0, "audio": 1.0}])
def test_h3s_student_moves_by_what_is_trained(h3: MiniMaxH3Adapter, ranks: Ranks, weights: dict[str, float]) -> None:
    ids, student = (0, 1), h3.load_transformer()
    actor = ActorTrainer(h3_settings("actor", 1), h3, student, ranks, part_weights=weights)
    samples = [h3_sample(h3, i) for i in ids]
    scores = {s.sample_id: ScoreRow(s.x0, s.x0 + 0.1, 0.5) for s in samples}
    metrics = actor.train(0, (ids,), samples, [scores])
    start = dict(h3.load_transformer().named_parameters())
    still = {name for name, value in actor.network.module.named_parameters() if torch.equal(value, start[name])}
    assert still == (set() if "audio" in weights else set(h3.head_of("audio")))
    assert ("dmd2_score_gap_abs_mean_audio" in metrics) == ("audio" in weights)
    assert metrics["dmd2_score_gap_abs_mean"] == pytest.approx(0.1, rel=1e-5)
    update = actor.export_weights(["raw"])["raw"]
    video, audio = split(update.probe.velocity, h3.canvas)
    assert torch.equal(join(video, audio), update.probe.velocity)
    assert bool(torch.isfinite(update.probe.velocity).all())


def h3_rollouts(
    ranks: Ranks, checkpoint: Path, forward_dtype: torch.dtype, gradient_checkpointing: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Two rollouts of critic and student, all parts trained: their weights, and the student's probe."""
    adapter = MiniMaxH3Adapter(checkpoint, 32, 32, 5)
    own = TrainerSettings(
        "critic",
        SEED,
        OptimizerSettings(lr=1e-2, beta1=0.0, eps=1e-2),
        1,
        forward_dtype=forward_dtype,
        gradient_checkpointing=gradient_checkpointing,
    )
    weights = {"visual": 1.0, "audio": 0.5}
    load = adapter.load_transformer
    critic = CriticTrainer(own, adapter, load(), load(), ranks, part_weights=weights)
    actor = ActorTrainer(own, adapter, load(), ranks, part_weights=weights)
    window = (0, 1, 2, 3)
    share = [h3_sample(adapter, i) for i in wanted_ids([window], ranks.rank, ranks.world_size)]
    for rollout_id in range(2):
        _, scores = critic.train(rollout_id, [window], share)
        actor.train(rollout_id, [window], share, ranks.gather(scores))
    update = actor.export_weights(["raw"])["raw"]
    return weights_of(critic), weights_of(actor), update.probe.velocity


def test_h3_on_two_ranks_is_h3_on_one(ranks: Ranks, two_ranks: RankPool, h3_checkpoint: Path) -> None:
    alone = h3_rollouts(ranks, h3_checkpoint, torch.float32)
    start = dict(MiniMaxH3Adapter(h3_checkpoint, 32, 32, 5).load_transformer().named_parameters())
    assert distance(start, alone[1]) > 5e-5
    for sharded in two_ranks.run(h3_rollouts, h3_checkpoint, torch.float32):
        assert distance(sharded[0], alone[0]) < 5e-6
        assert distance(sharded[1], alone[1]) < 5e-6


def test_h3s_forward_under_fsdp_is_that_of_the_release_in_bf16(
    ranks: Ranks, two_ranks: RankPool, h3_checkpoint: Path
) -> None:
    """fp32 shards, gathered in bf16 but for projections and clock: what a bf16 network computes, bit for bit."""
    alone = h3_rollouts(ranks, h3_checkpoint, torch.bfloat16)
    for _, student, probed in (alone, two_ranks.run(h3_rollouts, h3_checkpoint, torch.bfloat16)[0]):
        adapter = MiniMaxH3Adapter(h3_checkpoint, 32, 32, 5)
        loaded = adapter.load_transformer(torch.bfloat16)
        with torch.no_grad():
            for name, value in loaded.named_parameters():
                value.copy_(student[name])
            x = normal(key_seed(0, "probe", 0, 1), adapter.latent_shape).unsqueeze(0)
            cond = adapter.collate([adapter.probe_conditioning()])
            assert torch.equal(adapter.velocity(loaded, x, torch.full((1,), 0.5), cond), probed)


@pytest.mark.parametrize("forward_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_h3s_blocks_computed_again_in_backward_give_the_same_bits(
    ranks: Ranks, h3_checkpoint: Path, forward_dtype: torch.dtype
) -> None:
    kept = h3_rollouts(ranks, h3_checkpoint, forward_dtype)
    again = h3_rollouts(ranks, h3_checkpoint, forward_dtype, True)
    for ours, theirs in zip(again[:2], kept[:2], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(again[2], kept[2])
