"""Placement on a simulated cluster: two nodes of eight declared GPUs each, on this host, without a device."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from miles_dmd2.cluster.failures import introduce
from miles_dmd2.cluster.placement import Placement, place
from miles_dmd2.cluster.runtime import ray_session, wait
from miles_dmd2.config import ConfigError
from miles_dmd2.observability import RunError

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NODES, GPUS = 2, 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_gpus": GPUS, "num_cpus": 1, "include_dashboard": False})
    made.add_node(num_gpus=GPUS, num_cpus=1)
    try:
        yield made
    finally:
        made.shutdown()


def stand(placement: Placement, role: str, logs: Path) -> list[Any]:
    """Actors in the place of a role's ranks, or of engines. Their class is sent by value: 32 imports take minutes."""

    class Stand:
        def where(self) -> tuple[str, str]:
            """(node, device as CUDA would see it)."""
            return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]

    actors = [ray.remote(Stand).options(**placement.options(rank)).remote() for rank in range(NODES * GPUS)]
    for rank, actor in enumerate(actors):
        introduce(actor, f"{role}_{rank}", logs)
    return actors


def test_ranks_and_engines_on_two_nodes_and_a_node_that_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    """Rank r of every role, and engine r, is on the r-th device: eight on one node, then eight on the other."""
    with ray_session(cluster.address, GPUS, "cuda"):
        with pytest.raises(ConfigError, match="needs 32 devices, the cluster has 16"):
            place(4, GPUS, "cuda", timeout=5)
        placement = place(NODES, GPUS, "cuda", timeout=60)
        roles = {role: stand(placement, role, tmp_path) for role in ("server", "critic")}
        placed = {role: wait([a.where.remote() for a in actors], 240, role) for role, actors in roles.items()}
        nodes = [node for node, _ in placed["critic"]]
        first, second = nodes[0], nodes[-1]
        assert first != second
        assert nodes == [first] * GPUS + [second] * GPUS
        assert placed["server"] == placed["critic"], "engine r is on the device of rank r"
        devices = defaultdict(set)
        for node, device in placed["critic"]:
            devices[node].add(device)
        assert devices == {first: set(map(str, range(GPUS))), second: set(map(str, range(GPUS)))}

        head = cluster.head_node.node_id
        lost = range(GPUS) if first != head else range(GPUS, NODES * GPUS)
        cluster.remove_node(next(node for node in cluster.list_all_nodes() if node.node_id != head))
        with pytest.raises(RunError) as caught:
            wait([actor.where.remote() for actor in roles["critic"]], 120, "rollout 3, critic training")
        text = str(caught.value)
        assert "\n" not in text
        assert text.startswith("rollout 3, critic training: critic_")
        assert int(re.split(r"\D", text.partition("critic_")[2])[0]) in lost
        assert "died: its node has died. Node Id: " in text
        assert len(text) < 600
        placement.release()
