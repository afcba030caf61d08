"""Adapters of critic and student: merged as float64 says, over a base whose bits nobody changes and the teacher has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from miles_dmd2.config.lora import Lora, lora_layers
from miles_dmd2.models.weights import checksum
from miles_dmd2.training import ActorTrainer, CriticTrainer, Ranks, wanted_ids
from miles_dmd2.training.batching import collate
from miles_dmd2.training.lora import add_lora, as_diffusers, merged, model_name
from miles_dmd2.training.network import Network
from miles_dmd2.training.replay import replay
from miles_dmd2.training.scoring import CRITIC_STEP, Noised, noised
from miles_dmd2.training.sharding import full, load_full
from miles_dmd2.types import ScoreRow
from tests.training.fake_device import FakeDevice
from tests.training.pool import RankPool
from tests.training.runs import (
    UNCOND,
    Setup,
    distance,
    make_actor,
    make_critic,
    one_rollout,
    same_bits,
    samples_of,
    settings,
    train,
    weights,
    windows_of,
)
from tests.training.test_bad_batch import meet_it, same
from tests.training.test_export import answer
from tests.training.toy import LABELS, LATENT, ToyAdapter

LORA = Lora(2, 3)
BOTH = Setup(critic_lora=LORA, student_lora=LORA)
FP32 = replace(BOTH, dtype=torch.float32, windows=2)
BF16 = replace(FP32, forward_dtype=torch.bfloat16)
LAYERS = [f"blocks.{i}.{name}" for i in range(2) for name in ("inner", "outer")]
Pair = tuple[CriticTrainer, ActorTrainer]


def trained(ranks: Ranks, setup: Setup, rollouts: int = 2) -> Pair:
    """Both awake."""
    critic, actor = make_critic(ranks, setup), make_actor(ranks, setup)
    for rollout_id in range(rollouts):
        one_rollout(critic, actor, setup, rollout_id)
    critic.wake()
    return critic, actor


def plain(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The base, by the model's own names."""
    return {name: value.detach() for name, value in ToyAdapter().load_transformer(dtype).named_parameters()}


def base_of(trainer: CriticTrainer | ActorTrainer) -> dict[str, Tensor]:
    """What a trainer's base is now. A collective."""
    trained_names = trainer.network.trained
    return {
        model_name(name): full(p).clone()
        for name, p in trainer.network.module.named_parameters()
        if name not in trained_names
    }


def factors(trainer: CriticTrainer | ActorTrainer) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer -> A and B in float64. A collective."""
    own = {name: full(p).double() for name, p in trainer.network.trained.items()}
    name = f"{{}}.lora_{{}}.{trainer.role}.weight"
    return {layer: (own[name.format(layer, "A")], own[name.format(layer, "B")]) for layer in LAYERS}


# -- where it begins ---------------------------------------------------------------------------------------------


def test_at_the_start_critic_and_teacher_are_one_function_and_the_student_is_the_checkpoint(ranks: Ranks) -> None:
    critic, actor = make_critic(ranks, BOTH), make_actor(ranks, BOTH)
    actor_weights = actor.export_weights(["raw"])["raw"].payload
    assert actor_weights is not None
    assert same_bits(actor_weights, {name: value.float() for name, value in plain(torch.float64).items()})
    metrics, _ = one_rollout(critic, actor, replace(BOTH, windows=1), 0)
    critic.wake()
    fresh = make_critic(ranks, replace(BOTH, windows=1))
    x, sigma, label = inputs(torch.float64)
    with torch.no_grad(), fresh.conditioning.told(torch.arange(3)):
        assert torch.equal(fresh.network.velocity(x, sigma, label), fresh.teacher.velocity(x, sigma, label))
    assert metrics["teacher_forwards"] == 8


def test_the_start_depends_on_seed_and_role_alone(ranks: Ranks) -> None:
    def starts(setup: Setup) -> dict[str, Tensor]:
        pair = make_critic(ranks, setup), make_actor(ranks, setup)
        return {f"{t.role}/{layer}": a for t in pair for layer, (a, _) in factors(t).items()}

    torch.manual_seed(1)
    first, state = starts(BOTH), torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is not drawn from"
    torch.manual_seed(2)
    assert same_bits(starts(BOTH), first)
    other = starts(replace(BOTH, seed=4))
    for layer in LAYERS:
        assert not torch.equal(first[f"critic/{layer}"], first[f"actor/{layer}"])
        assert not torch.equal(first[f"critic/{layer}"], other[f"critic/{layer}"])
        a = first[f"critic/{layer}"]
        assert 0.5 * a.shape[1] ** -0.5 < a.abs().max() <= a.shape[1] ** -0.5, "uniform in +- 1 / sqrt(in)"


def test_a_target_names_layers_by_the_ends_of_their_names(ranks: Ranks) -> None:
    actor = make_actor(ranks, replace(BOTH, student_lora=Lora(2, 2, ("inner", "blocks.1.outer"))))
    layers = {name.partition(".lora_")[0] for name in actor.network.trained}
    assert layers == {"blocks.0.inner", "blocks.1.inner", "blocks.1.outer"}


def test_a_layer_without_a_gradient_gets_no_adapter(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = {"unused": "none", "blocks.1.outer.weight": "zero"}
    monkeypatch.setattr(ToyAdapter, "idle_parameters", lambda *_: idle)
    layers = {name.partition(".lora_")[0] for name in make_actor(ranks, BOTH).network.trained}
    assert layers == {"blocks.0.inner", "blocks.0.outer", "blocks.1.inner"}


def test_a_target_without_any_gradient_is_refused(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside one that trains; of a target with both kinds of layers the idle ones are left out."""
    monkeypatch.setattr(ToyAdapter, "idle_parameters", lambda *_: {"blocks.1.outer.weight": "zero"})
    for targets in (("blocks.1.outer",), ("inner", "blocks.1.outer")):
        with pytest.raises(
            ValueError, match=r"--lora-target-modules blocks\.1\.outer: no gradient .* name other layers"
        ):
            make_actor(ranks, replace(BOTH, student_lora=Lora(2, 2, targets)))
    actor = make_actor(ranks, replace(BOTH, student_lora=Lora(2, 2, ("outer",))))
    assert {name.partition(".lora_")[0] for name in actor.network.trained} == {"blocks.0.outer"}


