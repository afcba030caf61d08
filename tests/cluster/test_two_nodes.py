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

from miles_dmd2.cluster import engine_group, server_worker, trainer_group
from miles_dmd2.cluster.launch import engine_settings, trainer_job, worker_settings
from miles_dmd2.cluster.placement import Placement, place
from miles_dmd2.cluster.runtime import ray_session, wait
from miles_dmd2.config import ConfigError, ParsedRun, parse
from miles_dmd2.observability import RunError
from recipes import dmd2_h3_t2va_16gpu_multinode

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


@pytest.fixture
def recipe(tmp_path: Path) -> ParsedRun:
    where = ("--checkpoint", "c", "--sglang-python", "p", "--prompts", "d", "--shared", str(tmp_path))
    return parse(dmd2_h3_t2va_16gpu_multinode.command(where))


def started(recipe: ParsedRun, placement: Placement, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The recipe's groups, started by their own code, with stand-ins for the workers: their class is sent by value, 49
    imports of the real ones take minutes.
    """

    class Stand:
        def __init__(self, *_: object) -> None:
            pass

        def where(self) -> tuple[str, str]:
            """(node, device as CUDA would see it)."""
            return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]

    for module, name in (
        (server_worker, "ServerWorker"),
        (engine_group, "EngineWorker"),
        (trainer_group, "TrainerWorker"),
    ):
        monkeypatch.setattr(module, name, Stand)
    config, worker = recipe.config, worker_settings(recipe.config)
    settings = engine_settings(config, worker)
    servers = server_worker.ServerGroup.start(config.num_engines, settings, placement)
    client = engine_group.RayEngineGroup.start(config.num_engines, settings, placement, 60, 60, servers.workers)
    groups = [
        trainer_group.RayTrainerGroup.start(trainer_job(config, spec, worker), placement, 60, 60)
        for spec in recipe.trainers
    ]
    return {"server": servers.workers, "client": client._actors, **{group.name: group._workers for group in groups}}


def test_ranks_and_engines_on_two_nodes_and_a_node_that_is_lost(
    cluster: Cluster, recipe: ParsedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank r of every role, and engine r, is on the r-th device: eight on one node, then eight on the other."""
    with ray_session(cluster.address, GPUS, "cuda"):
        with pytest.raises(ConfigError, match="needs 32 devices, the cluster has 16"):
            place(4, GPUS, "cuda", timeout=5)
        placement = place(NODES, GPUS, "cuda", timeout=60)
        roles = started(recipe, placement, monkeypatch)
        placed = {role: wait([a.where.remote() for a in actors], 240, role) for role, actors in roles.items()}
        nodes = [node for node, _ in placed["critic"]]
        first, second = nodes[0], nodes[-1]
        assert first != second
        assert nodes == [first] * GPUS + [second] * GPUS
        assert placed["server"] == placed["critic"] == placed["actor"], "engine r is on the device of rank r"
        assert placed["client"] == placed["critic"][:1], "the servers' client is beside the first of them"
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
        assert "died: its node has died. Node Id: " in text or "cannot be reached: its node is lost: " in text
        assert len(text) < 600
        placement.release()
