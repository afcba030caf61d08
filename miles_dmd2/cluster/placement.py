"""Where ranks live: one placement group whose bundle i is the device of rank i of every colocated role."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_dmd2.config import ConfigError
from miles_dmd2.observability import RunError

# Colocated roles share a device; each declares this part of it. Ray only counts: who computes is settled by sleep and
# wake. An eighth leaves room for an engine, its server and six trainer groups.
SHARE = 0.125


@dataclass(frozen=True, slots=True)
class Placement:
    """Bundles ordered by node, so that consecutive ranks share a node."""

    group: PlacementGroup
    bundles: tuple[int, ...]
    device: str

    def options(self, rank: int) -> dict[str, Any]:
        """Ray actor options that put an actor on rank's device."""
        share = {"num_gpus": SHARE, "num_cpus": 0} if self.device == "cuda" else {"num_cpus": SHARE}
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[rank])
        return {**share, "scheduling_strategy": strategy, "max_restarts": 0}

    def release(self) -> None:
        remove_placement_group(self.group)


def place(num_nodes: int, ranks_per_node: int, device: str, timeout: float) -> Placement:
    """Reserve num_nodes x ranks_per_node devices. ConfigError if the cluster has fewer or cannot split them so."""
    resource = "GPU" if device == "cuda" else "CPU"
    wanted = num_nodes * ranks_per_node
    available = int(ray.cluster_resources().get(resource, 0))
    if available < wanted:
        raise ConfigError(
            f"--actor-num-nodes {num_nodes} x --actor-num-gpus-per-node {ranks_per_node} needs {wanted} devices, "
            f"the cluster has {available} ({resource}); lower one of them or add nodes"
        )
    group = placement_group([{resource: 1}] * wanted, strategy="PACK")
    if not group.wait(timeout):
        remove_placement_group(group)
        free = int(ray.available_resources().get(resource, 0))
        raise RunError(
            f"of the cluster's {available} devices ({resource}) {wanted} were not free within {timeout:g} s "
            f"(--start-timeout), {free} are; others hold the rest: wait for them to end, or raise it"
        )
    node_of = placement_group_table(group)["bundles_to_node_id"]
    per_node = Counter(node_of.values())
    if set(per_node.values()) != {ranks_per_node}:
        remove_placement_group(group)
        raise ConfigError(
            f"devices fell {sorted(per_node.values(), reverse=True)} per node, --actor-num-gpus-per-node wants "
            f"{ranks_per_node} on each of {num_nodes}"
        )
    return Placement(group, tuple(sorted(node_of, key=lambda bundle: (node_of[bundle], bundle))), device)