def test_a_network_without_a_layer_to_train_is_refused() -> None:
    for shapes, untrained in (({"entry.weight": (2, 2)}, ()), ({"blocks.0.a.weight": (2, 2)}, ("blocks.0.a.weight",))):
        with pytest.raises(
            ValueError, match="--lora-rank 1: no linear layer of the network's blocks is trained; use 0"
        ):
            lora_layers(shapes, Lora(1, 1), untrained)


# -- what is trained ---------------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_merged_weight_by_the_chain_rule() -> None:
    """With W' = W + s B A: dL/dB = s dL/dW' A^T and dL/dA = s B^T dL/dW', where dL/dW' is a plain module's at W'."""
    module = ToyAdapter().load_transformer(torch.float64)
    add_lora(module, LORA, "actor", 0, ())
    parameters = dict(module.named_parameters())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    whole = ToyAdapter().load_transformer(torch.float64)
    load_full(whole, merged({name: value.detach().clone() for name, value in parameters.items()}, 1.5))
    x, sigma, cond = inputs(torch.float64)
    for one in (module, whole):
        (one(x, sigma, cond["label"]) ** 3).sum().backward()
    wanted = dict(whole.named_parameters())
    for layer in LAYERS:
        a, b = (parameters[f"{layer}.lora_{factor}.actor.weight"] for factor in "AB")
        of_weight = wanted[f"{layer}.weight"].grad
        torch.testing.assert_close(b.grad, 1.5 * of_weight @ a.T, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(a.grad, 1.5 * b.T @ of_weight, rtol=1e-11, atol=1e-11)
        assert parameters[f"{layer}.base_layer.weight"].grad is None


def test_roles_train_disjoint_parameters_and_nothing_else(ranks: Ranks) -> None:
    critic, actor = trained(ranks, BOTH)
    names = [
        {f"{layer}.lora_{factor}.{role}.weight" for layer in LAYERS for factor in "AB"} for role in ("critic", "actor")
    ]
    assert critic.network.trained.keys() == names[0] | {"time.stop_step_embedding"}
    assert actor.network.trained.keys() == names[1]
    for trainer in (critic, actor):
        assert trainer.optimizer.parameters.keys() == trainer.network.trained.keys()
        for name, parameter in trainer.network.module.named_parameters():
            assert parameter.grad is None
            assert parameter.requires_grad == (name in trainer.network.trained)
    storages = [{p.untyped_storage()._cdata for p in t.network.module.parameters()} for t in (critic, actor)]
    assert not storages[0] & storages[1]


def base_after(ranks: Ranks, setup: Setup) -> tuple[list[str], float]:
    """Checksums of both bases after training and export, and after sleep; how far the adapters are from 0."""
    critic, actor = trained(ranks, setup)
    actor.export_weights()
    found = [checksum(base_of(trainer)) for trainer in (critic, actor)]
    for trainer in (critic, actor):
        trainer.sleep()
        trainer.wake()
    least = min(b.abs().max().item() for t in (critic, actor) for _, b in factors(t).values())
    return found + [checksum(base_of(trainer)) for trainer in (critic, actor)], least


@pytest.mark.parametrize("setup", [FP32, BF16], ids=["fp32", "bf16"])
def test_the_base_keeps_its_bits(ranks: Ranks, two_ranks: RankPool, setup: Setup) -> None:
    untouched = checksum(plain())
    for found, least in (base_after(ranks, setup), *two_ranks.run(base_after, setup)):
        assert found == 4 * [untouched]
        assert least > 1e-3


# -- the teacher -------------------------------------------------------------------------------------------------


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = torch.linspace(-1, 1, 3 * 6, dtype=dtype).view(3, *LATENT)
    return x, torch.tensor([0.2, 0.5, 0.9], dtype=dtype), {"label": torch.eye(LABELS, dtype=dtype)[:3]}


def velocities(ranks: Ranks, setup: Setup) -> tuple[Tensor, Tensor, Tensor]:
    """Of a trained critic's base, of a plain teacher, of the critic."""
    critic, _ = trained(ranks, setup)
    own = settings(setup, "teacher")
    alone = Network(
        "teacher",
        ToyAdapter(),
        ToyAdapter().load_transformer(),
        ranks,
        trainable=False,
        forward_dtype=own.forward_dtype,
        master_dtype=own.master_dtype,
    )
    with torch.no_grad():
        of_base, of_plain = (network.velocity(*inputs(torch.float32)) for network in (critic.teacher, alone))
        with critic.conditioning.told(torch.arange(3)):
            return of_base, of_plain, critic.network.velocity(*inputs(torch.float32))


@pytest.mark.parametrize("setup", [FP32, BF16], ids=["fp32", "bf16"])
def test_the_teacher_is_the_plain_teacher_bit_for_bit(ranks: Ranks, two_ranks: RankPool, setup: Setup) -> None:
    """While the adapter and the stop-step embedding are far from 0; sharded and not."""
    for of_base, of_plain, of_critic in (velocities(ranks, setup), *two_ranks.run(velocities, setup)):
        assert torch.equal(of_base, of_plain)
        assert (of_critic - of_base).abs().max() > 1e-2


def scores_after(ranks: Ranks, setup: Setup, rollouts: int) -> tuple[CriticTrainer, dict[int, ScoreRow]]:
    """Of the rollout after so many, by a critic that has moved in them."""
    critic = make_critic(ranks, setup)
    for rollout_id in range(rollouts + 1):
        windows = windows_of(setup, rollout_id)
        ids = wanted_ids(windows, ranks.rank, ranks.world_size)
        metrics, scores = critic.train(rollout_id, windows, samples_of(setup, rollout_id, ids))
    assert metrics["teacher_forwards"] == 8 * (1 if setup.guidance == 1 else 2)
    return critic, scores


def x0_by_hand(at: Noised, label: Tensor, guidance: float) -> Tensor:
    """x - sigma v of a plain module that no trainer has seen, in float64; guided by the textbook's formula."""
    module = ToyAdapter().load_transformer().double()
    x, sigma = at.x.double(), at.level.double()
    with torch.no_grad():
        cond, uncond = (
            x - sigma.view(-1, 1, 1) * module(x, sigma, of.double()) for of in (label, UNCOND["label"].expand_as(label))
        )
    return cond if guidance == 1 else (1 - guidance) * uncond + guidance * cond


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("lr", [1e-12, 3e-2])
def test_scores_of_a_shared_teacher_are_those_of_one_of_its_own(ranks: Ranks, guidance: float, lr: float) -> None:
    """x0_real cannot tell the two apart bit for bit, with critics that are where they began, and that are far away."""
    setup = replace(FP32, guidance=guidance, windows=1, lr=lr)
    critic, shared = scores_after(ranks, setup, 2)
    _, own = scores_after(ranks, replace(setup, critic_lora=None), 2)
    assert shared.keys() == own.keys() == set(windows_of(setup, 2)[-1])
    batch = collate(ToyAdapter(), samples_of(setup, 2, sorted(shared)), torch.device("cpu"), torch.float32)
    at = noised(batch, ToyAdapter(), critic.score_sigma, setup.seed, CRITIC_STEP, 2)
    for row, x0 in zip((shared[i] for i in batch.ids), x0_by_hand(at, batch.cond["label"], guidance), strict=True):
        torch.testing.assert_close(row.x0_real.double(), x0, rtol=1e-5, atol=1e-5)
    for i, row in shared.items():
        assert row.score_sigma == own[i].score_sigma
        assert torch.equal(row.x0_real, own[i].x0_real)
    if guidance == 1:
        moved = max((row.x0_fake - row.x0_real).abs().max().item() for row in shared.values())
        assert moved > 1e-2 if lr > 1e-3 else moved < 1e-6


def test_a_teacher_too_many_or_too_few_is_refused(ranks: Ranks) -> None:
    adapter = ToyAdapter()
    for setup, teacher in ((BOTH, adapter.load_transformer()), (Setup(), None)):
        with pytest.raises(ValueError, match="has its base as the teacher"):
            CriticTrainer(settings(setup, "critic"), adapter, adapter.load_transformer(), teacher, ranks)


# -- the cut, memory, checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setup",
    [BOTH, Setup(student_lora=Lora(1, 2))],
    ids=["both", "student of rank 1"],
)
def test_two_ranks_are_one_rank(ranks: Ranks, two_ranks: RankPool, setup: Setup) -> None:
    """In fp64, also cut in micro-batches; of rank 1 the second rank has no row of A."""
    alone, start = train(ranks, setup), train(ranks, setup, rollouts=0)
    assert distance(alone.student, start.student) > 1e-3
    for run in (train(ranks, replace(setup, micro=3)), *two_ranks.run(train, replace(setup, micro=3))):
        assert distance(run.critic, alone.critic) < 1e-12
        assert distance(run.student, alone.student) < 1e-12


