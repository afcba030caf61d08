"""Asleep a trainer holds no byte of the device, refuses work, and forgets nothing."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from miles_dmd2.training import CriticTrainer, Ranks
from miles_dmd2.training.trainer import Trainer
from tests.training.fake_device import FakeDevice
from tests.training.pool import RankPool
from tests.training.runs import (
    Run,
    Setup,
    make_actor,
    make_critic,
    one_rollout,
    same_bits,
    samples_of,
    weights,
    windows_of,
)
from tests.training.toy import LABELS, LATENT, ToyAdapter

PLAIN = Setup(dtype=torch.float32, micro=3)
SHARDED = Setup(dtype=torch.float32, forward_dtype=torch.bfloat16, micro=3)  # FSDP2 also on one rank


def host_tensors(trainer: Trainer) -> list[torch.Tensor]:
    return [slot.host for slot in trainer.residence._slots.values() if slot.host is not None]


def settled(device: FakeDevice, hosts: list[torch.Tensor], seconds: float = 10.0) -> int:
    """Bytes, once gloo's own thread has let go of the last collective's buffer, which it does a moment after `wait`."""
    deadline = time.monotonic() + seconds
    while device.bytes(hosts) and time.monotonic() < deadline:
        time.sleep(0.05)
    return device.bytes(hosts)


def bytes_on_device(ranks: Ranks, setup: Setup) -> dict[str, tuple[int, int, int]]:
    """Per trainer: bytes awake after a rollout, asleep, and in its host buffers."""
    found = {}
    with FakeDevice() as device:
        critic, actor = make_critic(ranks, setup), make_actor(ranks, setup)
        one_rollout(critic, actor, setup, 0)
        actor.export_weights()
        critic.sleep()
        actor.sleep()
        hosts = host_tensors(critic) + host_tensors(actor)
        asleep = settled(device, hosts)
        for name, trainer in (("critic", critic), ("actor", actor)):
            trainer.wake()
            awake = device.bytes(hosts)
            trainer.sleep()
            found[name] = (awake, asleep, sum(host.nbytes for host in host_tensors(trainer)))
    return found


def check_bytes(found: dict[str, tuple[int, int, int]]) -> None:
    for awake, asleep, host in found.values():
        assert asleep == 0
        assert awake == host > 0


@pytest.mark.parametrize("setup", [PLAIN, SHARDED])
def test_asleep_no_byte_is_on_the_device(ranks: Ranks, setup: Setup) -> None:
    check_bytes(bytes_on_device(ranks, setup))


def test_asleep_no_byte_is_on_the_device_of_two_ranks(two_ranks: RankPool) -> None:
    for found in two_ranks.run(bytes_on_device, PLAIN):
        check_bytes(found)


def test_the_fake_device_sees_what_a_sleeping_trainer_keeps(ranks: Ranks) -> None:
    """Mutation: gradients that are not dropped, and a tensor outside the list."""
    with FakeDevice() as device:
        actor = make_actor(ranks, PLAIN)
        parameter = next(iter(actor.network.trained.values()))
        parameter.grad = torch.ones_like(parameter)
        actor.residence.sleep()  # without dropping gradients
        hosts = host_tensors(actor)
        assert device.bytes(hosts) == parameter.nbytes
        parameter.grad = None
        actor.forgotten = torch.ones(5)
        assert device.bytes(hosts) == 20


def test_sleep_drops_gradients(ranks: Ranks) -> None:
    """Also those of a train call that an exception left half done."""
    actor = make_actor(ranks, PLAIN)
    parameter = next(iter(actor.network.trained.values()))
    parameter.grad = torch.ones_like(parameter)
    actor.sleep()
    kept = parameter.grad is not None  # not in the assert: pytest would print the parameter, which has no memory now
    assert not kept


def cycles(ranks: Ranks, setup: Setup, count: int) -> Run:
    """Two rollouts with `count` extra sleep and wake cycles after each."""
    critic, actor = make_critic(ranks, setup), make_actor(ranks, setup)
    for rollout_id in range(2):
        one_rollout(critic, actor, setup, rollout_id)
        for _ in range(count):
            for trainer in (critic, actor):
                trainer.wake()
                trainer.sleep()
    actor.wake()
    exported = {kind: update.payload or {} for kind, update in actor.export_weights().items()}
    return Run(weights(critic), weights(actor), exported, [])


def check_cycles(first: Run, second: Run) -> None:
    assert same_bits(first.critic, second.critic)
    assert same_bits(first.student, second.student)
    assert same_bits(first.exported["raw"], second.exported["raw"])
    assert same_bits(first.exported["ema"], second.exported["ema"])


@pytest.mark.parametrize("setup", [PLAIN, SHARDED])
def test_three_cycles_change_no_bit_and_training_goes_on(ranks: Ranks, setup: Setup) -> None:
    check_cycles(cycles(ranks, setup, 0), cycles(ranks, setup, 3))


def test_three_cycles_change_no_bit_on_two_ranks(two_ranks: RankPool) -> None:
    """With tied parameters, and shards of different size, one of them empty."""
    for first, second in zip(two_ranks.run(cycles, PLAIN, 0), two_ranks.run(cycles, PLAIN, 3), strict=True):
        check_cycles(first, second)


@pytest.mark.parametrize("setup", [PLAIN, SHARDED])
def test_any_use_while_asleep_is_refused(ranks: Ranks, setup: Setup) -> None:
    critic, actor = make_critic(ranks, setup), make_actor(ranks, setup)
    windows = windows_of(setup, 0)
    samples = samples_of(setup, 0, [i for window in windows for i in window])
    critic.sleep()
    actor.sleep()
    assert not critic.is_awake
    with pytest.raises(RuntimeError, match=r"critic\.train while asleep: call wake"):
        critic.train(0, windows, samples)
    with pytest.raises(RuntimeError, match=r"actor\.train while asleep"):
        actor.train(0, windows[-1:], samples[-8:], [dict.fromkeys(windows[-1])])
    with pytest.raises(RuntimeError, match=r"actor\.export_weights while asleep"):
        actor.export_weights()
    x, label = torch.zeros(1, *LATENT), torch.zeros(1, LABELS)
    for network in (critic.network, critic.teacher, actor.network):
        with pytest.raises(RuntimeError, match=f"a forward of the {network.role} while asleep"):
            network.module(x, torch.ones(1), label)
        with pytest.raises(RuntimeError, match="while asleep"):
            network.module.blocks[0](torch.zeros(1, 8), torch.zeros(1, 8))
    critic.wake()
    critic.wake()
    assert critic.is_awake
    critic.train(0, windows, samples)


@pytest.mark.parametrize("setup", [PLAIN, SHARDED])
def test_the_teacher_is_copied_to_the_host_once(ranks: Ranks, setup: Setup) -> None:
    """A bit that flips in its device copy between two sleeps is gone after them; the critic's changes are kept."""
    critic = make_critic(ranks, setup)
    critic.sleep()
    critic.wake()
    teacher = critic.residence.entries["teacher/exit.bias"].tensor
    trained = critic.residence.entries["critic/exit.bias"].tensor
    before, changed = teacher.clone(), trained + 1
    teacher.add_(1)
    trained.copy_(changed)
    critic.sleep()
    critic.wake()
    assert torch.equal(teacher, before)
    assert torch.equal(trained, changed)


