"""Several runs on one cluster that somebody else has started: they share devices in number, and nothing else."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from run_commands import Finished, command, environment, wait_for

from miles_dmd2.observability.declared import without_machine
from tests.faults.chain import alive

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

DEVICES = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": DEVICES, "include_dashboard": False})
    try:
        yield made
    finally:
        made.shutdown()


def begin(workspace: Path, name: str, cluster: Cluster, **changes: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(workspace, name, ray_address=cluster.address, **changes),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def placements() -> dict[str, str]:
    """Id -> state, of every run that the cluster has seen."""
    return {group["placement_group_id"]: group["state"] for group in placement_group_table().values()}


def pids(directory: Path) -> list[list[int]]:
    """Of each worker's log the processes that wrote it."""
    return [list(map(int, re.findall(r"pid (\d+), torch", log.read_text()))) for log in directory.glob("logs/*_0.log")]


def test_runs_that_share_a_cluster(base: Finished, workspace: Path, cluster: Cluster) -> None:
    """Two whole runs and one that is killed, at once on three devices; a fourth is told, then goes on where the killed
    one was, beside the two. All have the bits of a run that had a Ray to itself.
    """
    started: dict[str, subprocess.Popen[str]] = {}

    def start(name: str, **changes: object) -> None:
        started[name] = begin(workspace, name, cluster, **changes)

    def end(name: str) -> tuple[int, str]:
        _, err = started[name].communicate(timeout=240)
        return started[name].returncode, err

    ray.init(address=cluster.address)
    try:
        start("shared, killed", num_rollout=1000, save_interval=1)
        checkpoint = workspace / "shared, killed" / "checkpoints" / "step_000001"
        wait_for(checkpoint.exists, 240)
        ((lost, state),) = placements().items()
        assert state == "CREATED"
        for name in ("shared, one", "shared, two"):
            start(name, save_interval=2)
        wait_for(lambda: list(placements().values()).count("CREATED") == DEVICES, 240)

        start("shared, refused", start_timeout=3)
        code, err = end("shared, refused")
        assert code == 1
        assert err.splitlines()[1].startswith(
            "error: of the cluster's 3 devices (CPU) 1 were not free within 3 s (--start-timeout), 0 are; others hold"
        )
        assert sum(line.startswith("error: ") for line in err.splitlines()) == 1
        assert "Traceback" not in err

        workers = [pid for log in pids(workspace / "shared, killed") for pid in log]
        started["shared, killed"].kill()
        killed = time.monotonic()
        wait_for(lambda: placements()[lost] == "REMOVED" and not alive(workers), 60)
        print(f"devices and processes of the killed run were back after {time.monotonic() - killed:.1f} s")
        start("shared, goes on", load=checkpoint, save_interval=2)
        for name in ("shared, one", "shared, two", "shared, goes on"):
            code, err = end(name)
            assert code == 0, err
    finally:
        for process in started.values():
            process.kill()
        ray.shutdown()
    for name in ("shared, one", "shared, two", "shared, goes on"):
        done = Finished(0, "", "", workspace / name)
        for kind in ("raw", "ema"):
            ours, alone = done.student(kind), base.student(kind)
            assert all(torch.equal(ours[key], alone[key]) for key in ours.keys() | alone.keys())
        rows = [without_machine(row) for row in base.rows()[1 if name == "shared, goes on" else 0 :]]
        assert [without_machine(row) for row in done.rows()] == rows
    every = [
        log
        for name in ("shared, killed", "shared, one", "shared, two", "shared, goes on")
        for log in pids(workspace / name)
    ]
    assert len(every) == 4 * 3
    assert all(len(log) == 1 for log in every), "a log has lines of another run's processes"
    assert len({pid for (pid,) in every}) == len(every)