def test_a_group_holds_one_base_and_its_adapter(ranks: Ranks) -> None:
    """Counted by a fake device that knows nothing of the state's list; asleep nothing is left."""
    setup = replace(FP32, told=False)
    for one, networks in ((setup, 1), (replace(setup, critic_lora=None), 2)):
        with FakeDevice() as device:
            critic = make_critic(ranks, one)
            whole = sum(value.nbytes for value in plain().values()) + 4  # a buffer
            own = sum(parameter.nbytes for parameter in critic.network.trained.values())
            beside = own if one.critic_lora else 0
            assert device.bytes() == networks * whole + beside + 2 * own
            critic.sleep()
            host = [slot.host for slot in critic.residence._slots.values()]
            assert device.bytes(host) == 0
            assert sum(copy.nbytes for copy in host) == networks * whole + beside + 2 * own


def save_and_continue(ranks: Ranks, directory: Path) -> tuple[Pair, Pair]:
    """Four rollouts at once, and four with a checkpoint after two."""
    whole = trained(ranks, BOTH, 4)
    first = trained(ranks, BOTH, 2)
    states = [trainer.save(directory) for trainer in first]
    ranks.gather(None)
    second = make_critic(ranks, BOTH), make_actor(ranks, BOTH)
    for trainer, state in zip(second, states, strict=True):
        trainer.load(directory, state.counters)
    for rollout_id in (2, 3):
        one_rollout(*second, BOTH, rollout_id)
    second[0].wake()
    return whole, second