def test_what_sleep_relies_on_in_fsdp(ranks: Ranks) -> None:
    """The private padded shard, a parameter's local tensor and the state list are views of one storage.

    If this fails after an upgrade of torch, sleeping no longer frees (or no longer restores) what FSDP gathers from.
    """
    critic = make_critic(ranks, SHARDED)
    groups = [m._get_fsdp_state()._fsdp_param_group for m in (critic.network.module, *critic.network._units)]
    shards = [p for group in groups for p in group.fsdp_params]
    assert len(shards) == len(list(critic.network.module.parameters()))
    listed = {entry.tensor.untyped_storage()._cdata for entry in critic.residence.entries.values()}
    for shard in shards:
        padded = shard._sharded_param_data.untyped_storage()
        assert padded._cdata == shard.sharded_param.to_local().untyped_storage()._cdata
        assert padded._cdata in listed
        assert padded.resizable()
    critic.sleep()
    assert all(shard._sharded_param_data.untyped_storage().nbytes() == 0 for shard in shards)


@pytest.mark.gpu
def test_asleep_no_byte_is_allocated_on_a_gpu() -> None:
    from miles_dmd2.training import init_ranks
    from miles_dmd2.training.trainer import TrainerSettings
    from tests.training.runs import settings

    ranks = init_ranks(device="cuda")
    held = torch.cuda.memory_allocated()
    adapter = ToyAdapter()
    value: TrainerSettings = settings(SHARDED, "critic")
    critic = CriticTrainer(value, adapter, adapter.load_transformer(), adapter.load_transformer(), ranks)
    windows = windows_of(SHARDED, 0)
    critic.train(0, windows, samples_of(SHARDED, 0, [i for window in windows for i in window]))
    critic.sleep()
    gc.collect()
    assert torch.cuda.memory_allocated() == held
    critic.wake()
    critic.train(1, windows, samples_of(SHARDED, 0, [i for window in windows for i in window]))
