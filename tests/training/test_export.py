"""Weights on their way out: complete, in the model's own names, with a probe that only they answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from miles_dmd2.models.weights import checksum
from miles_dmd2.training import ActorTrainer, Ranks
from miles_dmd2.training.export import export
from miles_dmd2.training.sharding import load_full
from miles_dmd2.types import WeightUpdate, WeightVersion
from tests.training.pool import RankPool
from tests.training.runs import Setup, make_actor, make_critic, same_bits, weights
from tests.training.test_actor import train_actor
from tests.training.toy import ToyAdapter

SETUP = Setup(windows=1, dtype=torch.float32)


def trained(ranks: Ranks, setup: Setup) -> ActorTrainer:
    actor = make_actor(ranks, setup)
    for rollout_id in range(2):
        train_actor(actor, rollout_id, setup)
    return actor


def exported(ranks: Ranks, setup: Setup) -> dict[str, WeightUpdate]:
    return trained(ranks, setup).export_weights()


def answer(update: WeightUpdate) -> torch.Tensor:
    """What a fresh module with these weights says to the probe."""
    adapter = ToyAdapter(seed=99)
    module = adapter.load_transformer()
    assert dict(module.named_parameters()).keys() == update.payload.keys()
    load_full(module, update.payload)
    probe = update.probe
    with torch.no_grad():
        return adapter.velocity(module, probe.x, probe.sigma, adapter.collate([probe.cond]))


def test_payload_checksum_version_and_probe_belong_together(ranks: Ranks) -> None:
    updates = exported(ranks, SETUP)
    assert [update.version for update in updates.values()] == [WeightVersion(2, "raw"), WeightVersion(2, "ema")]
    for update in updates.values():
        assert all(value.dtype == torch.float32 for value in update.payload.values())
        assert update.checksum == checksum(update.payload)
        assert torch.equal(answer(update), update.probe.velocity)
    assert not torch.equal(updates["raw"].probe.velocity, updates["ema"].probe.velocity)
    assert updates["raw"].checksum != updates["ema"].checksum


def test_exporting_changes_nothing_and_shares_no_memory(ranks: Ranks) -> None:
    actor = trained(ranks, SETUP)
    before, average = weights(actor), {name: value.clone() for name, value in actor.ema.average.items()}
    updates = actor.export_weights()
    for update in updates.values():
        for value in update.payload.values():
            value.zero_()
    assert same_bits(weights(actor), before)
    assert same_bits(actor.ema.average, average)


def test_two_ranks_export_once_and_the_same(ranks: Ranks, two_ranks: RankPool) -> None:
    alone = exported(ranks, SETUP)
    first, second = two_ranks.run(exported, SETUP)
    for kind, update in first.items():
        assert update.checksum == checksum(update.payload)
        assert update.payload.keys() == alone[kind].payload.keys()
        for name, value in update.payload.items():
            torch.testing.assert_close(value, alone[kind].payload[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(answer(update), update.probe.velocity, rtol=1e-5, atol=1e-6)
        assert torch.equal(second[kind].probe.velocity, update.probe.velocity)
        assert (second[kind].payload, second[kind].checksum) == (None, "")


def test_kinds(ranks: Ranks) -> None:
    actor = trained(ranks, SETUP)
    assert list(actor.export_weights(["raw"])) == ["raw"]
    assert list(actor.export_weights(["ema"])) == ["ema"]
    assert list(trained(ranks, replace(SETUP, decay=0.0)).export_weights()) == ["raw"]


def test_the_stop_step_embedding_never_leaves(ranks: Ranks) -> None:
    critic = make_critic(ranks, SETUP)
    assert "time.stop_step_embedding" in dict(critic.network.module.named_parameters())
    with critic.conditioning.told(torch.tensor([0])):
        update = export(critic.network, ToyAdapter(), ranks, 0, "raw")
    assert update.payload.keys() == dict(ToyAdapter().load_transformer().named_parameters()).keys()
    assert "time.stop_step_embedding" not in dict(make_actor(ranks, SETUP).network.module.named_parameters())


@pytest.mark.parametrize("change", [lambda t: t.pop("exit.bias"), lambda t: t.update({"exit.bias": torch.zeros(1)})])
def test_incomplete_or_misshapen_tensors_are_not_loaded(change) -> None:
    module = ToyAdapter().load_transformer()
    tensors = {name: value.detach().clone() for name, value in ToyAdapter(1).load_transformer().named_parameters()}
    change(tensors)
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    with pytest.raises(ValueError, match=r"exit\.bias"):
        load_full(module, tensors)
    assert same_bits(before, dict(module.named_parameters()))


def load_and_gather(ranks: Ranks, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    actor = make_actor(ranks, SETUP)
    load_full(actor.network.module, tensors)
    return weights(actor)


def test_full_tensors_load_into_shards(two_ranks: RankPool) -> None:
    tensors = {name: value.detach().clone() for name, value in ToyAdapter(1).load_transformer().named_parameters()}
    for gathered in two_ranks.run(load_and_gather, tensors):
        assert same_bits(gathered, tensors)
