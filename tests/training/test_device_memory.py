"""Memory figures: of CUDA as torch and the driver count it, on a CPU of this process and its host."""

from __future__ import annotations

import gc

import pytest
import torch

from miles_dmd2.training.device_memory import DeviceMemory

MB = 1_000_000


def test_on_a_cpu_the_peak_of_the_step_and_not_of_the_past() -> None:
    """400 MB that come and go are seen in their own step, and not in the next."""
    memory = DeviceMemory(torch.device("cpu"))
    memory.step()
    before = memory.take()["peak_memory_resident_gb"]
    block = torch.ones(100 * MB)
    del block
    gc.collect()
    memory.step()
    during = memory.take()["peak_memory_resident_gb"]
    memory.step()
    after = memory.take()["peak_memory_resident_gb"]
    assert during - before == pytest.approx(0.4, abs=0.05)
    assert during - after == pytest.approx(0.4, abs=0.05)


def test_the_host_is_the_device_of_a_cpu() -> None:
    """Beside this process's own there is more in use, and the whole machine has more still."""
    memory = DeviceMemory(torch.device("cpu"))
    memory.step()
    taken = memory.take()
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024 / 1e9
    assert 0.5 * taken["peak_memory_resident_gb"] < taken["device_memory_used_gb"] < total
    assert taken.keys() == {"peak_memory_resident_gb", "device_memory_used_gb"}
    assert memory.take() == {}


def test_where_the_peak_cannot_be_reset_none_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    memory = DeviceMemory(torch.device("cpu"))
    memory.step()
    assert memory.take().keys() == {"device_memory_used_gb"}


def test_on_cuda_the_largest_of_the_steps_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 80 GB by the driver's count; torch's peaks are 3, 5 and 4 GB, each reset after it was read."""
    peaks = iter([3, 5, 4])
    free = iter([50, 40, 45, 60])
    resets: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: next(peaks) * 1000 * MB)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (next(free) * 1000 * MB, 80_000 * MB))
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", resets.append)
    device = torch.device("cuda", 1)
    memory = DeviceMemory(device)
    for _ in range(2):
        memory.step()
    assert memory.take() == {"peak_memory_allocated_gb": 5.0, "device_memory_used_gb": 40.0}
    memory.step()
    assert memory.take() == {"peak_memory_allocated_gb": 4.0, "device_memory_used_gb": 35.0}
    assert resets == [device] * 4
