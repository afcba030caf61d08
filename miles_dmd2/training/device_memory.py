"""Memory of the working device around optimizer steps, as figures that mean the same on every machine.

torch keeps no count of what it has allocated on a CPU. There the process's peak resident memory is logged under a name
of its own: it is larger than the tensors, and never below what the process held before.
"""

from __future__ import annotations

from pathlib import Path

import torch

GB = 1e9
_PROC = Path("/proc")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): the peak becomes what is resident now


class DeviceMemory:
    """Figures of each step since the last `take`, of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: dict[str, list[float]] = {}
        self._resets = True
        self._restart()

    def step(self) -> None:
        """After an optimizer step: what it took, and what is in use now."""
        found = _cuda_bytes(self._device) if self._device.type == "cuda" else _host_bytes(peak=self._resets)
        for name, value in found.items():
            self._steps.setdefault(name, []).append(value / GB)
        self._restart()

    def take(self) -> dict[str, float]:
        """The largest of each figure, in GB of 1e9 bytes."""
        taken = {name: max(values) for name, values in self._steps.items()}
        self._steps.clear()
        return taken

    def _restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            (_PROC / "self" / "clear_refs").write_text(_RESET_PEAK)
        except OSError:  # a sandbox: a peak since the process began is not what the name says
            self._resets = False


def _cuda_bytes(device: torch.device) -> dict[str, float]:
    free, total = torch.cuda.mem_get_info(device)
    return {
        "peak_memory_allocated_gb": float(torch.cuda.max_memory_allocated(device)),
        "device_memory_used_gb": float(total - free),
    }


def _host_bytes(*, peak: bool) -> dict[str, float]:
    host = _kilobytes(_PROC / "meminfo")
    found = {"device_memory_used_gb": 1024 * (host["MemTotal"] - host["MemAvailable"])}
    if peak:
        found["peak_memory_resident_gb"] = 1024 * _kilobytes(_PROC / "self" / "status")["VmHWM"]
    return found


def _kilobytes(path: Path) -> dict[str, float]:
    """The lines `Name:  12 kB` of a file of the proc file system."""
    fields = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): float(words[1]) for words in fields if words[2:] == ["kB"]}