def ends(ranks: Ranks, directory: Path) -> list[dict[str, Tensor]]:
    whole, continued = save_and_continue(ranks, directory)
    return [
        {f"{t.role}/{name}": full(p).clone() for t in pair for name, p in t.network.module.named_parameters()}
        | {f"ema/{name}": t.clone() for name, t in pair[1].ema.average.items()}
        for pair in (whole, continued)
    ]


def test_a_checkpoint_holds_the_adapter_alone_and_continues_bit_for_bit(
    ranks: Ranks, two_ranks: RankPool, tmp_path: Path
) -> None:
    from safetensors import safe_open

    for found in (ends(ranks, tmp_path / "one"), *two_ranks.run(ends, tmp_path / "two")):
        assert same_bits(*found)
    kinds = {"actor": ("actor", "ema"), "critic": ("critic",)}
    for role, own in kinds.items():
        (file,) = (tmp_path / "one" / role).iterdir()
        with safe_open(file, "pt") as opened:
            names = set(opened.keys())
        network = "student" if role == "actor" else "critic"
        trained_names = [f"{layer}.lora_{factor}.{role}.weight" for layer in LAYERS for factor in "AB"]
        trained_names += ["time.stop_step_embedding"] if role == "critic" else []
        wanted = (network, "exp_avg", "exp_avg_sq", *own[1:])
        assert names == {f"{kind}/{name}" for kind in wanted for name in trained_names}


