"""Sleep frees every byte and waking restores every bit, ties and views included."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from miles_dmd2.models.offload import Entry, Residence, held_bytes, module_entries, own_storage


def tied_module() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    module[2].weight = module[0].weight
    return module


def test_three_cycles_are_bitwise_neutral() -> None:
    module = tied_module().eval()
    x = torch.randn(2, 3)
    before, held = module(x), held_bytes(module)
    residence = Residence(module_entries("m", module))
    for _ in range(3):
        residence.sleep()
        assert held_bytes(module) == 0
        residence.wake()
        assert held_bytes(module) == held
        assert torch.equal(module(x), before)
    assert module[2].weight is module[0].weight


def test_changes_between_cycles_survive_and_training_goes_on() -> None:
    module = tied_module()
    residence = Residence(module_entries("m", module))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        module(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        kept = {name: value.clone() for name, value in module.state_dict().items()}
        residence.sleep()
        residence.wake()
        assert all(torch.equal(value, kept[name]) for name, value in module.state_dict().items())


def test_sleep_and_wake_may_be_repeated() -> None:
    module = nn.Linear(2, 2)
    residence = Residence(module_entries("m", module))
    residence.wake()
    residence.sleep()
    residence.sleep()
    assert not residence.awake
    with pytest.raises(RuntimeError, match="a forward while asleep"):
        residence.require_awake("a forward")
    residence.wake()
    residence.require_awake("a forward")


def test_values_can_be_read_while_asleep() -> None:
    value = torch.arange(6.0).reshape(2, 3).t()
    residence = Residence([Entry("x", value)])
    expected = value.clone()
    residence.sleep()
    assert torch.equal(residence.view("x"), expected)


def test_a_view_of_a_mapped_file_is_refused_until_it_owns_its_bytes(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    module = nn.Linear(2, 2)
    module.load_state_dict(load_file(tmp_path / "w.safetensors"), assign=True)
    module.weight.detach().numpy()  # whatever safetensors does today, this alone forbids resizing
    with pytest.raises(ValueError, match="cannot leave the device"):
        Residence(module_entries("m", module))
    own_storage(module)
    Residence(module_entries("m", module)).sleep()
    assert held_bytes(module) == 0
