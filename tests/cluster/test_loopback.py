"""A run's own Ray, and what its processes open, can be reached from this host only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray

from miles_dmd2.cluster.runtime import ray_session
from miles_dmd2.training.distributed import open_rendezvous
from tests.faults.chain import descendants

pytestmark = pytest.mark.ray
LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


class Idle:
    def ready(self) -> bool:
        return True


def listening(pids: list[int]) -> dict[str, int]:
    """Local address in hex, as /proc/net/tcp has it -> how many sockets of these processes listen there."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue  # closed meanwhile
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                address = fields[1].partition(":")[0]
                found[address] = found.get(address, 0) + 1
    return found


def test_everything_listens_on_loopback() -> None:
    with ray_session(None, 2, "cpu"):
        worker = ray.remote(Idle).options(num_cpus=0.1).remote()
        assert ray.get(worker.ready.remote(), timeout=120)
        store = open_rendezvous("127.0.0.1", 1)
        found = listening([os.getpid(), *descendants(os.getpid())])
        assert store.port
    assert sum(found.values()) > 3, "Ray listens on several ports: the test looks in the wrong place"
    assert found.keys() <= LOOPBACK, found