def test_another_number_of_ranks_goes_on(ranks: Ranks, two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(ends, tmp_path)
    wanted = trained(ranks, BOTH, 2)
    for trainer, fresh in zip(wanted, (make_critic(ranks, BOTH), make_actor(ranks, BOTH)), strict=True):
        start = weights(fresh)
        fresh.load(tmp_path, trainer.counters(), 2)
        assert distance(weights(fresh), weights(trainer)) < 1e-12
        assert distance(weights(fresh), start) > 1e-3


def test_a_kept_step_replays_with_its_numbers(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the base that it had: another is refused, as the kept state has none."""
    monkeypatch.chdir(tmp_path)
    base = tmp_path / ToyAdapter().checkpoint / "transformer"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    (base / "a.safetensors").write_bytes(b"weights")
    setup = replace(BOTH, windows=2, micro=2, max_skipped=100)
    critic, actor = meet_it(ranks, tmp_path / "x", setup)
    for kept, report in zip(sorted((tmp_path / "x").iterdir()), (actor, critic), strict=True):
        assert report is not None
        assert same(dict(replay(kept, ToyAdapter(), ranks).losses), dict(report.losses))
        (base / "a.safetensors").write_bytes(b"weightz")
        with pytest.raises(ValueError, match=r"--hf-checkpoint toy: another transformer .* than the base of this step"):
            replay(kept, ToyAdapter(), ranks)
        (base / "a.safetensors").write_bytes(b"weights")


# -- on its way out ----------------------------------------------------------------------------------------------


def merged_by_float64(actor: ActorTrainer) -> dict[str, Tensor]:
    wanted = {name: value.double() for name, value in plain().items()}
    for layer, (a, b) in factors(actor).items():
        wanted[f"{layer}.weight"] = wanted[f"{layer}.weight"] + LORA.alpha / LORA.rank * (b @ a)
    return wanted


def export_and_float64(ranks: Ranks, setup: Setup) -> tuple[object, dict[str, Tensor], dict[str, Tensor]]:
    """Updates, what they have to be by float64, raw and averaged."""
    _, actor = trained(ranks, setup)
    assert actor.ema is not None
    updates, raw = actor.export_weights(), merged_by_float64(actor)
    with actor.ema.swapped_in():
        return updates, raw, merged_by_float64(actor)


def test_exported_weights_are_w_plus_s_b_a(ranks: Ranks, two_ranks: RankPool) -> None:
    """In fp32 to its rounding, of weights below 1; what has no adapter keeps its bits; a plain module answers the probe
    alike.
    """
    for found in (export_and_float64(ranks, FP32), two_ranks.run(export_and_float64, FP32)[0]):
        updates, raw, averaged = found
        for kind, wanted in (("raw", raw), ("ema", averaged)):
            update = updates[kind]
            assert update.checksum == checksum(update.payload)
            assert distance({name: value.double() for name, value in update.payload.items()}, wanted) < 1e-7
            torch.testing.assert_close(answer(update), update.probe.velocity, rtol=1e-5, atol=1e-6)
            for name, value in plain().items():
                moved = name.removesuffix(".weight") in LAYERS and name.endswith(".weight")
                assert torch.equal(update.payload[name], value) != moved, name
        assert distance(updates["raw"].payload, updates["ema"].payload) > 1e-3


def test_a_file_for_diffusers_has_the_scale_in_b(ranks: Ranks) -> None:
    _, actor = trained(ranks, FP32)
    file = as_diffusers({name: full(p) for name, p in actor.network.trained.items()}, LORA.scale)
    assert file.keys() == {f"transformer.{layer}.lora_{factor}.weight" for layer in LAYERS for factor in "AB"}
    for layer, (a, b) in factors(actor).items():
        wanted = LORA.scale * (b @ a)
        found = (
            file[f"transformer.{layer}.lora_B.weight"].double() @ file[f"transformer.{layer}.lora_A.weight"].double()
        )
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


def test_half_an_adapter_is_not_merged() -> None:
    base, a = plain(), torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"blocks\.0\.inner has A only"):
        merged({**base, "blocks.0.inner.lora_A.actor.weight": a}, 1.0)
    with pytest.raises(ValueError, match="over elsewhere, which the base has not"):
        merged({**base, "elsewhere.lora_A.actor.weight": a, "elsewhere.lora_B.actor.weight": a.T}, 1.0)
